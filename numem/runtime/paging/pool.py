"""Page bookkeeping: routes, reference counts, copy-on-write, leases, reservations and capacity. No tensors here.

    route.pages     [p0, p1, ..., pk]      physical pages in logical order, possibly shared
    route.length    tokens held; the last page is partial unless length is a multiple of the page size

Rules: the lowest free page is taken first; full pages are shared by reference count; a partial tail that anything else
holds is copied before the first append; a reservation commits or aborts as a whole, and every page it names (the one
being replaced too) stays held until then. One thread uses a pool at a time.
"""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from numem.errors import CapacityError, InputError, LeaseError, OutOfPlanError
from numem.runtime.paging.route import Capacity, PageLease, PoolStats, Reservation, Route
from numem.state.groups import Floor

if TYPE_CHECKING:
    from numem.runtime.paging.guard import PageGuard

__all__ = ["Capacity", "PageLease", "PagePool", "PoolStats", "Reservation", "Route"]


class PagePool:
    """Reference-counted physical pages.

    Args:
        pages: number of physical pages.
        page_tokens: tokens per page.
        guard: is told of pages that are taken, filled, written again and freed (a debug aid).
    """

    def __init__(self, pages: int, page_tokens: int = 16, guard: "PageGuard | None" = None) -> None:
        if pages <= 0 or page_tokens <= 0:
            raise InputError(f"page pool: pages {pages} and page_tokens {page_tokens} must be positive")
        self.page_tokens = page_tokens
        self.physical = pages
        self.clock = 0
        self._guard = guard
        self._free = list(range(pages))
        self._refs = [0] * pages
        self._routes: set[Route] = set()
        self._leases: set[PageLease] = set()
        self._capacities: set[Capacity] = set()
        self._promised = 0
        self._pending = 0

    @property
    def free(self) -> int:
        """Pages that anybody may take."""
        return len(self._free) - self._promised

    def refs(self, page: int) -> int:
        """How many routes, leases and pending appends hold a page."""
        return self._refs[page]

    def references(self) -> tuple[int, ...]:
        """`refs` of every page, as it is now."""
        return tuple(self._refs)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    # routes

    def allocate(self) -> Route:
        """An empty route."""
        route = Route()
        self._routes.add(route)
        self.touch(route)
        return route

    def fork(self, route: Route, length: int | None = None) -> Route:
        """A route over the same pages, cut at `length` (default: whole). Copies nothing.

        Raises:
            OutOfPlanError: the rows that a sequence of this length attends to lie below a window floor.
        """
        self._settled(route, "fork")
        length = route.length if length is None else length
        if not 0 <= length <= route.length:
            raise InputError(f"fork: length {length} lies outside [0, {route.length}]")
        for floor in route.floors:
            if not floor.allows(length):
                raise OutOfPlanError(
                    f"fork: at length {length} group {floor.group} needs rows below {floor.start}, which were not "
                    "loaded; restore this boundary or recompute it"
                )
        child = Route(route.pages[: self.pages_for(length)], length, route.floors if length else ())
        self._hold(child.pages)
        self._routes.add(child)
        self.touch(child)
        return child

    def fork_allowed(self, route: Route, length: int) -> bool:
        """Whether a fork at this length has every row it attends to."""
        return 0 <= length <= route.length and all(floor.allows(length) for floor in route.floors)

    def set_floors(self, route: Route, floors: Sequence[Floor]) -> None:
        """Say which rows of windowed groups a route will not hold, before its rows are committed.

        A child inherits them. On a route that has rows and no pending append a floor may only rise.

        Raises:
            OutOfPlanError: a floor would fall below one under which rows are missing already.
        """
        if route.released or route not in self._routes:
            raise LeaseError("set_floors: the route was released")
        if route.length and route.pending is None:
            starts = {floor.group: floor.start for floor in floors}
            for old in route.floors:
                if starts.get(old.group, 0) < old.start:
                    raise OutOfPlanError(f"set_floors: rows of group {old.group} below {old.start} are missing")
        route.floors = tuple(floors)

    def release(self, route: Route) -> tuple[int, ...]:
        """Give a route's pages back; returns those that became free."""
        self._settled(route, "release")
        route.released = True
        self._routes.discard(route)
        freed = self._drop(route.pages)
        route.pages, route.length = [], 0
        return freed

    def touch(self, route: Route) -> None:
        """Note that a route was used just now."""
        self.clock += 1
        route.last_access = self.clock

    # leases

    def lease(self, route: Route, *, prospective: bool = False) -> PageLease:
        """Keep a route's present pages alive, also after its release.

        Args:
            prospective: the pages and length that the route will have once its pending append is committed. They stay
                alive also if it is aborted.
        """
        if prospective and route.pending and route in self._routes:
            pages, length = tuple(route.pending.pages), route.length + route.pending.count
        else:
            self._settled(route, "lease")
            pages, length = tuple(route.pages), route.length
        self._hold(pages)
        lease = PageLease(pages, length, route.floors, route, self._end_lease)
        self._leases.add(lease)
        route.leases += 1
        return lease

    def leased(self, route: Route) -> bool:
        """Whether a lease on this route is not released yet."""
        return route.leases > 0

    def capacity(self, pages: int) -> Capacity:
        """Set pages aside for the reservations that name this capacity.

        Raises:
            CapacityError: so many are not free; nothing was set aside.
        """
        if pages < 0:
            raise InputError(f"capacity: {pages} pages")
        if pages > self.free:
            raise CapacityError(f"page pool: {pages} pages asked for, {self.free} of {self.physical} are free; {_HELP}")
        capacity = Capacity(pages, self._end_capacity)
        self._capacities.add(capacity)
        self._promised += pages
        return capacity

    def extend(self, capacity: Capacity, pages: int) -> None:
        """Set further pages aside for a capacity; whoever draws from it goes on with the same one.

        Raises:
            CapacityError: too few free pages; nothing was set aside.
        """
        if capacity not in self._capacities:
            raise LeaseError("extend: the capacity was released, or belongs to another pool")
        if pages < 0:
            raise InputError(f"extend: {pages} pages")
        if pages > self.free:
            raise CapacityError(f"page pool: {pages} pages asked for, {self.free} of {self.physical} are free; {_HELP}")
        capacity.left += pages
        self._promised += pages

    # appends

    def reserve(self, route: Route, count: int, capacity: Capacity | None = None) -> Reservation:
        """Reserve room for `count` tokens; nothing of the route changes before commit.

        Args:
            capacity: pages set aside, drawn before free ones.

        Raises:
            CapacityError: too few free pages; nothing was taken.
        """
        self._settled(route, "reserve")
        if count <= 0:
            raise InputError(f"reserve: {count} tokens")
        if capacity is not None and capacity not in self._capacities:
            raise LeaseError("reserve: the capacity was released, or belongs to another pool")
        pages, length = route.pages, route.length
        partial = length % self.page_tokens > 0
        copy_tail = partial and self._refs[pages[-1]] > 1
        need = self.pages_for(length + count) - len(pages) + copy_tail
        if not need:  # as at most steps: the tail has room, and nobody else holds it
            if self._guard is not None and partial:
                self._guard.reopened(pages[-1])
            made = route.pending = Reservation(route, length, count, (), None, pages, capacity)
            return made
        drawn = min(need, capacity.left) if capacity is not None else 0
        if need - drawn > self.free:
            raise CapacityError(
                f"page pool: {count} tokens need {need} pages, {self.free + drawn} of {self.physical} are free; {_HELP}"
            )
        taken = [heapq.heappop(self._free) for _ in range(need)]
        if self._guard is not None:
            self._admit(taken, pages[-1] if partial and not copy_tail else None)
        for page in taken:
            self._refs[page] = 1
        self._pending += need
        if capacity is not None:
            capacity.left -= drawn
            self._promised -= drawn
        if copy_tail:
            table = [*pages[:-1], *taken]
            made = Reservation(route, length, count, tuple(taken[1:]), (pages[-1], taken[0]), table, capacity, drawn)
        else:
            made = Reservation(route, length, count, tuple(taken), None, [*pages, *taken], capacity, drawn)
        route.pending = made
        return made

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Make reserved tokens part of their routes; all are checked before any changes."""
        self._resolvable(reservations, "commit")
        for r in reservations:
            route = r.route
            self._settle(r)
            route.pages, route.length = r.pages, r.expected + r.count
            self.clock += 1
            route.last_access = self.clock
            if r.replaced:
                self._drop((r.replaced[0],))
            if self._guard is not None:
                self._guard.filled(r.pages[r.expected // self.page_tokens : route.length // self.page_tokens])

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give reserved pages back, to the capacity they were drawn from first; the routes are as before."""
        self._resolvable(reservations, "abort")
        for r in reservations:
            self._settle(r)
            freed = self._drop(r.taken)
            if r.capacity is not None and not r.capacity.released:
                back = min(r.drawn, len(freed))
                r.capacity.left += back
                self._promised += back

    # audit

    def stats(self) -> PoolStats:
        """Counts of the moment."""
        return PoolStats(
            physical=self.physical,
            free=self.free,
            resident=self.physical - len(self._free) - self._pending,
            shared=self.physical - len(self._free) - self._refs.count(1),
            routes=len(self._routes),
            leases=len(self._leases),
            reserved=self._pending + self._promised,
        )

    def check(self) -> None:
        """Raise LeaseError unless free and held pages are disjoint and every count equals its holders (a debug
        audit)."""
        expected = [0] * self.physical
        pending = [r.pending for r in self._routes if r.pending]
        tables = [*(r.pages for r in self._routes), *(p.taken for p in pending), *(x.pages for x in self._leases)]
        for pages in tables:
            for page in pages:
                expected[page] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise LeaseError("page pool: a page is on the free list twice")
        for page, count in enumerate(expected):
            if count != self._refs[page] or (page in free) != (count == 0):
                raise LeaseError(f"page pool: page {page} has {self._refs[page]} references and {count} holders")
        promised = sum(capacity.left for capacity in self._capacities)
        reserved = sum(len(p.taken) for p in pending)
        if promised != self._promised or promised > len(free) or reserved != self._pending:
            raise LeaseError(
                f"page pool: {self._promised} pages promised and {self._pending} pending, but holders name {promised} "
                f"and {reserved}, and {len(free)} are free"
            )

    def _settled(self, route: Route, verb: str) -> None:
        if route.released or route not in self._routes:
            raise LeaseError(f"{verb}: the route was released")
        if route.pending:
            raise LeaseError(f"{verb}: the route has a pending append; commit or abort it first")

    def _resolvable(self, reservations: Sequence[Reservation], verb: str) -> None:
        if len(reservations) > 1 and len(set(reservations)) != len(reservations):
            raise LeaseError(f"{verb}: a reservation appears twice in one batch")
        for r in reservations:
            if r.route not in self._routes or r.route.pending is not r or r.route.length != r.expected:
                raise LeaseError(f"{verb}: the reservation at {r.expected} is not its route's pending one in this pool")

    def _settle(self, r: Reservation) -> None:
        if r.added or r.replaced:
            self._pending -= len(r.taken)
        r.route.pending = None

    def _admit(self, taken: list[int], reopened: int | None) -> None:
        """Let the guard look at pages before they are written; a refusal leaves the pool as it was."""
        assert self._guard is not None
        try:
            self._guard.taken(taken)
        except BaseException:
            for page in taken:
                heapq.heappush(self._free, page)
            raise
        if reopened is not None:
            self._guard.reopened(reopened)

    def _end_lease(self, lease: PageLease) -> None:
        self._leases.discard(lease)
        lease.route.leases -= 1
        self._drop(lease.pages)

    def _end_capacity(self, capacity: Capacity) -> None:
        self._capacities.discard(capacity)
        self._promised -= capacity.left

    def _hold(self, pages: Sequence[int]) -> None:
        refs = self._refs
        for page in pages:
            refs[page] += 1

    def _drop(self, pages: Sequence[int]) -> tuple[int, ...]:
        refs, freed = self._refs, []
        for page in pages:
            left = refs[page] = refs[page] - 1
            if not left:
                freed.append(page)
        for page in freed:
            heapq.heappush(self._free, page)
        if freed and self._guard is not None:
            self._guard.freed(freed)
        return tuple(freed)


_HELP = "release continuations or open a larger pool"
