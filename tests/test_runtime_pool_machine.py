"""The page pool against a model of token rows, under any order of operations."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from numem.errors import CapacityError, LeaseError
from numem.runtime.paging.pool import Capacity, PageLease, PagePool, Reservation, Route

PAGE, PAGES = 4, 10


class PoolMachine(RuleBasedStateMachine):
    """Every route and lease reads back its own rows, whatever happened to the others.

    The rows live in an array indexed by physical page, written only through reservations, as a device would.
    """

    routes = Bundle("routes")
    leases = Bundle("leases")
    capacities = Bundle("capacities")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, PAGE)
        self.rows = np.zeros((PAGES, PAGE), dtype=np.int64)
        self.expected: dict[Route, list[int]] = {}
        self.leased: dict[int, tuple[PageLease, list[int]]] = {}
        self.promised: list[Capacity] = []
        self.clock = 0

    def read(self, pages: tuple[int, ...] | list[int], length: int) -> list[int]:
        return [int(self.rows[pages[at // PAGE], at % PAGE]) for at in range(length)]

    def resolve(self, route: Route) -> Reservation:
        assert route.pending is not None
        return route.pending

    @rule(target=routes)
    def allocate(self) -> Route:
        route = self.pool.allocate()
        self.expected[route] = []
        return route

    @rule(target=routes, route=routes, cut=st.integers(0, 40))
    def fork(self, route: Route, cut: int) -> Route:
        if route.pending or route.released:
            with pytest.raises(LeaseError):
                self.pool.fork(route)
            return route
        length = min(cut, route.length)
        child = self.pool.fork(route, length)
        assert child.last_access == self.pool.clock
        self.expected[child] = self.expected[route][:length]
        return child

    @rule(target=capacities, pages=st.integers(0, 6))
    def set_aside(self, pages: int) -> Capacity | None:
        before = self.pool.stats()
        try:
            capacity = self.pool.capacity(pages)
        except CapacityError:
            assert pages > before.free and self.pool.stats() == before
            return None
        assert self.pool.free == before.free - pages
        self.promised.append(capacity)
        return capacity

    @rule(capacity=consumes(capacities))
    def give_up(self, capacity: Capacity | None) -> None:
        if capacity is not None:
            before, left = self.pool.free, capacity.left
            capacity.release()
            self.promised.remove(capacity)
            assert self.pool.free == before + left

    @rule(capacity=capacities, pages=st.integers(0, 6))
    def extend(self, capacity: Capacity | None, pages: int) -> None:
        if capacity is None:
            return
        before, left = self.pool.stats(), capacity.left
        try:
            self.pool.extend(capacity, pages)
        except CapacityError:
            assert pages > before.free and self.pool.stats() == before and capacity.left == left
            return
        assert self.pool.free == before.free - pages and capacity.left == left + pages

    @rule(route=routes, count=st.integers(1, 9), capacity=st.none() | capacities)
    def reserve(self, route: Route, count: int, capacity: Capacity | None) -> None:
        before = self.pool.stats()
        left = capacity.left if capacity else 0
        try:
            step = self.pool.reserve(route, count, capacity)
        except (LeaseError, CapacityError):
            assert self.pool.stats() == before and (not capacity or capacity.left == left)
            return
        drawn = min(left, len(step.taken))
        assert step.drawn == drawn and self.pool.free == before.free - len(step.taken) + drawn
        if step.replaced:
            self.rows[step.replaced[1]] = self.rows[step.replaced[0]]
        for at in range(step.expected, step.expected + count):
            self.clock += 1
            self.rows[step.pages[at // PAGE], at % PAGE] = self.clock

    @rule(route=routes)
    def commit(self, route: Route) -> None:
        if route.pending:
            step = route.pending
            self.pool.commit([step])
            at = range(step.expected, step.expected + step.count)
            self.expected[route] += [int(self.rows[step.pages[i // PAGE], i % PAGE]) for i in at]

    @rule(route=routes)
    def abort(self, route: Route) -> None:
        if route.pending:
            self.pool.abort([route.pending])

    @rule(route=consumes(routes))
    def release(self, route: Route) -> None:
        if route.pending:
            self.pool.abort([route.pending])
        if not route.released:
            self.pool.release(route)
            del self.expected[route]

    @rule(target=leases, route=routes, prospective=st.booleans())
    def lease(self, route: Route, prospective: bool) -> int:
        if route.released or (route.pending and not prospective):
            with pytest.raises(LeaseError):
                self.pool.lease(route)
            return -1
        lease = self.pool.lease(route, prospective=prospective)
        rows = self.read(lease.pages, lease.length)
        assert rows[: route.length] == self.expected[route] and self.pool.leased(route)
        self.clock += 1
        self.leased[self.clock] = (lease, rows)
        return self.clock

    @rule(key=consumes(leases))
    def end_lease(self, key: int) -> None:
        if key in self.leased:
            self.leased.pop(key)[0].release()

    @precondition(lambda self: any(r.pending for r in self.expected))
    @rule(keep=st.booleans())
    def resolve_all(self, keep: bool) -> None:
        pending = [route for route in self.expected if route.pending]
        steps = [self.resolve(route) for route in pending]
        (self.pool.commit if keep else self.pool.abort)(steps)
        for route, step in zip(pending, steps, strict=True):
            if keep:
                self.expected[route] = self.read(step.pages, step.expected + step.count)

    @invariant()
    def counts_equal_holders(self) -> None:
        self.pool.check()
        stats = self.pool.stats()
        assert stats.routes == len(self.expected) and stats.leases == len(self.leased)
        assert stats.free + stats.resident + stats.reserved == stats.physical == PAGES and stats.free >= 0
        pending = [r.pending for r in self.expected if r.pending]
        assert stats.reserved == sum(len(p.taken) for p in pending) + sum(c.left for c in self.promised)
        for route in self.expected:
            assert self.pool.leased(route) == any(lease.route is route for lease, _ in self.leased.values())

    @invariant()
    def everyone_reads_their_own_rows(self) -> None:
        for route, rows in self.expected.items():
            assert route.length == len(rows) and len(route.pages) == self.pool.pages_for(route.length)
            assert self.read(route.pages, route.length) == rows
        for lease, rows in self.leased.values():
            assert self.read(lease.pages, lease.length) == rows


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
