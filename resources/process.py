"""What one process holds on behalf of its runs: shared handles, and the turn of the one Dagster-facing thread.

Two threads that materialise in one process deadlock inside Dagster, so the second one is refused here with a message.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from numem.errors import CapacityError

T = TypeVar("T")

_lock = threading.Lock()
_owner: list[int] = []
_handles: dict[Hashable, list[Any]] = {}


@contextmanager
def dagster_thread() -> Iterator[None]:
    """The turn of one thread to face Dagster; the same thread may enter again.

    Raises:
        CapacityError: another thread of this process has the turn.
    """
    me = threading.get_ident()
    with _lock:
        if _owner and _owner[-1] != me:
            raise CapacityError(
                "another thread of this process is inside a Dagster run; materialise from one thread, or launch the run "
                "as a process of its own"
            )
        _owner.append(me)
    try:
        yield
    finally:
        with _lock:
            _owner.pop()


@contextmanager
def shared(key: Hashable, open_: Callable[[], T], close: Callable[[T], None]) -> Iterator[T]:
    """One handle for all holders of an equal key in this process; opened by the first, closed by the last."""
    with _lock:
        if key not in _handles:
            _handles[key] = [open_(), 0]
        entry = _handles[key]
        entry[1] += 1
    try:
        yield entry[0]
    finally:
        with _lock:
            entry[1] -= 1
            last = entry[1] == 0
            if last:
                del _handles[key]
        if last:
            close(entry[0])
