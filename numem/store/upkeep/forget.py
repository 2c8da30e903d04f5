"""Deletion for good: of a tenant (a scope), of a branch, or of single nodes.

Tokens and payload leave the spool, every volume that this node can change, and every version of the catalog; what only
the forgotten nodes used goes, what others use too stays. The report names what could not be reached: volumes that a
running process writes, tiers of other nodes, archives. Facts that a node is gone stay (its id says nothing about its
content), so that no copy elsewhere brings it back.

Those facts come first, and a record last. Where a deletion was cut short between them, its nodes are not visible, the
doctor names them, and the next deletion, whatever it is asked for, ends that one too.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from numem.errors import InputError, IntegrityError, NotFoundError
from numem.state.node import Node
from numem.store.catalog import compact
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import FORGOTTEN, Record, Retired, State
from numem.store.catalog.nodes import split_ids
from numem.store.catalog.table import column
from numem.store.payload.tier import Tier
from numem.store.session import Session
from numem.store.upkeep import collect, recovery
from numem.store.upkeep.archive import KIND as ARCHIVED

Fence = Callable[[], None]
# Negative: versions that another node's clock, or this one's before it went back, dated in the future go too.
_ALL_VERSIONS_S = -1e9


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """Outcome of a deletion.

    Attributes:
        nodes: nodes that were removed, those of a deletion before that was cut short included.
        pieces, shared: pieces that only they used, which are gone; pieces that others use too, which stay.
        volumes: volumes that were removed, their other content rewritten.
        staged: spool files removed.
        bytes: bytes of payload removed.
        unreached: places that may still hold some of it, and why; empty where the deletion is complete.
    """

    nodes: int = 0
    pieces: int = 0
    shared: int = 0
    volumes: int = 0
    staged: int = 0
    bytes: int = 0
    unreached: tuple[str, ...] = ()


def forget(
    parts: Session,
    *,
    scope: bytes | None = None,
    branch: str | None = None,
    ids: Iterable[bytes] | None = None,
    actor: str,
    reason: str,
    fence: Fence = lambda: None,
) -> ForgetReport:
    """Delete a scope, what only a branch reaches (and the branch), or nodes with everything that builds on them.

    Raises:
        InputError: not exactly one of the three.
        NotFoundError: no such scope, branch or node.
    """
    if sum(given is not None for given in (scope, branch, ids)) != 1:
        raise InputError("forget: give exactly one of scope, branch and ids")
    parts.captures.drain()
    parts.committer.flush()  # what this process has under way is visible, and goes too
    parts.catalog.refresh("placements", "nodes", "branches", "identities", force=True)
    unfinished = parts.catalog.unfinished()
    chosen = _chosen(parts, scope, branch, ids, unfinished) | unfinished
    staged = _staged(parts, scope, chosen)
    chosen |= staged
    branches = {fact.name for fact in parts.catalog.branch_facts() if fact.head in chosen or fact.name == branch}
    fence()
    with parts.catalog.transaction():
        facts = [Retired(parts.clock.next(), node, FORGOTTEN) for node in sorted(chosen)]
        parts.catalog.append(Facts(retired=facts))
        doomed, shared = _pieces(parts, chosen)
        copies = [
            placement.turned(parts.clock.next(), State.EVICTED, FORGOTTEN)
            for content in doomed
            for placement in parts.catalog.placements.current(content)
            if placement.state is not State.EVICTED
        ]
        if copies:
            parts.catalog.append(Facts(placements=copies))
    for node in staged:
        parts.spool.discard(node)
    parts.hosting.discard(doomed)
    nbytes, volumes, unreached = 0, 0, _elsewhere(parts, doomed) + _archived(parts, doomed)
    forgotten = compact.Forgotten(
        frozenset(chosen | _within(parts, chosen)),
        frozenset(doomed),
        frozenset({scope} if scope else ()),
        frozenset(branches),
    )
    for tier in parts.tiers.values():
        with parts.evictor.exclusive(tier):
            size, count, left = _purge(parts, tier, forgotten, fence)
        nbytes, volumes, unreached = nbytes + size, volumes + count, unreached + left
    fence()
    shutil.rmtree(parts.work.quarantine, ignore_errors=True)
    recovery.sweep_spool(parts.work.spool, 0)
    compact.compact(
        parts.catalog,
        parts.volume_gone,
        least=0,
        keep_versions_s=_ALL_VERSIONS_S,
        grace_s=0,
        without=forgotten,
        fence=fence,
    )
    for table in parts.catalog.tables.values():
        with parts.catalog.exclusive():
            table.dataset.refresh()
            recovery.sweep(table.dataset, set(), 0)  # a compaction that was cut short left such files
    parts.trim_ledger()
    unreached += [f"catalog/{file}: {why}; run numem doctor" for file, why in parts.catalog.damaged().items()]
    report = ForgetReport(len(chosen), len(doomed), len(shared), volumes, len(staged), nbytes, tuple(unreached))
    body = {"actor": actor, "reason": reason, "nodes": report.nodes, "pieces": report.pieces, "bytes": nbytes}
    parts.catalog.append(Facts(records=[Record(parts.clock.next(), FORGOTTEN, scope or b"", body)]))
    return report


def _chosen(
    parts: Session,
    scope: bytes | None,
    branch: str | None,
    ids: Iterable[bytes] | None,
    unfinished: frozenset[bytes],
) -> set[bytes]:
    """Nodes to forget, retired ones included: their rows may still be there, and need not where they are `unfinished`."""
    hint = "; a deletion was cut short, end it with numem doctor --repair" if unfinished else ""
    rows = parts.catalog.tables["nodes"]
    rows.dataset.refresh()
    found: dict[bytes, tuple[bytes, bytes]] = {}
    for _, part in rows.read(list(rows.dataset.fragments().values()), ("id", "parent", "scope")):
        columns = (column(part, name).to_pylist() for name in ("id", "parent", "scope"))
        found.update({node: (parent, owner) for node, parent, owner in zip(*columns, strict=True)})
    if scope is not None:
        chosen = {node for node, (_, owner) in found.items() if owner == scope}
        if not chosen and scope not in parts.catalog.identities() and not _staged(parts, scope, set()):
            raise NotFoundError(f"forget: no scope {scope.hex()} in this memory{hint}")
        return chosen
    if branch is not None:
        heads = {fact.name: fact.head for fact in parts.catalog.branch_facts()}
        if branch not in heads:
            raise NotFoundError(f"forget: no branch {branch!r} in this memory{hint}")
        kept = [head for name, head in heads.items() if name != branch]
        return _up(found, [heads[branch]]) - _up(found, kept)
    wanted = set(ids or ())
    for node in wanted - found.keys() - unfinished:
        raise NotFoundError(f"forget: no node {node.hex()} in this memory")
    children: dict[bytes, list[bytes]] = {}
    for node, (parent, _) in found.items():
        children.setdefault(parent, []).append(node)
    below: set[bytes] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in below:
            below.add(node)
            todo += children.get(node, ())
    return below


def _up(found: dict[bytes, tuple[bytes, bytes]], heads: Iterable[bytes]) -> set[bytes]:
    reached: set[bytes] = set()
    for head in heads:
        while head in found and head not in reached:
            reached.add(head)
            head = found[head][0]
    return reached


def _within(parts: Session, chosen: set[bytes]) -> set[bytes]:
    """Boundaries inside nodes to forget, which decisions about a part of a chunk name."""
    table = parts.catalog.tables["nodes"]
    found: set[bytes] = set()
    for _, rows in table.read(list(table.dataset.fragments().values()), ("id", "marks")):
        for node, marks in zip(column(rows, "id").to_pylist(), column(rows, "marks").to_pylist(), strict=True):
            if node in chosen:
                found.update(split_ids(marks))
    return found


def _staged(parts: Session, scope: bytes | None, chosen: set[bytes]) -> set[bytes]:
    """Spool entries of the scope, or of or below the chosen nodes; a damaged one cannot be told, and goes too."""
    entries: dict[bytes, Node | None] = {}
    for node in parts.spool.ids():
        try:
            entries[node] = parts.spool.open(node).node
        except IntegrityError:
            entries[node] = None
    gone = {node for node, entry in entries.items() if entry is None or entry.scope == scope or node in chosen}
    while True:
        more = {n for n, entry in entries.items() if entry is not None and entry.parent in gone | chosen} - gone
        if not more:
            return gone
        gone |= more


def _pieces(parts: Session, chosen: set[bytes]) -> tuple[set[bytes], set[bytes]]:
    """Pieces that only the chosen nodes use, and those that visible nodes use too."""
    live, _ = collect.referenced(parts)
    table = parts.catalog.tables["nodes"]
    mine: set[bytes] = set()
    for _, rows in table.read(list(table.dataset.fragments().values()), ("id", "pieces")):
        for node, joined in zip(column(rows, "id").to_pylist(), column(rows, "pieces").to_pylist(), strict=True):
            if node in chosen:
                mine.update(split_ids(joined))
    return mine - live, mine & live


def _purge(parts: Session, tier: Tier, forgotten: compact.Forgotten, fence: Fence) -> tuple[int, int, list[str]]:
    """Write every volume anew that holds some of it, without it; (bytes, volumes, what could not be changed)."""
    tier.close_volume()
    nbytes, count, unreached = 0, 0, []
    ready = collect.ready_copies(parts, tier)
    for name in tier.volumes():
        with collect.closed(parts, tier, name) as closed:
            volume = tier.volume(name)
            volume.dataset.refresh()
            if closed:
                recovery.sweep(volume.dataset, parts.catalog.placements.files(tier.name, name), 0)
            if not collect.mentions(volume, forgotten.nodes, forgotten.pieces, forgotten.scopes):
                continue
            if not closed:
                unreached.append(f"{tier.label}/{name}: a running process writes to it; end it and forget again")
                continue
            tier.seal(name)
            documents = collect.documents_of(volume, parts.catalog.nodes.__contains__, forgotten.scopes)
            copies = ready.get(name, [])
            before = tier.shelf.nbytes(name)
            fence()
            kept = collect.rewrite(parts, tier, copies, documents) if copies or documents["nodes"] else 0
            fence()
            collect.remove(parts, tier, name)
            nbytes += before - kept
            count += 1
    for orphan in tier.shelf.orphans(0):
        fence()
        nbytes += tier.shelf.sweep(orphan)
    return nbytes, count, unreached


def _archived(parts: Session, pieces: set[bytes]) -> list[str]:
    """Volumes in archives that hold copies, and copies that were cut short; numem never removes one from an archive."""
    volumes = {
        placement.volume
        for content in pieces
        for placement in parts.catalog.placements.current(content)
        if placement.tier == parts.home.name
    }
    held = {(record.body.get("archive"), record.subject.decode()) for record in parts.catalog.records(ARCHIVED)}
    found = [
        f"{name}/{volume}: an archived volume holds it; delete it there" for name, volume in held if volume in volumes
    ]
    for archive in parts.archives.values():
        found += [
            f"{archive.name}/{left}: a copy that was cut short may hold some; delete it there"
            for left in archive.leftovers()
        ]
    return sorted(found)


def _elsewhere(parts: Session, pieces: set[bytes]) -> list[str]:
    """Copies that lie where this node does not reach."""
    places = {
        (placement.tier, placement.node)
        for content in pieces
        for placement in parts.catalog.placements.current(content)
        if placement.tier not in parts.tiers or not parts.tiers[placement.tier].reachable(placement)
    }
    return [
        f"{tier}@{node}: another node's tier; run numem maintain --grace 0 --dead 0 there"
        if node
        else f"{tier}: not a tier of this handle"
        for tier, node in sorted(places)
    ]
