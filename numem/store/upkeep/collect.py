"""Collection: what nothing reaches any more leaves the catalog, then the volumes.

mark     nodes reached from branches, claims, leases and the spool, and everything young; the others are retired
sweep    pieces of no visible node, and second copies of one piece in one tier, are evicted
reclaim  volumes without any ready copy are removed; those that are mostly dead are written anew without the dead

A step takes the catalog's lock where there is one, so that no new reference to a doomed piece appears meanwhile. On an
object store a publisher looks again after its commit and writes what was taken from under it (see `publish.py`); only
pieces that have been unreferenced for the grace go, which is longer than any publication.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from numem.errors import IntegrityError, StoreError
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Placement, Retired, State
from numem.store.catalog.nodes import node_from_document, split_ids
from numem.store.catalog.table import column
from numem.store.payload.manifests import manifest_versions
from numem.store.payload.packing import parts_of
from numem.store.payload.pieces import NO_CONTENT, Piece, padded
from numem.store.payload.tier import Tier
from numem.store.payload.volume import Volume
from numem.store.publication.publish import placement_at
from numem.store.upkeep.adoption import adopt

if TYPE_CHECKING:
    from numem.store.session import Session

# Longer than any publication, promotion or read in flight.
GRACE_S = 3600.0
# Dead share of a volume above which it is written anew: copying the living must be worth it.
DEAD_FRACTION = 0.5

Fence = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CollectReport:
    """Outcome of a collection.

    Attributes:
        retired: nodes that nothing reached.
        evicted: copies of pieces that were let go of, and their bytes.
        removed, rewritten: volumes that are gone, the second count those whose living pieces were copied first.
        orphans: bytes of files that belonged to no volume or commit.
        bytes_before, bytes_after: of all volumes this node can remove.
    """

    retired: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    removed: int = 0
    rewritten: int = 0
    orphans: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def collect(
    parts: "Session",
    *,
    retain_s: float | None = None,
    grace_s: float = GRACE_S,
    dead_fraction: float = DEAD_FRACTION,
    fence: Fence = lambda: None,
) -> CollectReport:
    """Mark, sweep and reclaim in every tier that this node writes to.

    Args:
        retain_s: retire nodes that nothing reaches once they are older; None keeps every published node.
        grace_s: age below which nothing is taken.
        fence: called before every destructive step; raises where the maintenance lease was lost.
    """
    fence()
    retired = 0
    if retain_s is not None:
        with parts.catalog.transaction():  # a branch or pin that is made meanwhile keeps its node, or finds it gone
            retired = retire(parts, unreached(parts, retain_s), "collected", fence)
    report = CollectReport(retired=retired)
    for tier in parts.tiers.values():
        fence()
        with parts.evictor.exclusive(tier):  # an eviction gives space back too
            gone = sweep(parts, tier, grace_s)
            swept = reclaim(parts, tier, dead_fraction=dead_fraction, grace_s=grace_s, fence=fence)
        report = CollectReport(
            retired,
            report.evicted + len(gone),
            report.evicted_bytes + sum(placement.nbytes for placement in gone),
            report.removed + swept.removed,
            report.rewritten + swept.rewritten,
            report.orphans + swept.orphans,
            report.bytes_before + swept.bytes_before,
            report.bytes_after + swept.bytes_after,
        )
    return report


def unreached(parts: "Session", retain_s: float) -> list[bytes]:
    """Visible nodes older than `retain_s` that no branch, claim, lease, staged node or younger node reaches."""
    catalog = parts.catalog
    catalog.refresh("placements", "nodes", "branches", "claims", force=True)
    nodes = catalog.nodes
    late = time.time_ns() - int(retain_s * 1e9)
    roots = [fact.head for fact in catalog.branch_facts()]
    roots += [claim.subject for claim in catalog.claims(time.time_ns())]
    roots += parts.leases.held()
    roots += [node for node in nodes.ids() if nodes.sequence(node) > late]
    for staged in parts.spool.ids():
        try:
            roots.append(parts.spool.open(staged).node.parent)
        except IntegrityError:
            continue  # damaged: publishing it sets it aside
    reached: set[bytes] = set()
    for root in roots:
        while root not in reached and (node := nodes.get(root)) is not None:
            reached.add(root)
            root = node.parent
    return [node for node in nodes.ids() if node not in reached]


def retire(parts: "Session", ids: Iterable[bytes], reason: str, fence: Fence = lambda: None) -> int:
    """Make nodes invisible; returns how many were visible. Their pieces go with the next sweep."""
    with parts.catalog.transaction():
        known = [node for node in ids if node in parts.catalog.nodes]
        fence()
        if known:
            parts.catalog.append(Facts(retired=[Retired(parts.clock.next(), node, reason) for node in known]))
        return len(known)


def referenced(parts: "Session") -> tuple[set[bytes], dict[bytes, int]]:
    """Pieces of visible nodes, and the time at which the last node of every other known piece was retired."""
    nodes = parts.catalog.nodes
    table = parts.catalog.tables["nodes"]
    live: set[bytes] = set()
    ended: dict[bytes, int] = {}
    for _, rows in table.read(list(table.dataset.fragments().values()), ("id", "pieces")):
        for node, joined in zip(column(rows, "id").to_pylist(), column(rows, "pieces").to_pylist(), strict=True):
            if node in nodes:
                live.update(split_ids(joined))
            else:
                for piece in split_ids(joined):
                    ended[piece] = max(ended.get(piece, 0), nodes.retired(node))
    return live, ended


def sweep(parts: "Session", tier: Tier, grace_s: float = GRACE_S) -> list[Placement]:
    """Evict from a tier what no visible node needs, and all copies of a piece there but one; returns the copies."""
    catalog = parts.catalog
    with catalog.transaction():
        catalog.tables["nodes"].dataset.refresh()
        live, ended = referenced(parts)
        late = time.time_ns() - int(grace_s * 1e9)
        gone = []
        for content in catalog.placements.contents():
            copies = [p for p in catalog.placements.current(content) if tier.reachable(p)]
            ready = sorted((p for p in copies if p.state is State.READY), key=lambda p: p.sequence)
            doomed = ready[:-1] if content in live else ready
            doomed += [p for p in copies if p.state is State.COPYING]
            if content not in live or _is_anywhere(parts, content):
                doomed += [p for p in copies if p.state is State.QUARANTINED]
            gone += [p for p in doomed if max(p.sequence, 0 if content in live else ended.get(content, 0)) <= late]
        facts = [placement.turned(parts.clock.next(), State.EVICTED, "collected") for placement in gone]
        if facts:
            catalog.append(Facts(placements=facts))
    return gone


def reclaim(
    parts: "Session",
    tier: Tier,
    *,
    dead_fraction: float = DEAD_FRACTION,
    grace_s: float = GRACE_S,
    fence: Fence = lambda: None,
) -> CollectReport:
    """Give back the space of a tier's dead pieces: see the module. Volumes of running writers are let be."""
    before = after = removed = rewritten = 0
    ready = ready_copies(parts, tier)
    doubtful = _doubtful(parts, tier)
    # The newest first: where it goes as well, what is copied out of the others is not put into it.
    for name in reversed(tier.volumes()):
        with closed(parts, tier, name) as free:
            nbytes = tier.shelf.nbytes(name)
            before += nbytes
            copies = ready.get(name, [])
            live = sum(padded(placement.nbytes) for placement in copies)
            if free and live <= (1 - dead_fraction) * nbytes:
                # Its writer may have put more into it since, and closed it then.
                parts.catalog.refresh("placements", force=True)
                ready = ready_copies(parts, tier)
                copies = ready.get(name, [])
                live = sum(padded(placement.nbytes) for placement in copies)
            needed = name in doubtful or live > (1 - dead_fraction) * nbytes
            if not free or needed or not _catalogued(parts, tier, name, grace_s):
                after += nbytes
                continue
            tier.seal(name)
            documents = documents_of(tier.volume(name), lambda node: node in parts.catalog.nodes)
            if copies or documents["nodes"]:
                fence()
                after += rewrite(parts, tier, copies, documents)
                rewritten += 1
            fence()
            remove(parts, tier, name)
            removed += 1
    orphans = 0
    for name in tier.shelf.orphans(grace_s):
        fence()
        orphans += tier.shelf.sweep(name)
    return CollectReport(
        removed=removed, rewritten=rewritten, orphans=orphans, bytes_before=before + orphans, bytes_after=after
    )


def rewrite(parts: "Session", tier: Tier, copies: Sequence[Placement], documents: Mapping[str, Any]) -> int:
    """Copy living pieces, with what their volume says about nodes, into the open volume; returns the bytes written."""
    pieces = [Piece(p.content, p.nbytes, p.xxh3, partial(_load, parts, p)) for p in copies]
    volume, written = tier.append(pieces, lambda volume, damaged: json.dumps(documents), parts.prepare_volume)
    next_sequence = parts.clock.next
    with parts.catalog.transaction():
        # What was let go of, or found bad, while it was copied is not brought back.
        kept = [copy for copy in copies if _is_ready(parts, copy)]
        wanted = {NO_CONTENT, *(copy.content for copy in kept)}
        slots = [slot for slot in written.slots if slot.content in wanted]
        placements = [placement_at(slot, tier, volume, next_sequence()) for slot in slots]
        for copy in kept:
            bad = written.damaged.get(copy.content)
            state, reason = (State.EVICTED, "rewritten") if bad is None else (State.QUARANTINED, bad)
            placements.append(copy.turned(next_sequence(), state, reason))
        parts.catalog.append(Facts(placements=placements))
    return sum(padded(slot.nbytes) for slot in written.slots)


def remove(parts: "Session", tier: Tier, name: str) -> int:
    """Remove a volume that holds nothing ready; returns its bytes.

    Raises:
        StoreError: a copy in it became ready meanwhile; nothing was removed.
    """
    with parts.catalog.transaction():
        if name in ready_copies(parts, tier):
            raise StoreError(f"{tier.label}/{name}: not removed, a copy in it became ready meanwhile; collect again")
        nbytes = tier.shelf.remove(name)
    tier.forget_volume(name)
    parts.reader.files.drop_removed()
    return nbytes


def documents_of(volume: Volume, keep: Callable[[bytes], bool], gone: Collection[bytes] = ()) -> dict[str, Any]:
    """What the facts rows of a volume say about the nodes that are kept, and about identities but those `gone`."""
    identities: dict[str, Any] = {}
    nodes: dict[bytes, str] = {}
    for _, _, row in volume.rows(list(volume.dataset.fragments())):
        if row["kind"] == "facts":
            document = json.loads(row["facts"] or "{}")
            identities.update({s: d for s, d in document.get("identities", {}).items() if bytes.fromhex(s) not in gone})
            for text in document.get("nodes", ()):
                node = node_from_document(text).id
                if keep(node):
                    nodes[node] = text
    return {"identities": identities, "nodes": list(nodes.values())}


def mentions(
    volume: Volume, nodes: Collection[bytes], pieces: Collection[bytes], scopes: Collection[bytes] = ()
) -> bool:
    """Whether a volume holds one of the pieces, catalogued or not, or says something about a node or scope."""
    for _, _, row in volume.rows(list(volume.dataset.fragments())):
        if row["kind"] == "facts":
            document = json.loads(row["facts"] or "{}")
            if any(node_from_document(text).id in nodes for text in document.get("nodes", ())):
                return True
            if any(bytes.fromhex(scope) in scopes for scope in document.get("identities", ())):
                return True
        elif any(part.content in pieces for part in parts_of(row)):
            return True
    return False


@contextmanager
def closed(parts: "Session", tier: Tier, name: str) -> Iterator[bool]:
    """Whether nobody appends to a volume: it is not the newest of its writer, or its writer is not running."""
    writer, _, _ = name.rpartition(".")
    if tier.shelf.marked(f"{writer}.")[-1:] != [name]:
        # Also where another local state of the same node name made the newer one: this one's writer, should it live,
        # looks at the marker before it appends, and once more before the catalog speaks of it.
        yield True
        return
    if not tier.shelf.owned(name) or tier.writes(name):
        yield False
        return
    with parts.writers.borrowed(int(writer.rpartition(".w")[2])) as free:
        yield free


def ready_copies(parts: "Session", tier: Tier) -> dict[str, list[Placement]]:
    """Ready copies by volume."""
    found: dict[str, list[Placement]] = {}
    for content in parts.catalog.placements.contents():
        for placement in parts.catalog.placements.current(content):
            if placement.state is State.READY and tier.reachable(placement):
                found.setdefault(placement.volume, []).append(placement)
    return found


def _is_anywhere(parts: "Session", content: bytes) -> bool:
    """Whether a piece has a ready copy, on whatever node."""
    return any(copy.state is State.READY for copy in parts.catalog.placements.current(content))


def _doubtful(parts: "Session", tier: Tier) -> set[str]:
    """Volumes with a copy that was found bad, of a piece that a visible node needs and that is ready nowhere: the disk
    may only have been away, and a scrub looks at it again."""
    placements = parts.catalog.placements
    bad = {
        content: [copy.volume for copy in placements.current(content) if _is_bad(copy) and tier.reachable(copy)]
        for content in placements.contents()
        if any(_is_bad(copy) for copy in placements.current(content)) and not _is_anywhere(parts, content)
    }
    live = referenced(parts)[0] if any(bad.values()) else set()
    return {volume for content, volumes in bad.items() if content in live for volume in volumes}


def _is_bad(copy: Placement) -> bool:
    return copy.state is State.QUARANTINED


def _catalogued(parts: "Session", tier: Tier, name: str, grace_s: float) -> bool:
    """Whether the catalog knows every commit of a volume; what a crash left out is adopted once it is old enough."""
    volume = tier.volume(name)
    if volume.location.path is not None and not manifest_versions(volume.location.path):
        return False  # its creation did not end, on a full disk for one; the next append ends it
    volume.dataset.refresh()
    unknown = set(volume.dataset.fragments()) - parts.catalog.placements.files(tier.name, name)
    if not unknown:
        return True
    path = volume.location.path
    if path is not None and all((path / "data" / file).stat().st_mtime < time.time() - grace_s for file in unknown):
        parts.recovered += adopt(tier, volume, parts.catalog, parts.ledger.read().get(volume.label, {}))
    return False


def _is_ready(parts: "Session", copy: Placement) -> bool:
    return any(p.copy == copy.copy and p.state is State.READY for p in parts.catalog.placements.current(copy.content))


def _load(parts: "Session", placement: Placement, view: memoryview) -> None:
    reason = parts.reader.read_replica(placement, view)
    if reason:
        raise IntegrityError(reason)
