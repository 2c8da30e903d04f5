"""The page pool: exact bookkeeping on small pools."""

import pytest

from numem.errors import CapacityError, InputError, LeaseError
from numem.runtime.paging.pool import PagePool, Reservation, Route


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
    assert reservation.replaced == (0, 1) and reservation.pages == [1] and pool.free == 6
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
    assert (step.added, step.pages, step.replaced) == ((2, 3, 4), [1, 2, 3, 4], None)
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
    assert (stats.physical, stats.free, stats.resident, stats.shared) == (8, 4, 2, 2)
    assert (stats.routes, stats.leases, stats.reserved) == (2, 1, 2)
    lease.release()
    assert pool.stats().leases == 0


def test_the_audit_sees_a_page_that_nobody_holds() -> None:
    pool = PagePool(8, 4)
    lease = pool.lease(root_of(pool, 3))
    pool.check()
    pool._leases.discard(lease)
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
