"""Publication of one group: payload, barrier, catalog, barrier, acknowledgement.

Pieces that are durable in the home tier already are not written again. A causal id that the memory holds with other
content keeps what it has; the difference becomes an event.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from numem.state.node import Node
from numem.store import barrier
from numem.store.catalog.catalog import Catalog, Facts
from numem.store.catalog.facts import Clock, Event, Placement, State
from numem.store.catalog.nodes import node_document
from numem.store.payload.pieces import Piece, Slot
from numem.store.payload.tier import Prepare, Tier
from numem.store.payload.volume import Volume
from numem.store.reports import PublishReceipt
from numem.store.stats import Stats

# Why a copy is quarantined whose file is not there at the length that it needs.
GONE = "sidecar missing or cut short"
# Why a node is not published although its payload is there.
ORPHANED = "what it builds on was removed from this memory; compute it again from its beginning"


# Checkpoints are never dropped, whoever publishes one waits; cache entries are dropped where there is no room.
QUEUES = ("checkpoint", "cache")


@dataclass(frozen=True, slots=True, eq=False)
class NodeJob:
    """A node on its way into the memory.

    Attributes:
        node, pieces: one piece per entry of `node.pieces`.
        future: of its receipt.
        queue: one of `QUEUES`.
        timings: see `Ticket.timings`.
        started, queued: when it was handed over and when it was captured (`time.perf_counter`).
    """

    node: Node
    pieces: tuple[Piece, ...]
    future: "Future[PublishReceipt]"
    queue: str = "checkpoint"
    timings: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    queued: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def entered(self) -> None:
        """A group took it: it cannot be taken back any more."""
        self.timings["queue"] = (time.perf_counter() - self.queued) * 1e3

    def spent(self, written: float, durable: float, done: float) -> None:
        """Note the phases of its commit from the moments when they ended."""
        taken = self.queued + self.timings.get("queue", 0.0) / 1e3
        self.timings["write"] = max(0.0, written - taken) * 1e3
        self.timings["barrier"] = (durable - max(written, taken)) * 1e3
        self.timings["catalog"] = (done - durable) * 1e3
        self.timings["total"] = (done - self.started) * 1e3


class Publisher:
    """Turns groups of jobs into commits of the home tier and the catalog. Used by one thread at a time."""

    def __init__(
        self,
        catalog: Catalog,
        home: Tier,
        stats: Stats,
        prepare: Prepare,
        describe: Callable[[bytes], Mapping[str, object] | None],
    ) -> None:
        self._catalog = catalog
        self._home = home
        self._stats = stats
        self._prepare = prepare
        self._describe = describe
        # Written durably, but the catalog commit behind it failed: used by the next group instead of writing again.
        self._uncatalogued: dict[bytes, Placement] = {}
        self._described: set[tuple[str, bytes]] = set()
        # Nodes of the group at hand whose beginning was removed from the memory.
        self._orphans: set[bytes] = set()
        # Told of every group that became durable, before its futures are done: tiers that are written through.
        self.published: list[Callable[[Sequence[NodeJob]], None]] = []

    def commit(self, jobs: Iterable[NodeJob], facts: Callable[[], Facts]) -> None:
        """Make jobs and facts durable, then resolve the jobs' futures. On an error nothing of the group is visible.

        Args:
            jobs: handed over while they still arrive; their payload is written meanwhile.
            facts: asked for the facts of the group once there are no more jobs.
        """
        self._catalog.refresh("placements", "nodes")
        group: list[NodeJob] = []
        needed: set[bytes] = set()
        gone: list[Placement] = []
        incoming = self._incoming(jobs, group, needed, gone)
        damaged: Mapping[bytes, str] = {}
        # The first piece to write, or all jobs: without either no volume is touched.
        first = list(itertools.islice(incoming, 1))
        moments = [time.perf_counter()]
        if first or self._new(group):
            damaged = self._write(itertools.chain(first, incoming), group, moments)
        asked = facts()
        facts_now = Facts(**{name: list(getattr(asked, name)) for name in Facts.__slots__})
        facts_now.placements.extend(gone)
        durable = time.perf_counter()
        with self._home.appending, self._catalog.transaction():
            self._drop_removed()
            # Others may have published meanwhile: what is looked up here stays true until the facts are appended.
            taken, bad = self._write_taken(group, damaged, facts_now)
            needed |= taken
            damaged = {**damaged, **bad}
            written = self._drop_duplicates({content for content in needed if content not in damaged})
            receipts = self._decide(group, damaged, written, facts_now)
            facts_now.placements.extend(self._uncatalogued.values())
            self._catalog.append(facts_now)
            self._uncatalogued.clear()
            receipts = self._confirm(group, receipts)
            if self._catalog.lock_path is None:
                late = Facts()
                if self._write_taken(group, damaged, late)[0]:
                    late.placements.extend(self._uncatalogued.values())
                    self._catalog.append(late)
                    self._uncatalogued.clear()
        barrier.reached("durable")
        self._stats.add("group_commits", 1)
        done = time.perf_counter()
        for tell in self.published:
            tell(group)
        for job, receipt in zip(group, receipts, strict=True):
            self._count(receipt)
            job.spent(moments[-1], durable, done)
            job.future.set_result(receipt)

    def _incoming(
        self, jobs: Iterable[NodeJob], group: list[NodeJob], needed: set[bytes], gone: list[Placement]
    ) -> Iterator[Piece]:
        """Pieces that no usable copy in the home tier holds, as their jobs arrive; one piece from every job that has it,
        should the first be damaged. Notes the jobs, what is needed, and copies that turn out to be gone."""
        self._orphans.clear()
        for job in jobs:
            group.append(job)
            held = self._catalog.nodes.get(job.node.id)
            if held is not None and held.pieces != job.node.pieces:
                continue
            if held is None and self._orphaned(job.node, (other.node.id for other in group)):
                continue
            for piece in job.pieces:
                if piece.content in needed or not self._durable(piece.content, gone):
                    needed.add(piece.content)
                    yield piece

    def _write_taken(
        self, group: Sequence[NodeJob], damaged: Mapping[bytes, str], facts: Facts
    ) -> tuple[set[bytes], Mapping[bytes, str]]:
        """Write what a collection took since it was looked up; returns what that was, and what of it is damaged. Where
        no lock holds collections off, this is asked once more after the nodes are visible: from then on they keep their
        pieces."""
        taken: dict[bytes, Piece] = {}
        for job in group:
            held = self._catalog.nodes.get(job.node.id)
            if held is None and self._orphaned(job.node, (other.node.id for other in group)):
                continue
            if held is None or held.pieces == job.node.pieces:
                for piece in job.pieces:
                    if piece.content not in damaged and not self._durable(piece.content, facts.placements):
                        taken[piece.content] = piece
        return set(taken), self._write(taken.values(), group, []) if taken else {}

    def _drop_duplicates(self, written: set[bytes]) -> set[bytes]:
        """What of `written` counts as stored: another writer may have made the same pieces durable while this one
        wrote. Theirs are used, ours stay out of the catalog, and their bytes are left to collection."""
        late = {
            content
            for content in self._uncatalogued
            for placement in self._catalog.placements.current(content)
            if placement.state is State.READY and self._home.reachable(placement) and self._home.present(placement)
        }
        for content in late:
            del self._uncatalogued[content]
        return written - late

    def _drop_removed(self) -> None:
        """What was written and went with its volume, which no fact kept, is written again."""
        volumes = {placement.volume for placement in self._uncatalogued.values()}
        gone = {volume for volume in volumes if not self._home.shelf.exists(volume)}
        for content in [content for content, placement in self._uncatalogued.items() if placement.volume in gone]:
            del self._uncatalogued[content]

    def _durable(self, content: bytes, found_gone: list[Placement]) -> bool:
        if content in self._uncatalogued:
            return True
        for placement in self._catalog.placements.current(content):
            if placement.state is State.READY and self._home.reachable(placement):
                if self._home.present(placement):
                    return True
                gone = placement.turned(self._catalog.clock.next(), State.QUARANTINED, GONE)
                self._catalog.placements.note(gone)
                found_gone.append(gone)
        return False

    def _write(self, pieces: Iterable[Piece], group: Sequence[NodeJob], moments: list[float]) -> Mapping[bytes, str]:
        """Write pieces durably; `group` is complete once they are. Appends the moment when all was written."""
        described: set[tuple[str, bytes]] = set()

        def document(volume: Volume, damaged: Mapping[bytes, str]) -> str:
            moments.append(time.perf_counter())
            whole = [node for node in self._new(group) if not any(piece in damaged for piece in node.pieces)]
            identities = {}
            for scope in {node.scope for node in whole}:
                description = self._describe(scope)
                if description is not None and (volume.name, scope) not in self._described:
                    identities[scope.hex()] = description
                    described.add((volume.name, scope))
            return json.dumps({"identities": identities, "nodes": [node_document(node) for node in whole]})

        volume, written = self._home.append(pieces, document, self._prepare)
        self._described |= described
        for slot in written.slots:
            self._uncatalogued[slot.content] = placement_at(slot, self._home, volume, self._catalog.clock.next())
        barrier.reached("payload durable", volume.label)
        return written.damaged

    def _decide(
        self, jobs: Sequence[NodeJob], damaged: Mapping[bytes, str], written: set[bytes], facts: Facts
    ) -> list[PublishReceipt]:
        receipts = []
        added: dict[bytes, Node] = {}
        for job in jobs:
            node = job.node
            bad = [damaged[piece] for piece in node.pieces if piece in damaged]
            held = added.get(node.id) or self._catalog.nodes.get(node.id)
            if held is not None and held.pieces != node.pieces:
                event = difference(held, node, [*self._catalog.events(), *facts.events], self._catalog.clock)
                if event is not None:
                    facts.events.append(event)
                receipts.append(PublishReceipt(node.id, conflict=True))
                continue
            if held is None and self._orphaned(node, added):
                receipts.append(PublishReceipt(node.id, missing=ORPHANED))
                continue
            if bad:
                receipts.append(PublishReceipt(node.id, missing=bad[0]))
                continue
            if held is None:
                added[node.id] = node
                facts.nodes.append(node)
            stored = []
            for piece in job.pieces:
                if piece.content in written:
                    written.discard(piece.content)
                    stored.append(piece)
            receipts.append(
                PublishReceipt(
                    node.id,
                    stored=len(stored),
                    reused=len(job.pieces) - len(stored),
                    stored_bytes=sum(piece.nbytes for piece in stored),
                    logical_bytes=job.nbytes,
                )
            )
        return receipts

    def _new(self, group: Iterable[NodeJob]) -> list[Node]:
        """Nodes of a group that become visible with it."""
        known = self._catalog.nodes
        return [job.node for job in group if job.node.id not in known and job.node.id not in self._orphans]

    def _orphaned(self, node: Node, group: Iterable[bytes]) -> bool:
        """Whether what a node builds on was removed: a child staged elsewhere must not outlive a deletion. Noted."""
        nodes, parent = self._catalog.nodes, node.parent
        gone = nodes.retired(parent) >= 0 and parent not in nodes and parent not in group
        if gone or parent in self._orphans:
            self._orphans.add(node.id)
        return node.id in self._orphans

    def _confirm(self, jobs: Sequence[NodeJob], receipts: Sequence[PublishReceipt]) -> list[PublishReceipt]:
        """Who was first is settled by commit order; on an object store, where no lock orders the writers, only now."""
        confirmed, late = [], Facts()
        for job, receipt in zip(jobs, receipts, strict=True):
            held = self._catalog.nodes.get(job.node.id)
            if held is not None and held.pieces != job.node.pieces and not receipt.conflict:
                event = difference(held, job.node, [*self._catalog.events(), *late.events], self._catalog.clock)
                late.events += [event] if event is not None else []
                receipt = PublishReceipt(job.node.id, conflict=True)
            confirmed.append(receipt)
        if late:
            self._catalog.append(late)
        return confirmed

    def _count(self, receipt: PublishReceipt) -> None:
        self._stats.add("conflicts", int(receipt.conflict))
        self._stats.add("nodes_published", int(not receipt.conflict and not receipt.missing))
        self._stats.add("pieces_stored", receipt.stored)
        self._stats.add("pieces_reused", receipt.reused)
        self._stats.add("bytes_stored", receipt.stored_bytes)


def placement_at(slot: Slot, tier: Tier, volume: Volume, sequence: int) -> Placement:
    """The ready placement of a piece that a volume commit wrote."""
    return Placement(
        sequence=sequence,
        content=slot.content,
        tier=tier.name,
        node=tier.config.node,
        volume=volume.name,
        file=slot.file,
        blob=slot.blob,
        offset=slot.offset,
        nbytes=slot.nbytes,
        row=slot.row,
        skip=slot.skip,
        xxh3=slot.xxh3,
    )


def difference(held: Node, offered: Node, known: Sequence[Event], clock: Clock) -> Event | None:
    """The event that one causal id was computed with two contents; None where it is known already."""
    body = {"held": [c.hex() for c in held.pieces], "offered": [c.hex() for c in offered.pieces]}
    if any(event.subject == held.id and event.body == body for event in known):
        return None
    return Event(clock.next(), "non-determinism", held.id, body)
