"""Eviction: room in a tier of this node, made by letting go of what its policy values least.

A copy leaves the catalog first, in one commit, and the disk after it, by whole volumes. Only what another tier that all
nodes share holds is ever evicted: the home tier thus keeps everything, unless a second such tier or an archive has it.

Order of locks: promoter, tier, catalog. Reads take none of them.
"""

import contextlib
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

import filelock

from numem.errors import CapacityError, StoreError
from numem.policy.decision import Alternative, Decision, Term
from numem.store import barrier
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import State, decided
from numem.store.lance_errors import lance_errors
from numem.store.payload.tier import Tier
from numem.store.placement.account import Account
from numem.store.placement.claims import protected, with_ancestors
from numem.store.reading.runs import Request

if TYPE_CHECKING:
    from numem.store.session import Session

# What a commit writes besides the payload: manifests, data files, the ledger.
_SLACK_BYTES = 1 << 20
# Volumes' worth of pieces that one full disk may cost.
_VOLUMES = 2


@dataclass(frozen=True, slots=True)
class EvictReport:
    """Outcome of an eviction.

    Attributes:
        tier, policy, reason: where, in whose order, and what for.
        nodes: causal ids that are not whole in the tier any more, in the order in which they left.
        pieces, bytes: copies that left, and their bytes.
    """

    tier: str
    policy: str
    reason: str
    nodes: tuple[bytes, ...] = ()
    pieces: int = 0
    bytes: int = 0


class Evictor:
    """Makes room in the tiers of one open memory."""

    def __init__(self, parts: "Session") -> None:
        self._parts = parts
        self._accounts = {name: Account(parts, tier) for name, tier in parts.tiers.items()}
        self._locks = {
            name: (RLock(), filelock.FileLock(parts.work.locks / f"tier-{name}.lock", thread_local=False))
            for name in parts.tiers
        }

    @contextlib.contextmanager
    def exclusive(self, tier: Tier) -> Iterator[None]:
        """The right to fill or empty a tier, among the threads and processes of this node; re-entrant."""
        self._parts.require_writes()
        threads, processes = self._locks[tier.name]
        with threads, processes:
            yield

    def touched(self, requests: Iterable[Request]) -> None:
        """One read took these pieces; cheap, called for each read."""
        by_tier: dict[str, list[bytes]] = {}
        for request in requests:
            by_tier.setdefault(request.placement.tier, []).append(request.content)
        for tier, contents in by_tier.items():
            if tier in self._accounts:
                self._accounts[tier].touched(contents)

    def used(self, tier: Tier) -> int:
        """Bytes of ready pieces that count against the tier's capacity."""
        with self.exclusive(tier):
            account = self._accounts[tier.name]
            account.look()
            return account.used

    def reserve(self, tier: Tier, nbytes: int, ids: Sequence[bytes], keep: Iterable[bytes] = ()) -> None:
        """Make room for a promotion of nodes that adds `nbytes`; the caller holds `exclusive` until it is done.

        Args:
            ids: what is promoted; neither these nodes nor those that lead to them are evicted for it.
            keep: further nodes that stay.

        Raises:
            CapacityError: it cannot fit; nothing was evicted.
        """
        capacity = tier.config.spec.capacity
        if capacity is not None:
            account = self._accounts[tier.name]
            account.look()
            account.wanted(ids)
            over = account.used + nbytes - capacity
            if over > 0:
                self._evict(tier, over, {*ids, *keep}, f"{nbytes} bytes are promoted")
        if self._lacking(tier, nbytes) > 0:
            self.relieve(tier, nbytes, [*ids, *keep])

    def relieve(self, tier: Tier, nbytes: int, keep: Collection[bytes] = ()) -> int:
        """The disk is full: evict until a write of `nbytes` fits, as far as that can be; returns the bytes that left.

        Space comes back by whole volumes, so that more may have to leave than is needed, though never more than a few
        volumes: what else fills the disk is not made up for.
        """
        with self.exclusive(tier):
            tier.close_volume()
            account, freed = self._accounts[tier.name], 0
            lacking = self._lacking(tier, nbytes)
            step = lacking if lacking > 0 else nbytes
            while freed <= max(nbytes, _VOLUMES * tier.config.close_bytes):
                account.look()
                most = account.most(self._kept(tier, keep))
                report = self._evict(tier, min(step, most), keep, "the disk is full")
                freed += report.bytes
                step *= 2
                if not report.bytes or self._lacking(tier, nbytes) <= 0:
                    break
            return freed

    def make_space(self, nbytes: int) -> bool:
        """The home tier's disk is full: let go of what tiers of this node hold on the same disk; whether any did."""
        home = self._parts.home.config.location.path
        freed = 0
        for tier in self._parts.tiers.values():
            if freed < nbytes and tier is not self._parts.home and _same_disk(home, tier.config.location.path):
                freed += self.relieve(tier, nbytes - freed)
        return freed > 0

    def trim(self, tier: Tier) -> EvictReport:
        """Bring a tier back to its capacity as far as can be, after what had to enter it did."""
        with self.exclusive(tier):
            account = self._accounts[tier.name]
            account.look()
            over = account.used - (tier.config.spec.capacity or account.used)
            most = account.most(self._kept(tier)) if over > 0 else 0
            return self._evict(tier, min(over, most), (), "over its capacity")

    def evict(self, tier: Tier, nbytes: int, reason: str) -> EvictReport:
        """See `Residency.evict`."""
        with self.exclusive(tier):
            self._accounts[tier.name].look()
            return self._evict(tier, nbytes, (), reason)

    def _kept(self, tier: Tier, keep: Iterable[bytes] = ()) -> set[bytes]:
        """Nodes that stay: claimed ones and those that are named, each with what leads to it."""
        return {*protected(self._parts, tier.name).nodes, *with_ancestors(self._parts.catalog, keep)}

    def _evict(self, tier: Tier, nbytes: int, keep: Collection[bytes], reason: str) -> EvictReport:
        spec = tier.config.spec
        report = EvictReport(tier.name, spec.policy, reason)
        if nbytes <= 0:
            return report
        account = self._accounts[tier.name]
        with self._parts.catalog.transaction():
            account.look()
            kept = self._kept(tier, keep)
            strays = account.strays(protected(self._parts, tier.name).pieces)
            left = max(0, nbytes - sum(copy.nbytes for copy in strays))
            victims = account.victims(left, kept) if left else []
            if victims is None:
                most = account.most(kept) + nbytes - left
                raise CapacityError(
                    f"tier {tier.name}: {nbytes} bytes must leave ({reason}), but of {account.used} only {most} may: "
                    "the rest is pinned, leased, in use or nowhere else durable; unpin or release"
                    + ("" if spec.capacity is None else f", or raise the capacity of {spec.capacity}")
                )
            copies = [*strays, *account.freed(victims)]
            clock, node = self._parts.clock, self._parts.work.node
            size = sum(copy.nbytes for copy in copies)
            known: dict[str, Term] = {
                "tier": tier.name,
                "node": node,
                "reason": reason,
                "need": nbytes,
                "bytes": size,
                "pieces": len(copies),
                "nodes": len(victims),
                "stray_bytes": nbytes - left,
                "resident": len(account.nodes),
                "used": account.used,
                "capacity": spec.capacity,
            }
            open_to_it = account.candidates(victims, kept) if victims else (Alternative("evict:strays"),)
            subject, *others = victims or [b""]
            decision = Decision("evict", "", subject, spec.policy, known, open_to_it, open_to_it[0].name, tuple(others))
            self._parts.catalog.append(
                Facts(
                    placements=[copy.turned(clock.next(), State.EVICTED, reason) for copy in copies],
                    records=[decided(clock.next(), decision)],
                )
            )
            account.look()
        barrier.reached("evicted", tier.name)
        self._parts.stats.add("evictions", 1)
        self._parts.stats.add("nodes_evicted", len(victims))
        self._parts.stats.add("bytes_evicted", size)
        self._reclaim(tier)
        return EvictReport(tier.name, spec.policy, reason, tuple(victims), len(copies), size)

    def _lacking(self, tier: Tier, nbytes: int) -> int:
        """Bytes that the file system lacks for a write: other programs and tiers fill it too."""
        path = tier.config.location.path
        if path is None:
            return 0
        while not path.exists():
            path = path.parent
        return nbytes + _SLACK_BYTES - shutil.disk_usage(path).free

    def _reclaim(self, tier: Tier) -> None:
        from numem.store.upkeep.collect import reclaim  # which needs the session that makes this

        try:
            with lance_errors(f"reclaim {tier.name}"):
                # First what is wholly dead, which takes no space; then the living are copied out of what is mostly so.
                reclaim(self._parts, tier, dead_fraction=1.0, grace_s=0.0)
                reclaim(self._parts, tier, grace_s=0.0)
        except StoreError:
            # The copies have left all the same; the next eviction or collection gives their space back.
            self._parts.stats.add("reclaims_failed", 1)


def _same_disk(first: Path | None, second: Path | None) -> bool:
    """Whether two directories exist and lie on one file system."""
    if first is None or second is None or not first.exists() or not second.exists():
        return False
    return first.stat().st_dev == second.stat().st_dev
