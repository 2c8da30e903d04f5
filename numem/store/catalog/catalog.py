"""The catalog: eight append-only tables of facts at the memory's home, and their indexes in RAM.

The directory is an ordinary LanceDB database (`lancedb.connect(home + "/catalog")` opens it). numem itself goes through
Lance, because the barrier needs the commit in its own hands and importing lancedb takes a second.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import filelock
import pyarrow as pa

from numem.errors import IntegrityError, ReadOnlyError, StoreError
from numem.state.node import Node
from numem.store.catalog.facts import (
    FORGOTTEN,
    LOADED,
    ORDER,
    BranchFact,
    Claim,
    Clock,
    Event,
    Placement,
    Record,
    Retired,
    to_json,
)
from numem.store.catalog.index import NodeIndex, PlacementIndex, StaleError, files_of, placement_row
from numem.store.catalog.nodes import node_of_row, sealed_row
from numem.store.catalog.table import FactTable, column, rows_of
from numem.store.payload.ledger import Ledger
from numem.store.urls import Location


@dataclass(slots=True)
class Facts:
    """Facts that are committed together. Nodes become visible last."""

    identities: list[tuple[bytes, Mapping[str, Any]]] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    branches: list[BranchFact] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    retired: list[Retired] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def extend(self, other: "Facts") -> None:
        for name in ORDER:
            getattr(self, name).extend(getattr(other, name))

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in ORDER)


class Catalog:
    """Facts of a memory.

    Args:
        home: where `catalog/` lies.
        ledger: see `ledger.Ledger`; None on object stores.
        lock: lock file that appends of all local processes take turns on; None on object stores, where Lance's own
            conditional commits serialise them and readers treat rows as a set.
        writer: asked for the name of this process, which every row carries.
    """

    def __init__(
        self,
        home: Location,
        ledger: Ledger | None,
        lock: Path | None,
        options: Mapping[str, str] | None,
        writer: Callable[[], str],
        clock: Clock,
        read_only: bool = False,
    ) -> None:
        self.location = home.child("catalog")
        self._read_only = read_only
        self.clock = clock
        self.tables = {name: FactTable(name, self.location, ledger, options, clock) for name in ORDER}
        self._nodes = NodeIndex(self.reload)
        self._placements = PlacementIndex()
        self._loaded = self._loading = self._asked = False
        # Called once, when what lookups need was loaded, to make good for data files that turned out damaged.
        self.mend: Callable[[], None] = lambda: None
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ORDER}
        self._known: dict[str, set[tuple[int, str]]] = {name: set() for name in ORDER}
        self._writer = writer
        self._ledger = ledger
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._identified = 0
        self._lock = RLock()
        self.lock_path = lock
        self._file_lock = None if lock is None else filelock.FileLock(lock, thread_local=False)
        self._depth = 0

    def create(self) -> None:
        """Create what is missing of the tables; the caller holds the exclusive right."""
        for table in self.tables.values():
            table.dataset.create()
        self.sync_ledger()

    def open(self) -> None:
        """Be ready for lookups. A local catalog is loaded by the first that needs more than `lookup`, `files` or a
        small table; one on an object store now, since no ledger says how far its sequences have come."""
        if self._ledger is None:
            self.load()

    @property
    def nodes(self) -> NodeIndex:
        """Nodes by id and parent, loaded on first use."""
        self.load()
        return self._nodes

    @property
    def placements(self) -> PlacementIndex:
        """Placements by content id, loaded on first use."""
        self.load()
        return self._placements

    def load(self) -> None:
        """Load what lookups need, once; every data file is checked against its digest before."""
        if self._loaded:
            return
        with self._lock:
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                self._refresh(LOADED, True)
                self.mend()
                self._loaded = True
            finally:
                self._loading = False

    def lookup(self, ids: Sequence[bytes]) -> tuple[Node | None, ...]:
        """Nodes by causal id, in the order asked for, None where one is not visible.

        The first lookup of a handle that has not loaded the catalog reads the rows it needs and no more (see
        `FactTable.find`), instead of all data files for their digests. Nothing is believed for that: a row is answered
        only where the digest that it holds of itself is right, and it names an id that was asked for. What a damaged
        file can do is to hide a row: the node is then recomputed, and its publication loads the catalog, checks the
        files and finds it. Where anything is wrong, or a row has no digest, the catalog is loaded.
        """
        if not self._loaded and not self._asked:
            self._asked = True
            with self._lock, contextlib.suppress(StoreError):
                return self._find(ids)
        self.refresh("nodes")
        return self._nodes.get_many(ids)

    def files(self, tier: str, volume: str) -> set[str]:
        """Data files of a volume that any placement names; unverified while the catalog is not loaded."""
        if not self._loaded:
            with self._lock, contextlib.suppress(StoreError):
                return set(files_of(self.tables["placements"].scan(("tier", "volume", "file")), tier, volume))
        return self.placements.files(tier, volume)

    def refresh(self, *names: str, force: bool = False) -> None:
        """Take up facts that this or another process appended since (`force`: ask an object store now).

        Args:
            names: tables; default those that lookups need. Nodes come with what retired them.
        """
        wanted = ("retired", *names) if "nodes" in names else names or LOADED
        if not self._loaded and not set(wanted).isdisjoint(LOADED):
            self.load()
        self._refresh(wanted, force)

    def _refresh(self, names: Sequence[str], force: bool) -> None:
        for name in names:
            table = self.tables[name]
            if table.current(force):
                continue
            with self._lock:
                fresh = table.fresh(force)
                if table.replaced:
                    self._forget(name)
                if fresh:
                    self._take_up(table, fresh)
                table.taken_up()

    def reload(self) -> None:
        """Move to the newest version now: a compaction replaced files that this handle had yet to read."""
        self.refresh(force=True)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Exclusive right to append: what is looked up inside stays true until the facts are appended."""
        with self.exclusive():
            if self._depth == 1:
                self.refresh(force=True)
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """The catalog's lock among threads and, where the home is local, among processes; re-entrant."""
        if self._read_only:
            raise ReadOnlyError(f"{self.location.url}: opened with read_only=True; open it without to change anything")
        with self._lock, self._file_lock or contextlib.nullcontext():
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def append(self, facts: Facts) -> None:
        """Append facts durably, nodes last."""
        with self.transaction():
            for name in ORDER:
                rows = self._encode(name, facts)
                if rows:
                    self.tables[name].append(rows, self._writer())
            for table in self.tables.values():
                table.index_if_worthwhile()
            self.sync_ledger()
            self.refresh()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All rows of a small table, in commit order, each once."""
        self.refresh(name)
        return self._rows[name]

    def identities(self) -> dict[bytes, dict[str, Any]]:
        rows = self.rows("identities")
        for row in rows[self._identified :]:
            self._identities.setdefault(row["scope"], json.loads(row["description"]))
        self._identified = len(rows)
        return self._identities

    def records(self, kind: str | None = None, subject: bytes | None = None) -> list[Record]:
        below = kind is not None and kind.endswith("/")
        return [
            Record(r["sequence"], r["kind"], r["subject"], json.loads(r["body"]))
            for r in self.rows("records")
            if (kind is None or r["kind"] == kind or (below and r["kind"].startswith(kind)))
            and (subject is None or r["subject"] == subject)
        ]

    def events(self) -> list[Event]:
        return [Event(r["sequence"], r["kind"], r["subject"], json.loads(r["body"])) for r in self.rows("events")]

    def branch_facts(self) -> list[BranchFact]:
        return [BranchFact(**{k: v for k, v in row.items() if k != "writer"}) for row in self.rows("branches")]

    def claims(self, now_ns: int | None = None) -> list[Claim]:
        """The newest of each claim; with a time only those that hold then."""
        newest: dict[tuple[str, bytes, str, str, str], Claim] = {}
        for row in self.rows("claims"):
            claim = Claim(**{k: v for k, v in row.items() if k != "writer"})
            held = newest.get(claim.key)
            if held is None or held.sequence <= claim.sequence:
                newest[claim.key] = claim
        return [claim for claim in newest.values() if now_ns is None or claim.holds(now_ns)]

    def forgotten(self) -> dict[bytes, int]:
        """Causal id -> sequence of its deletion, of the nodes that were forgotten and not published again by the last
        `refresh`, which this leaves to the caller: a compaction must not move under its table."""
        gone: dict[bytes, int] = {}
        for rows in self._newest("retired", ("sequence", "id", "reason")):
            names = (column(rows, name).to_pylist() for name in ("sequence", "id", "reason"))
            for sequence, node, reason in zip(*names, strict=True):
                if reason == FORGOTTEN and node not in self._nodes:
                    gone[node] = max(sequence, gone.get(node, -1))
        return gone

    def unfinished(self) -> frozenset[bytes]:
        """Nodes of deletions that were cut short: every deletion ends those before it, and leaves a record at its end."""
        gone = self.forgotten()
        ended = -1
        for rows in self._newest("records", ("sequence", "kind")) if gone else ():
            kinds = zip(column(rows, "sequence").to_pylist(), column(rows, "kind").to_pylist(), strict=True)
            ended = max([ended, *(sequence for sequence, kind in kinds if kind == FORGOTTEN)])
        return frozenset(node for node, sequence in gone.items() if sequence > ended)

    def damaged(self) -> dict[str, str]:
        """Data files of the catalog that are not read -> why."""
        self.load()
        return {
            f"{table.dataset.name}/{file}": why for table in self.tables.values() for file, why in table.damaged.items()
        }

    def sync_ledger(self) -> None:
        """Force what the ledger was told to the disk: the last step before an acknowledgement."""
        if self._ledger is not None:
            self._ledger.sync()

    def _find(self, ids: Sequence[bytes]) -> tuple[Node | None, ...]:
        self._refresh(("retired",), True)
        if self.tables["retired"].damaged:
            raise StoreError("catalog/retired: damaged")
        found = dict.fromkeys(ids)
        for row in rows_of(self.tables["nodes"].find(ids)):
            node = node_of_row(row, sealed=True)
            if node.id not in found:
                raise IntegrityError(f"catalog/nodes: a row that was not asked for, {node.id.hex()}")
            if found[node.id] is None and self._nodes.retired(node.id) < row["sequence"]:
                found[node.id] = node
        return tuple(found[id] for id in ids)

    def _newest(self, name: str, columns: Sequence[str]) -> list[pa.Table]:
        """Columns of a table's rows, of which nothing is kept in RAM."""
        table = self.tables[name]
        if table.dataset.changed(force=True):
            table.dataset.refresh()
        return [rows for _, rows in table.read(list(table.dataset.fragments().values()), columns)]

    def _forget(self, name: str) -> None:
        """Drop what was read of a table that is read anew."""
        if name == "nodes":
            self._nodes.clear()
        elif name == "placements":
            self._placements.clear()
        elif name != "retired":
            self._known[name].clear()
            self._rows[name].clear()
            if name == "identities":
                self._identified = 0

    def _take_up(self, table: FactTable, fragments: list[Any]) -> None:
        if table.name == "nodes":
            for fragment, narrow in table.read(fragments, NodeIndex.NARROW):
                self._nodes.add(narrow, partial(_rows, table, fragment))
        elif table.name == "placements":
            for _, rows in table.read(fragments):
                self._placements.add(rows)
        elif table.name == "retired":
            for _, rows in table.read(fragments):
                self._nodes.retire(rows)
        else:
            known = self._known[table.name]
            for _, part in table.read(fragments):
                for row in part.to_pylist():
                    key = (row["sequence"], row["writer"])
                    if key not in known:
                        known.add(key)
                        self._rows[table.name].append(row)

    def _encode(self, name: str, facts: Facts) -> list[dict[str, Any]]:
        next_sequence = self.clock.next
        if name == "identities":
            return [
                {"sequence": next_sequence(), "scope": scope, "description": to_json(description)}
                for scope, description in facts.identities
            ]
        if name == "placements":
            return [placement_row(placement) for placement in facts.placements]
        if name == "nodes":
            return [sealed_row(next_sequence(), node) for node in facts.nodes]
        if name in ("branches", "claims", "retired"):
            return [{slot: getattr(fact, slot) for slot in fact.__slots__} for fact in getattr(facts, name)]
        return [
            {"sequence": fact.sequence, "kind": fact.kind, "subject": fact.subject, "body": to_json(fact.body)}
            for fact in getattr(facts, name)
        ]


def _rows(table: FactTable, fragment: Any, numbers: Sequence[int]) -> pa.Table:
    try:
        return table.take(fragment, numbers)
    except StoreError as error:
        file = fragment.metadata.files[0].path
        if table.outdated(file):
            raise StaleError(file) from error
        raise IntegrityError(f"{table.dataset.name}: data file {file} cannot be read; run numem verify") from error
