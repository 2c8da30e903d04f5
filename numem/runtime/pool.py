"""Page bookkeeping: routes, reference counts, copy-on-write, leases and reservations. No tensors here.

    route.pages     [p0, p1, ..., pk]      physical pages in logical order, possibly shared
    route.length    tokens held; the last page is partial unless length is a multiple of the page size

Rules: the lowest free page is taken first; full pages are shared by reference count; a partial tail that anything else
holds is copied before the first append; a reservation commits or aborts as a whole, and every page it names (the one
being replaced too) stays held until then.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from numem.errors import CapacityError, InputError, LeaseError


@dataclass(eq=False, slots=True)
class Route:
    """The pages of one sequence. Changed only by the pool.

    Attributes:
        pages: physical pages in logical order.
        length: tokens held.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    pending: "Reservation | None" = None
    released: bool = False


@dataclass(eq=False, frozen=True, slots=True)
class Reservation:
    """Room for `count` more tokens on a route, not yet part of it.

    Attributes:
        expected: the route's length when reserved; commit demands that it still holds.
        added: fresh pages beyond the current last one, in logical order.
        replaced: (old, new) physical page of a partial tail that must be copied before writing, or None.
        pages: the route's page table as it will be after commit.
    """

    route: Route
    expected: int
    count: int
    added: tuple[int, ...]
    replaced: tuple[int, int] | None
    pages: tuple[int, ...]


@dataclass(eq=False, slots=True)
class PageLease:
    """Keeps the pages of a moment alive; its table never changes. Released exactly once."""

    pages: tuple[int, ...]
    length: int
    pool: "PagePool"
    released: bool = False

    def release(self) -> None:
        if self.released:
            raise LeaseError("page lease: released twice")
        self.released = True
        self.pool._end_lease(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of pages and holders."""

    physical: int
    free: int
    resident: int
    shared: int
    routes: int
    leases: int
    reserved: int


class PagePool:
    """Reference-counted physical pages.

    Args:
        pages: number of physical pages.
        page_tokens: tokens per page.
    """

    def __init__(self, pages: int, page_tokens: int = 16) -> None:
        if pages <= 0 or page_tokens <= 0:
            raise InputError(f"page pool: pages {pages} and page_tokens {page_tokens} must be positive")
        self.page_tokens = page_tokens
        self.physical = pages
        self._free = list(range(pages))
        self._refs = [0] * pages
        self._routes: set[Route] = set()
        self._leases = 0
        self._reserved = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def allocate(self) -> Route:
        """An empty route."""
        route = Route()
        self._routes.add(route)
        return route

    def fork(self, route: Route, length: int | None = None) -> Route:
        """A route over the same pages, cut at `length` (default: whole). Copies nothing."""
        self._settled(route, "fork")
        length = route.length if length is None else length
        if not 0 <= length <= route.length:
            raise InputError(f"fork: length {length} lies outside [0, {route.length}]")
        child = Route(route.pages[: self.pages_for(length)], length)
        self._hold(child.pages)
        self._routes.add(child)
        return child

    def release(self, route: Route) -> tuple[int, ...]:
        """Give a route's pages back; returns those that became free."""
        self._settled(route, "release")
        route.released = True
        self._routes.discard(route)
        freed = self._drop(route.pages)
        route.pages, route.length = [], 0
        return freed

    def lease(self, route: Route) -> PageLease:
        """Keep a route's present pages alive, also after its release."""
        self._settled(route, "lease")
        self._hold(route.pages)
        self._leases += 1
        return PageLease(tuple(route.pages), route.length, self)

    def reserve(self, route: Route, count: int) -> Reservation:
        """Reserve room for `count` tokens; nothing of the route changes before commit.

        Raises:
            CapacityError: too few free pages; nothing was taken.
        """
        self._settled(route, "reserve")
        if count <= 0:
            raise InputError(f"reserve: {count} tokens")
        offset = route.length % self.page_tokens
        copy_tail = offset > 0 and self._refs[route.pages[-1]] > 1
        fresh = self.pages_for(route.length + count) - len(route.pages)
        if fresh + copy_tail > len(self._free):
            raise CapacityError(
                f"page pool: {count} tokens need {fresh + copy_tail} pages, {len(self._free)} of {self.physical} are "
                "free; release continuations or open a larger pool"
            )
        taken = [heapq.heappop(self._free) for _ in range(fresh + copy_tail)]
        for page in taken:
            self._refs[page] = 1
        self._reserved += len(taken)
        replaced = (route.pages[-1], taken[0]) if copy_tail else None
        added = tuple(taken[1:] if copy_tail else taken)
        kept = route.pages[:-1] if copy_tail else route.pages
        table = (*kept, *([replaced[1]] if replaced else []), *added)
        route.pending = Reservation(route, route.length, count, added, replaced, table)
        return route.pending

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Make reserved tokens part of their routes; all are checked before any changes."""
        self._pending(reservations, "commit")
        for r in reservations:
            old = (r.replaced[0],) if r.replaced else ()
            self._settle(r)
            r.route.pages = list(r.pages)
            r.route.length = r.expected + r.count
            self._drop(old)

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give reserved pages back; the routes are as before."""
        self._pending(reservations, "abort")
        for r in reservations:
            self._settle(r)
            self._drop((*([r.replaced[1]] if r.replaced else []), *r.added))

    def stats(self) -> PoolStats:
        resident = self.physical - len(self._free)
        return PoolStats(
            physical=self.physical,
            free=len(self._free),
            resident=resident,
            shared=sum(1 for r in self._refs if r > 1),
            routes=len(self._routes),
            leases=self._leases,
            reserved=self._reserved,
        )

    def check(self, leases: Sequence[PageLease] = ()) -> None:
        """Raise LeaseError unless free and referenced pages are disjoint and counts equal holders (a debug audit).

        Args:
            leases: every live lease, so that the sum over holders is known.
        """
        expected = [0] * self.physical
        for route in self._routes:
            for page in route.pages:
                expected[page] += 1
            if route.pending:
                for page in (*([route.pending.replaced[1]] if route.pending.replaced else []), *route.pending.added):
                    expected[page] += 1
        for lease in leases:
            for page in lease.pages:
                expected[page] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise LeaseError("page pool: a page is on the free list twice")
        for page, count in enumerate(expected):
            if count != self._refs[page] or (page in free) != (count == 0):
                raise LeaseError(f"page pool: page {page} has {self._refs[page]} references and {count} holders")

    def _settled(self, route: Route, verb: str) -> None:
        if route.released or route not in self._routes:
            raise LeaseError(f"{verb}: the route was released")
        if route.pending:
            raise LeaseError(f"{verb}: the route has a pending append; commit or abort it first")

    def _pending(self, reservations: Sequence[Reservation], verb: str) -> None:
        if len({id(r) for r in reservations}) != len(reservations):
            raise LeaseError(f"{verb}: a reservation appears twice in one batch")
        for r in reservations:
            if r.route not in self._routes or r.route.pending is not r or r.route.length != r.expected:
                raise LeaseError(f"{verb}: the reservation at {r.expected} is not its route's pending one in this pool")

    def _settle(self, r: Reservation) -> None:
        self._reserved -= len(r.added) + (r.replaced is not None)
        r.route.pending = None

    def _end_lease(self, lease: PageLease) -> None:
        self._leases -= 1
        self._drop(lease.pages)

    def _hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._refs[page] += 1

    def _drop(self, pages: Sequence[int]) -> tuple[int, ...]:
        freed = []
        for page in pages:
            self._refs[page] -= 1
            if self._refs[page] == 0:
                heapq.heappush(self._free, page)
                freed.append(page)
        return tuple(freed)
