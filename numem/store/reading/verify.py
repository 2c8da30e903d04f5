"""Verification: every reachable copy against its content id, every node against its pieces, the catalog's own files."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from numem.errors import InputError, NotFoundError
from numem.identity.digest import content_id
from numem.state.node import Node
from numem.store.catalog.catalog import Catalog
from numem.store.catalog.facts import Placement, State
from numem.store.reading.reader import Reader
from numem.store.reports import Quarantined, VerifyReport


class Verifier:
    """Checks a memory and quarantines what it finds bad."""

    def __init__(
        self,
        catalog: Catalog,
        reader: Reader,
        present: Callable[[Placement], bool],
        key_of: Callable[[bytes], bytes | None],
        quarantine: Callable[[Placement], None],
    ) -> None:
        self._catalog = catalog
        self._reader = reader
        self._present = present
        self._key_of = key_of
        self._quarantine = quarantine

    def verify(self, ids: Iterable[bytes] | None, deep: bool) -> VerifyReport:
        """See `Memory.verify`."""
        started = time.perf_counter()
        self._catalog.refresh("placements", "nodes", "events")
        nodes = list(self._catalog.nodes.of_kind(None)) if ids is None else [self._node(node) for node in ids]
        owners: dict[bytes, Node] = {}
        for node in nodes:
            for content in node.pieces:
                owners.setdefault(content, node)
        bad: list[Quarantined] = []
        gone: set[bytes] = set()
        checked, nbytes = 0, 0
        for content, node in owners.items():
            # What is held in RAM is compared at every read, and is no reason to call a piece safe.
            replicas = [place for place in self._reader.replicas(content) if place.volume]
            good = False
            for placement in replicas:
                reason = self._fault(placement, node, deep)
                checked += 1
                nbytes += placement.nbytes if deep else 0
                if reason:
                    bad.append(Quarantined(content, placement.tier, placement.volume, reason))
                    self._quarantine(placement.turned(self._catalog.clock.next(), State.QUARANTINED, reason))
                good = good or not reason
            if not good:
                gone.add(content)
        missing = {node.id: tuple(c for c in node.pieces if c in gone) for node in nodes if gone & set(node.pieces)}
        return VerifyReport(
            nodes=len(nodes),
            pieces=len(owners),
            placements=checked,
            bytes=nbytes,
            bad=tuple(bad),
            missing=missing,
            conflicts=tuple(dict.fromkeys(e.subject for e in self._catalog.events() if e.kind == "non-determinism")),
            damaged=self._catalog.damaged(),
            ms=(time.perf_counter() - started) * 1e3,
        )

    def _node(self, id: bytes) -> Node:
        node = self._catalog.nodes.get(id)
        if node is None:
            raise NotFoundError(f"verify: no node {id.hex()} in this memory")
        return node

    def _fault(self, placement: Placement, node: Node, deep: bool) -> str:
        if not self._present(placement):
            return "sidecar missing or cut short"
        if not deep:
            return ""
        buffer = np.empty(placement.nbytes, np.uint8)
        reason = self._reader.read_replica(placement, buffer.data)
        if reason:
            return reason
        try:
            key = self._key_of(node.scope)
        except InputError:
            return ""  # salted, and the salt is not known here: xxh3 held, BLAKE3 cannot be recomputed
        return "" if content_id(buffer, key) == placement.content else "bytes are not those of the content id"
