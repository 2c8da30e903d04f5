"""The whole main job as one library call."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from numem.job.batch import Batch, make_batch, save_batch
from numem.job.durable import promote, publish
from numem.job.prompts import Prompt
from numem.job.proof import default_witnesses, prove
from numem.job.record import Progress, record, silent
from numem.job.reports import DecodedReport, Summary
from numem.job.stages import decode, prefill, restore
from numem.job.summary import summarise
from numem.store.memory import Memory

if TYPE_CHECKING:
    from numem.models.lm import LM


def run_job(
    memory: Memory,
    lm: "LM",
    prompts: Sequence[Prompt],
    *,
    model: str = "",
    out: Path | None = None,
    max_new_tokens: int = 64,
    lanes: int = 4,
    tier: str = "ssd",
    ignore_eos: bool = False,
    proof: bool = True,
    run: str | None = None,
    progress: Progress = silent,
) -> Summary:
    """Prompts in, completions out, through every stage in this process.

    Args:
        out: directory of the completions (default: below the memory).
        proof: rerun one prompt per prefix alone and compare bytes.
        run: id of this run (default: a new one).
    """
    run = run or uuid.uuid4().hex
    batch = make_batch(lm, prompts, model=model or str(lm.directory))
    save_batch(memory, batch)
    prefill(memory, lm, batch, run, progress)
    publish(memory, batch, run)
    promote(memory, batch, run, tier)
    restore(memory, lm, batch, run, tier, progress)
    decode_and_prove(
        memory, lm, batch, run, out=out, max_new_tokens=max_new_tokens, lanes=lanes, tier=tier,
        ignore_eos=ignore_eos, proof=proof, progress=progress,
    )  # fmt: skip
    return summarise(memory, batch, run)


def decode_and_prove(
    memory: Memory,
    lm: "LM",
    batch: Batch,
    run: str,
    *,
    out: Path | None = None,
    max_new_tokens: int = 64,
    lanes: int = 4,
    tier: str = "ssd",
    ignore_eos: bool = False,
    proof: bool = True,
    progress: Progress = silent,
) -> DecodedReport:
    """The decode stage, and the proof on its witnesses, both recorded."""
    out = out or memory.local / "outputs" / batch.id / run
    chosen = default_witnesses(batch) if proof else ()
    report, witnesses = decode(
        memory, lm, batch, run, out=out, max_new_tokens=max_new_tokens, lanes=lanes, tier=tier,
        ignore_eos=ignore_eos, witnesses=chosen, progress=progress,
    )  # fmt: skip
    if proof:
        progress("proof", 0, 1)
        record(memory, batch, run, "proof", prove(lm, batch, witnesses))
        progress("proof", 1, 1)
    return report
