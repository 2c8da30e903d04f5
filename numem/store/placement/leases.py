"""Local leases: what is held is not evicted or collected by this process until released or expired.

They cost no commit, because every prefix lookup takes one. `claims.lease` makes one that other processes see too.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from threading import Lock
from types import TracebackType
from typing import Self

from numem.errors import LeaseError

TTL_S = 300.0


class Lease:
    """A hold on causal ids; released once, by `release` or at the end of a with block, else by its deadline."""

    def __init__(
        self, table: "LeaseTable", ids: tuple[bytes, ...], deadline: float, released: Callable[[], None] | None
    ) -> None:
        self.ids = ids
        self.deadline = deadline
        self._table = table
        self._on_release = released
        self._released = False

    @property
    def active(self) -> bool:
        """Neither released nor past its deadline."""
        return not self._released and time.monotonic() < self.deadline

    def release(self) -> None:
        """Let go.

        Raises:
            LeaseError: released already.
        """
        if self._released:
            raise LeaseError("lease: released already; hold the ids again for another use")
        self._released = True
        self._table.drop(self)
        if self._on_release is not None:
            self._on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._released:
            self.release()


class LeaseTable:
    """Leases of one open memory. Expired ones are dropped and counted."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._leases: set[Lease] = set()
        self.expired = 0

    def hold(self, ids: Iterable[bytes], ttl_s: float = TTL_S, released: Callable[[], None] | None = None) -> Lease:
        """Hold nodes; `released` is called after an explicit release, not after an expiry."""
        lease = Lease(self, tuple(ids), time.monotonic() + ttl_s, released)
        with self._lock:
            self._expire()
            self._leases.add(lease)
        return lease

    def drop(self, lease: Lease) -> None:
        with self._lock:
            self._leases.discard(lease)

    def held(self) -> Counter[bytes]:
        """Causal id -> number of active leases."""
        with self._lock:
            self._expire()
            return Counter(node for lease in self._leases for node in lease.ids)

    def _expire(self) -> None:
        late = {lease for lease in self._leases if not lease.active}
        self.expired += len(late)
        self._leases -= late
