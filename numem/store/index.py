"""The RAM side of the catalog: nodes by id and parent, placements by content id, fed from new fragments."""

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from numem.errors import IntegrityError
from numem.state.node import Node
from numem.store.facts import Placement, State
from numem.store.nodes import node_of
from numem.store.table import column

Row = tuple["_Segment", int]


class StaleError(Exception):
    """Rows that were announced lie in a file that a compaction replaced: read the table again."""


class _Segment:
    """Rows loaded together; the wide columns are read on first use."""

    __slots__ = ("_columns", "_load")

    def __init__(self, load: Callable[[], pa.Table]) -> None:
        self._load = load
        self._columns: dict[str, Any] | None = None

    def row(self, number: int) -> dict[str, Any]:
        if self._columns is None:
            table = self._load()
            self._columns = {name: column(table, name) for name in table.column_names}
        return {name: values[number].as_py() for name, values in self._columns.items()}


class NodeIndex:
    """Nodes by causal id and by parent. The first node of an id in commit order holds, unless it was retired since.

    Args:
        reload: reads the whole table again; called where a compaction replaced rows that were not read yet.
    """

    NARROW = ("sequence", "id", "parent", "kind")

    def __init__(self, reload: Callable[[], None]) -> None:
        self._reload = reload
        self._retired: dict[bytes, int] = {}
        self.clear()

    def clear(self) -> None:
        """Forget every node, before the table is read anew; what is retired stays so."""
        self._rows: dict[bytes, Row] = {}
        self._sequences: dict[bytes, int] = {}
        self._children: dict[bytes, list[bytes]] = {}
        self._kinds: dict[str, list[bytes]] = {}
        self._cache: dict[bytes, Node] = {}

    def add(self, narrow: pa.Table, load: Callable[[], pa.Table]) -> None:
        """Take up rows; `load` reads the same rows with all columns when one is first needed."""
        segment = _Segment(load)
        sequences, ids, parents, kinds = (column(narrow, name).to_pylist() for name in self.NARROW)
        for number, (sequence, node, parent, kind) in enumerate(zip(sequences, ids, parents, kinds, strict=True)):
            if node not in self._rows and self._retired.get(node, -1) < sequence:
                self._rows[node] = (segment, number)
                self._sequences[node] = sequence
                self._children.setdefault(parent, []).append(node)
                self._kinds.setdefault(kind, []).append(node)

    def retire(self, rows: pa.Table) -> None:
        """Take up nodes that are not visible any more."""
        gone = set()
        for node, sequence in zip(column(rows, "id").to_pylist(), column(rows, "sequence").to_pylist(), strict=True):
            self._retired[node] = max(sequence, self._retired.get(node, -1))
            if self._sequences.get(node, sequence) < sequence:
                gone.add(node)
        if not gone:
            return
        for node in gone:
            del self._rows[node], self._sequences[node]
            self._cache.pop(node, None)
        _drop(self._children, gone)
        _drop(self._kinds, gone)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, node: bytes) -> bool:
        return node in self._rows

    def sequence(self, node: bytes) -> int:
        """When a node was published: the sequence of its row. KeyError where it is not visible."""
        return self._sequences[node]

    def retired(self, node: bytes) -> int:
        """Sequence of the newest retirement of a node, -1 where there is none."""
        return self._retired.get(node, -1)

    def ids(self) -> list[bytes]:
        """Every visible node, oldest first."""
        return list(self._rows)

    def get(self, node: bytes) -> Node | None:
        try:
            return self._get(node)
        except StaleError:
            self._reload()
            return self._get(node)

    def children(self, parent: bytes) -> tuple[Node, ...]:
        return tuple(self._known(self._children.get(parent, ())))

    def of_kind(self, kind: str | None) -> tuple[Node, ...]:
        return tuple(self._known(list(self._rows) if kind is None else self._kinds.get(kind, ())))

    def with_prefix(self, prefix: str) -> tuple[Node, ...]:
        """Nodes whose id starts with hex digits."""
        whole, odd = divmod(len(prefix), 2)
        start = bytes.fromhex(prefix[: 2 * whole])
        matches = (node for node in list(self._rows) if node.startswith(start))
        return tuple(self._known([node for node in matches if not odd or node.hex().startswith(prefix)]))

    def _get(self, node: bytes) -> Node | None:
        found = self._cache.get(node)
        if found is None:
            row = self._rows.get(node)
            if row is None:
                return None
            found = node_of(row[0].row(row[1]))
            if found.id != node:
                raise IntegrityError(f"node {node.hex()}: the catalog row it was read from names {found.id.hex()}")
            self._cache[node] = found
        return found

    def _known(self, ids: Any) -> Iterator[Node]:
        for node in ids:
            found = self.get(node)
            if found is not None:
                yield found


class PlacementIndex:
    """Placements by content id. Of several facts about one copy the newest sequence holds."""

    def __init__(self) -> None:
        self._noted: dict[bytes, list[Placement]] = {}
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Forget what was read, before the table is read anew; what was noted stays."""
        with self._lock:
            self._rows: dict[bytes, list[Row]] = {}
            self._tables: list[pa.Table] = []
            self._cache: dict[bytes, tuple[Placement, ...]] = {}

    def note(self, placement: Placement) -> None:
        """Know a fact now that is appended to the catalog later: a replica found bad is not offered again."""
        with self._lock:
            self._noted.setdefault(placement.content, []).append(placement)
            self._cache.pop(placement.content, None)

    def add(self, table: pa.Table) -> None:
        segment = _Segment(lambda: table)
        contents = column(table, "content").to_pylist()
        with self._lock:
            self._tables.append(table)
            for number, content in enumerate(contents):
                if content:  # else the mark of a commit, see `pieces.NO_CONTENT`
                    self._rows.setdefault(content, []).append((segment, number))
                    self._cache.pop(content, None)

    def __contains__(self, content: bytes) -> bool:
        return content in self._rows

    def contents(self) -> list[bytes]:
        return list(self._rows)

    def current(self, content: bytes) -> tuple[Placement, ...]:
        """Every copy in its newest state, failures included."""
        found = self._cache.get(content)
        if found is not None or content not in self._rows:
            return found or ()
        newest: dict[tuple[str, str, str, str, int, int], Placement] = {}
        with self._lock:
            for placement in self._facts(content):
                held = newest.get(placement.copy)
                if held is None or held.sequence <= placement.sequence:
                    newest[placement.copy] = placement
            found = self._cache[content] = tuple(newest.values())
        return found

    def _facts(self, content: bytes) -> Iterator[Placement]:
        for segment, number in self._rows.get(content, ()):
            yield _placement_of(segment.row(number))
        yield from self._noted.get(content, ())

    def files(self, tier: str, volume: str) -> set[str]:
        """Data files of a volume that any placement names."""
        files: set[str] = set()
        for table in self._tables:
            mine = table.filter((pc.field("volume") == volume) & (pc.field("tier") == tier))
            files.update(pc.unique(mine.column("file")).to_pylist())
        return files


def _drop(lists: dict[Any, list[bytes]], gone: set[bytes]) -> None:
    for key, nodes in list(lists.items()):
        if not gone.isdisjoint(nodes):
            lists[key] = [node for node in nodes if node not in gone]


def placement_row(placement: Placement) -> dict[str, Any]:
    """Columns of the catalog's table of placements, without the writer."""
    return {
        name: str(value) if name == "state" else value
        for name, value in ((field, getattr(placement, field)) for field in Placement.__slots__)
    }


def _placement_of(row: dict[str, Any]) -> Placement:
    row.pop("writer")
    return Placement(**{**row, "state": State(row["state"])})
