"""Decisions as records of a memory: written by whoever decides, found again by any process, with what they cost.

record  "decision/<kind>" about the subject    {"id", "scope", "request", ..., "alternatives", "choice", "outcomes": [...]}
record  "decision/outcome" about the subject   {"decision": id, "scope", "choice", "cost_ms", "terms"}

An outcome that comes before its decision is written becomes part of it, so that most decisions are one row.
"""

import os
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from numem.errors import InputError
from numem.policy.decision import Decision, Measured, Recorded, Term, finite, plain
from numem.store.catalog.facts import Record

if TYPE_CHECKING:
    from numem.store.memory import Memory

PREFIX = "decision/"
OUTCOME = "decision/outcome"
# Decisions without an outcome that are remembered, to find the row that it may still become part of.
_OPEN = 4096


class DecisionLog:
    """Decisions of one open memory. Any thread may call it; recording costs tens of microseconds and never raises for
    the memory's sake: where that is closed, only read, or cannot be written, the decision is lost and counted in
    `Memory.stats()["notes_lost"]`.

    Args:
        scope: under which the decisions are made; forgetting it takes those too that are about no state of it.
    """

    def __init__(self, memory: "Memory", scope: bytes = b"") -> None:
        self._memory = memory
        self._made = {"scope": scope.hex()} if scope else {}
        self._lock = Lock()
        self._open: OrderedDict[str, tuple[int, bytes, dict[str, Any]]] = OrderedDict()

    @property
    def recording(self) -> bool:
        """Whether decisions are written: not in a memory that is opened for reading alone."""
        return not self._memory.read_only

    def record(self, decision: Decision) -> str:
        """Write a decision down; durable some seconds later, or after the memory's `flush` or `close`.

        Returns:
            The decision's id, 32 hex digits.

        Raises:
            InputError: an input or term is no plain value.
        """
        id = os.urandom(16).hex()
        body = {"id": id, **self._made, **decision.to_body(), "outcomes": []}
        note = self._memory.note(PREFIX + decision.kind, decision.subject, body)
        with self._lock:
            self._open[id] = (note, decision.subject, body)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return id

    def outcome(self, decision_id: str, cost_ms: float, *, choice: str | None = None, **terms: Term) -> None:
        """Say what a decision cost. The first outcome is what happened; others are of alternatives executed to compare.

        Args:
            choice: the alternative that was executed; default the chosen one.
            terms: what the cost is made of.
        """
        with self._lock:
            note, subject, body = self._open.get(decision_id, (0, b"", {}))
        measured = {"choice": choice or body.get("choice", ""), "cost_ms": finite(cost_ms), "terms": plain(terms)}
        if not self._memory.amend(note, lambda: body["outcomes"].append(measured)):
            self._memory.note(OUTCOME, subject, {"decision": decision_id, **self._made, **measured})

    def all(self, kind: str | None = None) -> tuple[Recorded, ...]:
        """Every decision (of a kind), newest first; rows that are no decisions are passed over."""
        later: dict[str, list[dict[str, Any]]] = {}
        rows = []
        for row in self._memory.records(PREFIX):
            if row.kind == OUTCOME:
                later.setdefault(str(row.body.get("decision")), []).append(dict(row.body))
            elif kind is None or row.kind == PREFIX + kind:
                rows.append(row)
        found = (_recorded(row, later) for row in rows)
        return tuple(sorted((one for one in found if one is not None), key=lambda one: (-one.when_ns, one.id)))

    def of_request(self, request: str) -> tuple[Recorded, ...]:
        """Decisions made for a request, newest first."""
        return tuple(one for one in self.all() if one.decision.request == request)

    def about(self, subject: bytes) -> tuple[Recorded, ...]:
        """Decisions that touched a causal id, newest first: about it, or about a boundary that it leads to."""
        reached: dict[bytes, bool] = {b"": False, subject: True}
        return tuple(
            one
            for one in self.all()
            if subject in (one.decision.subject, *one.decision.others)
            or (_of_a_boundary(one.decision) and self._leads_to(subject, one.decision.subject, reached))
        )

    def _leads_to(self, subject: bytes, boundary: bytes, reached: dict[bytes, bool]) -> bool:
        """Whether a causal id lies on the way to a boundary; `reached` holds what was found out before."""
        way = []
        at = boundary
        while at not in reached:
            way.append(at)
            node = self._memory.get(at)
            at = b"" if node is None or node.is_root else node.parent
        reached.update(dict.fromkeys(way, reached[at]))
        return reached[at]


def _of_a_boundary(decision: Decision) -> bool:
    """Whether it is about all that leads to its subject. Those of the durable plane name every chunk that they touch."""
    return decision.kind not in ("evict", "promote", "drop") or decision.inputs.get("tier") == "pages"


def _recorded(row: Record, later: dict[str, list[dict[str, Any]]]) -> Recorded | None:
    """The decision of a row; None where the row is of another shape."""
    try:
        decision = Decision.from_body(row.kind.removeprefix(PREFIX), row.subject, row.body)
        id = str(row.body["id"])
        outcomes = [*row.body["outcomes"], *later.get(id, ())]
        measured = tuple(
            Measured(str(o["choice"] or decision.choice), float(o["cost_ms"]), plain(o["terms"]))
            for o in outcomes
            if o["cost_ms"] is not None
        )
    except (InputError, KeyError, TypeError, AttributeError, ValueError):
        return None
    return Recorded(id, row.sequence, decision, measured)
