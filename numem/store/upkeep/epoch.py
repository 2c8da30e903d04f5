"""Leases with fencing, for work that only one process may do at a time (maintenance).

Each acquisition has an epoch, higher than every one before. Whoever holds a lease asks `check` right before each
destructive commit: a holder that was paused past its lease is refused there, because a newer epoch exists.

local   a file lock, which ends with its process, and the epoch in a file beside it
remote  a create-only object for each epoch, renewed by conditional updates

No wall clock is compared. A holder counts its time from before its last renewal was sent; another process takes over
when it saw the same unrenewed object for the whole time to live and a grace by its own monotonic clock. So the holder
stops at least the grace before anybody else starts, and a step that passed `check` has that long to end.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import filelock

from numem.errors import LeaseLostError, RecoveryError, StoreError
from numem.store import barrier
from numem.store.lance_errors import lance_errors
from numem.store.payload.objects import Objects
from numem.store.urls import Location, require_name

TTL_S = 30.0
GRACE_S = 10.0
_DIRECTORY = "leases"


class EpochLease(Protocol):
    """What a holder has.

    Attributes:
        name: of the lease.
        epoch: rises strictly with each acquisition of this name, by whomever.
        ttl_s: seconds that it lasts without renewal.
    """

    name: str
    epoch: int
    ttl_s: float

    def check(self) -> None:
        """Return while the lease is held; LeaseLostError from when it ended or another holder has a newer epoch."""

    def renew(self) -> None:
        """Let it last for `ttl_s` from now; LeaseLostError where it ended before. Any other error leaves it as it was."""

    def release(self) -> None:
        """Let others have it at once. Idempotent; a store that does not answer lets it run out instead."""


class Leases(Protocol):
    """Where leases are taken; one object per process remembers what it observed."""

    def acquire(self, name: str, owner: str, ttl_s: float = TTL_S) -> EpochLease | None:
        """The lease, or None while somebody else has it; ask again later, with the same object.

        Args:
            owner: for people who look at it.
        """


def leases_at(home: Location, options: Mapping[str, str] | None) -> Leases:
    """The leases of a memory."""
    return RemoteLeases(Objects(home, options)) if home.path is None else LocalLeases(home.path / "locks")


@contextmanager
def kept(lease: EpochLease) -> Iterator[EpochLease]:
    """Renew a lease in the background for the time of the with block, then release it.

    A lease that is lost meanwhile is not renewed again: the next `check` raises.
    """
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(lease.ttl_s / 3):
            try:
                lease.renew()
            except LeaseLostError:
                return
            except StoreError:
                continue  # not answered this time; `check` says when it is too late

    thread = threading.Thread(target=renew, name=f"numem-lease-{lease.name}", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        lease.release()


class LocalLeases:
    """Leases among the processes of one machine.

    Args:
        directory: of the memory's locks; exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def acquire(self, name: str, owner: str, ttl_s: float = TTL_S) -> "LocalLease | None":
        """See `Leases`; it lasts until it is released or its process ends, whatever `ttl_s`."""
        require_name("lease", name)
        lock = filelock.FileLock(self._directory / f"lease-{name}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return None
        path = self._directory / f"lease-{name}.epoch"
        try:
            epoch = _stored_epoch(path) + 1
            temporary = path.with_suffix(".tmp")
            with lance_errors(f"lease {name!r}"):
                temporary.write_text(f"{epoch} {owner}\n")
                barrier.sync_file(temporary)
                os.replace(temporary, path)
                barrier.sync_directory(path.parent)
        except BaseException:
            lock.release()
            raise
        return LocalLease(name, epoch, ttl_s, path, lock)


class LocalLease:
    """A file lock that is held."""

    def __init__(self, name: str, epoch: int, ttl_s: float, path: Path, lock: filelock.BaseFileLock) -> None:
        self.name = name
        self.epoch = epoch
        self.ttl_s = ttl_s
        self._path = path
        self._lock = lock

    def check(self) -> None:
        # The lock file may have been removed by hand and taken anew by another process.
        if not self._lock.is_locked or _stored_epoch(self._path) != self.epoch:
            raise _lost(self)

    def renew(self) -> None:
        self.check()

    def release(self) -> None:
        self._lock.release()


class RemoteLeases:
    """Leases among the processes that reach one object-store prefix.

    Args:
        objects: the memory's home.
        grace_s: how long after its end, as others see it, a lease is left to its holder.
    """

    def __init__(self, objects: Objects, grace_s: float = GRACE_S) -> None:
        self._objects = objects
        self._grace_s = grace_s
        # name -> (epoch, content, monotonic time when it was first seen so)
        self._seen: dict[str, tuple[int, bytes, float]] = {}

    def acquire(self, name: str, owner: str, ttl_s: float = TTL_S) -> "RemoteLease | None":
        require_name("lease", name)
        known = _epochs(self._objects, name)
        if known and not self._is_over(name, known[-1], ttl_s):
            return None
        lease = RemoteLease(self._objects, name, known[-1] + 1 if known else 1, owner, ttl_s)
        if not lease.start():
            return None
        self._objects.delete([_object(name, epoch) for epoch in known])
        return lease

    def _is_over(self, name: str, epoch: int, ttl_s: float) -> bool:
        try:
            data = self._objects.read(_object(name, epoch))
        except FileNotFoundError:
            return False  # a newer holder removed it since it was listed
        now = time.monotonic()
        state = _parse(data)
        if state.get("released") is True:
            return True
        if self._seen.get(name, (0, b"", 0.0))[:2] != (epoch, data):
            self._seen[name] = (epoch, data, now)
            return False
        given = state.get("ttl_s")
        lasts = float(given) if isinstance(given, int | float) else ttl_s
        return now - self._seen[name][2] > lasts + self._grace_s


class RemoteLease:
    """An epoch object and the time until which its holder may act."""

    def __init__(self, objects: Objects, name: str, epoch: int, owner: str, ttl_s: float) -> None:
        self.name = name
        self.epoch = epoch
        self.ttl_s = ttl_s
        self._objects = objects
        self._owner = owner
        self._holder = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._deadline = 0.0
        self._ended = False

    def start(self) -> bool:
        """Create the epoch object; False where a rival was first."""
        begun = time.monotonic()
        if not self._objects.create(_object(self.name, self.epoch), self._state(0)):
            return False
        # A process that stalled since its listing can create an epoch that was held, succeeded and removed meanwhile.
        if _epochs(self._objects, self.name)[-1:] != [self.epoch]:
            return False
        self._deadline = begun + self.ttl_s
        return True

    def check(self) -> None:
        self._require_time()
        if _epochs(self._objects, self.name)[-1:] != [self.epoch]:
            self._ended = True
        self._require_time()

    def renew(self) -> None:
        with self._lock:
            self.check()
            begun = time.monotonic()
            if not self._update(released=False):
                self._ended = True
            self._require_time()
            self._deadline = begun + self.ttl_s

    def release(self) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                with suppress(StoreError):
                    self._update(released=True)

    def _update(self, released: bool) -> bool:
        name = _object(self.name, self.epoch)
        try:
            found = self._objects.fetch(name)
        except FileNotFoundError:
            return False
        state = _parse(found.data)
        if state.get("holder") != self._holder:
            return False
        return self._objects.replace(name, self._state(int(state["renewals"]) + 1, released), found.mark) is not None

    def _require_time(self) -> None:
        if self._ended or time.monotonic() >= self._deadline:
            raise _lost(self)

    def _state(self, renewals: int, released: bool = False) -> bytes:
        return json.dumps(
            {
                "owner": self._owner,
                "holder": self._holder,
                "ttl_s": self.ttl_s,
                "renewals": renewals,
                "released": released,
            }
        ).encode()


def _epochs(objects: Objects, name: str) -> list[int]:
    """Epochs of a lease that have an object, lowest first."""
    prefix = f"{_DIRECTORY}/{name}."
    listed = (entry.name.removeprefix(prefix) for entry in objects.listing(_DIRECTORY) if entry.name.startswith(prefix))
    return sorted(int(epoch) for epoch in listed if epoch.isdigit())


def _object(name: str, epoch: int) -> str:
    return f"{_DIRECTORY}/{name}.{epoch:012d}"


def _parse(data: bytes) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _stored_epoch(path: Path) -> int:
    try:
        number = path.read_text().split(" ")[0]
    except FileNotFoundError:
        return 0
    if not number.isdigit():
        raise RecoveryError(f"{path}: not an epoch; write a number higher than any before into it")
    return int(number)


def _lost(lease: EpochLease) -> LeaseLostError:
    return LeaseLostError(
        f"lease {lease.name!r}: epoch {lease.epoch} is over (released, not renewed in time, or taken over); "
        "nothing more was changed, acquire it again"
    )
