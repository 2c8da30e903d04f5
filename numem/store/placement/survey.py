"""What each tier holds, and whether it holds what it should."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numem.store.catalog.facts import Placement, State
from numem.store.placement.demands import demands

if TYPE_CHECKING:
    from numem.store.session import Session

ORPHAN_S = 3600.0


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier, as this node sees it.

    Attributes:
        name, url: as configured; `url` is "host" for memory of this process.
        home: whether it is the home tier.
        node: the node it belongs to, "" where every node sees the same bytes.
        write, policy, capacity: see `TierSpec`.
        pieces, used_bytes: ready pieces that this node reads there, and their bytes without padding.
        volumes, file_bytes: volumes and their bytes on disk, dead pieces and padding included; 0 of a tier in RAM.
        desired, actual: pieces that should have a copy there, and those of them that have one. The home tier should
            have every piece of every node, other tiers what is demanded in them, an archive nothing in particular.
        quarantined: pieces whose copies there were all found bad.
        orphans: volumes with files but without a marker, older than an hour: what a removal that was cut short left.
    """

    name: str
    url: str
    home: bool
    node: str
    write: str
    policy: str
    capacity: int | None
    pieces: int
    used_bytes: int
    volumes: int
    file_bytes: int
    desired: int
    actual: int
    quarantined: int
    orphans: tuple[str, ...]


def survey(parts: "Session") -> tuple[TierReport, ...]:
    """Every tier of this memory, in the order in which they were configured. Nothing is read but the catalog, and names and
    sizes of files."""
    parts.catalog.refresh("placements", "nodes", "claims")
    ready: dict[str, dict[bytes, int]] = {name: {} for name in parts.work.specs}
    bad: dict[str, set[bytes]] = {name: set() for name in parts.work.specs}
    for content in parts.catalog.placements.contents():
        for copy in parts.reader.replicas(content):
            ready[copy.tier][content] = copy.nbytes
        for name in _quarantined(parts, parts.catalog.placements.current(content)):
            bad[name].add(content)
    return tuple(_report(parts, name, ready[name], bad[name] - ready[name].keys()) for name in parts.work.specs)


def _report(parts: "Session", name: str, ready: dict[bytes, int], bad: set[bytes]) -> TierReport:
    spec, tier, archive = parts.work.specs[name], parts.tiers.get(name), parts.archives.get(name)
    desired = _desired(parts, name)
    sizes = [] if tier is None else [tier.shelf.nbytes(volume) for volume in tier.volumes()]
    if archive is not None:
        sizes = [volume.nbytes for volume in archive.volumes()]
    return TierReport(
        name=name,
        url=str(spec.url),
        home=name == parts.work.home_tier,
        node=tier.config.node if tier is not None else "" if archive is not None else parts.work.node,
        write=spec.write,
        policy=spec.policy,
        capacity=spec.capacity,
        pieces=len(ready),
        used_bytes=sum(ready.values()),
        volumes=len(sizes),
        file_bytes=sum(sizes),
        desired=len(desired),
        actual=len(desired & ready.keys()),
        quarantined=len(bad),
        orphans=() if tier is None else tuple(tier.shelf.orphans(ORPHAN_S)),
    )


def _desired(parts: "Session", name: str) -> set[bytes]:
    nodes = parts.catalog.nodes
    if name == parts.work.home_tier:
        return {piece for node in nodes.of_kind(None) for piece in node.pieces}
    wanted = (nodes.get(d.id) for d in demands(parts, parts.work.node) if d.tier == name)
    return {piece for node in wanted if node is not None for piece in node.pieces}


def _quarantined(parts: "Session", copies: Sequence[Placement]) -> list[str]:
    """Tiers of this node with a copy that was found bad."""
    return [
        copy.tier
        for copy in copies
        if copy.state is State.QUARANTINED
        and (copy.tier in parts.archives or (copy.tier in parts.tiers and parts.tiers[copy.tier].reachable(copy)))
    ]
