"""How pieces become the rows and the sidecar of one commit.

Where the volume is local the sidecar is written here and described to Lance as packed blobs: no copy on the way (Lance's
writer, with one, is two to three times slower on a busy machine), offsets aligned with exact sizes, and a file
descriptor of our own to sync. Where it is remote Lance writes it.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileSession
from lance.fragment import DataFile, FragmentMetadata

from numem.errors import IntegrityError
from numem.identity.digest import Buffer
from numem.store.payload.dataset import FORMAT
from numem.store.payload.pieces import BLOB, NO_CONTENT, SCHEMA, SMALL, Piece, aligned, padded
from numem.store.payload.sidecar import SidecarWriter

Facts = Callable[[Mapping[bytes, str]], str]

BLOB_ID = 1
_BATCH_BYTES = 32 << 20
_BUNDLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A piece inside a row: `skip` bytes behind the row's first byte."""

    content: bytes
    nbytes: int
    xxh3: bytes
    skip: int


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a commit. `size` is the length of its blob, `offset` where it lies if that is known already."""

    kind: str
    parts: tuple[Part, ...]
    size: int
    offset: int = -1
    facts: str = ""


class Packer:
    """Loads pieces and lays them out.

    Args:
        pieces: taken one after the other while they are written. Another source of a piece that came already is used
            only where the first turns out to be damaged.
        facts: see `Volume.append`.

    Attributes:
        rows: rows in the order in which they were written.
        damaged: content ids that could not be loaded -> why.
    """

    def __init__(self, pieces: Iterable[Piece], facts: Facts) -> None:
        self.rows: list[Row] = []
        self.damaged: dict[bytes, str] = {}
        self._pieces = pieces
        self._small: list[Piece] = []
        self._others: dict[bytes, list[Piece]] = {}
        self._facts = facts

    def write_local(self, root: Path, fields: Sequence[int]) -> list[FragmentMetadata]:
        """Write sidecar and data file below a local dataset's root; returns the one fragment to commit.

        Args:
            fields: Lance's ids of the schema's fields.
        """
        file = f"{uuid.uuid4().hex}.lance"
        with SidecarWriter(root, file, BLOB_ID) as sidecar:
            for piece, view in self._loaded():
                part = Part(piece.content, piece.nbytes, piece.xxh3, 0)
                self.rows.append(Row("piece", (part,), piece.nbytes, sidecar.write(view)))
            for bundle, parts in self._bundles():
                self.rows.append(Row("bundle", parts, len(bundle), sidecar.write(bundle)))
        self._finish()
        builder = lance.BlobDescriptorArrayBuilder("v")
        blobs = [row for row in self.rows if row.offset >= 0]
        builder.extend_packed(BLOB_ID, [row.offset for row in blobs], [row.size for row in blobs])
        builder.append_null()
        schema = pa.schema([*list(SCHEMA)[:-1], builder.field])
        writer = LanceFileSession(str(root)).open_writer(f"data/{file}", schema=schema, version=FORMAT)
        writer.write_batch(pa.record_batch([*_columns(self.rows), builder.finish()], schema=schema))
        writer.close()
        major, minor = (int(part) for part in FORMAT.split("."))
        data = DataFile(file, list(fields), list(range(len(schema))), major, minor, writer.size_bytes)
        return [FragmentMetadata(id=0, files=[data], physical_rows=len(self.rows))]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Record batches with the payload inside, for Lance's writer."""
        for group in _groups(list(self._large()), _BATCH_BYTES):
            first = len(self.rows)
            # From Arrow's pool, which keeps freed memory: fresh pages cost more than the copy into them.
            memory = np.frombuffer(pa.allocate_buffer(sum(padded(piece.nbytes) for piece in group)), np.uint8)
            offsets = [0]
            for piece in group:
                at, end = offsets[-1], offsets[-1] + padded(piece.nbytes)
                if self._load(piece, memory[at : at + piece.nbytes].data):  # else the next one takes its place
                    memory[at + piece.nbytes : end] = 0
                    offsets.append(end)
                    part = Part(piece.content, piece.nbytes, piece.xxh3, 0)
                    self.rows.append(Row("piece", (part,), padded(piece.nbytes)))
            if len(self.rows) > first:
                yield _batch(self.rows[first:], _blobs(memory, offsets))
        for bundle, parts in self._bundles():
            self.rows.append(Row("bundle", parts, len(bundle)))
            yield _batch(self.rows[-1:], _blobs(bundle, [0, len(bundle)]))
        self._finish()
        yield _batch(self.rows[-1:], pa.ExtensionArray.from_storage(BLOB.type, pa.nulls(1, BLOB.type.storage_type)))

    def _large(self) -> Iterator[Piece]:
        """Large pieces as they come, each once; puts aside the small ones, and other sources of what came already."""
        for piece in self._pieces:
            if piece.content in self._others:
                self._others[piece.content].append(piece)
                continue
            self._others[piece.content] = []
            if piece.nbytes >= SMALL:
                yield piece
            else:
                self._small.append(piece)

    def _again(self) -> Iterator[Piece]:
        """Large pieces whose first source was damaged before another was known."""
        for content in list(self.damaged):
            for piece in self._others[content][:1]:
                del self.damaged[content]
                yield piece

    def _loaded(self) -> Iterator[tuple[Piece, memoryview]]:
        """Large pieces that loaded well, in padded buffers."""
        for pieces in (self._large(), self._again()):
            for piece in pieces:
                view = piece.held
                if view is None:
                    view = aligned(piece.nbytes)
                    if not self._load(piece, view[: piece.nbytes]):
                        continue
                yield piece, view

    def _bundles(self) -> Iterator[tuple[bytearray, tuple[Part, ...]]]:
        for group in _groups(self._small, _BUNDLE_BYTES):
            bundle, parts = bytearray(), []
            for piece in group:
                payload = bytearray(piece.nbytes)
                if self._load(piece, memoryview(payload)):
                    parts.append(Part(piece.content, piece.nbytes, piece.xxh3, len(bundle)))
                    bundle += payload
            if parts:
                yield bundle, tuple(parts)

    def _finish(self) -> None:
        """The facts row, last: only now is it known which pieces are whole."""
        self.rows.append(Row("facts", (Part(NO_CONTENT, 0, b"", 0),), 0, facts=self._facts(self.damaged)))

    def _load(self, piece: Piece, view: memoryview) -> bool:
        for source in (piece, *tuple(self._others[piece.content])):
            try:
                source.load(view)
            except IntegrityError as error:
                self.damaged.setdefault(piece.content, str(error))
            else:
                self.damaged.pop(piece.content, None)
                return True
        return False


def parts_of(row: Mapping[str, Any]) -> list[Part]:
    """The pieces inside a row that was read back."""
    if row["kind"] == "bundle":
        return [
            Part(bytes.fromhex(content), nbytes, bytes.fromhex(xxh3), skip)
            for content, nbytes, xxh3, skip in json.loads(row["parts"])
        ]
    return [Part(row["content"], row["nbytes"], row["xxh3"], 0)]


def _groups(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.nbytes
    if group:
        yield group


def _columns(rows: Sequence[Row]) -> list[pa.Array]:
    """Columns of rows, without the payload."""
    single = [row.parts[0] if row.kind != "bundle" else Part(NO_CONTENT, row.size, b"", 0) for row in rows]
    parts = [
        json.dumps([[p.content.hex(), p.nbytes, p.xxh3.hex(), p.skip] for p in row.parts])
        if row.kind == "bundle"
        else ""
        for row in rows
    ]
    return [
        pa.array([row.kind for row in rows], pa.string()),
        pa.array([part.content for part in single], pa.binary()),
        pa.array([part.nbytes for part in single], pa.int64()),
        pa.array([part.xxh3 for part in single], pa.binary()),
        pa.array(parts, pa.string()),
        pa.array([row.facts for row in rows], pa.string()),
    ]


def _batch(rows: Sequence[Row], blobs: pa.Array) -> pa.RecordBatch:
    return pa.record_batch([*_columns(rows), blobs], schema=SCHEMA)


def _blobs(buffer: Buffer, offsets: Sequence[int]) -> pa.ExtensionArray:
    count = len(offsets) - 1
    data = pa.Array.from_buffers(
        pa.large_binary(), count, [None, pa.py_buffer(np.asarray(offsets, np.int64)), pa.py_buffer(buffer)]
    )
    storage = pa.StructArray.from_arrays(
        [data, pa.nulls(count, pa.utf8()), pa.nulls(count, pa.uint64()), pa.nulls(count, pa.uint64())],
        names=["data", "uri", "position", "size"],
    )
    return pa.ExtensionArray.from_storage(BLOB.type, storage)
