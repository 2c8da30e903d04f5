"""One catalog table: an append-only Lance dataset of facts, read fragment by fragment."""

import itertools
import mmap
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from numem.errors import StoreError
from numem.identity.digest import ID_BYTES
from numem.store.catalog.facts import KEYS, SCHEMAS, Clock
from numem.store.lance_errors import lance_errors
from numem.store.payload.dataset import Dataset
from numem.store.payload.ledger import Ledger
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
        self._loaded = self._returned = 0
        self._indexed = 0
        self._appended = False
        # Data file and rows of the last append, which are taken up next and need not be read back for that.
        self._own: tuple[str, pa.Table] | None = None
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
        batch = pa.record_batch(columns, schema=self.schema)
        appended = self.dataset.append([batch])
        self._own = (appended.file, pa.Table.from_batches([batch]))
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
        """Whether everything committed was returned by `fresh` and taken up."""
        return not self.dataset.changed(force) and self.dataset.version == self._loaded

    def fresh(self, force: bool = False) -> list[Any]:
        """Fragments not returned before, in commit order; damaged ones are left out and named in `damaged`.

        After a compaction these are all of them: `replaced` says so until the next call.
        """
        if self.dataset.changed(force):
            self.dataset.refresh()
        elif self.dataset.version == self._loaded:
            return []
        self._returned = self.dataset.version
        fragments = self.dataset.fragments()
        self.replaced = not self._seen.issubset(fragments)
        if self.replaced:
            self._seen.clear()
            self.damaged.clear()
        fresh = []
        for file, fragment in fragments.items():
            if file not in self._seen:
                self._seen.add(file)
                fresh.append(fragment)
        return self.sound(fresh)

    def taken_up(self) -> None:
        """What `fresh` returned last is known now: until then `current` is false, and other threads wait for it."""
        self._loaded = self._returned

    def sound(self, fragments: Sequence[Any]) -> list[Any]:
        """Those whose data files have the bytes that were acknowledged; the others are named in `damaged`."""
        return [fragment for fragment in fragments if self._intact(str(fragment.metadata.files[0].path))]

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

    def take(self, fragment: Any, numbers: Sequence[int]) -> pa.Table:
        """Rows of a fragment by their numbers in it.

        Raises:
            StoreError: the data file cannot be read.
        """
        with lance_errors(f"read {self.dataset.name}"):
            rows = fragment.take(list(numbers), columns=self.schema.names)
        if rows.num_rows != len(numbers):
            raise StoreError(f"{self.dataset.name}: {rows.num_rows} rows where {len(numbers)} were asked for")
        return rows

    def find(self, values: Sequence[bytes]) -> pa.Table:
        """Rows whose key is one of these, in commit order, without loading the table. Nothing of them is verified.

        One scan of the key column, then the rows by number. The BTREE is no faster before millions of rows: keys are
        digests, so that 200 of them lie in all of its pages, which a handle that has not loaded any must read.
        """
        key = KEYS[self.name]
        keys = column(self.scan((key,)), key)
        with lance_errors(f"read {self.dataset.name}"):
            return self.dataset.lance.take(_numbers(keys, values), columns=self.schema.names)

    def scan(self, columns: Sequence[str]) -> pa.Table:
        """Columns of all rows of the newest version, in commit order, without loading the table or verifying it."""
        if self.dataset.changed(force=True):
            self.dataset.refresh()
        with lance_errors(f"read {self.dataset.name}"):
            return self.dataset.lance.scanner(columns=list(columns), scan_in_order=True).to_table().combine_chunks()

    def compact(self, keep: Callable[[pa.Table], pa.Table], *, settled_ns: int | None, least: int) -> int:
        """Replace the fragments by one with the rows that `keep` leaves of theirs; returns the fragments replaced.

        The caller holds the catalog's lock, or a maintenance lease where there is none.

        Args:
            settled_ns: replace only fragments whose facts are older than this sequence: rows appended meanwhile would
                stand before the rewritten ones, so the youngest must be older than any race for being first.
            least: fragments below which nothing is done, unless `keep` drops a quarter of the rows; 0 for any change.
        """
        self.dataset.refresh()
        parts = self.read(list(self.dataset.fragments().values()))
        if self.damaged:
            return 0  # what cannot be read is not thrown away here; see `doctor`
        if settled_ns is not None:
            parts = list(itertools.takewhile(lambda part: _newest(part[1]) < settled_ns, parts))
        if not parts:
            return 0
        rows = pa.concat_tables([rows for _, rows in parts]).combine_chunks()
        kept = keep(rows)
        dropped = rows.num_rows - kept.num_rows
        if (len(parts) < (least or len(parts) + 1) and dropped < (rows.num_rows / 4 if least else 1)) or (
            len(parts) == 1 and not dropped
        ):
            return 0
        if not self.dataset.rewrite([fragment for fragment, _ in parts], kept):
            return 0
        self._indexed, self._appended = 0, True
        return len(parts)

    def drop_damaged(self, quarantine: Path) -> dict[str, str]:
        """Commit a version without the damaged data files, of which a copy is kept; file -> what was lost and why.

        The caller holds the catalog's lock, and took what else says the same (the volumes) into the catalog before.
        """
        self.dataset.refresh()
        fragments = self.dataset.fragments()
        kept = self.sound(list(fragments.values()))
        self.read(kept)  # names what Lance cannot read
        bad = {file: why for file, why in self.damaged.items() if file in fragments}
        if not bad:
            return {}
        root = self.dataset.location.path
        for file in bad:
            path = None if root is None else root / "data" / file
            if path is not None and path.is_file():
                quarantine.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, quarantine / f"catalog-{self.name}.{file}.{time.time_ns()}")
        whole = [fragment.metadata for file, fragment in fragments.items() if file not in bad]
        digests = {file: digest for file, digest in self._digests.items() if file in fragments and file not in bad}
        self.dataset.recommit(whole, digests, whole=True)
        self._indexed, self._appended = 0, True
        for file in bad:
            self.damaged.pop(file)
        return {
            file: f"{fragments[file].metadata.physical_rows} rows of {self.name}: {why}" for file, why in bad.items()
        }

    def _scan(self, fragments: Sequence[Any], columns: Sequence[str] | None) -> pa.Table:
        names = list(columns) if columns is not None else self.schema.names
        own, self._own = self._own, None
        if own is not None and [str(fragment.metadata.files[0].path) for fragment in fragments] == [own[0]]:
            return own[1].select(names)
        with lance_errors(f"read {self.dataset.name}"):
            table = self.dataset.lance.scanner(columns=names, fragments=list(fragments), scan_in_order=True).to_table()
            return table.select(names).combine_chunks()

    def _intact(self, file: str) -> bool:
        expected = self._digests.get(file)
        path = self.dataset.location.path
        if expected is None or path is None:
            return True
        try:
            with open(path / "data" / file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
                found = xxhash.xxh3_128_hexdigest(data)
        except OSError as error:
            self.damaged[file] = f"unreadable: {error.strerror}"
            return False
        except ValueError:
            self.damaged[file] = "empty"  # which cannot be mapped
            return False
        if found != expected:
            self.damaged[file] = "bytes differ from those that were acknowledged"
        return found == expected


def _newest(rows: pa.Table) -> int:
    return int(pc.max(rows.column("sequence")).as_py()) if rows.num_rows else 0


def _numbers(keys: pa.Array, values: Sequence[bytes]) -> list[int]:
    """Where one of the values stands in an array of binary keys."""
    numbers = np.arange(len(keys))
    ends = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1] if len(keys) else None
    if ends is not None and (np.diff(ends) == ID_BYTES).all() and all(len(value) == ID_BYTES for value in values):
        # Digests: their first two bytes rule out all but a few of a hundred thousand, in a tenth of the time.
        heads = np.frombuffer(keys.buffers()[2], np.uint8, ID_BYTES * len(keys), ends[0]).reshape(-1, ID_BYTES)[:, :2]
        wanted = np.zeros(1 << 16, np.bool_)
        wanted[[int.from_bytes(value[:2], "big") for value in values]] = True
        numbers = np.flatnonzero(wanted[heads[:, 0] * np.uint16(256) + heads[:, 1]])
        keys = keys.take(pa.array(numbers))
    return list(numbers[pc.is_in(keys, value_set=pa.array(values, keys.type)).to_numpy(zero_copy_only=False)].tolist())


def column(table: pa.Table, name: str) -> Any:
    """A column of a combined table as one array."""
    values = table.column(name)
    return values.chunk(0) if values.num_chunks else pa.array([], values.type)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as dictionaries: `Table.to_pylist`, several times as fast."""
    names = table.column_names
    columns = (table.column(name).to_pylist() for name in names)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
