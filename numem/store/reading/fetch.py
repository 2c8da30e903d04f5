"""Bytes of pieces from where they lie into the caller's buffers, verified, before a deadline.

Local sidecars, in two phases:

    resident   pieces in the page cache are copied by two threads at once (`preadv2`, RWF_NOWAIT), until one is not there
    cold       one thread reads runs of up to 16 MiB in the order of the file, so that the kernel reads ahead, and
               another hashes what the one before it fetched

There is no mmap. Copied into a buffer of the caller's, a mapping that is kept is faster than `preadv` by one thread (1.9x
warm, 1.3x where it is made anew; 16 x 4 MiB, 2 cores), about as two threads of `preadv` are where a core is free (1.6x).
But a file that is cut short under a mapping ends the process (SIGBUS), where `preadv` returns a short count, which is a
typed error. There is no `WILLNEED` either: it made cold reads slower (0.65x of one plain `preadv`, 0.9x without) by
competing with the kernel's own readahead, and scattered ones no faster.

Remote sidecars: one call for up to 16 MiB of one sidecar, of few requests (`objects.plan_requests`), `REMOTE_THREADS`
calls at once: what came is copied and hashed while the rest is on its way.
"""

import errno
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol

from numem.errors import IntegrityError, StoreError
from numem.identity.digest import checksum
from numem.store.catalog.facts import Placement
from numem.store.payload.objects import plan_requests
from numem.store.payload.sidecar import SidecarFiles, sidecar_name
from numem.store.payload.tier import Tier
from numem.store.reading.host import Host
from numem.store.reading.runs import Outcome, Request, groups_of, runs_of
from numem.store.stats import Stats

# Calls to object stores at once, by all reads of a handle.
REMOTE_THREADS = 4
# Below this a second thread costs more than it saves.
_INLINE_BYTES = 4 << 20
_UNIT_BYTES = 4 << 20
# What says that a copy itself is bad, rather than that it cannot be reached at the moment.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EISDIR)


class Ranges(Protocol):
    """Where whole sidecars are fetched by ranges: an object store, or an archive."""

    def read_ranges(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[memoryview]: ...


class Fetcher:
    """Reads copies that a `Reader` chose.

    Args:
        ranges: tier name -> where its sidecars are fetched by ranges; the other tiers are local.
    """

    def __init__(
        self, tiers: Mapping[str, Tier], ranges: Mapping[str, Ranges], hosts: Mapping[str, Host], stats: Stats
    ) -> None:
        self._tiers = tiers
        self._ranges = ranges
        self._hosts = hosts
        self._stats = stats
        self._lock = Lock()
        self._helper: ThreadPoolExecutor | None = None
        self._remote: ThreadPoolExecutor | None = None
        self.files = SidecarFiles()

    def fetch(self, requests: Sequence[Request], outcome: Outcome, deadline: float | None = None) -> bool:
        """Fill the requests' buffers, or note in `outcome` why not; False where the deadline came first.

        Args:
            deadline: on `time.monotonic`. A local read that has begun is waited for; a remote one is left behind, and
                what it brings later goes nowhere.
        """
        remote, local = [], []
        for request in requests:
            tier = request.placement.tier
            if tier in self._hosts:
                self._from_host(self._hosts[tier], request, outcome)
            elif tier in self._ranges:
                remote.append(request)
            else:
                local.append(request)
        groups = groups_of(remote)
        if len(groups) == 1 and not local and deadline is None:
            self._run_ranges(groups[0], outcome)
            return True
        futures = [self._remote_pool().submit(self._run_ranges, group, outcome) for group in groups]
        in_time = False
        try:
            in_time = self._fetch_local(local, outcome, deadline)
            for future in futures if in_time else ():
                future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            in_time = False
        finally:
            if not (in_time and all(future.done() for future in futures)):
                with outcome.lock:
                    outcome.late = True
                for future in futures:
                    future.cancel()
        return in_time

    def close(self) -> None:
        for pool in (self._helper, self._remote):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        self._helper = self._remote = None
        self.files.close()

    def _from_host(self, host: Host, request: Request, outcome: Outcome) -> None:
        if host.get_into(request.content, request.view):
            outcome.good(request)
        else:
            outcome.bad(request, "no longer held", False)

    def _fetch_local(self, requests: Sequence[Request], outcome: Outcome, deadline: float | None) -> bool:
        if not requests:
            return True
        if sum(len(request.view) for request in requests) < _INLINE_BYTES:
            for run in runs_of(requests):
                if _passed(deadline):
                    return False
                if self._read_run(run, outcome):
                    self._check_run(run, outcome)
            return True
        pool = self._helper_pool()
        checks: list[Future[None]] = []
        runs = runs_of(self._resident(requests, outcome, pool))
        try:
            for number, run in enumerate(runs):
                if _passed(deadline):
                    return False
                if not self._read_run(run, outcome):
                    continue
                if number + 1 < len(runs):
                    checks.append(pool.submit(self._check_run, run, outcome))
                else:
                    self._check_run(run, outcome)
        finally:
            for check in checks:
                check.result()
        return True

    def _resident(self, requests: Sequence[Request], outcome: Outcome, pool: ThreadPoolExecutor) -> list[Request]:
        """Copy what lies in the page cache, until something does not; returns what is left."""
        units = deque(runs_of(requests, _UNIT_BYTES))
        left: list[Request] = []
        lock = Lock()

        def work() -> None:
            while True:
                with lock:
                    if left or not units:
                        return
                    unit = units.popleft()
                if not self._read_resident(unit, outcome):
                    with lock:
                        left.extend(unit)

        first = units.popleft()
        if self._read_resident(first, outcome):
            helper = pool.submit(work)
            try:
                work()
            finally:
                if not helper.cancel():
                    helper.result()
        else:
            left.extend(first)
        return [*left, *(request for unit in units for request in unit)]

    def _read_resident(self, run: Sequence[Request], outcome: Outcome) -> bool:
        first = run[0].placement
        try:
            path = self._tiers[first.tier].volume(first.volume).sidecar(first.file, first.blob)
            assert path is not None
            if not self._tiers[first.tier].positioned(first, self.files):
                return False
            buffers = _buffers(run)
            if not self.files.read_resident(path, first.offset, buffers):
                return False
        except (OSError, StoreError):
            return False  # the second phase finds the reason
        self._check_run(run, outcome)
        return True

    def _read_run(self, run: Sequence[Request], outcome: Outcome) -> bool:
        """Fill the buffers of a run; False where something is amiss, which is noted."""
        first = run[0].placement
        tier = self._tiers[first.tier]
        try:
            path = tier.volume(first.volume).sidecar(first.file, first.blob)
            assert path is not None
            if not tier.positioned(first, self.files):
                self._run_through_lance(tier, run, outcome)
                return False
        except StoreError as error:
            for request in run:
                outcome.bad(request, str(error), isinstance(error, IntegrityError))
            return False
        try:
            got = self.files.read_into(path, first.offset, _buffers(run))
        except OSError as error:
            for request in run:
                outcome.bad(request, f"{path.name} of {first.file}: {error.strerror}", error.errno in _GONE)
            return False
        if got == _end(run) - first.offset:
            return True
        for request in run:
            end = request.placement.offset + request.placement.nbytes - first.offset
            if got < end:
                outcome.bad(request, f"sidecar of {first.file} ends {end - got} bytes too early", True)
            else:
                outcome.check(request)
        self.files.forget(path)  # it may be replaced by a good copy
        return False

    def _check_run(self, run: Sequence[Request], outcome: Outcome) -> None:
        good = True
        for request in run:
            good = outcome.check(request) and good
        if not good:
            first = run[0].placement
            path = self._tiers[first.tier].volume(first.volume).sidecar(first.file, first.blob)
            assert path is not None
            self.files.forget(path)

    def _run_through_lance(self, tier: Tier, run: Sequence[Request], outcome: Outcome) -> None:
        """The portable way; what it cannot deliver is tried by position all the same, since xxh3 decides."""
        for request in run:
            place = request.placement
            try:
                data = tier.volume(place.volume).read_through_lance(place.file, place.row, place.skip, place.nbytes)
            except StoreError:
                data = b""
            if len(data) == place.nbytes and checksum(data) == place.xxh3:
                request.view[:] = data
                outcome.good(request)
                with outcome.lock:
                    outcome.fallbacks += 1
                continue
            path = tier.volume(place.volume).sidecar(place.file, place.blob)
            assert path is not None
            try:
                got = self.files.read_into(path, place.offset, [request.view])
            except OSError as error:
                outcome.bad(request, f"{path.name} of {place.file}: {error.strerror}", error.errno in _GONE)
                continue
            if got < place.nbytes:
                outcome.bad(request, f"sidecar of {place.file} ends {place.nbytes - got} bytes too early", True)
            elif not outcome.check(request):
                self.files.forget(path)

    def _run_ranges(self, run: Sequence[Request], outcome: Outcome) -> None:
        """All that is wanted of one remote sidecar."""
        first = run[0].placement
        offsets = [request.placement.offset for request in run]
        lengths = [request.placement.nbytes for request in run]
        try:
            name = f"{first.volume}.lance/{sidecar_name(first.file, first.blob)}"
            self._stats.add("remote_requests", len(plan_requests(offsets, lengths)[0]))
            found = self._ranges[first.tier].read_ranges(name, offsets, lengths)
        except FileNotFoundError:
            for request in run:
                outcome.bad(request, f"object {name} is gone", True)
            return
        except StoreError as error:
            for request in run:
                outcome.bad(request, str(error), isinstance(error, IntegrityError))
            return
        for request, data in zip(run, found, strict=True):
            outcome.deliver(request, data, f"object {name}")

    def _helper_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._helper is None:
                self._helper = ThreadPoolExecutor(1, thread_name_prefix="numem-read")
            return self._helper

    def _remote_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._remote is None:
                self._remote = ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="numem-fetch")
            return self._remote


def _buffers(run: Sequence[Request]) -> list[memoryview]:
    """The callers' buffers in the order of the file, with room for what lies between."""
    buffers, at = [], run[0].placement.offset
    for request in run:
        if request.placement.offset > at:
            buffers.append(memoryview(bytearray(request.placement.offset - at)))
        buffers.append(request.view)
        at = request.placement.offset + request.placement.nbytes
    return buffers


def _end(run: Sequence[Request]) -> int:
    last: Placement = run[-1].placement
    return last.offset + last.nbytes


def _passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline
