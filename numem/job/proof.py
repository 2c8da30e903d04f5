"""The proof: prompts run alone, prefilled by the model and never evicted, compared with the job's own, every byte."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from numem.identity.digest import content_id
from numem.job.batch import Batch
from numem.job.journal import Entry
from numem.job.reports import Proof
from numem.job.settings import Decoding
from numem.runtime.engine import pages_for_lanes

if TYPE_CHECKING:
    from numem.models.lm import LM


def default_witnesses(batch: Batch, limit: int = 8) -> tuple[int, ...]:
    """One prompt per prefix, its last one (served from restored or shared rows), at most `limit`; else the first."""
    chosen = tuple(prefix.prompts[-1] for prefix in batch.prefixes[:limit])
    return chosen or (0,)


def prove(lm: "LM", batch: Batch, decoding: Decoding, witnesses: Mapping[int, Entry]) -> Proof:
    """Run each witness alone from its bare tokens and compare cache bytes, logits and tokens with the job's.

    The job's bytes are compared by their BLAKE3-256 digests in the journal, so that a witness of an earlier run serves
    as well. Nothing here touches the memory; the time is outside every figure of the job.
    """
    began = time.perf_counter()
    compared, tokens = 0, 0
    differences: list[str] = []
    for entry in witnesses.values():
        steps = len(entry.tokens)
        tokens += entry.prompt_tokens + steps
        compared += entry.witness.nbytes if entry.witness else 0
        differences += [f"prompt {entry.id}: {what}" for what in _difference(lm, batch, decoding, entry)]
    return Proof(
        prompts=len(witnesses),
        tokens=tokens,
        bytes_compared=compared,
        ms=(time.perf_counter() - began) * 1e3,
        exact=not differences,
        differences=tuple(differences),
    )


def _difference(lm: "LM", batch: Batch, decoding: Decoding, entry: Entry) -> list[str]:
    """The first thing in which a prompt run alone differs from its entry, if any."""
    if entry.witness is None or len(entry.witness.logits) != len(entry.tokens):
        return ["the journal has no digests of it"]
    total = min(entry.prompt_tokens + len(entry.tokens), lm.max_position)
    sampler = decoding.sampler_of(entry.index)
    session = lm.session(pages=pages_for_lanes(1, total))
    with session.start(batch.items[entry.index].tokens) as alone:
        for step, (token, logits) in enumerate(zip(entry.tokens, entry.witness.logits, strict=True)):
            mine = alone.step(sampler)
            assert alone.logits is not None
            if content_id(alone.logits).hex() != logits:
                return [f"logits of step {step} differ"]
            if mine != token:
                return [f"token of step {step} differs"]
        return ["cache bytes differ"] if content_id(alone.kv()).hex() != entry.witness.kv else []
