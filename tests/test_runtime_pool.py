"""The page pool: exact bookkeeping on small pools, and a state machine against a model of token rows."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from numem.errors import CapacityError, InputError, LeaseError
from numem.runtime.pool import PageLease, PagePool, Reservation, Route


def grow(pool: PagePool, route: Route, count: int) -> Reservation:
    reservation = pool.reserve(route, count)
    pool.commit([reservation])
    return reservation


def root_of(pool: PagePool, length: int) -> Route:
    route = pool.allocate()
    grow(pool, route, length)
    return route


def test_fork_shares_pages_and_the_first_append_copies_only_the_tail() -> None:
    pool = PagePool(8, 4)
    root = root_of(pool, 6)
    assert root.pages == [0, 1]
    fork = pool.fork(root)
    assert fork.pages == [0, 1] and pool.free == 6
    step = grow(pool, fork, 1)
    assert step.replaced == (1, 2) and step.expected % 4 == 2 and step.added == ()
    assert pool.free == 5 and fork.pages == [0, 2] and root.pages == [0, 1]
    assert pool.release(fork) == (2,) and pool.free == 6
    assert pool.release(root) == (0, 1) and pool.free == 8
    pool.check()


def test_abort_leaves_route_counts_and_free_pages_as_before() -> None:
    pool = PagePool(8, 4)
    fork = pool.fork(root_of(pool, 3))
    reservation = pool.reserve(fork, 1)
    assert reservation.replaced == (0, 1) and reservation.pages == (1,) and pool.free == 6
    pool.abort([reservation])
    assert fork.pages == [0] and fork.length == 3 and pool.refs(0) == 2 and pool.free == 7
    pool.check()


def test_a_lease_forces_a_copy_and_outlives_the_route() -> None:
    pool = PagePool(8, 4)
    route = root_of(pool, 3)
    lease = pool.lease(route)
    step = grow(pool, route, 1)
    assert step.replaced is not None and step.replaced[0] == 0
    assert route.pages == [1] and lease.pages == (0,) and lease.length == 3
    pool.release(route)
    assert pool.free == 7
    lease.release()
    assert pool.free == 8
    pool.check()


def test_a_fork_at_a_page_end_copies_nothing() -> None:
    pool = PagePool(8, 4)
    root = root_of(pool, 8)
    fork = pool.fork(root)
    for route in (fork, root):
        assert grow(pool, route, 1).replaced is None
    assert fork.pages == [0, 1, 2] and root.pages == [0, 1, 3]
    shorter = pool.fork(root, 4)
    assert shorter.pages == [0] and grow(pool, shorter, 1).replaced is None


@pytest.mark.parametrize("length", range(7))
def test_a_fork_at_a_shorter_boundary_holds_just_the_pages_it_needs(length: int) -> None:
    pool = PagePool(8, 4)
    root = root_of(pool, 6)
    fork = pool.fork(root, length)
    assert fork.pages == [0, 1][: -(-length // 4)] and fork.length == length
    step = pool.reserve(fork, 1)
    assert (step.replaced is not None) == (length % 4 != 0)
    pool.abort([step])
    pool.check()


def test_the_last_holder_of_a_tail_writes_in_place() -> None:
    pool = PagePool(8, 4)
    root = root_of(pool, 6)
    fork = pool.fork(root)
    pool.release(root)
    assert grow(pool, fork, 1).replaced is None and fork.pages == [0, 1]


def test_the_lowest_free_page_is_taken_first() -> None:
    pool = PagePool(8, 4)
    routes = [root_of(pool, 4) for _ in range(6)]
    for index in (4, 1, 3):
        pool.release(routes[index])
    assert root_of(pool, 12).pages == [1, 3, 4]
    assert root_of(pool, 4).pages == [6]


def test_many_tokens_take_their_pages_in_logical_order() -> None:
    pool = PagePool(8, 4)
    blocker = root_of(pool, 4)
    route = root_of(pool, 2)
    step = pool.reserve(route, 11)
    assert (step.added, step.pages, step.replaced) == ((2, 3, 4), (1, 2, 3, 4), None)
    assert route.length == 2 and route.pages == [1]
    pool.commit([step])
    assert route.length == 13 and route.pages == [1, 2, 3, 4]
    assert blocker.pages == [0]


def test_the_page_being_replaced_stays_held_until_the_reservation_resolves() -> None:
    """Seed systems, part 4, row 32: abort after the other holder released must not free a page that is in use."""
    pool = PagePool(4, 4)
    root = root_of(pool, 3)
    fork = pool.fork(root)
    step = pool.reserve(fork, 1)
    assert pool.release(root) == ()
    pool.abort([step])
    pool.check()
    assert fork.pages == [0] and pool.refs(0) == 1 and pool.free == 3
    grow(pool, fork, 1)
    assert fork.pages == [0]


def test_two_pending_copies_of_one_tail_both_resolve() -> None:
    pool = PagePool(4, 4)
    root = root_of(pool, 3)
    fork = pool.fork(root)
    first, second = pool.reserve(root, 1), pool.reserve(fork, 1)
    pool.commit([first, second])
    pool.check()
    assert root.pages == [1] and fork.pages == [2] and pool.free == 2


def test_too_few_pages_is_an_error_that_takes_nothing() -> None:
    """llama.cpp#17118: a refused append leaves the state as it was."""
    pool = PagePool(3, 4)
    root = root_of(pool, 7)
    fork = pool.fork(root)
    before = pool.stats()
    with pytest.raises(CapacityError, match="need 2 pages, 1 of 3"):
        pool.reserve(fork, 2)
    assert pool.stats() == before and fork.pending is None
    pool.check()
    assert grow(pool, fork, 1).replaced == (1, 2)


def test_a_batch_is_checked_whole_before_anything_changes() -> None:
    pool = PagePool(8, 4)
    a, b = root_of(pool, 3), root_of(pool, 3)
    first, second = pool.reserve(a, 2), pool.reserve(b, 2)
    pool.abort([second])
    for resolve in (pool.commit, pool.abort):
        with pytest.raises(LeaseError, match="pending"):
            resolve([first, second])
    assert a.pending is first and a.length == 3
    pool.commit([first])
    assert a.length == 5
    pool.check()


@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_a_reservation_twice_in_one_batch_is_refused(verb: str) -> None:
    """sglang#13483: an index is never given back twice."""
    pool = PagePool(8, 4)
    fork = pool.fork(root_of(pool, 3))
    step = pool.reserve(fork, 6)
    with pytest.raises(LeaseError, match="twice"):
        getattr(pool, verb)([step, step])
    assert fork.pending is step
    getattr(pool, verb)([step])
    pool.check()
    with pytest.raises(LeaseError, match=f"{verb}: "):
        getattr(pool, verb)([step])
    pool.check()


def test_another_pools_reservation_is_refused() -> None:
    pool, other = PagePool(8, 4), PagePool(8, 4)
    route = pool.allocate()
    step = pool.reserve(route, 1)
    for verb in (other.commit, other.abort):
        with pytest.raises(LeaseError):
            verb([step])
    for use in (other.release, other.fork, other.lease):
        with pytest.raises(LeaseError):
            use(route)
    other.check()


def test_nothing_else_happens_to_a_route_with_a_pending_append() -> None:
    pool = PagePool(8, 4)
    route = root_of(pool, 3)
    step = pool.reserve(route, 1)
    for use in (pool.fork, pool.lease, pool.release, lambda r: pool.reserve(r, 1)):
        with pytest.raises(LeaseError, match="pending append"):
            use(route)
    pool.commit([step])
    pool.release(route)


def test_releases_happen_once() -> None:
    """lmcache#3381, lmcache#5095: a double unpin is an error, not a corruption."""
    pool = PagePool(8, 4)
    route = root_of(pool, 3)
    lease = pool.lease(route)
    lease.release()
    with pytest.raises(LeaseError, match="twice"):
        lease.release()
    pool.release(route)
    for use in (pool.release, pool.fork, pool.lease, lambda r: pool.reserve(r, 1)):
        with pytest.raises(LeaseError, match="released"):
            use(route)
    assert pool.free == 8
    pool.check()


def test_a_lease_is_released_by_its_with_statement_also_on_error() -> None:
    pool = PagePool(8, 4)
    route = root_of(pool, 3)
    with pytest.raises(ZeroDivisionError), pool.lease(route):
        assert pool.stats().leases == 1
        raise ZeroDivisionError
    assert pool.stats().leases == 0 and pool.refs(0) == 1


def test_statistics_count_pages_and_holders() -> None:
    pool = PagePool(8, 4)
    root = root_of(pool, 6)
    fork = pool.fork(root)
    lease = pool.lease(root)
    pool.reserve(fork, 4)
    stats = pool.stats()
    assert (stats.physical, stats.free, stats.resident, stats.shared) == (8, 4, 4, 2)
    assert (stats.routes, stats.leases, stats.reserved) == (2, 1, 2)
    lease.release()
    assert pool.stats().leases == 0


def test_the_audit_sees_a_page_that_nobody_holds() -> None:
    pool = PagePool(8, 4)
    lease = pool.lease(root_of(pool, 3))
    pool.check([lease])
    with pytest.raises(LeaseError, match="page 0 has 2 references and 1 holders"):
        pool.check()


@pytest.mark.parametrize(("pages", "tokens"), [(0, 4), (4, 0), (-1, 4)])
def test_pools_without_room_are_refused(pages: int, tokens: int) -> None:
    with pytest.raises(InputError):
        PagePool(pages, tokens)


@pytest.mark.parametrize("length", [-1, 4])
def test_forks_beyond_the_route_are_refused(length: int) -> None:
    pool = PagePool(8, 4)
    with pytest.raises(InputError, match="outside"):
        pool.fork(root_of(pool, 3), length)


@pytest.mark.parametrize("count", [0, -1])
def test_appends_of_no_tokens_are_refused(count: int) -> None:
    pool = PagePool(8, 4)
    with pytest.raises(InputError):
        pool.reserve(pool.allocate(), count)


PAGE, PAGES = 4, 10


class PoolMachine(RuleBasedStateMachine):
    """Every route and lease reads back its own rows, whatever happened to the others.

    The rows live in an array indexed by physical page, written only through committed reservations, as a device would.
    """

    routes = Bundle("routes")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, PAGE)
        self.rows = np.zeros((PAGES, PAGE), dtype=np.int64)
        self.expected: dict[Route, list[int]] = {}
        self.leased: dict[int, tuple[PageLease, list[int]]] = {}
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
        self.expected[child] = self.expected[route][:length]
        return child

    @rule(route=routes, count=st.integers(1, 9))
    def reserve(self, route: Route, count: int) -> None:
        before = self.pool.stats()
        try:
            step = self.pool.reserve(route, count)
        except (LeaseError, CapacityError):
            assert self.pool.stats() == before
            return
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

    @rule(target=leases, route=routes)
    def lease(self, route: Route) -> int:
        if route.pending or route.released:
            return -1
        lease = self.pool.lease(route)
        self.clock += 1
        self.leased[self.clock] = (lease, list(self.expected[route]))
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
        self.pool.check([lease for lease, _ in self.leased.values()])
        stats = self.pool.stats()
        assert stats.routes == len(self.expected) and stats.leases == len(self.leased)
        assert stats.free + stats.resident == PAGES
        pending = [r.pending for r in self.expected if r.pending]
        assert stats.reserved == sum(len(p.added) + (p.replaced is not None) for p in pending)

    @invariant()
    def everyone_reads_their_own_rows(self) -> None:
        for route, rows in self.expected.items():
            assert route.length == len(rows) and len(route.pages) == self.pool.pages_for(route.length)
            assert self.read(route.pages, route.length) == rows
        for lease, rows in self.leased.values():
            assert self.read(lease.pages, lease.length) == rows


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
