"""The catalog: eight append-only tables of facts at the memory's home, and their indexes in RAM.

The directory is an ordinary LanceDB database (`lancedb.connect(home + "/catalog")` opens it). numem itself goes through
Lance, because the barrier needs the commit in its own hands and importing lancedb takes a second.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import filelock
import pyarrow as pa

from numem.errors import IntegrityError
from numem.state.node import Node
from numem.store.facts import LOADED, ORDER, BranchFact, Claim, Clock, Event, Placement, Record, Retired, to_json
from numem.store.index import NodeIndex, PlacementIndex, StaleError, placement_row
from numem.store.ledger import Ledger
from numem.store.nodes import node_row
from numem.store.table import FactTable
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
    ) -> None:
        self.location = home.child("catalog")
        self.clock = clock
        self.tables = {name: FactTable(name, self.location, ledger, options, clock) for name in ORDER}
        self.nodes = NodeIndex(self.reload)
        self.placements = PlacementIndex()
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
        self._sync_ledger()

    def open(self) -> None:
        """Load what lookups need."""
        self.refresh()

    def refresh(self, *names: str, force: bool = False) -> None:
        """Take up facts that this or another process appended since (`force`: ask an object store now).

        Args:
            names: tables; default those that lookups need. Nodes come with what retired them.
        """
        for name in ("retired", *names) if "nodes" in names else names or LOADED:
            table = self.tables[name]
            if table.current(force):
                continue
            with self._lock:
                fresh = table.fresh(force)
                if table.replaced:
                    self._forget(name)
                if fresh:
                    self._take_up(table, fresh)

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
            self._sync_ledger()
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
        return [
            Record(r["sequence"], r["kind"], r["subject"], json.loads(r["body"]))
            for r in self.rows("records")
            if (kind is None or r["kind"] == kind) and (subject is None or r["subject"] == subject)
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

    def damaged(self) -> dict[str, str]:
        """Data files of the catalog that are not read -> why."""
        return {
            f"{table.dataset.name}/{file}": why for table in self.tables.values() for file, why in table.damaged.items()
        }

    def _sync_ledger(self) -> None:
        if self._ledger is not None:
            self._ledger.sync()

    def _forget(self, name: str) -> None:
        """Drop what was read of a table that is read anew."""
        if name == "nodes":
            self.nodes.clear()
        elif name == "placements":
            self.placements.clear()
        elif name != "retired":
            self._known[name].clear()
            self._rows[name].clear()
            if name == "identities":
                self._identified = 0

    def _take_up(self, table: FactTable, fragments: list[Any]) -> None:
        if table.name == "nodes":
            for fragment, narrow in table.read(fragments, NodeIndex.NARROW):
                self.nodes.add(narrow, partial(_whole, table, fragment))
        elif table.name == "placements":
            for _, rows in table.read(fragments):
                self.placements.add(rows)
        elif table.name == "retired":
            for _, rows in table.read(fragments):
                self.nodes.retire(rows)
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
            return [{"sequence": next_sequence(), **node_row(node)} for node in facts.nodes]
        if name in ("branches", "claims", "retired"):
            return [{slot: getattr(fact, slot) for slot in fact.__slots__} for fact in getattr(facts, name)]
        return [
            {"sequence": fact.sequence, "kind": fact.kind, "subject": fact.subject, "body": to_json(fact.body)}
            for fact in getattr(facts, name)
        ]


def _whole(table: FactTable, fragment: Any) -> pa.Table:
    parts = table.read([fragment])
    if not parts:
        file = fragment.metadata.files[0].path
        if table.outdated(file):
            raise StaleError(file)
        raise IntegrityError(f"{table.dataset.name}: data file {file} cannot be read; run numem verify")
    return parts[0][1]
