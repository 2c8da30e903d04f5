"""From the journal to completions.jsonl and to the figures of the whole table, one prompt at a time."""

import json
import os
import uuid
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numem.job.journal import Entry, Journal
from numem.job.reports import SHOWN, PromptResult, Series, series
from numem.job.versions import OutputsDigest

SOURCES = ("recomputed", "restored", "shared")


class Tally:
    """Sums and samples over entries; of single prompts it keeps the first `SHOWN`, without tokens and texts."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(("prompt_tokens", "computed", "shared", "restored", "restored_bytes"), 0)
        self.preemptions = 0
        self.rows_again = 0
        self.failures: list[str] = []
        self.failed = 0
        self.shown: list[PromptResult] = []
        self._samples = {source: array("d") for source in SOURCES}

    def add(self, entry: Entry) -> None:
        for name in self.totals:
            self.totals[name] += getattr(entry, name)
        self.preemptions += entry.preempted
        self.rows_again += entry.again
        self.failures += entry.failures[: SHOWN - len(self.failures)]
        self.failed += len(entry.failures)
        if entry.source != "restored":
            self._samples[entry.source].append(entry.ttft_ms)
        if entry.restored_ttft_ms is not None:
            self._samples["restored"].append(entry.restored_ttft_ms)
        if len(self.shown) < SHOWN:
            self.shown.append(_shown(entry))

    @property
    def ttft_ms(self) -> dict[str, Series]:
        """Time to first token by source; a prompt with restored rows has a sample there whatever else was done for it."""
        return {source: series(samples) for source, samples in self._samples.items()}


def write_completions(journal: Journal, out: Path) -> tuple[Path, str, Tally]:
    """Write `out`/completions.jsonl in table order, whole or not at all.

    Returns:
        Its path, the digest of its outputs and what its prompts add up to.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "completions.jsonl"
    temporary = out / f".completions-{uuid.uuid4().hex}.partial"
    tally, digest = Tally(), OutputsDigest()
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for entry in journal.entries():
                file.write(json.dumps(_row(entry), ensure_ascii=False) + "\n")
                digest.add(entry.id, entry.tokens)
                tally.add(entry)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path, digest.hex(), tally


def read_completions(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file of completions, one at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "completion": entry.text,
        "tokens": entry.tokens,
        "finish": entry.finish,
        "prompt_tokens": entry.prompt_tokens,
    }


def _shown(entry: Entry) -> PromptResult:
    return PromptResult(
        id=entry.id,
        tokens=entry.prompt_tokens,
        generated=len(entry.tokens),
        computed=entry.computed,
        shared=entry.shared,
        restored=entry.restored,
        restored_bytes=entry.restored_bytes,
        source=entry.source,
        ttft_ms=entry.ttft_ms,
        restored_ttft_ms=entry.restored_ttft_ms,
        finish=entry.finish,
    )
