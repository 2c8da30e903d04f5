"""What `numem demo` and `numem run` print: progress while a run is under way, its summary when it is done.

Belongs here: Rich. Progress goes to stderr, so that stdout holds the result alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from numem.job.record import Progress as Watcher
from numem.job.reports import Series, Summary

STAGES = {
    "model": "load the model",
    "prefill": "prefill prefixes",
    "restore": "restore prefixes",
    "decode": "decode prompts",
    "proof": "prove exactness",
}


class Watched:
    """A run as it advances: a bar for each stage on a terminal, and what would be kept if it ended now."""

    def __init__(self) -> None:
        self._decoded: tuple[int, int] | None = None

    @contextmanager
    def shown(self, console: Console) -> Iterator[Watcher]:
        """Something to tell the run's progress to; silent where the console is no terminal."""
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            tasks: dict[str, tuple[TaskID, float]] = {}

            def watcher(stage: str, done: int, total: int, tokens: int = 0) -> None:
                if stage == "decode":
                    self._decoded = (done, total)
                if stage not in tasks:
                    # What an earlier run finished is there from the start and says nothing about the speed of this one.
                    tasks[stage] = (
                        bars.add_task(STAGES.get(stage, stage), total=total, completed=done, rate=""),
                        time.monotonic(),
                    )
                task, began = tasks[stage]
                seconds = time.monotonic() - began
                rate = f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds else ""
                bars.update(task, completed=done, total=total, rate=rate)

            yield watcher

    def kept(self) -> str:
        """What another run would not do again."""
        if self._decoded is None:
            return "run it again: what is durable by now is not computed again"
        done, total = self._decoded
        return f"{done} of {total} prompts are finished and kept: run it again and it goes on with the rest"


def summary_table(summary: Summary) -> Table:
    """The summary's fields for people, in the order in which a prompt meets them."""
    out = Table(title="numem: the main job", show_header=False, title_justify="left")
    out.add_column(style="bold")
    out.add_column(justify="right")
    rows = {
        "model": summary.model,
        "memory": summary.memory,
        "batch": summary.batch,
        "prompts": f"{summary.prompts:,} over {summary.prefixes:,} prefixes",
        **({"  finished before": f"{summary.resumed:,}"} if summary.resumed else {}),
        "prompt tokens": f"{summary.requested_tokens:,}",
        "  computed": f"{summary.computed_tokens:,}",
        "  found in pages": f"{summary.shared_tokens:,}",
        "  restored": f"{summary.restored_tokens:,}",
        "chunks": f"{summary.chunks_stored:,} stored, {summary.chunks_reused:,} reused",
        "bytes stored": _bytes(summary.stored_bytes),
        "bytes restored": _bytes(summary.restored_bytes),
        **{f"time to first token, {name}": _series(one) for name, one in summary.ttft_ms.items()},
        "decoded": f"{summary.decode_tokens:,} tokens, {_rate(summary.decode_tokens_per_s)}",
        "exact": _exact(summary),
    }
    for name, value in rows.items():
        out.add_row(Text(name), Text(value))  # keys, paths and ids may look like markup
    return out


def _series(series: Series) -> str:
    if series.median is None or series.p95 is None:
        return "no samples"
    return f"median {series.median:,.1f} ms, p95 {series.p95:,.1f} ms, n {series.n}"


def _rate(rate: float | None) -> str:
    return "no steps" if rate is None else f"{rate:,.1f} a second"


def _bytes(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


def _exact(summary: Summary) -> str:
    if summary.exact is None:
        return "not proven"
    proof = summary.proof
    verdict = "yes" if summary.exact else "NO"
    return f"{verdict}: {proof['prompts']} prompts rerun alone, {_bytes(proof['bytes_compared'])} compared"
