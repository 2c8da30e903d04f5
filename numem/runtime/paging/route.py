"""What the page pool hands out: routes, reservations, leases and capacity. Changed only by the pool."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from numem.errors import LeaseError
from numem.state.groups import Floor


@dataclass(eq=False, slots=True)
class Route:
    """The pages of one sequence.

    Attributes:
        pages: physical pages in logical order; a new list where they change, so that an old one stays as it was.
        length: tokens held.
        floors: windowed groups of which the rows below a position are not held.
        pending: the append under way, or None.
        last_access: when it was last made, grown or touched, on the pool's logical clock.
        leases: leases on it that are not released.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    floors: tuple[Floor, ...] = ()
    pending: "Reservation | None" = None
    released: bool = False
    last_access: int = 0
    leases: int = 0


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for `count` more tokens on a route, not yet part of it; never changed.

    Attributes:
        expected: the route's length when reserved; commit demands that it still holds.
        added: fresh pages beyond the current last one, in logical order.
        replaced: (old, new) physical page of a partial tail that must be copied before writing, or None.
        pages: the route's page table as it will be after commit.
        capacity: what it drew `drawn` pages from; an abort gives them back to it.
    """

    route: Route
    expected: int
    count: int
    added: tuple[int, ...]
    replaced: tuple[int, int] | None
    pages: list[int]
    capacity: "Capacity | None" = None
    drawn: int = 0

    @property
    def taken(self) -> tuple[int, ...]:
        """Pages that were free before."""
        return self.added if self.replaced is None else (self.replaced[1], *self.added)


@dataclass(eq=False, slots=True)
class PageLease:
    """Keeps the pages of a moment alive; its table never changes. Released exactly once.

    Attributes:
        pages, length, floors: those of the route at that moment.
    """

    pages: tuple[int, ...]
    length: int
    floors: tuple[Floor, ...]
    route: Route = field(repr=False)
    end: Callable[["PageLease"], None] = field(repr=False)
    released: bool = False

    def release(self) -> None:
        if self.released:
            raise LeaseError("page lease: released twice")
        self.released = True
        self.end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(eq=False, slots=True)
class Capacity:
    """Pages set aside for reservations to come; nobody else takes them. Released exactly once.

    Attributes:
        left: pages not drawn yet.
    """

    left: int
    end: Callable[["Capacity"], None] = field(repr=False)
    released: bool = False

    def release(self) -> None:
        """Give back what is left; pages already drawn stay with their routes."""
        if self.released:
            raise LeaseError("capacity: released twice")
        self.released = True
        self.end(self)
        self.left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of pages and holders: free + resident + reserved = physical.

    Attributes:
        free: pages that anybody may take.
        resident: pages that routes and leases hold.
        reserved: pages of pending appends and of capacity that is not drawn.
        shared: pages with more than one holder.
    """

    physical: int
    free: int
    resident: int
    shared: int
    routes: int
    leases: int
    reserved: int
