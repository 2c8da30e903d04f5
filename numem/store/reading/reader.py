"""The restore reader: which copy of a piece is read, what happens where it is not good, and who is told.

The nearest copy is read straight into the caller's buffer and verified before the read returns (`fetch.py`). A copy
that does not deliver is blamed only after the catalog was asked anew: eviction, rewriting and compaction by others
remove files on purpose, and record that first. What the catalog still calls ready is quarantined with the reason, and
the next copy is tried.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from numem.errors import DeadlineError, InputError, IntegrityError, NotFoundError, StoreError
from numem.identity.digest import Buffer
from numem.store.catalog.catalog import Catalog
from numem.store.catalog.facts import Placement, State
from numem.store.payload.sidecar import SidecarFiles
from numem.store.payload.tier import Tier, rank_of
from numem.store.reading.fetch import Fetcher, Ranges
from numem.store.reading.host import Host
from numem.store.reading.runs import Failure, Outcome, Request
from numem.store.reports import Quarantined, ReadReport
from numem.store.stats import Stats


class Archived(Ranges, Protocol):
    """An archive, as a reader sees it."""

    def holds(self, volume: str) -> bool:
        """Whether a volume of the home tier is in it, complete."""
        ...


class Reader:
    """Reads pieces from the tiers that this node reaches, nearest first.

    Args:
        quarantine: told every replica that is found bad, in its new state; records the fact.
        hosts: tiers in RAM; what they hold needs no fact.
        archives: archives by tier name, of volumes of the home tier.
        home: name of the home tier.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Sequence[Tier],
        stats: Stats,
        quarantine: Callable[[Placement], None],
        hosts: Mapping[str, Host] | None = None,
        archives: Mapping[str, Archived] | None = None,
        home: str = "",
    ) -> None:
        self._catalog = catalog
        self._tiers = {tier.name: tier for tier in tiers}
        self._stats = stats
        self._quarantine = quarantine
        self._hosts = dict(hosts or {})
        self._archives = dict(archives or {})
        self._home = home
        self._ranks = {name: rank_of(name) for name in self._tiers}
        self._ranks |= dict.fromkeys(self._hosts, rank_of("host")) | dict.fromkeys(self._archives, rank_of("archive"))
        ranges: dict[str, Ranges] = {tier.name: tier.objects for tier in tiers if tier.objects is not None}
        self._fetcher = Fetcher(self._tiers, {**ranges, **self._archives}, self._hosts, stats)
        # Called with what a read delivered, the bytes still in the callers' buffers: policies learn and fill from it.
        self.touched: list[Callable[[Sequence[Request]], None]] = []

    @property
    def files(self) -> SidecarFiles:
        """Open sidecars."""
        return self._fetcher.files

    def replicas(self, content: bytes, tier: str | None = None) -> tuple[Placement, ...]:
        """Ready copies that this node reaches, nearest tier first."""
        known = self._catalog.placements.current(content)
        found = [
            placement
            for placement in known
            if placement.state is State.READY
            and (tier is None or placement.tier == tier)
            and placement.tier in self._tiers
            and self._tiers[placement.tier].reachable(placement)
        ]
        whole = next((p for p in known if p.xxh3), None)  # not the mark of a copy that failed or is under way
        for name, host in self._hosts.items():
            if whole is not None and (tier is None or tier == name) and content in host:
                found.append(_in_host(name, whole))
        for name, archive in self._archives.items():
            if tier is None or tier == name:
                found += self._archived(name, archive, known)
        if len(found) > 1:
            found.sort(key=lambda p: (self._ranks[p.tier], p.sequence))
        return tuple(found)

    def elsewhere(self, content: bytes, tier: str) -> list[Placement]:
        """Ready copies in other tiers, nearest first; the catalog is asked again before it is said that there are none."""
        found = [placement for placement in self.replicas(content) if placement.tier != tier]
        if not found:
            self._catalog.refresh("placements", force=True)
            found = [placement for placement in self.replicas(content) if placement.tier != tier]
        return found

    def read(
        self, requests: Sequence[tuple[bytes, Buffer]], tier: str | None = None, deadline_s: float | None = None
    ) -> ReadReport:
        """Fill buffers with verified pieces; see `Memory.read`."""
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        planned = [self._plan(content, buffer, tier) for content, buffer in requests]
        outcome = Outcome()
        todo = planned
        try:
            while todo:
                if not self._fetcher.fetch(todo, outcome, deadline):
                    raise DeadlineError(
                        f"read: {outcome.nbytes} of {sum(len(request.view) for request in planned)} bytes came before "
                        "the deadline; recompute the pieces or read them again",
                        outcome.nbytes,
                    )
                failed, outcome.failed = outcome.failed, []
                # All are judged before anything is raised, so that one read finds every lost copy, not only the first.
                self._judge(failed, outcome)
                todo = [self._next_replica(failure, tier) for failure in failed]
        finally:
            total = outcome.nbytes
            self._stats.add("reads", len(planned))
            self._stats.add("bytes_read", total)
            self._stats.add("fallback_reads", outcome.fallbacks)
        for tell in self.touched:
            tell(planned)
        return ReadReport(total, 0.0, outcome.by_tier, tuple(outcome.quarantined), outcome.fallbacks)

    def read_replica(self, placement: Placement, view: memoryview) -> str:
        """Read one given copy; returns why it is bad, or an empty string. Nothing is recorded."""
        failure = self._try(placement, view)
        return failure.reason if failure is not None else ""

    def read_from_others(
        self,
        content: bytes,
        view: memoryview,
        target: str,
        verify: Callable[[memoryview], str],
    ) -> str:
        """Fill a buffer from the nearest tier other than `target`; returns why that failed, or an empty string.

        Args:
            verify: a further check of the bytes; what it refuses is quarantined like a wrong checksum.
            target: "" to read from any tier.
        """
        reason = "no readable replica in another tier" if target else "no readable replica"
        for placement in self.elsewhere(content, target):
            failure = self._try(placement, view)
            if failure is None:
                reason = verify(view)
                if not reason:
                    return ""
                failure = Failure(Request(content, view, placement), reason, True)
            self._judge([failure], Outcome())
            reason = f"{placement.tier}/{placement.volume}: {failure.reason}"
        return reason

    def close(self) -> None:
        self._fetcher.close()

    def _try(self, placement: Placement, view: memoryview) -> Failure | None:
        outcome = Outcome()
        self._fetcher.fetch([Request(placement.content, view, placement)], outcome)
        return outcome.failed[0] if outcome.failed else None

    def _archived(self, name: str, archive: Archived, known: Sequence[Placement]) -> list[Placement]:
        """Copies of the home tier's volumes in an archive, whatever became of them at home."""
        bad = {(p.volume, p.file, p.blob, p.offset) for p in known if p.tier == name and p.state is State.QUARANTINED}
        return [
            replace(place, tier=name, node="", state=State.READY, reason="")
            for place in known
            if place.tier == self._home
            and place.state in (State.READY, State.EVICTED, State.QUARANTINED)
            and (place.volume, place.file, place.blob, place.offset) not in bad
            and archive.holds(place.volume)
        ]

    def _plan(self, content: bytes, buffer: Buffer, tier: str | None) -> Request:
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise InputError(f"read: the buffer for piece {content.hex()} must be writable and contiguous")
        view = view.cast("B")
        replicas = self.replicas(content, tier)
        if not replicas:
            self._catalog.refresh("placements", force=True)
            replicas = self.replicas(content, tier)
        if not replicas:
            raise self._none(content, tier)
        if replicas[0].nbytes != len(view):
            raise InputError(
                f"read: piece {content.hex()} has {replicas[0].nbytes} bytes, its buffer {len(view)}; "
                "pass a buffer of exactly its size"
            )
        return Request(content, view, replicas[0])

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

    def _judge(self, failed: Sequence[Failure], outcome: Outcome) -> None:
        """Do not try these copies again, and quarantine those that are bad themselves and still said to be ready."""
        blamed = [failure for failure in failed if failure.blame and self._tier_is_there(failure.request.placement)]
        if blamed:
            self._catalog.refresh("placements", force=True)
        for failure in failed:
            failure.request.tried.add(failure.request.placement.copy)
        for failure in blamed:
            bad = failure.request.placement
            if bad.copy in {replica.copy for replica in self.replicas(bad.content, bad.tier)}:
                self._quarantine(bad.turned(self._catalog.clock.next(), State.QUARANTINED, failure.reason))
                outcome.quarantined.append(Quarantined(bad.content, bad.tier, bad.volume, failure.reason))
                self._stats.add("quarantined", 1)

    def _next_replica(self, failure: Failure, tier: str | None) -> Request:
        """The request on its next replica; raises where there is none."""
        request = failure.request
        replicas = self.replicas(request.content, tier)
        remaining = [replica for replica in replicas if replica.copy not in request.tried]
        if not remaining and not replicas:
            raise self._none(request.content, tier)
        if not remaining:
            bad = request.placement
            where = f" in tier {tier!r}" if tier else ""
            message = (
                f"piece {request.content.hex()}: no good replica{where}; {bad.tier}/{bad.volume}: {failure.reason}"
            )
            raise IntegrityError(f"{message}; recompute it")
        request.placement = remaining[0]
        return request

    def _tier_is_there(self, placement: Placement) -> bool:
        tier = self._tiers.get(placement.tier)
        path = None if tier is None else tier.config.location.path
        return path is None or path.is_dir()


def _in_host(name: str, known: Placement) -> Placement:
    """The copy in RAM of a piece, of which the catalog knows another."""
    return replace(known, tier=name, node="", volume="", file="", blob=0, offset=0, row=0, skip=0, state=State.READY)
