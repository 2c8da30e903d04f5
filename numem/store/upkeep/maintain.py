"""The maintenance lane: one process at a time, under a lease whose epoch is checked before every destructive commit."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numem.errors import LeaseHeldError
from numem.store.catalog.compact import KEEP_VERSIONS_S, LEAST, CompactReport, compact
from numem.store.payload.objects import Objects
from numem.store.payload.shelf import file_sizes
from numem.store.upkeep import recovery
from numem.store.upkeep.collect import DEAD_FRACTION, GRACE_S, CollectReport, collect
from numem.store.upkeep.epoch import kept

if TYPE_CHECKING:
    from numem.store.session import Session

LANE = "maintenance"
# A process that publishes looks after the catalog by itself: every so many group commits, where there are so many
# fragments. Until then a commit costs what it cost at the beginning.
TIDY_COMMITS = 64
TIDY_FRAGMENTS = 128
TIDY_VERSIONS_S = 60.0


@dataclass(frozen=True, slots=True)
class MaintainReport:
    """Outcome of one round of maintenance.

    Attributes:
        collected, compacted: what the two steps did.
        catalog_before, catalog_after: bytes of the catalog's files.
        payload_before, payload_after: bytes of the volumes of every tier that this node reaches.
        ledger_saved: bytes of ledger lines that were dropped.
        spool_swept: half-written spool files that were removed.
        epoch: of the lease it ran under.
        ms: wall time.
    """

    collected: CollectReport
    compacted: CompactReport
    catalog_before: int
    catalog_after: int
    payload_before: int
    payload_after: int
    ledger_saved: int
    spool_swept: int
    epoch: int
    ms: float


@contextmanager
def lane(parts: "Session") -> Iterator[tuple[int, Callable[[], None]]]:
    """Hold the maintenance lease; gives its epoch and the check to call before every destructive commit.

    Raises:
        LeaseHeldError: another process maintains this memory.
    """
    lease = parts.epochs.acquire(LANE, parts.writer)
    if lease is None:
        raise LeaseHeldError(
            f"{parts.work.home.url}: another process maintains this memory; wait for it, or until its lease runs out"
        )
    with kept(lease):
        yield lease.epoch, lease.check


def maintain(
    parts: "Session",
    *,
    retain_s: float | None = None,
    grace_s: float = GRACE_S,
    dead_fraction: float = DEAD_FRACTION,
    keep_versions_s: float = KEEP_VERSIONS_S,
    least: int = LEAST,
) -> MaintainReport:
    """Collect, compact, clean up versions, keep the indexes, trim the ledger, sweep the spool.

    Args:
        retain_s, grace_s, dead_fraction: see `collect`.
        keep_versions_s, least: see `compact`.

    Raises:
        LeaseHeldError: another process maintains this memory.
        LeaseLostError: the lease was lost on the way; what was done stays done, nothing is half done.
    """
    started = time.perf_counter()
    with lane(parts) as (epoch, fence):
        catalog_before, payload_before = catalog_bytes(parts), payload_bytes(parts)
        collected = collect(parts, retain_s=retain_s, grace_s=grace_s, dead_fraction=dead_fraction, fence=fence)
        compacted = compact(
            parts.catalog,
            parts.volume_gone,
            least=least,
            keep_versions_s=keep_versions_s,
            grace_s=2 * grace_s,
            fence=fence,
        )
        fence()
        return MaintainReport(
            collected=collected,
            compacted=compacted,
            catalog_before=catalog_before,
            catalog_after=catalog_bytes(parts),
            payload_before=payload_before,
            payload_after=payload_bytes(parts),
            ledger_saved=parts.trim_ledger(),
            spool_swept=len(recovery.sweep_spool(parts.work.spool)),
            epoch=epoch,
            ms=(time.perf_counter() - started) * 1e3,
        )


def tidy(parts: "Session") -> None:
    """Compact the catalog if it is due and nobody maintains the memory already."""
    try:
        with lane(parts) as (_, fence):
            keep = TIDY_VERSIONS_S if parts.work.home.local else KEEP_VERSIONS_S
            compact(parts.catalog, parts.volume_gone, least=TIDY_FRAGMENTS, keep_versions_s=keep, fence=fence)
            parts.trim_ledger()
    except LeaseHeldError:
        return


def catalog_bytes(parts: "Session") -> int:
    """Bytes of the catalog's files, every version that is kept."""
    root = parts.catalog.location.path
    if root is None:
        return sum(listed.nbytes for listed in Objects(parts.catalog.location, parts.options).listing())
    return sum(nbytes for _, nbytes in file_sizes(root))


def payload_bytes(parts: "Session") -> int:
    """Bytes of the volumes of every tier that this node reaches."""
    return sum(tier.shelf.nbytes(name) for tier in parts.tiers.values() for name in tier.volumes())
