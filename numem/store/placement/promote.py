"""Promotion: pieces copied into a tier nearer to compute, verified before they are ready.

A node is ready in a tier when all of its pieces are. Before any is, its bytes were compared with their content ids, and
the node with the catalog. What fails leaves a FAILED fact with the reason, and no bytes.

A promotion that takes longer than a commit is announced: COPYING facts tell other processes that it is under way. A
smaller one is not, because the announcement would take as long as the copy; a second process that asks for the same
meanwhile waits for the tier's lock and then finds it done. The COPYING of a process that died counts for nothing: its
writer's lock is free.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from numem.errors import InputError, IntegrityError, NotFoundError, StorageFullError
from numem.identity.digest import content_id
from numem.policy.decision import Alternative, Decision
from numem.state.node import Node
from numem.store import barrier
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Placement, State
from numem.store.catalog.nodes import node_document
from numem.store.lance_errors import lance_errors
from numem.store.payload.pieces import NO_CONTENT, Piece
from numem.store.payload.tier import Tier, rank_of
from numem.store.payload.volume import Volume
from numem.store.publication.publish import GONE, placement_at
from numem.store.reports import PromoteReport

if TYPE_CHECKING:
    from numem.store.session import Session

_GROUP_BYTES = 256 << 20
# Copying as much takes about as long as ten commits.
ANNOUNCE_BYTES = 64 << 20
COPYING_TTL_NS = 600 * 10**9


class Promoter:
    """Copies nodes into tiers, one promotion at a time."""

    def __init__(self, parts: "Session") -> None:
        self._parts = parts
        self._lock = Lock()
        self._current: frozenset[tuple[str, bytes]] = frozenset()

    def promote(self, ids: Sequence[bytes], target: Tier, keep: Iterable[bytes] = ()) -> PromoteReport:
        """See `Memory.promote`.

        Args:
            keep: further nodes that are not evicted to make room.
        """
        started = time.perf_counter()
        parts = self._parts
        with self._lock, parts.evictor.exclusive(target), lance_errors(f"promotion to {target.name}"):
            nodes = {id: self._node(id) for id in ids}
            failed: dict[str, str] = {}
            held, groups, nbytes = self._sort(list(nodes.values()), target, failed)
            sources = self._where(groups, target)
            if groups:
                parts.evictor.reserve(target, nbytes, list(nodes), keep)
            self._current = frozenset((target.name, node.id) for group in groups for node in group)
            try:
                if nbytes >= ANNOUNCE_BYTES:
                    self._announce(groups, target)
                done = self._copy_groups(groups, target, failed)
            finally:
                self._current = frozenset()
            promoted = sum(placement.content != NO_CONTENT for placement in done)
            copied = sum(placement.nbytes for placement in done)
            if promoted:
                self._decide(target, groups, sources, (held, promoted, copied, len(failed)), started)
            parts.stats.add("pieces_promoted", promoted)
            parts.stats.add("bytes_promoted", copied)
            return PromoteReport(promoted, held, copied, (time.perf_counter() - started) * 1e3, failed)

    def _where(self, groups: Sequence[Sequence[Node]], target: Tier) -> dict[str, list[int]]:
        """Tier -> rank, and pieces and bytes that the target lacks and that tier has."""
        found: dict[str, list[int]] = {}
        for content in dict.fromkeys(piece for group in groups for node in group for piece in node.pieces):
            if self._parts.reader.replicas(content, target.name):
                continue
            for tier, nbytes in {source.tier: source.nbytes for source in self._sources(content, target)}.items():
                counted = found.setdefault(tier, [rank_of(tier), 0, 0])
                counted[1] += 1
                counted[2] += nbytes
        return found

    def _decide(
        self,
        target: Tier,
        groups: Sequence[Sequence[Node]],
        sources: Mapping[str, Sequence[int]],
        counts: tuple[int, int, int, int],
        started: float,
    ) -> None:
        """Write down what was promoted, and from where it could have come."""
        ms = (time.perf_counter() - started) * 1e3
        inputs = dict(zip(("held", "pieces", "bytes", "failed"), counts, strict=True))
        able = [
            Alternative(f"from:{tier}", terms={"rank": rank, "pieces": pieces, "bytes": nbytes})
            for tier, (rank, pieces, nbytes) in sources.items()
        ]
        first, *others = [node.id for group in groups for node in group]
        nearest = f"from:{min(sources, key=lambda tier: sources[tier][0])}"
        self._parts.decided(
            Decision(
                "promote", "", first, "nearest", {"tier": target.name, **inputs, "ms": round(ms, 3)},
                (*able, Alternative("leave")), nearest, tuple(others),
            )
        )  # fmt: skip

    def under_way(self, node: Node, tier: Tier) -> bool:
        """Whether this or another live process copies what the tier lacks of a node."""
        if (tier.name, node.id) in self._current:
            return True
        lacking = [piece for piece in node.pieces if not self._parts.reader.replicas(piece, tier.name)]
        return bool(lacking) and all(self._copying(piece, tier) for piece in lacking)

    def _copying(self, content: bytes, tier: Tier) -> bool:
        mine = [p for p in self._parts.catalog.placements.current(content) if tier.reachable(p)]
        newest = max(mine, key=lambda p: p.sequence, default=None)
        return (
            newest is not None
            and newest.state is State.COPYING
            and newest.sequence + COPYING_TTL_NS > time.time_ns()
            and self._alive(newest.reason)
        )

    def _alive(self, writer: str) -> bool:
        """Whether another writer lives: one of this node by its lock, one of another node by word of the fact."""
        stem, _, number = writer.rpartition(".w")
        if not number.isdigit():
            return False
        if stem != self._parts.writer.rpartition(".w")[0]:
            return True
        with self._parts.writers.borrowed(int(number)) as free:
            return not free

    def _node(self, id: bytes) -> Node:
        self._parts.catalog.refresh("placements", "nodes")
        node = self._parts.catalog.nodes.get(id)
        if node is None:
            raise NotFoundError(f"promote: no node {id.hex()} in this memory; publish it first")
        return node

    def _sort(self, nodes: Sequence[Node], target: Tier, failed: dict[str, str]) -> tuple[int, list[list[Node]], int]:
        """How many pieces are there already, the nodes to copy in groups, and the bytes that they add."""
        wanted = dict.fromkeys(piece for node in nodes for piece in node.pieces)
        there = {piece for piece in wanted if self._satisfied(piece, target)}
        planned: set[bytes] = set()
        groups: list[list[Node]] = []
        size = total = 0
        faults: dict[bytes, str] = {}
        for node in nodes:
            lacking = [piece for piece in dict.fromkeys(node.pieces) if piece not in there and piece not in planned]
            if not lacking:
                continue
            sources = {piece: self._sources(piece, target) for piece in lacking}
            reason = lineage_fault(self._parts, node)
            if not reason and not all(sources.values()):
                reason = "no readable replica in another tier"
            if reason:
                alone = lacking if all(sources.values()) else [piece for piece in lacking if not sources[piece]]
                faults.update(dict.fromkeys(alone, reason))
                continue
            nbytes = sum(sources[piece][0].nbytes for piece in lacking)
            if not groups or size + nbytes > _GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(node)
            planned.update(lacking)
            size += nbytes
            total += nbytes
        if faults:
            failed.update({content.hex(): reason for content, reason in faults.items()})
            self._parts.catalog.append(Facts(placements=self._marks(faults, target, State.FAILED)))
        return len(there), groups, total

    def _satisfied(self, content: bytes, target: Tier) -> bool:
        """Whether the target holds the piece; copies of it there whose file is gone are quarantined."""
        satisfied = False
        for placement in self._parts.reader.replicas(content, target.name):
            if target.present(placement):
                satisfied = True
            else:
                self._parts.quarantine(placement.turned(self._parts.clock.next(), State.QUARANTINED, GONE))
                self._parts.stats.add("quarantined", 1)
        return satisfied

    def _sources(self, content: bytes, target: Tier) -> list[Placement]:
        return self._parts.reader.elsewhere(content, target.name)

    def _announce(self, groups: Sequence[Sequence[Node]], target: Tier) -> None:
        pieces = dict.fromkeys(
            (piece for group in groups for node in group for piece in node.pieces), self._parts.writer
        )
        lacking = {
            piece: writer for piece, writer in pieces.items() if not self._parts.reader.replicas(piece, target.name)
        }
        self._parts.catalog.append(Facts(placements=self._marks(lacking, target, State.COPYING)))
        barrier.reached("announced", target.name)

    def _marks(self, reasons: Mapping[bytes, str], target: Tier, state: State) -> list[Placement]:
        """Facts about copies that do not exist (yet): they name no volume and count no bytes."""
        next_sequence, node = self._parts.clock.next, target.config.node
        return [
            Placement(next_sequence(), content, target.name, node, "", "", 0, 0, 0, 0, 0, b"", state, reason)
            for content, reason in reasons.items()
        ]

    def _copy_groups(self, groups: Sequence[Sequence[Node]], target: Tier, failed: dict[str, str]) -> list[Placement]:
        done: list[Placement] = []
        for number, group in enumerate(groups):
            try:
                done += self._copy_or_relieve(group, target, failed)
            except StorageFullError as error:
                # Reads go on from where the pieces are; what was not copied is named, and the disk is let be.
                self._parts.stats.add("promotions_full", 1)
                rest = dict.fromkeys(
                    (piece for nodes in groups[number:] for node in nodes for piece in node.pieces), str(error)
                )
                failed.update({piece.hex(): reason for piece, reason in rest.items()})
                break
        return done

    def _copy_or_relieve(self, group: Sequence[Node], target: Tier, failed: dict[str, str]) -> list[Placement]:
        """Copy a group; where the disk is full, evict as much as it takes and try once more."""
        try:
            return self._copy(group, target, failed)
        except StorageFullError:
            pieces = {p.content: p.nbytes for p in self._lacking(group, target)}
            if not self._parts.evictor.relieve(target, sum(pieces.values()), [node.id for node in group]):
                raise
            return self._copy(group, target, failed)

    def _lacking(self, group: Sequence[Node], target: Tier) -> list[Placement]:
        """A source of every piece that the target lacks."""
        found = []
        for content in dict.fromkeys(piece for node in group for piece in node.pieces):
            sources = self._sources(content, target)
            if sources and not self._parts.reader.replicas(content, target.name):
                found.append(sources[0])
        return found

    def _copy(self, group: Sequence[Node], target: Tier, failed: dict[str, str]) -> list[Placement]:
        catalog = self._parts.catalog
        owner = {piece: node for node in group for piece in node.pieces}
        pieces = [self._piece(source, owner[source.content], target) for source in self._lacking(group, target)]
        if not pieces:
            return []  # another process was first

        def document(volume: Volume, damaged: Mapping[bytes, str]) -> str:
            return self._document(group, damaged) if target is self._parts.home else "{}"

        with lance_errors(f"promotion to {target.name}"):
            volume, written = target.append(pieces, document, self._parts.prepare_volume)
        barrier.reached("payload durable", volume.label)
        with catalog.transaction():
            reasons = dict(written.damaged)
            for content, node in owner.items():
                if catalog.nodes.get(node.id) != node:
                    reasons[content] = f"node {node.id.hex()} is not in the catalog any more"
            done = [
                placement_at(slot, target, volume, catalog.clock.next())
                for slot in written.slots
                if slot.content not in reasons
                and (slot.content == NO_CONTENT or not self._parts.reader.replicas(slot.content, target.name))
            ]
            catalog.append(Facts(placements=[*done, *self._marks(reasons, target, State.FAILED)]))
        barrier.reached("durable")
        failed.update({content.hex(): reason for content, reason in reasons.items()})
        return done

    def _document(self, group: Sequence[Node], damaged: Mapping[bytes, str]) -> str:
        """What a rebuild of the catalog needs, beside copies that may be the last ones."""
        whole = [node for node in group if not any(piece in damaged for piece in node.pieces)]
        known = self._parts.catalog.identities()
        identities = {node.scope.hex(): known[node.scope] for node in whole if node.scope in known}
        return json.dumps({"identities": identities, "nodes": [node_document(node) for node in whole]})

    def _piece(self, source: Placement, node: Node, target: Tier) -> Piece:
        def load(view: memoryview) -> None:
            try:
                key = self._parts.key_of(node.scope)
            except InputError as error:
                raise IntegrityError(str(error)) from error

            def verify(view: memoryview) -> str:
                return "" if content_id(view, key) == source.content else "bytes are not those of the content id"

            reason = self._parts.reader.read_from_others(source.content, view, target.name, verify)
            if reason:
                raise IntegrityError(reason)

        return Piece(source.content, source.nbytes, source.xxh3, load)


def lineage_fault(parts: "Session", node: Node) -> str:
    """Why a node does not continue its parent as the catalog has it; empty where it does. A root continues its scope."""
    parent = None if node.is_root else parts.catalog.nodes.get(node.parent)
    if parent is None or node.append_axis is None:
        return ""
    if parent.scope != node.scope:
        return f"node {node.id.hex()}: its parent {parent.id.hex()} is of another scope"
    if parent.end != node.start:
        return f"node {node.id.hex()}: starts at {node.start}, its parent {parent.id.hex()} ends at {parent.end}"
    return ""
