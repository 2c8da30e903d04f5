"""One catalog table: an append-only Lance dataset of facts, read fragment by fragment."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from numem.errors import StoreError
from numem.store.dataset import Dataset
from numem.store.facts import KEYS, SCHEMAS, Clock
from numem.store.lance_errors import lance_errors
from numem.store.ledger import Ledger
from numem.store.urls import Location

# Rows after which a BTREE pays off: 10,000 rows without one are searched in 1-2 ms.
INDEX_ROWS = 16384


class FactTable:
    """Facts of one kind.

    Args:
        name: a key of `facts.SCHEMAS`; the table is `<name>.lance` in the catalog, as LanceDB names it.
        clock: told every sequence read.
    """

    def __init__(
        self,
        name: str,
        catalog: Location,
        ledger: Ledger | None,
        options: Mapping[str, str] | None,
        clock: Clock,
    ) -> None:
        self.name = name
        self.schema = SCHEMAS[name]
        self.dataset = Dataset(
            f"catalog/{name}", catalog.child(f"{name}.lance"), self.schema, ledger, options, whole_files=True
        )
        self._clock = clock
        self._seen: set[str] = set()
        self._loaded = 0
        self._indexed = 0
        self._appended = False
        self._digests: dict[str, str] = {}
        self.replaced = False
        self.damaged: dict[str, str] = {}

    def expect(self, digests: Mapping[str, str]) -> None:
        """Digests (xxh3-128, hex) that data files must have; a file that differs is not read."""
        self._digests.update(digests)

    def append(self, rows: Sequence[Mapping[str, Any]], writer: str) -> None:
        """Append facts durably; each row holds its `sequence` and the table's own columns."""
        columns = []
        for field in self.schema:
            values = [writer if field.name == "writer" else row[field.name] for row in rows]
            columns.append(pa.array(values, field.type))
        if self.dataset.changed(force=True):
            # Versions are cleaned up behind a handle that was not refreshed for long: it could not commit on its own.
            self.dataset.refresh()
        self.dataset.append([pa.record_batch(columns, schema=self.schema)])
        self._appended = True

    def index_if_worthwhile(self) -> None:
        """Keep a BTREE on the table's key once it has many rows, for readers other than numem (its own are in RAM)."""
        key = KEYS.get(self.name)
        if key is None or not self._appended:
            return
        self._appended = False
        lance, name = self.dataset.lance, f"{key}_idx"
        with lance_errors(f"index {self.dataset.name}"):
            rows = lance.count_rows()
            if rows - self._indexed < INDEX_ROWS:
                return
            exists = any(index.name == name for index in lance.describe_indices())
            if exists and not self._indexed:
                self._indexed = int(lance.stats.index_stats(name)["num_indexed_rows"])
                if rows - self._indexed < INDEX_ROWS:
                    return
            if exists:
                lance.optimize.optimize_indices()
            else:
                lance.create_scalar_index(key, "BTREE", name=name)
            self._indexed = rows
        self.dataset.acknowledge_index()

    def current(self, force: bool = False) -> bool:
        """Whether everything committed was returned by `fresh`."""
        return not self.dataset.changed(force) and self.dataset.version == self._loaded

    def fresh(self, force: bool = False) -> list[Any]:
        """Fragments not returned before, in commit order; damaged ones are left out and named in `damaged`.

        After a compaction these are all of them: `replaced` says so until the next call.
        """
        if self.dataset.changed(force):
            self.dataset.refresh()
        elif self.dataset.version == self._loaded:
            return []
        self._loaded = self.dataset.version
        fragments = self.dataset.fragments()
        self.replaced = not self._seen.issubset(fragments)
        if self.replaced:
            self._seen.clear()
            self.damaged.clear()
        fresh = []
        for file, fragment in fragments.items():
            if file not in self._seen:
                self._seen.add(file)
                if self._intact(file):
                    fresh.append(fragment)
        return fresh

    def outdated(self, file: str) -> bool:
        """Whether the newest version does not name a data file any more: it was compacted, and is no damage."""
        if self.dataset.newest_names(file):
            return False
        self.damaged.pop(file, None)
        return True

    def read(self, fragments: Sequence[Any], columns: Sequence[str] | None = None) -> list[tuple[Any, pa.Table]]:
        """(fragment, its rows) in commit order; a fragment that Lance cannot read is left out and named."""
        if not fragments:
            return []
        try:
            table = self._scan(fragments, columns)
            sizes = [fragment.metadata.physical_rows for fragment in fragments]
            if sum(sizes) != table.num_rows:
                raise StoreError(f"{self.dataset.name}: {table.num_rows} rows where {sum(sizes)} were committed")
            ends = list(itertools.accumulate(sizes))
            parts = [
                (fragment, table.slice(end - size, size))
                for fragment, size, end in zip(fragments, sizes, ends, strict=True)
            ]
        except StoreError as error:
            if len(fragments) == 1:
                self.damaged[str(fragments[0].metadata.files[0].path)] = str(error)
                return []
            return [part for fragment in fragments for part in self.read([fragment], columns)]
        if "sequence" in table.column_names and table.num_rows:
            self._clock.observe(pc.max(table.column("sequence")).as_py())
        return parts

    def _scan(self, fragments: Sequence[Any], columns: Sequence[str] | None) -> pa.Table:
        names = list(columns) if columns is not None else self.schema.names
        with lance_errors(f"read {self.dataset.name}"):
            table = self.dataset.lance.scanner(columns=names, fragments=list(fragments), scan_in_order=True).to_table()
            return table.select(names).combine_chunks()

    def _intact(self, file: str) -> bool:
        expected = self._digests.get(file)
        path = self.dataset.location.path
        if expected is None or path is None:
            return True
        try:
            found = xxhash.xxh3_128_hexdigest((path / "data" / file).read_bytes())
        except OSError as error:
            self.damaged[file] = f"unreadable: {error.strerror}"
            return False
        if found != expected:
            self.damaged[file] = "bytes differ from those that were acknowledged"
        return found == expected


def column(table: pa.Table, name: str) -> Any:
    """A column of a combined table as one array."""
    values = table.column(name)
    return values.chunk(0) if values.num_chunks else pa.array([], values.type)
