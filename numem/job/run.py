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
from numem.job.settings import Decoding
from numem.job.stages import decode, prefill, restore
from numem.job.summary import summarise
from numem.store.memory import Memory

if TYPE_CHECKING:
    from numem.models.lm import LM


def run_job(
    memory: Memory,
    lm: "LM",
    prompts: Sequence[Prompt],
    decoding: Decoding | None = None,
    *,
    model: str = "",
    out: Path | None = None,
    run: str | None = None,
    progress: Progress = silent,
) -> Summary:
    """Prompts in, completions out, through every stage in this process.

    Prompts that an earlier run of the same batch under the same settings finished are not decoded again, unless
    `decoding.again` says so.

    Args:
        out: directory of the completions (default: below the memory).
        run: id of this run (default: a new one).
    """
    run = run or uuid.uuid4().hex
    decoding = decoding or Decoding()
    batch = make_batch(lm, prompts, model=model or str(lm.directory))
    save_batch(memory, batch)
    prefill(memory, lm, batch, run, progress)
    publish(memory, batch, run)
    promote(memory, batch, run, decoding.tier)
    restore(memory, lm, batch, run, decoding.tier, progress)
    decode_and_prove(memory, lm, batch, run, decoding, out=out, progress=progress)
    return summarise(memory, batch, run)


def decode_and_prove(
    memory: Memory,
    lm: "LM",
    batch: Batch,
    run: str,
    decoding: Decoding,
    *,
    out: Path | None = None,
    progress: Progress = silent,
) -> DecodedReport:
    """The decode stage, and the proof on its witnesses, both recorded."""
    out = out or memory.local / "outputs" / batch.id / run
    chosen = default_witnesses(batch) if decoding.proof else ()
    report, witnesses = decode(memory, lm, batch, run, out=out, decoding=decoding, witnesses=chosen, progress=progress)
    if decoding.proof:
        progress("proof", 0, 1)
        record(memory, batch, run, "proof", prove(lm, batch, decoding, witnesses))
        progress("proof", 1, 1)
    return report
