"""Promotion: pieces copied into a tier nearer to compute, verified against their content ids before they are ready."""

import time
from collections.abc import Callable, Sequence
from threading import Lock

from numem.errors import InputError, IntegrityError, NotFoundError
from numem.identity.digest import content_id
from numem.state.node import Node
from numem.store import barrier
from numem.store.catalog import Catalog, Facts
from numem.store.facts import Placement, State
from numem.store.lance_errors import lance_errors
from numem.store.pieces import NO_CONTENT, Piece
from numem.store.publish import GONE, placement_at
from numem.store.reader import Reader
from numem.store.reports import PromoteReport
from numem.store.stats import Stats
from numem.store.tier import Prepare, Tier

_GROUP_BYTES = 256 << 20


class Promoter:
    """Copies pieces into a target tier of this node, one promotion at a time."""

    def __init__(
        self,
        catalog: Catalog,
        reader: Reader,
        stats: Stats,
        prepare: Prepare,
        key_of: Callable[[bytes], bytes | None],
        quarantine: Callable[[Placement], None],
    ) -> None:
        self._catalog = catalog
        self._reader = reader
        self._stats = stats
        self._prepare = prepare
        self._key_of = key_of
        self._quarantine = quarantine
        self._lock = Lock()

    def promote(self, ids: Sequence[bytes], target: Tier) -> PromoteReport:
        """See `Memory.promote`."""
        started = time.perf_counter()
        with self._lock, lance_errors(f"promotion to {target.name}"):
            nodes = [self._node(node) for node in ids]
            wanted: dict[bytes, Node] = {}
            for node in nodes:
                for content in node.pieces:
                    wanted.setdefault(content, node)
            todo = [content for content in wanted if not self._satisfied(content, target)]
            failed: dict[str, str] = {}
            promoted, nbytes = 0, 0
            for group in self._groups(todo, target, failed):
                done = self._copy([self._piece(p, wanted[p.content], target) for p in group], target, failed)
                promoted += sum(placement.content != NO_CONTENT for placement in done)
                nbytes += sum(placement.nbytes for placement in done)
            self._stats.add("pieces_promoted", promoted)
            self._stats.add("bytes_promoted", nbytes)
            return PromoteReport(
                promoted, len(wanted) - len(todo), nbytes, (time.perf_counter() - started) * 1e3, failed
            )

    def _node(self, id: bytes) -> Node:
        self._catalog.refresh("placements", "nodes")
        node = self._catalog.nodes.get(id)
        if node is None:
            raise NotFoundError(f"promote: no node {id.hex()} in this memory; publish it first")
        return node

    def _satisfied(self, content: bytes, target: Tier) -> bool:
        """Whether the target holds the piece; copies of it there whose file is gone are quarantined."""
        satisfied = False
        for placement in self._reader.replicas(content, target.name):
            if target.present(placement):
                satisfied = True
            else:
                self._quarantine(placement.turned(self._catalog.clock.next(), State.QUARANTINED, GONE))
                self._stats.add("quarantined", 1)
        return satisfied

    def _sources(self, content: bytes, target: Tier) -> list[Placement]:
        return [placement for placement in self._reader.replicas(content) if placement.tier != target.name]

    def _groups(self, todo: Sequence[bytes], target: Tier, failed: dict[str, str]) -> list[list[Placement]]:
        groups: list[list[Placement]] = []
        size = 0
        for content in todo:
            sources = self._sources(content, target)
            if not sources:
                failed[content.hex()] = "no readable replica in another tier"
                continue
            if not groups or size + sources[0].nbytes > _GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(sources[0])
            size += sources[0].nbytes
        return groups

    def _piece(self, source: Placement, node: Node, target: Tier) -> Piece:
        def load(view: memoryview) -> None:
            try:
                key = self._key_of(node.scope)
            except InputError as error:
                raise IntegrityError(str(error)) from error

            def verify(view: memoryview) -> str:
                return "" if content_id(view, key) == source.content else "bytes are not those of the content id"

            reason = self._reader.read_from_others(source.content, view, target.name, verify)
            if reason:
                raise IntegrityError(reason)

        return Piece(source.content, source.nbytes, source.xxh3, load)

    def _copy(self, pieces: Sequence[Piece], target: Tier, failed: dict[str, str]) -> list[Placement]:
        volume, written = target.append(pieces, lambda volume, damaged: "{}", self._prepare)
        barrier.reached("payload durable", volume.label)
        clock = self._catalog.clock
        done = [placement_at(slot, target, volume, clock.next()) for slot in written.slots]
        failures = [
            Placement(
                clock.next(), content, target.name, target.config.node, "", "", 0, 0, 0, 0, 0, b"", State.FAILED, reason
            )
            for content, reason in written.damaged.items()
        ]
        failed.update({content.hex(): reason for content, reason in written.damaged.items()})
        self._catalog.append(Facts(placements=[*done, *failures]))
        barrier.reached("durable")
        return done
