"""What stages did, as facts of their batch: written under the id of the run, found again by any later process."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from numem.job.batch import Batch

if TYPE_CHECKING:
    from numem.store.memory import Memory


class Progress(Protocol):
    """Somebody who watches a run."""

    def __call__(self, stage: str, done: int, total: int, tokens: int = 0) -> None:
        """A stage has come so far; `tokens` counts those decoded by now."""


def silent(stage: str, done: int, total: int, tokens: int = 0) -> None:
    """Progress of nobody watching."""


def record(memory: "Memory", batch: Batch, run: str, stage: str, report: Any) -> None:
    """Keep a stage's report as a fact of the batch; it names the scope, so that forgetting a tenant takes it."""
    body = {"run": run, "scope": batch.scope, **asdict(report)}
    memory.record(f"job/{stage}", bytes.fromhex(batch.id), body)


def recall(memory: "Memory", batch: Batch, run: str | None, stage: str) -> Mapping[str, Any] | None:
    """The newest report of a stage in this run (None: in any run), as plain values."""
    for fact in reversed(memory.records(f"job/{stage}", bytes.fromhex(batch.id))):
        if run is None or fact.body.get("run") == run:
            return fact.body
    return None
