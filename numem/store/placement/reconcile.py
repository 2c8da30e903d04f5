"""Reconciliation: the plan of this node's demands, carried out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from numem.errors import CapacityError, NotFoundError, StoreError
from numem.store.placement.demands import Action, Unsatisfiable, demands, plan

if TYPE_CHECKING:
    from numem.store.session import Session

# Nodes that are promoted together, so that they share commits.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """Outcome of one reconciliation.

    Attributes:
        ready: causal ids that became ready in the tier they are demanded in.
        failed: causal id -> why it did not.
        suppressed: causal ids left alone, because the same attempt failed before.
        satisfied, in_progress: demands that needed nothing.
        unsatisfiable: demands that nothing can be done about now.
    """

    ready: tuple[bytes, ...] = ()
    failed: Mapping[bytes, str] = field(default_factory=dict)
    suppressed: tuple[bytes, ...] = ()
    satisfied: int = 0
    in_progress: int = 0
    unsatisfiable: tuple[Unsatisfiable, ...] = ()


class Reconciler:
    """Carries out plans, one at a time, and remembers which attempts failed."""

    def __init__(self, parts: "Session") -> None:
        self._parts = parts
        self._lock = Lock()
        self._failed: set[object] = set()

    @property
    def failed_attempts(self) -> int:
        """Attempts that are not made again until their sources change."""
        return len(self._failed)

    def reconcile(self, retry_failed: bool = False) -> ReconcileReport:
        """See `Residency.reconcile`."""
        stats = self._parts.stats
        with self._lock:
            self._parts.writes.resume()
            if retry_failed:
                self._failed.clear()
            todo = plan(self._parts)
            # What is neither demanded nor possible any more need not be remembered.
            self._failed &= {action.attempt for action in todo.actions}
            actions = [action for action in todo.actions if action.attempt not in self._failed]
            suppressed = tuple(a.demand.id for a in todo.actions if a.attempt in self._failed)
            ready: list[bytes] = []
            failed: dict[bytes, str] = {}
            for batch in _batches(actions):
                self._promote(batch, ready, failed)
            stats.add("reconciliations", 1)
            stats.add("ready", len(ready))
            stats.add("failed", len(failed))
            stats.add("suppressed", len(suppressed))
            return ReconcileReport(
                tuple(ready), failed, suppressed, len(todo.satisfied), len(todo.in_progress), todo.unsatisfiable
            )

    def _promote(self, batch: Sequence[Action], ready: list[bytes], failed: dict[bytes, str]) -> None:
        parts = self._parts
        tier = parts.tiers[batch[0].demand.tier]
        ids = [action.demand.id for action in batch]
        # Demands do not push each other out.
        keep = [d.id for d in demands(parts, parts.work.node) if d.tier == tier.name]
        try:
            report = parts.promoter.promote(ids, tier, keep)
        except (CapacityError, NotFoundError, StoreError) as error:
            if len(batch) > 1:
                for action in batch:
                    self._promote([action], ready, failed)
                return
            failed[ids[0]] = str(error)
            self._failed.add(batch[0].attempt)
            return
        for action in batch:
            node = parts.catalog.nodes.get(action.demand.id)
            pieces = () if node is None else node.pieces
            lacking = [piece for piece in pieces if not parts.reader.replicas(piece, tier.name)]
            if node is not None and not lacking:
                ready.append(node.id)
                continue
            reasons = (report.failed[piece.hex()] for piece in lacking if piece.hex() in report.failed)
            failed[action.demand.id] = next(reasons, "it left the memory or the tier meanwhile")
            self._failed.add(action.attempt)


def _batches(actions: Sequence[Action]) -> list[list[Action]]:
    """Neighbours of one tier together; the order of priority stays."""
    batches: list[list[Action]] = []
    for action in actions:
        if batches and batches[-1][0].demand.tier == action.demand.tier and len(batches[-1]) < _BATCH:
            batches[-1].append(action)
        else:
            batches.append([action])
    return batches
