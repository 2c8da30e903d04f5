"""Cache entries that were refused or dropped, as decisions: one record for the first of a kind, then one for all that
followed within some seconds, so that a full queue does not fill the catalog too."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from numem.errors import RejectedError
from numem.policy.decision import Alternative, Decision, Term

EVERY_S = 10.0
# Causal ids that one record names.
_NAMED = 256


@dataclass(slots=True)
class _Pending:
    """Drops at one limit that are not recorded yet."""

    ids: list[bytes] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0
    waiting: int = 0
    sentence: str = ""
    recorded: float = float("-inf")


class Drops:
    """Counts drops of one open memory, by the limit that they met.

    Args:
        note: writes a decision down.
    """

    def __init__(self, note: Callable[[Decision], object]) -> None:
        self._note = note
        self._lock = Lock()
        self._pending: dict[str, _Pending] = {}

    def dropped(self, id: bytes, nbytes: int, waiting: int, error: RejectedError) -> None:
        """An entry was dropped while `waiting` others waited for a commit."""
        with self._lock:
            pending = self._pending.setdefault(error.code, _Pending())
            pending.count += 1
            pending.nbytes += nbytes
            pending.waiting = waiting
            pending.sentence = str(error)
            if len(pending.ids) < _NAMED:
                pending.ids.append(id)
            if time.monotonic() >= pending.recorded + EVERY_S:
                self._record(error.code, pending)

    def close(self) -> None:
        """Record what has not been."""
        with self._lock:
            for code, pending in self._pending.items():
                if pending.count:
                    self._record(code, pending)

    def _record(self, code: str, pending: _Pending) -> None:
        known: dict[str, Term] = {
            "reason": code,
            "entries": pending.count,
            "bytes": pending.nbytes,
            "waiting": pending.waiting,
            "sentence": pending.sentence,
        }
        wait = Alternative("wait", declined="an entry of the cache queue never waits")
        subject, *others = pending.ids
        drop = Decision("drop", "", subject, "limits", known, (Alternative("drop"), wait), "drop", tuple(others))
        self._pending[code] = _Pending(recorded=time.monotonic())
        self._note(drop)
