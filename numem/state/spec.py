"""Slabs and the canonical payload order.

A spec names the slabs of one kind of state that grows along one axis (tokens, steps, rows). The payload of a chunk is
one contiguous array in the order slab, member, row, so that one chunk is one cell of a regular grid and is never
re-encoded:

    K layer 0 rows | K layer 1 rows | ... | V layer 0 rows | V layer 1 rows | ...

Where layers keep different rows (sliding windows), the spec names retention groups, and a chunk has one such array per
group.
"""

from dataclasses import dataclass, field
from typing import Any

from numem.errors import InputError
from numem.state.groups import Group

# The group of a spec that names none: everything, every row.
WHOLE = "kv"

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
        slabs: at least one; names unique; widths equal within a group, so that each group is one regular field.
        dtype: element type, stored raw and little-endian.
        axis: name of the growing axis, for example "token".
        layout: id of the layout; part of the identity, because equal shapes do not make equal layouts.
        groups: retention groups that hold every (slab, member) exactly once; empty where all rows are kept together.
        retained: the groups, in the order of a chunk's fields and pieces; one of everything where none is named.
    """

    slabs: tuple[Slab, ...]
    dtype: str
    axis: str = "token"
    layout: str = "slab-member-row/v1"
    groups: tuple[Group, ...] = ()
    retained: tuple[Group, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.slabs:
            raise InputError("state spec: at least one slab is needed")
        names = [slab.name for slab in self.slabs]
        if len(set(names)) != len(names):
            raise InputError(f"state spec: slab names repeat: {names}")
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"state spec: dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        widths = {slab.name: slab.width for slab in self.slabs}
        everything = [(slab.name, member) for slab in self.slabs for member in range(slab.members)]
        if self.groups:
            ids = [group.id for group in self.groups]
            named = [pair for group in self.groups for pair in group.members]
            if len(set(ids)) != len(ids) or sorted(named) != sorted(everything):
                raise InputError(f"state spec: groups {ids} must be unique and hold every (slab, member) exactly once")
        object.__setattr__(self, "retained", self.groups or (Group(WHOLE, tuple(everything)),))
        for group in self.retained:
            if len({widths[slab] for slab, _ in group.members}) != 1:
                raise InputError("state spec: slabs of different row widths need one field each: a group of their own")

    @property
    def members(self) -> int:
        return sum(slab.members for slab in self.slabs)

    @property
    def width(self) -> int:
        return self.slabs[0].width

    @property
    def row_bytes(self) -> int:
        """Bytes of one position over all slabs and members."""
        return sum(slab.members * slab.width for slab in self.slabs) * DTYPE_BYTES[self.dtype]

    def group_shape(self, group: Group, rows: int) -> tuple[int, int, int]:
        """Shape of a group's payload of so many positions: [members, rows, width]."""
        width = next(slab.width for slab in self.slabs if slab.name == group.members[0][0])
        return len(group.members), rows, width

    def group_bytes(self, group: Group, rows: int) -> int:
        """Bytes of a group's payload of so many positions."""
        members, rows, width = self.group_shape(group, rows)
        return members * rows * width * DTYPE_BYTES[self.dtype]

    def parts(self, rows: int, group: Group | None = None) -> tuple[Part, ...]:
        """Payload plan of a chunk of `rows` positions, in payload order: of one group, or of a spec without groups."""
        if group is None:
            if self.groups:
                raise InputError("state spec: a spec with groups has one payload plan per group; name the group")
            (group,) = self.retained
        _, rows, width = self.group_shape(group, rows)
        step = rows * width
        return tuple(Part(slab, member, i * step, step) for i, (slab, member) in enumerate(group.members))

    def describe(self) -> dict[str, Any]:
        """Plain values for a fingerprint. A spec without groups does not mention them: ids from before them hold."""
        described: dict[str, Any] = {
            "axis": self.axis,
            "byte_order": "little",
            "dtype": self.dtype,
            "layout": self.layout,
            "slabs": [{"members": s.members, "name": s.name, "width": s.width} for s in self.slabs],
        }
        if self.groups:
            described["groups"] = [
                {
                    "extent": "token" if group.window is None else f"window {group.window}",
                    "id": group.id,
                    "members": [[slab, member] for slab, member in group.members],
                }
                for group in self.groups
            ]
        return described
