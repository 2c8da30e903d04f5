"""The restore reader: coalesced positioned reads, straight into the caller's buffers, verified before they return.

A replica whose bytes or length are wrong is quarantined with the reason, and the next one is tried.
"""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from numem.errors import InputError, IntegrityError, NotFoundError, StoreError
from numem.identity.digest import Buffer, checksum
from numem.store.catalog import Catalog
from numem.store.facts import Placement, State
from numem.store.reports import Quarantined, ReadReport
from numem.store.sidecar import SidecarFiles, sidecar_name
from numem.store.stats import Stats
from numem.store.tier import Tier

_THREADS = 2
_INLINE_BYTES = 4 << 20
# A run is one system call, and one unit of work of a thread.
_RUN_BYTES = 16 << 20
_GAP_BYTES = 64 << 10
# What says that a copy itself is bad, rather than that it cannot be reached at the moment.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EISDIR)


@dataclass(slots=True)
class _Request:
    content: bytes
    view: memoryview
    placement: Placement
    tried: set[tuple[str, str, str, str, int, int]] = field(default_factory=set)


@dataclass(slots=True)
class _Outcome:
    """Shared by the threads of one read; `failed` is appended to under the lock."""

    lock: Lock = field(default_factory=Lock)
    failed: list[tuple[_Request, str, bool]] = field(default_factory=list)
    by_tier: dict[str, int] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)
    fallbacks: int = 0

    def good(self, request: _Request) -> None:
        with self.lock:
            tier = request.placement.tier
            self.by_tier[tier] = self.by_tier.get(tier, 0) + request.placement.nbytes

    def bad(self, request: _Request, reason: str, blame: bool) -> None:
        with self.lock:
            self.failed.append((request, reason, blame))


class Reader:
    """Reads pieces from the tiers that this node reaches, nearest first.

    Args:
        quarantine: told every replica that is found bad, in its new state; records the fact.
    """

    def __init__(
        self, catalog: Catalog, tiers: Sequence[Tier], stats: Stats, quarantine: Callable[[Placement], None]
    ) -> None:
        self._catalog = catalog
        self._tiers = {tier.name: tier for tier in tiers}
        self._stats = stats
        self._quarantine = quarantine
        self._pool: ThreadPoolExecutor | None = None
        self.files = SidecarFiles()

    def replicas(self, content: bytes, tier: str | None = None) -> tuple[Placement, ...]:
        """Ready copies that this node reaches, nearest tier first."""
        found = [
            placement
            for placement in self._catalog.placements.current(content)
            if placement.state is State.READY
            and (tier is None or placement.tier == tier)
            and placement.tier in self._tiers
            and self._tiers[placement.tier].reachable(placement)
        ]
        if len(found) > 1:
            found.sort(key=lambda p: (self._tiers[p.tier].config.rank, p.sequence))
        return tuple(found)

    def read(self, requests: Sequence[tuple[bytes, Buffer]], tier: str | None = None) -> ReadReport:
        """Fill buffers with verified pieces; see `Memory.read`."""
        planned = [self._plan(content, buffer, tier) for content, buffer in requests]
        outcome = _Outcome()
        self._run_all(_runs(planned), outcome, sum(len(request.view) for request in planned))
        while outcome.failed:
            failed, outcome.failed = outcome.failed, []
            for request, reason, blame in failed:
                # All of them before anything is raised, so that one read finds every lost copy and not only the first.
                self._blame(request, reason, blame, outcome)
            again = [self._next_replica(request, reason, tier) for request, reason, _ in failed]
            self._run_all([[request] for request in again], outcome, 0)
        total = sum(outcome.by_tier.values())
        self._stats.add("reads", len(planned))
        self._stats.add("bytes_read", total)
        self._stats.add("fallback_reads", outcome.fallbacks)
        return ReadReport(total, 0.0, outcome.by_tier, tuple(outcome.quarantined), outcome.fallbacks)

    def read_replica(self, placement: Placement, view: memoryview) -> str:
        """Read one given copy; returns why it is bad, or an empty string. Nothing is recorded."""
        outcome = _Outcome()
        self._run([_Request(placement.content, view, placement)], outcome)
        return outcome.failed[0][1] if outcome.failed else ""

    def read_from_others(
        self, content: bytes, view: memoryview, target: str, verify: Callable[[memoryview], str]
    ) -> str:
        """Fill a buffer from the nearest tier other than `target`; returns why that failed, or an empty string.

        Args:
            verify: a further check of the bytes; what it refuses is quarantined like a wrong checksum.
        """
        reason = "no readable replica in another tier"
        for placement in self.replicas(content):
            if placement.tier == target:
                continue
            outcome = _Outcome()
            self._run([_Request(content, view, placement)], outcome)
            blame = True
            if outcome.failed:
                _, reason, blame = outcome.failed[0]
            else:
                reason = verify(view)
            if not reason:
                return ""
            if blame and self._tier_is_there(placement):
                self._quarantine(placement.turned(self._catalog.clock.next(), State.QUARANTINED, reason))
                self._stats.add("quarantined", 1)
            reason = f"{placement.tier}/{placement.volume}: {reason}"
        return reason

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self.files.close()

    def _plan(self, content: bytes, buffer: Buffer, tier: str | None) -> _Request:
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise InputError(f"read: the buffer for piece {content.hex()} must be writable and contiguous")
        view = view.cast("B")
        replicas = self.replicas(content, tier)
        if not replicas:
            raise self._none(content, tier)
        if replicas[0].nbytes != len(view):
            raise InputError(
                f"read: piece {content.hex()} has {replicas[0].nbytes} bytes, its buffer {len(view)}; "
                "pass a buffer of exactly its size"
            )
        return _Request(content, view, replicas[0])

    def _none(self, content: bytes, tier: str | None) -> StoreError:
        where = f" in tier {tier!r}" if tier else ""
        bad = [
            placement
            for placement in self._catalog.placements.current(content)
            if placement.state is State.QUARANTINED and (tier is None or placement.tier == tier)
        ]
        if bad:
            return IntegrityError(
                f"piece {content.hex()}: no good replica{where}; {bad[-1].tier}: {bad[-1].reason}; recompute it"
            )
        return NotFoundError(f"piece {content.hex()}: no replica{where}; promote or recompute it")

    def _run_all(self, runs: Sequence[list[_Request]], outcome: _Outcome, nbytes: int) -> None:
        if len(runs) < 2 or nbytes < _INLINE_BYTES:
            for run in runs:
                self._run(run, outcome)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="numem-read")
        for future in [self._pool.submit(self._run, run, outcome) for run in runs]:
            future.result()

    def _run(self, run: list[_Request], outcome: _Outcome) -> None:
        first = run[0].placement
        tier = self._tiers[first.tier]
        try:
            sidecar_name(first.file, first.blob)
        except IntegrityError as error:
            for request in run:
                outcome.bad(request, str(error), True)
            return
        if tier.objects is not None:
            self._run_remote(tier, run, outcome)
            return
        if tier.positioned(first, self.files):
            self._run_positioned(tier, run, outcome)
        else:
            self._run_through_lance(tier, run, outcome)

    def _run_positioned(self, tier: Tier, run: list[_Request], outcome: _Outcome) -> None:
        first = run[0].placement
        path = tier.volume(first.volume).sidecar(first.file, first.blob)
        assert path is not None
        buffers, at = [], first.offset
        for request in run:
            if request.placement.offset > at:
                buffers.append(memoryview(bytearray(request.placement.offset - at)))
            buffers.append(request.view)
            at = request.placement.offset + request.placement.nbytes
        try:
            got = self.files.read_into(path, first.offset, buffers)
        except OSError as error:
            for request in run:
                outcome.bad(request, f"{path.name} of {first.file}: {error.strerror}", error.errno in _GONE)
            return
        good = True
        for request in run:
            end = request.placement.offset + request.placement.nbytes - first.offset
            if got < end:
                outcome.bad(request, f"sidecar of {first.file} ends {end - got} bytes too early", True)
                good = False
            else:
                good = self._check(request, outcome) and good
        if not good:
            self.files.forget(path)  # it may be replaced by a good copy

    def _run_remote(self, tier: Tier, run: list[_Request], outcome: _Outcome) -> None:
        first = run[0].placement
        name = f"{first.volume}.lance/{sidecar_name(first.file, first.blob)}"
        assert tier.objects is not None
        try:
            ranges = tier.objects.read_ranges(
                name, [r.placement.offset for r in run], [r.placement.nbytes for r in run]
            )
        except FileNotFoundError:
            for request in run:
                outcome.bad(request, f"object {name} is gone", True)
            return
        except StoreError as error:
            for request in run:
                outcome.bad(request, str(error), False)
            return
        for request, data in zip(run, ranges, strict=True):
            data = memoryview(data).cast("B")
            if len(data) != len(request.view):
                outcome.bad(request, f"object {name} gave {len(data)} of {len(request.view)} bytes", True)
                continue
            request.view[:] = data
            self._check(request, outcome)

    def _run_through_lance(self, tier: Tier, run: list[_Request], outcome: _Outcome) -> None:
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
            else:
                self._run_positioned(tier, [request], outcome)

    def _check(self, request: _Request, outcome: _Outcome) -> bool:
        if checksum(request.view) == request.placement.xxh3:
            outcome.good(request)
            return True
        outcome.bad(request, "bytes differ from their xxh3-128", True)
        return False

    def _blame(self, request: _Request, reason: str, blame: bool, outcome: _Outcome) -> None:
        """Do not try this copy again, and quarantine it where it is bad itself."""
        bad = request.placement
        request.tried.add(bad.copy)
        if blame and self._tier_is_there(bad):
            self._quarantine(bad.turned(self._catalog.clock.next(), State.QUARANTINED, reason))
            outcome.quarantined.append(Quarantined(bad.content, bad.tier, bad.volume, reason))
            self._stats.add("quarantined", 1)

    def _next_replica(self, request: _Request, reason: str, tier: str | None) -> _Request:
        """The request on its next replica; raises where there is none."""
        bad = request.placement
        remaining = [r for r in self.replicas(request.content, tier) if r.copy not in request.tried]
        if not remaining:
            where = f" in tier {tier!r}" if tier else ""
            message = f"piece {request.content.hex()}: no good replica{where}; {bad.tier}/{bad.volume}: {reason}"
            raise IntegrityError(f"{message}; recompute it")
        return _Request(request.content, request.view, remaining[0], request.tried)

    def _tier_is_there(self, placement: Placement) -> bool:
        path = self._tiers[placement.tier].config.location.path
        return path is None or path.is_dir()


def _runs(requests: Sequence[_Request]) -> list[list[_Request]]:
    """Requests that lie near each other in one sidecar, in the order of their offsets, cut at `_RUN_BYTES`."""

    def place(request: _Request) -> tuple[str, str, str, int, int]:
        p = request.placement
        return (p.tier, p.volume, p.file, p.blob, p.offset)

    runs: list[list[_Request]] = []
    size = 0
    for request in sorted(requests, key=place):
        if runs:
            last = runs[-1][-1]
            gap = request.placement.offset - (last.placement.offset + last.placement.nbytes)
            joins = place(request)[:4] == place(last)[:4] and 0 <= gap <= _GAP_BYTES
            if joins and size + request.placement.nbytes <= _RUN_BYTES:
                runs[-1].append(request)
                size += request.placement.nbytes
                continue
        runs.append([request])
        size = request.placement.nbytes
    return runs
