"""Slabs and the canonical payload order.

A spec names the slabs of one kind of state that grows along one axis (tokens, steps, rows). The payload of a chunk is
one contiguous array in the order slab, member, row, so that one chunk is one cell of a regular grid and is never
re-encoded:

    K layer 0 rows | K layer 1 rows | ... | V layer 0 rows | V layer 1 rows | ...
"""

from dataclasses import dataclass
from typing import Any

from numem.errors import InputError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class Slab:
    """One named tensor family: `members` (for example layers) times rows of `width` elements."""

    name: str
    members: int
    width: int

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("slab: the name is empty")
        if self.members <= 0 or self.width <= 0:
            raise InputError(f"slab {self.name!r}: members {self.members} and width {self.width} must be positive")


@dataclass(frozen=True, slots=True)
class Part:
    """Where one (slab, member) lies in a chunk's payload, in elements."""

    slab: str
    member: int
    offset: int
    elements: int


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Layout of state whose rows are sized per position of `axis`.

    Attributes:
        slabs: at least one; names unique; equal widths, so that the state is one regular field.
        dtype: element type, stored raw and little-endian.
        axis: name of the growing axis, for example "token".
        layout: id of the layout; part of the identity, because equal shapes do not make equal layouts.
    """

    slabs: tuple[Slab, ...]
    dtype: str
    axis: str = "token"
    layout: str = "slab-member-row/v1"

    def __post_init__(self) -> None:
        if not self.slabs:
            raise InputError("state spec: at least one slab is needed")
        names = [slab.name for slab in self.slabs]
        if len(set(names)) != len(names):
            raise InputError(f"state spec: slab names repeat: {names}")
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"state spec: dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if len({slab.width for slab in self.slabs}) != 1:
            raise InputError("state spec: slabs of different row widths need one field each")

    @property
    def members(self) -> int:
        return sum(slab.members for slab in self.slabs)

    @property
    def width(self) -> int:
        return self.slabs[0].width

    @property
    def row_bytes(self) -> int:
        """Bytes of one position over all slabs and members."""
        return self.members * self.width * DTYPE_BYTES[self.dtype]

    def parts(self, rows: int) -> tuple[Part, ...]:
        """Payload plan of a chunk of `rows` positions, in payload order."""
        out, offset = [], 0
        for slab in self.slabs:
            for member in range(slab.members):
                out.append(Part(slab.name, member, offset, rows * slab.width))
                offset += rows * slab.width
        return tuple(out)

    def describe(self) -> dict[str, Any]:
        """Plain values for a fingerprint."""
        return {
            "axis": self.axis,
            "byte_order": "little",
            "dtype": self.dtype,
            "layout": self.layout,
            "slabs": [{"members": s.members, "name": s.name, "width": s.width} for s in self.slabs],
        }
