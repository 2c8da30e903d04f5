"""Retention groups: which rows of which layers a boundary needs, decided by one function for everyone who asks.

A token at boundary `b` attends, in a layer of window `w`, to the cached rows [max(0, b - w + 1), b) and to itself. Rows
are stored in chunks of `C` at absolute multiples, so what is loaded of a windowed group starts at its floor:

    floor = C * (max(0, b - w + 1) // C)

    global      |--------|--------|--------|--------|----|        every chunk
    window-8    ..........................|--------|----|b       chunks from the floor on
"""

from dataclasses import dataclass

from numem.errors import InputError

# A window of one row would never read the cache.
SMALLEST_WINDOW = 2


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered set of (slab, member) of one row width that keep the same rows.

    Attributes:
        id: its name in manifests, for example "global" or "window-512".
        members: (slab, member) pairs in payload order.
        window: rows that a position sees, its own included; None where every row is kept.
    """

    id: str
    members: tuple[tuple[str, int], ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.id or not self.members:
            raise InputError(f"group {self.id!r}: the id or the members are empty")
        if self.window is not None and self.window < SMALLEST_WINDOW:
            raise InputError(f"group {self.id!r}: window {self.window} is below {SMALLEST_WINDOW}")


@dataclass(frozen=True, slots=True)
class Floor:
    """Rows of a windowed group below `start` are not held.

    Attributes:
        group: the group's id.
        window: its window.
        start: first position held.
    """

    group: str
    window: int
    start: int

    def allows(self, boundary: int) -> bool:
        """Whether a sequence may go on at this boundary: the rows it attends to are all held (at 0 there are none)."""
        return boundary == 0 or first_attended(boundary, self.window) >= self.start


def first_attended(boundary: int, window: int | None) -> int:
    """First cached row that the token at `boundary` attends to; 0 without a window."""
    return 0 if window is None else max(0, boundary - window + 1)


def floor_of(boundary: int, window: int | None, chunk: int) -> int:
    """Where the rows of a group begin that a boundary needs, on a grid of `chunk` rows: the selection of every
    restore, manifest and estimate of bytes."""
    return first_attended(boundary, window) // chunk * chunk
