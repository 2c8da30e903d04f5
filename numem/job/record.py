"""What stages did, as facts of their batch: written under the id of the run, found again by any later process."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from numem.job.batch import Batch

if TYPE_CHECKING:
    from numem.store.memory import Memory

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Progress of nobody watching."""


def record(memory: "Memory", batch: Batch, run: str, stage: str, report: Any) -> None:
    """Keep a stage's report as a fact of the batch."""
    memory.record(f"job/{stage}", bytes.fromhex(batch.id), {"run": run, **asdict(report)})


def recall(memory: "Memory", batch: Batch, run: str | None, stage: str) -> Mapping[str, Any] | None:
    """The newest report of a stage in this run (None: in any run), as plain values."""
    for fact in reversed(memory.records(f"job/{stage}", bytes.fromhex(batch.id))):
        if run is None or fact.body.get("run") == run:
            return fact.body
    return None
