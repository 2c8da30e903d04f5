"""Rows of a volume: what a piece is on its way in, and where it landed."""

from collections.abc import Callable
from dataclasses import dataclass, field

import lance
import numpy as np
import pyarrow as pa

ALIGNMENT = 4096
SMALL = 64 * 1024
CLOSE_BYTES = 1 << 30
CLOSE_COMMITS = 256
# Content id of a commit's facts row. Its placement says that the commit is catalogued.
NO_CONTENT = b""

BLOB = lance.blob_field(
    "v", inline_size_threshold=0, dedicated_size_threshold=1 << 50, pack_file_size_threshold=CLOSE_BYTES
)
SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("xxh3", pa.binary(), nullable=False),
        pa.field("parts", pa.string(), nullable=False),
        pa.field("facts", pa.string(), nullable=False),
        BLOB,
    ]
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A payload on its way into a volume.

    Attributes:
        content, nbytes, xxh3: its content id, true length and checksum.
        load: fills a buffer of `nbytes` with the bytes, verified against the content id.
        held: the verified bytes where they are in memory already, in a buffer of `aligned`.
    """

    content: bytes
    nbytes: int
    xxh3: bytes
    load: Callable[[memoryview], None]
    held: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a piece landed: sidecar coordinates, and the row for Lance's own reader."""

    content: bytes
    nbytes: int
    xxh3: bytes
    file: str
    blob: int
    offset: int
    row: int
    skip: int


@dataclass(slots=True)
class Written:
    """Outcome of one volume commit; `damaged` maps the content ids left out to why."""

    version: int
    slots: list[Slot]
    damaged: dict[bytes, str] = field(default_factory=dict)


def aligned(nbytes: int) -> memoryview:
    """A buffer for a piece of `nbytes` that can be written past the page cache: its address and its length (that of
    the piece, padded with zeros) are multiples of `ALIGNMENT`."""
    room = padded(nbytes)
    # From Arrow's pool, which keeps freed memory: fresh pages cost more than the copy into them.
    buffer = np.frombuffer(pa.allocate_buffer(room + ALIGNMENT), np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    buffer[start + nbytes : start + room] = 0
    return buffer[start : start + room].data


def padded(nbytes: int) -> int:
    """Room that a large piece takes inside its volume."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
