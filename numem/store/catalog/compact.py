"""Compaction of the catalog: of every table the facts that still say something, in one fragment, and few versions.

Facts are never updated in place, so a table grows with every change; the newest of each is all that a reader needs.
"""

import re
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from numem.store.catalog.catalog import Catalog
from numem.store.catalog.facts import ORDER, State
from numem.store.catalog.index import NodeIndex
from numem.store.catalog.table import column
from numem.store.payload.pieces import NO_CONTENT

# Fragments of a table above which a compaction pays off: 64 cost a reader about as much as one more commit.
LEAST = 64
# Versions younger than this stay: longer than any publication, promotion or read that may still stand on one.
KEEP_VERSIONS_S = 600.0
# On object stores no lock orders the writers; facts younger than this may still be racing for being first.
SETTLE_S = 60.0
# Records that the store makes of its own work, and how many of them stay.
HOUSEKEEPING = ("eviction", "scrub", "lookups")
KEEP_NOTES = 1000
# Decisions and their outcomes, whoever made them: what `numem why` and `numem replay` look back on.
DECISIONS = "decision/"
KEEP_DECISIONS = 1 << 16
# What the stages of the main job report, about a batch.
JOB = "job/"
# Rows of retired nodes and of claims that ended stay this long: a collection goes by them.
GRACE_S = 2 * 3600.0
_ID = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Outcome of a compaction.

    Attributes:
        fragments: table -> fragments that were replaced by one.
        rows_dropped: facts that nothing needs any more.
        bytes_removed: of old versions and the files that they alone named.
    """

    fragments: dict[str, int] = field(default_factory=dict)
    rows_dropped: int = 0
    bytes_removed: int = 0


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a deletion takes out of the catalog: nodes, pieces, scopes and branch names."""

    nodes: frozenset[bytes]
    pieces: frozenset[bytes]
    scopes: frozenset[bytes]
    branches: frozenset[str]

    def filter(self, table: str, keep: Callable[[pa.Table], pa.Table], rows: pa.Table) -> pa.Table:
        """Rows that `keep` leaves and that are about nothing of this."""
        rows = keep(rows)
        about: dict[str, tuple[str, frozenset[bytes] | frozenset[str]]] = {
            "nodes": ("id", self.nodes),
            "placements": ("content", self.pieces),
            "identities": ("scope", self.scopes),
            "branches": ("name", self.branches),
        }
        name, gone = about.get(table, ("subject", self.nodes | self.scopes))
        if table == "retired" or not gone:
            return rows  # says that something is gone, and nothing else
        doomed = pa.array([value in gone for value in column(rows, name).to_pylist()], pa.bool_())
        if table == "records":
            doomed = pc.or_(doomed, pa.array(self._named(rows), pa.bool_()))
        return rows.filter(pc.invert(doomed))

    def _named(self, records: pa.Table) -> list[bool]:
        """Which records name some of it beside their subject.

        Decisions name the scope they were made under, the other victims of a plan and what else could have gone. A
        report of the main job names scope or states, and all reports of such a batch go: they hold its prompts' ids.
        """
        gone = {id.hex() for id in self.nodes | self.scopes}
        kinds, subjects, bodies = (column(records, name).to_pylist() for name in ("kind", "subject", "body"))
        found = [
            kind.startswith((DECISIONS, JOB)) and not gone.isdisjoint(_ID.findall(body))
            for kind, body in zip(kinds, bodies, strict=True)
        ]
        batches = {s for s, kind, is_in in zip(subjects, kinds, found, strict=True) if is_in and kind.startswith(JOB)}
        return [
            is_in or (kind.startswith(JOB) and s in batches)
            for s, kind, is_in in zip(subjects, kinds, found, strict=True)
        ]


def compact(
    catalog: Catalog,
    gone: Callable[[str, str, str], bool],
    *,
    least: int = LEAST,
    keep_versions_s: float = KEEP_VERSIONS_S,
    grace_s: float = GRACE_S,
    without: Forgotten | None = None,
    fence: Callable[[], None] = lambda: None,
) -> CompactReport:
    """Compact every table that has many fragments, and remove old versions of all.

    Args:
        gone: whether a (tier, node, volume) exists no more, so that evicted copies in it need not be remembered.
        least: see `FactTable.compact`.
        grace_s: age from which rows of retired nodes and of claims that ended are dropped.
        without: facts about these are dropped, whatever else holds, and every table that has some is written anew.
        fence: called before every commit; raises where the maintenance lease was lost.
    """
    replaced: dict[str, int] = {}
    dropped = 0
    removed = 0
    for name in ORDER:
        with catalog.exclusive():
            catalog.refresh()
            table = catalog.tables[name]
            before = table.dataset.lance.count_rows()
            fence()
            ordered = catalog.lock_path is not None or without is not None
            keep = partial(_keep(name), catalog, gone, time.time_ns() - int(grace_s * 1e9))
            count = table.compact(
                keep if without is None else partial(without.filter, name, keep),
                settled_ns=None if ordered else time.time_ns() - int(SETTLE_S * 1e9),
                least=least,
            )
            if count:
                replaced[name] = count
                dropped += before - table.dataset.lance.count_rows()
                table.index_if_worthwhile()
                catalog.sync_ledger()
            catalog.refresh(name)
            fence()
            removed += table.dataset.clean_up(keep_versions_s)
    return CompactReport(replaced, dropped, removed)


_Gone = Callable[[str, str, str], bool]
_Keep = Callable[[Catalog, _Gone, int, pa.Table], pa.Table]


def _keep(name: str) -> _Keep:
    keep: dict[str, _Keep] = {
        "placements": _placements,
        "nodes": _nodes,
        "claims": _claims,
        "retired": _retired,
        "records": _records,
    }
    return keep.get(name, _distinct)


def _placements(catalog: Catalog, gone: _Gone, late: int, rows: pa.Table) -> pa.Table:
    """The newest fact of every copy; none of an evicted or bad copy, or of a commit, whose volume is gone."""
    names = ("content", "tier", "node", "volume", "file", "blob", "offset")
    columns = [column(rows, name).to_pylist() for name in names]
    kept = _newest(rows, list(zip(*columns, strict=True)))
    states = column(rows, "state").to_pylist()
    contents, tiers, nodes, volumes = columns[:4]
    memo: dict[tuple[str, str, str], bool] = {}

    def useless(row: int) -> bool:
        if contents[row] != NO_CONTENT and states[row] not in (State.EVICTED, State.QUARANTINED):
            return False
        place = (tiers[row], nodes[row], volumes[row])
        if place not in memo:
            memo[place] = gone(*place)
        return memo[place]

    return rows.take(pa.array([row for row in kept if not useless(row)], pa.int64()))


def _nodes(catalog: Catalog, gone: _Gone, late: int, rows: pa.Table) -> pa.Table:
    """The first row of every node that was not retired since, or not long ago, or whose deletion has yet to end: by its
    row the deletion knows what belongs to it."""
    unfinished = catalog.unfinished()
    seen: set[bytes] = set()
    kept = []
    sequences, ids, _, _ = (column(rows, name).to_pylist() for name in NodeIndex.NARROW)
    for row, (sequence, node) in enumerate(zip(sequences, ids, strict=True)):
        retired = catalog.nodes.retired(node)
        if retired < sequence and node not in seen:
            seen.add(node)
            kept.append(row)
        elif sequence <= retired and (retired > late or node in unfinished):
            kept.append(row)
    return rows.take(pa.array(kept, pa.int64()))


def _claims(catalog: Catalog, gone: _Gone, late: int, rows: pa.Table) -> pa.Table:
    """The newest of every claim that holds, or held not long ago."""
    names = ("kind", "subject", "tier", "node", "owner")
    columns = [column(rows, name).to_pylist() for name in names]
    kept = _newest(rows, list(zip(*columns, strict=True)))
    sequences, expires, active = (column(rows, name).to_pylist() for name in ("sequence", "expires", "active"))

    def over(row: int) -> bool:
        ended = sequences[row] if not active[row] else expires[row]
        return bool(ended) and ended < late

    return rows.take(pa.array([row for row in kept if not over(row)], pa.int64()))


def _retired(catalog: Catalog, gone: _Gone, late: int, rows: pa.Table) -> pa.Table:
    """The newest retirement of every node."""
    return rows.take(pa.array(_newest(rows, column(rows, "id").to_pylist()), pa.int64()))


def _distinct(catalog: Catalog, gone: _Gone, late: int, rows: pa.Table) -> pa.Table:
    """Every fact once."""
    keys = zip(column(rows, "sequence").to_pylist(), column(rows, "writer").to_pylist(), strict=True)
    return rows.take(pa.array(sorted({key: row for row, key in reversed(list(enumerate(keys)))}.values()), pa.int64()))


def _records(catalog: Catalog, gone: _Gone, late: int, rows: pa.Table) -> pa.Table:
    """Every record once; of what the store notes of its own work, and of decisions, only the newest."""
    rows = _distinct(catalog, gone, late, rows)
    kinds = column(rows, "kind").to_pylist()
    noted = [row for row, kind in enumerate(kinds) if kind in HOUSEKEEPING]
    decided = [row for row, kind in enumerate(kinds) if kind.startswith(DECISIONS)]
    old = {*noted[:-KEEP_NOTES], *decided[:-KEEP_DECISIONS]}
    return rows.take(pa.array([row for row in range(rows.num_rows) if row not in old], pa.int64()))


def _newest(rows: pa.Table, keys: Sequence[Hashable]) -> list[int]:
    """Row numbers, in order, of the row with the highest sequence of every key."""
    sequences = column(rows, "sequence").to_pylist()
    held: dict[Hashable, int] = {}
    for row, key in enumerate(keys):
        other = held.get(key)
        if other is None or sequences[other] <= sequences[row]:
            held[key] = row
    return sorted(held.values())
