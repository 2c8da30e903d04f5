"""The proof: prompts run alone, prefilled by the model and never evicted, compared byte for byte with the job's own."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from numem.job.batch import Batch
from numem.job.reports import Proof
from numem.runtime.engine import pages_for_lanes
from numem.runtime.request import Outcome

if TYPE_CHECKING:
    from numem.models.lm import LM


def default_witnesses(batch: Batch, limit: int = 8) -> tuple[int, ...]:
    """One prompt per prefix, its last one (served from restored or shared rows), at most `limit`; else the first."""
    chosen = tuple(prefix.prompts[-1] for prefix in batch.prefixes[:limit])
    return chosen or (0,)


def prove(lm: "LM", batch: Batch, witnesses: Mapping[int, Outcome]) -> Proof:
    """Run each witness alone from its bare tokens and compare cache bytes, logits and tokens with the job's.

    Nothing here touches the memory; the time is outside every figure of the job.
    """
    began = time.perf_counter()
    compared, tokens = 0, 0
    differences: list[str] = []
    for index, outcome in witnesses.items():
        item = batch.items[index]
        steps = len(outcome.generated)
        total = min(len(item.tokens) + steps, lm.max_position)
        session = lm.session(pages=pages_for_lanes(1, total))
        with session.start(item.tokens) as alone:
            for step in range(steps):
                token = alone.step()
                theirs = outcome.logits[step]
                compared += theirs.nbytes
                assert alone.logits is not None
                if alone.logits.tobytes() != theirs.tobytes():
                    differences.append(f"prompt {item.id}: logits of step {step} differ")
                if token != outcome.generated[step]:
                    differences.append(f"prompt {item.id}: token of step {step} differs")
                if differences:
                    break
            mine = alone.kv()
        theirs_kv = outcome.kv if outcome.kv is not None else np.empty(0, dtype=np.uint8)
        compared += theirs_kv.nbytes
        tokens += len(item.tokens) + steps
        if not differences and not np.array_equal(mine, theirs_kv):
            differences.append(f"prompt {item.id}: cache bytes differ")
    return Proof(
        prompts=len(witnesses),
        tokens=tokens,
        bytes_compared=compared,
        ms=(time.perf_counter() - began) * 1e3,
        exact=not differences,
        differences=tuple(differences),
    )
