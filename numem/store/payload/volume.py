"""A volume: one Lance dataset of payload (blob v2, packed), written by one process, never changed once closed.

Rows of one commit, in this order:

    piece    one payload of 64 KiB or more; the next one starts at a multiple of 4 KiB
    bundle   the smaller payloads of the commit, unpadded, back to back; `parts` says which lies where
    facts    no payload: the nodes and identities published with this commit, so that a catalog can be rebuilt
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numem.errors import IntegrityError, StoreError
from numem.store.catalog.facts import Placement
from numem.store.lance_errors import lance_errors
from numem.store.payload.dataset import Dataset
from numem.store.payload.ledger import Ledger
from numem.store.payload.packing import BLOB_ID, Facts, Packer, Row, parts_of
from numem.store.payload.pieces import SCHEMA, SMALL, Piece, Slot, Written
from numem.store.payload.sidecar import SidecarFiles, sidecar_name
from numem.store.urls import Location


class Volume:
    """One volume of a tier, for appending, for Lance's own reads and for scans of its rows."""

    def __init__(
        self, name: str, label: str, location: Location, ledger: Ledger | None, options: Mapping[str, str] | None
    ) -> None:
        self.name = name
        self.label = label
        self.location = location
        self._dataset = Dataset(label, location, SCHEMA, ledger, options, whole_files=True)
        self._agreed = False

    def create(self) -> None:
        self._dataset.create()

    @property
    def dataset(self) -> Dataset:
        return self._dataset

    @property
    def commits(self) -> int:
        return self._dataset.version

    def payload_bytes(self) -> int:
        """Bytes of all sidecars; 0 where remote (the caller counts what it wrote)."""
        path = self.location.path
        if path is None:
            return 0
        return sum(entry.stat().st_size for entry in (path / "data").glob("*/*.blob"))

    def append(self, pieces: Iterable[Piece], facts: Facts) -> Written:
        """Write pieces durably as one commit; a piece whose `load` finds damage is left out and named.

        Args:
            pieces: may still arrive while the first are written; of several with one content id one is written.
            facts: called with the damaged pieces (content id -> reason) once all are loaded; returns the JSON of the
                facts row.

        Raises:
            StorageFullError, StoreError: nothing of it is visible.
        """
        packer = Packer(pieces, facts)
        root = self.location.path
        if root is None:
            appended = self._dataset.append(packer.batches())
        else:
            fields = [field.id() for field in self._dataset.lance.lance_schema.fields()]
            appended = self._dataset.commit(partial(packer.write_local, root, fields))
        if root is not None and self._agreed:
            slots = [slot for number, row in enumerate(packer.rows) for slot in _slots(appended.file, number, row)]
        else:
            slots = self._read_back(appended.file, packer.rows)
            self._agreed = True
        return Written(appended.version, slots, packer.damaged)

    def _read_back(self, file: str, rows: Sequence[Row]) -> list[Slot]:
        """Where Lance says that the rows lie, compared with where they were written. Where numem wrote them itself the
        first commit of a process to the volume is compared, for the others it is known."""
        slots: list[Slot] = []
        for (_, number, found), row in zip(self.rows([file]), rows, strict=True):
            blob = found["v"] or {"blob_id": 0, "position": 0, "size": 0}
            if blob["size"] != row.size or row.offset not in (-1, blob["position"]):
                raise StoreError(f"{self.label}: row {number} of {file} reads as {blob}, not as it was written")
            slots.extend(slots_of(file, number, found))
        return slots

    def rows(self, files: Sequence[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """(data file, row number, columns with the blob's descriptor) of some data files."""
        fragments = self._dataset.fragments()
        for file in files:
            with lance_errors(f"read {self.label}"):
                table = self._dataset.lance.scanner(fragments=[fragments[file]], scan_in_order=True).to_table()
            for number, row in enumerate(table.to_pylist()):
                yield file, number, row

    def read_through_lance(self, file: str, row: int, skip: int, nbytes: int) -> bytes:
        """The portable, slower way to the same bytes."""
        with lance_errors(f"read {self.label}"):
            fragment = self._dataset.fragments().get(file)
            if fragment is None and self._dataset.changed(force=True):
                self._dataset.refresh()
                fragment = self._dataset.fragments().get(file)
            if fragment is None:
                raise IntegrityError(f"{self.label}: no data file {file}")
            address = (fragment.fragment_id << 32) | row
            (blob,) = self._dataset.lance.take_blobs("v", addresses=[address])
            if blob is None:
                raise IntegrityError(f"{self.label}: row {row} of {file} holds no payload")
            return bytes(blob.read_range(skip, nbytes))

    def sidecar(self, file: str, blob: int) -> Path | None:
        """Local path of a sidecar; None where the volume is remote."""
        return None if self.location.path is None else self.location.path / sidecar_name(file, blob)

    def sidecar_agrees(self, files: SidecarFiles, placement: Placement) -> bool | None:
        """Whether positioned reads and Lance's reader see the same first bytes of one blob; None where Lance itself
        cannot read it, which says nothing about the path."""
        path = self.sidecar(placement.file, placement.blob)
        if path is None:
            return False
        size = min(placement.nbytes, SMALL)
        try:
            expected = self.read_through_lance(placement.file, placement.row, placement.skip, size)
        except StoreError:
            return None
        buffer = bytearray(size)
        try:
            got = files.read_into(path, placement.offset, [buffer])
        except OSError:
            return False
        return got == size and bytes(buffer) == expected


def slots_of(file: str, number: int, row: Mapping[str, Any]) -> Iterator[Slot]:
    """Where the pieces of a row lie that was read back from a data file."""
    blob = row["v"] or {"blob_id": 0, "position": 0}
    for part in parts_of(row):
        offset = blob["position"] + part.skip
        yield Slot(part.content, part.nbytes, part.xxh3, file, blob["blob_id"], offset, number, part.skip)


def _slots(file: str, number: int, row: Row) -> Iterator[Slot]:
    """Where the pieces of a row lie that numem wrote itself."""
    blob = BLOB_ID if row.offset >= 0 else 0
    for part in row.parts:
        yield Slot(part.content, part.nbytes, part.xxh3, file, blob, max(row.offset, 0) + part.skip, number, part.skip)
