"""Counters of one open memory."""

from collections import Counter
from threading import Lock


class Stats:
    """Named counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int) -> None:
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
