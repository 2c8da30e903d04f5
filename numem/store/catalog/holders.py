"""Which nodes a piece belongs to: the catalog's question asked the other way round, answered from RAM."""

from collections.abc import Iterable
from threading import Lock

from numem.state.node import Node
from numem.store.catalog.catalog import Catalog


class Holders:
    """Nodes by piece and pieces by scope, grown as nodes appear; built on first use."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = Lock()
        self._seen: set[bytes] = set()
        self._nodes: dict[bytes, list[bytes]] = {}
        self._pieces: dict[bytes, dict[bytes, None]] = {}

    def nodes(self, contents: Iterable[bytes]) -> list[Node]:
        """Visible nodes that have any of these pieces, parents first."""
        with self._lock:
            self._grow()
            ids = dict.fromkeys(id for content in contents for id in self._nodes.get(content, ()))
        found = (self._catalog.nodes.get(id) for id in ids)
        return sorted((node for node in found if node is not None), key=lambda node: (node.start, node.id))

    def pieces(self, scope: bytes) -> list[bytes]:
        """Pieces of every node of a scope that was seen, also of those that were retired since."""
        with self._lock:
            self._grow()
            return list(self._pieces.get(scope, ()))

    def _grow(self) -> None:
        self._catalog.refresh("placements", "nodes")
        for id in self._catalog.nodes.ids():
            if id not in self._seen:
                node = self._catalog.nodes.get(id)
                if node is not None:
                    self._seen.add(id)
                    self._pieces.setdefault(node.scope, {}).update(dict.fromkeys(node.pieces))
                    for piece in dict.fromkeys(node.pieces):
                        self._nodes.setdefault(piece, []).append(id)
