"""The RAM side of the catalog: nodes by id and parent, placements by content id, fed from new fragments.

Rows are numbered in the order in which they were taken up. A batch is taken up by a few calls that run at the speed of
C; rows are looked at one by one only where a key occurs more than once or was retired.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from numem.errors import IntegrityError
from numem.state.node import Node
from numem.store.catalog.facts import Placement, State
from numem.store.catalog.nodes import node_of_row
from numem.store.catalog.table import column, rows_of
from numem.store.payload.pieces import NO_CONTENT

# Rows read together where one is needed: what lies beside it was mostly published with it, and is needed next.
BLOCK = 1024

Load = Callable[[Sequence[int]], pa.Table]


class StaleError(Exception):
    """Rows that were announced lie in a file that a compaction replaced: read the table again."""


class _Segment:
    """Nodes loaded together: the narrow columns, and the wide rows in blocks on first use."""

    __slots__ = ("_blocks", "_load", "first", "ids", "kinds", "parents")

    def __init__(self, first: int, ids: list[bytes], parents: Any, kinds: Any, load: Load) -> None:
        self.first = first
        self.ids = ids
        self.parents = parents
        self.kinds = kinds
        self._load = load
        self._blocks: dict[int, list[dict[str, Any]]] = {}

    def row(self, number: int) -> dict[str, Any]:
        """One row, by its number in here."""
        block, place = divmod(number, BLOCK)
        if block not in self._blocks:
            end = min(len(self.ids), (block + 1) * BLOCK)
            self._blocks[block] = rows_of(self._load(range(block * BLOCK, end)))
        return self._blocks[block][place]

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """These rows and no others."""
        return rows_of(self._load(numbers))


class _Taken:
    """What was taken up of one reading of the table; a new reading starts with a new one, so that no reader mixes two."""

    __slots__ = ("cache", "children", "filed", "firsts", "rows", "segments", "sequences")

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        self.sequences = array("q")
        self.segments: list[_Segment] = []
        self.firsts: list[int] = []
        self.cache: dict[bytes, Node] = {}
        self.children: dict[bytes, list[bytes]] = {}
        self.filed = 0

    def segment(self, number: int) -> _Segment:
        return self.segments[bisect_right(self.firsts, number) - 1]

    def keep(self, node: bytes, row: dict[str, Any]) -> Node:
        found = node_of_row(row)
        if found.id != node:
            raise IntegrityError(f"node {node.hex()}: the catalog row it was read from names {found.id.hex()}")
        self.cache[node] = found
        return found

    def file(self) -> None:
        """Enter the visible rows of segments that came since among their parents' children."""
        while self.filed < len(self.segments):
            segment = self.segments[self.filed]
            pairs = zip(segment.ids, segment.parents.to_pylist(), strict=True)
            for number, (node, parent) in enumerate(pairs, segment.first):
                if self.rows.get(node) == number:
                    self.children.setdefault(parent, []).append(node)
            self.filed += 1

    def of_kind(self, kind: str) -> list[bytes]:
        found = []
        for segment in list(self.segments):
            mine = pc.equal(segment.kinds, kind).to_numpy(zero_copy_only=False)
            for number in np.flatnonzero(mine).tolist():
                if self.rows.get(segment.ids[number]) == segment.first + number:
                    found.append(segment.ids[number])
        return found


class NodeIndex:
    """Nodes by causal id and by parent. The first node of an id in commit order holds, unless it was retired since.

    Args:
        reload: reads the whole table again; called where a compaction replaced rows that were not read yet.
    """

    NARROW = ("sequence", "id", "parent", "kind")

    def __init__(self, reload: Callable[[], None]) -> None:
        self._reload = reload
        self._lock = Lock()
        self._retired: dict[bytes, int] = {}
        self._taken = _Taken()

    def clear(self) -> None:
        """Forget every node, before the table is read anew; what is retired stays so."""
        self._taken = _Taken()

    def add(self, narrow: pa.Table, load: Load) -> None:
        """Take up rows; `load` reads rows with all columns, by their numbers in this batch, when they are needed."""
        taken = self._taken
        sequences, ids, parents, kinds = (column(narrow, name) for name in self.NARROW)
        first, names = len(taken.sequences), ids.to_pylist()
        taken.sequences.frombytes(sequences.to_numpy().astype(np.int64).tobytes())
        taken.firsts.append(first)
        taken.segments.append(_Segment(first, names, parents, kinds, load))
        new = dict(zip(names, range(first, first + len(names)), strict=True))
        known = taken.rows.keys()
        if len(new) == len(names) and known.isdisjoint(names) and self._retired.keys().isdisjoint(names):
            taken.rows.update(new)
            return
        for number, node in enumerate(names, first):
            if node not in known and self._retired.get(node, -1) < taken.sequences[number]:
                taken.rows[node] = number

    def retire(self, rows: pa.Table) -> None:
        """Take up nodes that are not visible any more."""
        taken = self._taken
        gone = False
        for node, sequence in zip(column(rows, "id").to_pylist(), column(rows, "sequence").to_pylist(), strict=True):
            self._retired[node] = max(sequence, self._retired.get(node, -1))
            if node in taken.rows and taken.sequences[taken.rows[node]] < sequence:
                del taken.rows[node]
                taken.cache.pop(node, None)
                gone = True
        if gone:
            with self._lock:
                taken.filed, taken.children = 0, {}

    def __len__(self) -> int:
        return len(self._taken.rows)

    def __contains__(self, node: bytes) -> bool:
        return node in self._taken.rows

    def sequence(self, node: bytes) -> int:
        """When a node was published: the sequence of its row. KeyError where it is not visible."""
        taken = self._taken
        return taken.sequences[taken.rows[node]]

    def retired(self, node: bytes) -> int:
        """Sequence of the newest retirement of a node, -1 where there is none."""
        return self._retired.get(node, -1)

    def ids(self) -> list[bytes]:
        """Every visible node, oldest first."""
        return list(self._taken.rows)

    def get(self, node: bytes) -> Node | None:
        found = self._taken.cache.get(node)
        if found is not None:
            return found
        try:
            return self._get(node)
        except StaleError:
            self._reload()
            return self._get(node)

    def get_many(self, nodes: Sequence[bytes]) -> tuple[Node | None, ...]:
        """Nodes in the order asked for, None where one is not visible; what is not at hand is read at once."""
        try:
            found = self._fetch(nodes)
        except StaleError:
            self._reload()
            found = self._fetch(nodes)
        return tuple(map(found.get, nodes))

    def children(self, parent: bytes) -> tuple[Node, ...]:
        with self._lock:
            taken = self._taken
            taken.file()
            ids = list(taken.children.get(parent, ()))
        return tuple(self._known(ids))

    def of_kind(self, kind: str | None) -> tuple[Node, ...]:
        """Every visible node (of a kind), oldest first."""
        return tuple(self._known(self.ids() if kind is None else self._taken.of_kind(kind)))

    def with_prefix(self, prefix: str) -> tuple[Node, ...]:
        """Nodes whose id starts with hex digits."""
        whole, odd = divmod(len(prefix), 2)
        start = bytes.fromhex(prefix[: 2 * whole])
        matches = (node for node in self.ids() if node.startswith(start))
        return tuple(self._known([node for node in matches if not odd or node.hex().startswith(prefix)]))

    def _get(self, node: bytes) -> Node | None:
        taken = self._taken
        number = taken.rows.get(node)
        if number is None:
            return None
        segment = taken.segment(number)
        return taken.keep(node, segment.row(number - segment.first))

    def _fetch(self, nodes: Sequence[bytes]) -> dict[bytes, Node]:
        taken = self._taken
        found = {node: held for node in nodes if (held := taken.cache.get(node)) is not None}
        if len(found) == len(nodes):
            return found
        wanted = sorted({(taken.rows[node], node) for node in nodes if node in taken.rows and node not in found})
        while wanted:
            segment = taken.segment(wanted[0][0])
            end = segment.first + len(segment.ids)
            mine = [one for one in wanted if one[0] < end]
            wanted = wanted[len(mine) :]
            for (_, node), row in zip(mine, segment.rows([at - segment.first for at, _ in mine]), strict=True):
                found[node] = taken.keep(node, row)
        return found

    def _known(self, ids: Sequence[bytes]) -> Iterator[Node]:
        if len(ids) == 1:
            single = self.get(ids[0])
            yield from () if single is None else (single,)
            return
        for at in range(0, len(ids), BLOCK):
            yield from (node for node in self.get_many(ids[at : at + BLOCK]) if node is not None)


class PlacementIndex:
    """Placements by content id. Of several facts about one copy the newest sequence holds."""

    def __init__(self) -> None:
        self._noted: dict[bytes, list[Placement]] = {}
        self._lock = Lock()
        self._readings = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was read, before the table is read anew; what was noted stays."""
        with self._lock:
            self._rows: dict[bytes, int] = {}  # the newest row of each piece
            self._before: dict[bytes, list[int]] = {}  # and older ones, where there are some
            self._count = 0
            self._tables: list[pa.Table] = []
            self._columns: list[dict[str, Any]] = []
            self._firsts: list[int] = []
            self._cache: dict[bytes, tuple[Placement, ...]] = {}
            self._readings += 1

    def note(self, placement: Placement) -> None:
        """Know a fact now that is appended to the catalog later: a replica found bad is not offered again."""
        with self._lock:
            self._noted.setdefault(placement.content, []).append(placement)
            self._cache.pop(placement.content, None)

    def add(self, table: pa.Table) -> None:
        """Take up rows, with all columns."""
        contents = column(table, "content").to_pylist()
        with self._lock:
            first = self._count
            new = dict(zip(contents, range(first, first + len(contents)), strict=True))
            for content in self._rows.keys() & new.keys():
                self._before.setdefault(content, []).append(self._rows[content])
            if len(new) < len(contents):
                newest = np.fromiter(map(new.__getitem__, contents), np.int64, len(contents)) - first
                for number in np.flatnonzero(newest != np.arange(len(contents))).tolist():
                    self._before.setdefault(contents[number], []).append(first + number)
            self._rows.update(new)
            # The mark of a commit is no piece.
            self._rows.pop(NO_CONTENT, None)
            self._before.pop(NO_CONTENT, None)
            for content in self._cache.keys() & new.keys():
                del self._cache[content]
            self._tables.append(table)
            self._columns.append({name: column(table, name) for name in table.column_names if name != "writer"})
            self._firsts.append(first)
            self._count += len(contents)

    def __contains__(self, content: bytes) -> bool:
        return content in self._rows

    def contents(self) -> list[bytes]:
        return list(self._rows)

    def since(self, mark: tuple[int, int]) -> tuple[tuple[int, int], list[tuple[bytes, str]]]:
        """A mark of now, and (piece, tier) of the facts taken up since an earlier one: all, where the table was read
        anew."""
        with self._lock:
            known = mark[1] if mark[0] == self._readings else 0
            tables = self._tables[known:]
            now = (self._readings, len(self._tables))
        pairs = (
            zip(*(column(table, name).to_pylist() for name in ("content", "tier")), strict=True) for table in tables
        )
        return now, [pair for part in pairs for pair in dict.fromkeys(part)]

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
        if content in self._rows:
            for number in (*self._before.get(content, ()), self._rows[content]):
                at = bisect_right(self._firsts, number) - 1
                yield _placement_of(self._columns[at], number - self._firsts[at])
        yield from self._noted.get(content, ())

    def files(self, tier: str, volume: str) -> set[str]:
        """Data files of a volume that any placement names."""
        return {file for table in self._tables for file in files_of(table, tier, volume)}

    def commits(self, tier: str, volume: str) -> dict[str, int]:
        """Data files of a volume -> when they were catalogued: the sequence of the mark that each commit leaves."""
        found: dict[str, int] = {}
        for table in self._tables:
            marks = (pc.field("volume") == volume) & (pc.field("tier") == tier) & (pc.field("content") == NO_CONTENT)
            mine = table.filter(marks)
            found.update(zip(column(mine, "file").to_pylist(), column(mine, "sequence").to_pylist(), strict=True))
        return found


def files_of(placements: pa.Table, tier: str, volume: str) -> list[str]:
    """Data files of a volume that rows of placements (tier, volume, file) name."""
    mine = placements.filter((pc.field("volume") == volume) & (pc.field("tier") == tier))
    return list(pc.unique(mine.column("file")).to_pylist())


def placement_row(placement: Placement) -> dict[str, Any]:
    """Columns of the catalog's table of placements, without the writer."""
    return {
        name: str(value) if name == "state" else value
        for name, value in ((field, getattr(placement, field)) for field in Placement.__slots__)
    }


def _placement_of(columns: dict[str, Any], number: int) -> Placement:
    row = {name: values[number].as_py() for name, values in columns.items()}
    return Placement(**{**row, "state": State(row["state"])})
