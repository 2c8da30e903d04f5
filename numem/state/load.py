"""What a restore to a boundary loads, and what it leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass

from numem.errors import InputError
from numem.state.groups import Floor, Group, floor_of
from numem.state.spec import StateSpec


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One group's rows [start, start + count): a stored piece.

    Attributes:
        index: place of the group in `spec.retained`, hence of the piece in a node.
    """

    group: Group
    index: int
    start: int
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Parts to load for a boundary, by position and then by group, and the floors of what is left out."""

    boundary: int
    parts: tuple[LoadPart, ...]
    floors: tuple[Floor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def load_plan(spec: StateSpec, boundary: int, chunk: int) -> LoadPlan:
    """Plan the load of `[0, boundary)`, stored in chunks of `chunk` rows.

    Example:
        >>> from numem.runtime.paging.pages import kv_spec
        >>> plan = load_plan(kv_spec(2, 1, 2, "float32", windows=(8, 0)), 20, 4)
        >>> [(part.group.id, part.start) for part in plan.parts if part.group.window]
        [('window-8', 12), ('window-8', 16)]
    """
    if boundary < 0 or chunk <= 0:
        raise InputError(f"load plan: boundary {boundary} or chunk {chunk} is out of range")
    parts = []
    for start in range(0, boundary, chunk):
        count = min(chunk, boundary - start)
        for index in needed_groups(spec, start, boundary, chunk):
            group = spec.retained[index]
            parts.append(LoadPart(group, index, start, count, spec.group_bytes(group, count)))
    return LoadPlan(boundary, tuple(parts), window_floors(spec, boundary, chunk))


def needed_groups(spec: StateSpec, start: int, boundary: int, chunk: int) -> tuple[int, ...]:
    """Groups, by their place in `spec.retained`, of whose chunk at `start` the boundary needs rows."""
    return tuple(index for index, group in enumerate(spec.retained) if start >= floor_of(boundary, group.window, chunk))


def window_floors(
    spec: StateSpec, boundary: int, chunk: int, *, held: int = 0, floors: tuple[Floor, ...] = ()
) -> tuple[Floor, ...]:
    """Floors of a sequence restored to `boundary`.

    Args:
        held: rows that it had before, which are not loaded; a floor among them leaves no gap.
        floors: the floors of those rows.
    """
    before: Mapping[str, int] = {floor.group: floor.start for floor in floors}
    found = []
    for group in spec.groups:
        if group.window is not None:
            start = floor_of(boundary, group.window, chunk)
            start = start if start > held else before.get(group.id, 0)
            if start:
                found.append(Floor(group.id, group.window, start))
    return tuple(found)
