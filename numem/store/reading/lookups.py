"""How often prefixes were looked for under each scope, and found: what tells a memory that nobody reads from one that
is read under another identity than it was written."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

KIND = "lookups"
EVERY_S = 60.0


@dataclass(slots=True)
class Count:
    """Lookups of one scope, and those of them that found rows."""

    lookups: int = 0
    found: int = 0


class Lookups:
    """Counts of one open memory, written down from time to time as what was added.

    Args:
        note: writes a record about a scope.
    """

    def __init__(self, note: Callable[[str, bytes, dict[str, Any]], object]) -> None:
        self._note = note
        self._lock = Lock()
        self._new: dict[bytes, Count] = {}
        self._noted = time.monotonic()
        self.lookups = self.found = 0

    def looked(self, scope: bytes, rows: int) -> None:
        """One lookup under a scope found so many rows."""
        with self._lock:
            count = self._new.setdefault(scope, Count())
            count.lookups += 1
            count.found += rows > 0
            self.lookups += 1
            self.found += rows > 0
            if time.monotonic() >= self._noted + EVERY_S:
                self._write()

    def close(self) -> None:
        """Write down what has not been."""
        with self._lock:
            self._write()

    def counts(self, bodies: Iterable[tuple[bytes, Mapping[str, Any]]]) -> dict[bytes, Count]:
        """Scope -> lookups that any process has written down (as subjects and bodies of records), and this one's."""
        with self._lock:
            new = [(scope, {"lookups": c.lookups, "found": c.found}) for scope, c in self._new.items()]
        return added([*bodies, *new])

    def _write(self) -> None:
        self._noted = time.monotonic()
        new, self._new = self._new, {}
        for scope, count in new.items():
            self._note(KIND, scope, {"lookups": count.lookups, "found": count.found})


def added(bodies: Iterable[tuple[bytes, Mapping[str, Any]]]) -> dict[bytes, Count]:
    """Scope -> sum of what records say."""
    counts: dict[bytes, Count] = {}
    for scope, body in bodies:
        count = counts.setdefault(scope, Count())
        count.lookups += int(body.get("lookups", 0))
        count.found += int(body.get("found", 0))
    return counts
