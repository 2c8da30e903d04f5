"""One append-only Lance dataset under numem's commit protocol: write, sync, commit, sync, record in the ledger."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import lance
import pyarrow as pa
import xxhash
from lance.fragment import FragmentMetadata, write_fragments

from numem.errors import RecoveryError, StorageFullError, StoreError
from numem.store import barrier
from numem.store.lance_errors import lance_errors
from numem.store.payload.ledger import Entry, Ledger
from numem.store.payload.manifests import MAGIC, digest_file, manifest_path, manifest_versions
from numem.store.urls import Location

FORMAT: Final = "2.2"
REMOTE_CHECK_S = 1.0
_FULL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of one append: the version it made, its fragment's data file, and Lance's fragment."""

    version: int
    file: str
    fragment: Any


class Dataset:
    """A dataset that only grows.

    Args:
        name: name inside the memory, for messages and the ledger.
        location: where it lies.
        schema: Arrow schema of its rows.
        ledger: where acknowledged commits are recorded; None on object stores, which commit atomically.
        options: Lance storage options.
        whole_files: record a digest of every data file; payload lies beside them, so they are small.
    """

    def __init__(
        self,
        name: str,
        location: Location,
        schema: pa.Schema,
        ledger: Ledger | None,
        options: Mapping[str, str] | None = None,
        *,
        whole_files: bool = False,
    ) -> None:
        self.name = name
        self.location = location
        self.schema = schema
        self._ledger = ledger
        self._options = dict(options) if options else None
        self._whole_files = whole_files
        self._lance: Any = None
        # (version, path of the next manifest, directory of manifests): what `changed` looks at.
        self._watched = (-1, "", "")
        self._mtime = 0
        self._asked = 0.0

    @property
    def lance(self) -> Any:
        """The open `lance.LanceDataset`."""
        if self._lance is None:
            self.open()
        return self._lance

    @property
    def version(self) -> int:
        return int(self.lance.version)

    def create(self) -> None:
        """Create the empty dataset durably. The caller holds the exclusive right to do so."""
        path = self.location.path
        if path is not None:
            if manifest_versions(path) or any((path / "data").glob("*")):
                self.open()
                return
            if path.exists():
                # A creation that a crash cut short: no manifest was ever complete, so nothing was acknowledged.
                shutil.rmtree(path)
        try:
            self.create_new()
        except StoreError as error:
            # An object store may have it: made earlier, or just now with the reply lost.
            if path is not None:
                raise
            try:
                self.open()
            except StoreError:
                raise error from None

    def create_new(self) -> None:
        """Create the empty dataset durably where there is no manifest; data files that are there are let be."""
        path = self.location.path
        with lance_errors(f"create {self.name}"):
            self._lance = lance.write_dataset(
                self.schema.empty_table(),
                self.location.url,
                mode="create",
                data_storage_version=FORMAT,
                storage_options=self._options,
            )
        if path is not None:
            barrier.sync([manifest_path(path, self.version)], [path / "_versions", path, path.parent])
            self._record(self.version, [], {})

    def missing(self) -> bool:
        """Whether a local dataset was never created."""
        path = self.location.path
        return path is not None and not path.exists()

    def newest_names(self, file: str) -> bool:
        """Whether the newest version names a data file; asks without moving this handle."""
        with lance_errors(f"refresh {self.name}"):
            newest = lance.dataset(self.location.url, storage_options=self._options)
            return any(_file(fragment.metadata) == file for fragment in newest.get_fragments())

    def open(self, version: int | None = None) -> None:
        """Open at the newest version, or at one; RecoveryError where its manifest on an object store is damaged."""
        try:
            with lance_errors(f"open {self.name}"):
                opened = lance.dataset(self.location.url, version=version, storage_options=self._options)
            # Lance reads some damaged manifests as a version 0 without rows and columns.
            if opened.version < 1 or opened.schema.names != self.schema.names:
                raise StoreError(f"{self.name}: reads as version {opened.version} with columns {opened.schema.names}")
        except StoreError as error:
            # What the store answered made no sense; a store that does not answer is an OSError.
            if self.location.path is None and not isinstance(error.__cause__, OSError):
                raise RecoveryError(f"{error}; the newest manifest there is damaged, run numem doctor") from error
            raise
        self._lance = opened

    def changed(self, force: bool = False) -> bool:
        """Whether another handle or process committed since: two system calls where local; where remote one request,
        at most every `REMOTE_CHECK_S` unless forced."""
        if self._lance is None:
            return True
        if self.location.path is None:
            now = time.monotonic()
            if not force and now - self._asked < REMOTE_CHECK_S:
                return False
            self._asked = now
            return bool(self._lance.latest_version > self._lance.version)
        if self._watched[0] != self._lance.version:
            root = self.location.path
            self._watched = (self._lance.version, str(manifest_path(root, self.version + 1)), str(root / "_versions"))
            self._mtime = 0
        if os.access(self._watched[1], os.F_OK):
            return True
        # The next number may be missing although a later one exists: old versions are cleaned up.
        mtime = os.stat(self._watched[2]).st_mtime_ns
        if mtime == self._mtime:
            return False
        if self._lance.latest_version > self._lance.version:
            return True
        self._mtime = mtime
        return False

    def refresh(self) -> None:
        """Move to the newest version; see `open`."""
        self.open()

    def append(self, batches: Iterable[pa.RecordBatch]) -> Appended:
        """Append rows as one fragment; see `commit`."""

        def write() -> list[Any]:
            return list(
                write_fragments(
                    pa.RecordBatchReader.from_batches(self.schema, batches),
                    self.lance,
                    mode="append",
                    data_storage_version=FORMAT,
                    storage_options=self._options,
                    max_rows_per_file=1 << 30,
                )
            )

        return self.commit(write)

    def commit(self, write: Callable[[], list[Any]]) -> Appended:
        """Write one fragment, commit it, and return only when it is durable.

        Args:
            write: writes the files and returns the fragment that names them, in a list.

        Raises:
            StorageFullError, StoreError: nothing is visible; files of the attempt are removed where local.
        """
        before = self._data_names()
        root = self.location.path
        grows = root is not None and not (root / "data").is_dir()
        try:
            with lance_errors(f"append to {self.name}"):
                fragments = write()
            barrier.reached("written", self.name)
            with lance_errors(f"sync {self.name}"):
                files = self._sync_data(fragments, grows)
        except BaseException as error:
            # Lance can lose a failed write's reason and only find the file too short.
            full = isinstance(error, StoreError) and root is not None and shutil.disk_usage(root).free < _FULL_BYTES
            self._remove_since(before)
            if full:
                raise StorageFullError(
                    f"append to {self.name}: no space left; free some and try again, nothing was published"
                ) from error
            raise
        # From here on nothing is removed: a commit that fails may still have landed.
        with lance_errors(f"commit to {self.name}"):
            self._lance = lance.LanceDataset.commit(
                self.lance,
                lance.LanceOperation.Append(fragments),
                read_version=self.version,
                storage_options=self._options,
            )
        barrier.reached("committed", self.name)
        self.acknowledge(fragments, files)
        (fragment,) = fragments
        return Appended(self.version, _file(fragment), fragment)

    def rewrite(self, old: Sequence[Any], rows: pa.Table) -> bool:
        """Replace fragments of the open version by one with these rows; False where another rewrite came first.

        What others append meanwhile stays, behind the rows. Returns when the new version is durable; the old versions
        and their files stay until `clean_up`.
        """
        index = [index.name for index in self.lance.describe_indices()]
        before = self._data_names()
        with lance_errors(f"compact {self.name}"):
            for name in index:
                self.lance.drop_index(name)
            new: list[Any] = []
            if rows.num_rows:
                new = list(
                    write_fragments(
                        rows,
                        self.lance,
                        mode="append",
                        data_storage_version=FORMAT,
                        storage_options=self._options,
                        max_rows_per_file=1 << 30,
                    )
                )
            barrier.reached("written", self.name)
            files = self._sync_data(new, False)
            group = lance.LanceOperation.RewriteGroup([fragment.metadata for fragment in old], new)
            try:
                self._lance = lance.LanceDataset.commit(
                    self.lance,
                    lance.LanceOperation.Rewrite([group], []),
                    read_version=self.version,
                    storage_options=self._options,
                )
            except OSError as error:
                if "onflict" not in str(error):
                    raise
                self._remove_since(before)
                self.refresh()
                return False
        barrier.reached("committed", self.name)
        everything = [fragment.metadata for fragment in self.lance.get_fragments()]
        if self._whole_files and self.location.path is not None:
            files = {_file(one): self._digest(_file(one)) for one in everything}
        self.acknowledge(everything, files, whole=True)
        return True

    def clean_up(self, older_than_s: float) -> int:
        """Remove versions older than this and the files that they alone name; returns the bytes removed."""
        with lance_errors(f"clean up {self.name}"):
            stats = self.lance.cleanup_old_versions(
                older_than=timedelta(seconds=older_than_s), error_if_tagged_old_versions=False
            )
        return int(stats.bytes_removed)

    def recommit(self, fragments: list[Any], files: Mapping[str, str], *, whole: bool = False) -> None:
        """Commit fragments whose data files exist already (recovery): appended, or in place of all (`whole`)."""
        # Lance numbers those with id 0 in the order given.
        fragments = [FragmentMetadata.from_json(json.dumps({**one.to_json(), "id": 0})) for one in fragments]
        operation = (
            lance.LanceOperation.Overwrite(self.schema, fragments) if whole else lance.LanceOperation.Append(fragments)
        )
        with lance_errors(f"commit to {self.name}"):
            self._lance = lance.LanceDataset.commit(self.lance, operation, read_version=self.version)
        self.acknowledge(fragments, files, whole=whole)

    def acknowledge(self, fragments: Iterable[Any], files: Mapping[str, str], *, whole: bool = False) -> None:
        """Make the current version durable and note it in the ledger, which the caller syncs."""
        path = self.location.path
        if path is None:
            return
        manifest = manifest_path(path, self.version)
        barrier.sync([manifest], [manifest.parent])
        self._record(self.version, [fragment.to_json() for fragment in fragments], files, whole)

    def acknowledge_index(self) -> None:
        """Make an index commit that Lance made on the open handle durable."""
        path = self.location.path
        if path is not None:
            for directory in (path / "_indices").glob("*"):
                barrier.sync(sorted(directory.iterdir()), [directory])
            barrier.sync_directory(path / "_indices")
            barrier.sync_directory(path)
        self.acknowledge([], {})

    def fragments(self) -> dict[str, Any]:
        """Data file name -> `lance.LanceFragment`, in the order of their rows."""
        return {_file(fragment.metadata): fragment for fragment in self.lance.get_fragments()}

    def has_strays(self) -> bool:
        """Whether `data/` holds more names than the open version uses."""
        names = self._data_names()
        return bool(names) and len(names) > len(self.lance.get_fragments())

    def _sync_data(self, fragments: Iterable[Any], grows: bool) -> dict[str, str]:
        path = self.location.path
        if path is None:
            return {}
        digests: dict[str, str] = {}
        names, directories = [], []
        for fragment in fragments:
            file = path / "data" / _file(fragment)
            _require_whole(file, fragment)
            sidecars = file.with_suffix("")
            if sidecars.is_dir():
                names.extend(sorted(sidecars.iterdir()))
                directories.append(sidecars)
            names.append(file)
            if self._whole_files:
                digests[file.name] = self._digest(file.name)
        # The first append makes data/ itself, whose name lies in the dataset's root.
        barrier.sync(names, [*directories, path / "data", *([path] if grows else [])])
        return digests

    def _digest(self, file: str) -> str:
        assert self.location.path is not None
        return str(xxhash.xxh3_128_hexdigest((self.location.path / "data" / file).read_bytes()))

    def _record(self, version: int, fragments: list[Any], files: Mapping[str, str], whole: bool = False) -> None:
        path = self.location.path
        if self._ledger is not None and path is not None:
            self._ledger.append(
                Entry(
                    self.name, version, digest_file(manifest_path(path, version)), fragments, dict(files), whole=whole
                )
            )

    def _data_names(self) -> frozenset[str]:
        path = self.location.path
        if path is None or not (path / "data").is_dir():
            return frozenset()
        return frozenset(entry.name for entry in (path / "data").iterdir())

    def _remove_since(self, before: frozenset[str]) -> None:
        """Remove what a failed attempt left; the caller is the only writer while it appends."""
        path = self.location.path
        if path is None or not (path / "data").is_dir():
            return
        for entry in (path / "data").iterdir():
            if entry.name not in before:
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)


def _file(fragment: Any) -> str:
    return str(fragment.files[0].path)


def _require_whole(file: Path, fragment: Any) -> None:
    """Whether a data file has the length that Lance says it wrote, and its end."""
    expected = fragment.files[0].file_size_bytes
    with open(file, "rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(-min(size, len(MAGIC)), os.SEEK_END)
        tail = opened.read()
    if (expected and size != expected) or tail != MAGIC:
        raise StoreError(f"{file.name} is cut short: {size} of {expected} bytes were written")
