"""The page pool: capacity, prospective leases, window floors, and what a guard sees."""

import numpy as np
import pytest
import torch

from numem.errors import CapacityError, InputError, IntegrityError, LeaseError, OutOfPlanError
from numem.runtime.engine import Engine, Rows, Span
from numem.runtime.paging.pages import PageStorage, kv_spec
from numem.runtime.paging.pool import PagePool, Route
from numem.state.groups import Floor


def root_of(pool: PagePool, length: int) -> Route:
    route = pool.allocate()
    pool.commit([pool.reserve(route, length)])
    return route


def books(pool: PagePool) -> tuple[int, int, int]:
    """(free, resident, reserved) after an audit."""
    pool.check()
    stats = pool.stats()
    assert stats.free + stats.resident + stats.reserved == stats.physical and stats.free == pool.free
    return stats.free, stats.resident, stats.reserved


# ---- capacity ----


def test_capacity_is_set_aside_for_the_one_who_names_it() -> None:
    pool = PagePool(8, 4)
    mine, other = pool.allocate(), pool.allocate()
    capacity = pool.capacity(5)
    assert books(pool) == (3, 0, 5)
    with pytest.raises(CapacityError, match="need 4 pages, 3 of 8"):
        pool.reserve(other, 13)
    step = pool.reserve(mine, 13, capacity)
    assert (step.drawn, capacity.left) == (4, 1) and books(pool) == (3, 0, 5)
    pool.commit([step])
    assert books(pool) == (3, 4, 1)
    # More than is left comes from the free pages.
    step = pool.reserve(mine, 11, capacity)
    assert (step.drawn, capacity.left, pool.free) == (1, 0, 2)
    pool.commit([step])
    capacity.release()
    assert books(pool) == (2, 6, 0)


def test_an_abort_gives_pages_back_to_their_capacity() -> None:
    pool = PagePool(8, 4)
    route, capacity = pool.allocate(), pool.capacity(3)
    pool.abort([pool.reserve(route, 16, capacity)])
    assert capacity.left == 3 and books(pool) == (5, 0, 3)
    step = pool.reserve(route, 16, capacity)
    capacity.release()
    assert books(pool) == (4, 0, 4)
    pool.abort([step])
    assert books(pool) == (8, 0, 0)


def test_a_capacity_pays_for_the_copy_of_a_tail() -> None:
    pool = PagePool(4, 4)
    fork = pool.fork(root_of(pool, 3))
    capacity = pool.capacity(3)
    assert pool.free == 0
    with pytest.raises(CapacityError):
        pool.reserve(fork, 1)
    step = pool.reserve(fork, 1, capacity)
    assert step.replaced == (0, 1) and capacity.left == 2
    pool.commit([step])
    assert books(pool) == (0, 2, 2)


def test_capacity_beyond_the_free_pages_is_refused_and_takes_nothing() -> None:
    pool = PagePool(8, 4)
    root_of(pool, 9)
    pool.capacity(2)
    before = pool.stats()
    with pytest.raises(CapacityError, match="4 pages asked for, 3 of 8 are free"):
        pool.capacity(4)
    with pytest.raises(InputError):
        pool.capacity(-1)
    assert pool.stats() == before


def test_capacity_is_released_once_and_not_used_after() -> None:
    pool, other = PagePool(8, 4), PagePool(8, 4)
    capacity = pool.capacity(8)
    with pytest.raises(LeaseError, match="another pool"):
        other.reserve(other.allocate(), 1, capacity)
    with pytest.raises(ZeroDivisionError), capacity:
        raise ZeroDivisionError
    assert pool.free == 8 and capacity.left == 0
    with pytest.raises(LeaseError, match="twice"):
        capacity.release()
    with pytest.raises(LeaseError, match="released"):
        pool.reserve(pool.allocate(), 1, capacity)
    assert books(pool) == (8, 0, 0)


def test_a_capacity_is_extended_from_the_free_pages() -> None:
    pool, other = PagePool(8, 4), PagePool(8, 4)
    route, capacity = pool.allocate(), pool.capacity(1)
    pool.commit([pool.reserve(route, 4, capacity)])
    pool.extend(capacity, 5)
    assert capacity.left == 5 and books(pool) == (2, 1, 5)
    with pytest.raises(CapacityError, match="3 pages asked for, 2 of 8"):
        pool.extend(capacity, 3)
    with pytest.raises(InputError):
        pool.extend(capacity, -1)
    with pytest.raises(LeaseError, match="another pool"):
        other.extend(capacity, 1)
    assert pool.references() == (1, 0, 0, 0, 0, 0, 0, 0)
    capacity.release()
    assert books(pool) == (7, 1, 0)


# ---- leases ----


def test_a_prospective_lease_shows_what_the_append_will_make() -> None:
    pool = PagePool(8, 4)
    root = root_of(pool, 3)
    fork = pool.fork(root)
    step = pool.reserve(fork, 6)
    lease = pool.lease(fork, prospective=True)
    assert (lease.pages, lease.length) == (tuple(step.pages), 9) == ((1, 2, 3), 9)
    assert (fork.pages, fork.length) == ([0], 3) and pool.leased(fork) and not pool.leased(root)
    assert books(pool) == (4, 1, 3)
    pool.commit([step])
    assert (fork.pages, fork.length) == ([1, 2, 3], 9) and pool.refs(3) == 2
    # The lease holds the tail, so that the next append copies it.
    assert pool.reserve(fork, 1).replaced == (3, 4)
    lease.release()
    assert not pool.leased(fork)


def test_pages_of_a_prospective_lease_outlive_an_abort() -> None:
    pool = PagePool(8, 4)
    route, capacity = root_of(pool, 3), pool.capacity(2)
    step = pool.reserve(route, 6, capacity)
    lease = pool.lease(route, prospective=True)
    pool.abort([step])
    assert lease.pages == (0, 1, 2) and capacity.left == 0 and books(pool) == (5, 3, 0)
    assert route.pages == [0] and route.length == 3
    lease.release()
    assert books(pool) == (7, 1, 0)


def test_without_a_pending_append_a_prospective_lease_is_a_lease() -> None:
    pool = PagePool(8, 4)
    route = root_of(pool, 5)
    with pool.lease(route, prospective=True) as lease:
        assert (lease.pages, lease.length) == ((0, 1), 5)
    pool.release(route)
    with pytest.raises(LeaseError, match="released"):
        pool.lease(route, prospective=True)


def test_access_is_counted_on_a_logical_clock() -> None:
    pool = PagePool(8, 4)
    first, second = root_of(pool, 3), root_of(pool, 3)
    assert first.last_access < second.last_access
    pool.touch(first)
    assert first.last_access > second.last_access
    assert pool.fork(second).last_access > first.last_access > second.last_access
    pool.commit([pool.reserve(second, 1)])
    assert second.last_access == pool.clock


# ---- floors ----


def test_forks_of_a_route_restored_at_twenty_with_floor_twelve() -> None:
    pool = PagePool(8, 4)
    route = pool.allocate()
    step = pool.reserve(route, 20)
    pool.set_floors(route, [Floor("window-8", 8, 12)])
    pool.commit([step])
    assert [n for n in range(21) if pool.fork_allowed(route, n)] == [0, 19, 20]
    assert not pool.fork_allowed(route, 21)
    for length in (18, 16):
        with pytest.raises(OutOfPlanError, match="group window-8 needs rows below 12"):
            pool.fork(route, length)
    child = pool.fork(route, 19)
    assert child.floors == route.floors and pool.lease(child).floors == route.floors
    with pytest.raises(OutOfPlanError):
        pool.fork(child, 18)
    assert pool.fork(route, 0).floors == ()
    free = root_of(pool, 12)
    assert all(pool.fork_allowed(free, n) for n in range(13))
    pool.check()


def test_a_floor_only_rises_once_rows_are_committed() -> None:
    pool = PagePool(8, 4)
    route = pool.allocate()
    pool.set_floors(route, [Floor("w", 8, 12)])
    pool.set_floors(route, [Floor("w", 8, 8)])
    step = pool.reserve(route, 20)
    pool.set_floors(route, [Floor("w", 8, 4)])
    pool.commit([step])
    pool.set_floors(route, [Floor("w", 8, 8)])
    for lower in ([Floor("w", 8, 4)], []):
        with pytest.raises(OutOfPlanError, match="below 8 are missing"):
            pool.set_floors(route, lower)
    pool.release(route)
    with pytest.raises(LeaseError):
        pool.set_floors(route, [])


# ---- tables ----


class Recorder:
    """A decoder that keeps the rows it is given."""

    spec = kv_spec(1, 1, 16, "float32")
    kv_heads, head_dim, vocab, max_position = 1, 16, 8, 256
    device, max_rows = torch.device("cpu"), 512

    def __init__(self) -> None:
        self.rows: list[Rows] = []

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        self.rows.append(rows)
        return torch.zeros((len(rows.wanted), self.vocab))


def test_the_table_of_a_batch_is_dense() -> None:
    """Lane a holds 6 tokens on [4, 2], lane b 13 on [5, 0, 3, 1] from position 8 on; here in pages of 16."""
    decoder = Recorder()
    engine = Engine(decoder, pages=8)
    engine.evaluate([Span([4, 2], 20, [1]), Span([5, 0, 3, 1], 32, [1] * 20)])
    (rows,) = decoder.rows
    assert rows.tables.flatten().tolist() == [4, 2, -1, -1, 5, 0, 3, 1]
    assert [int(rows.positions[rows.lane == lane].max()) + 1 for lane in (0, 1)] == [21, 52]
    assert [int(rows.positions[rows.lane == lane].min()) for lane in (0, 1)] == [20, 32]
    assert rows.slots[:2].tolist() == [2 * 16 + 4, 3 * 16]


# ---- guard ----


def engine_of(*, debug: bool = False, canary: bool = False) -> Engine:
    return Engine(Recorder(), pages=6, debug=debug, canary=canary)


def test_a_write_to_a_freed_page_is_found_when_the_page_is_taken() -> None:
    """vllm#37076: use after free."""
    engine = engine_of(debug=True)
    route = engine.pool.allocate()
    engine.append([(route, [1] * 40)])
    pages = list(route.pages)
    engine.release(route)
    assert bool(engine.storage.k.isnan().all()) and bool(engine.storage.v.isnan().all())
    engine.storage.v[0, pages[1], 0, 3, 5] = 0.0
    fresh = engine.pool.allocate()
    before = engine.pool.stats()
    with pytest.raises(IntegrityError, match=f"page {pages[1]}: written while it was free"):
        engine.append([(fresh, [1] * 40)])
    assert engine.pool.stats() == before
    engine.pool.check()
    engine.append([(fresh, [1] * 16)])
    assert fresh.pages == [0]


def test_every_way_to_free_a_page_poisons_it() -> None:
    """sglang#13483: releases on several paths; none gives a page back twice, none leaves its bytes."""
    engine = engine_of(debug=True)
    pool, storage = engine.pool, engine.storage
    root = pool.allocate()
    engine.append([(root, [1] * 20)])
    lease, fork = pool.lease(root), pool.fork(root)
    storage.k[:, root.pages] = 1.0
    storage.v[:, root.pages] = 1.0
    pool.abort([engine.reserve(fork, 1)])
    step = engine.reserve(fork, 30)
    pool.commit([step])
    storage.k[:, list(step.taken)] = 1.0
    storage.v[:, list(step.taken)] = 1.0
    for which in range(3):
        if which == 1:
            lease.release()
        else:
            engine.release(fork if which else root)
        held = {page for page in range(6) if pool.refs(page)}
        for page in range(6):
            poisoned = bool(storage.k[:, page].isnan().all()) and bool(storage.v[:, page].isnan().all())
            assert poisoned == (page not in held)
        pool.check()
    assert sorted(pool._free) == list(range(6)) and pool.free == 6
    with pytest.raises(LeaseError):
        engine.release(fork)
    assert pool.free == 6


@pytest.mark.parametrize("read", ["evaluate", "save", "copy"])
def test_a_flipped_byte_in_a_full_page_is_found_when_it_is_read(read: str) -> None:
    engine = engine_of(canary=True)
    route = engine.pool.allocate()
    engine.append([(route, [1] * 40)])
    page = route.pages[1]
    engine.storage.v.view(torch.uint8)[0, page, 0, 15, 63] ^= 1
    with pytest.raises(IntegrityError, match=f"page {page}: its bytes changed"):
        if read == "evaluate":
            engine.append([(route, [1])])
        elif read == "save":
            engine.storage.save(route.pages, 20, 2)
        else:
            fork = engine.pool.fork(route, 20)
            engine.append([(fork, [1])])
    assert route.length == 40
    engine.storage.save(route.pages, 0, 16)
    engine.storage.save(route.pages, 32, 8)
    # The page is whole again once it was freed and written anew.
    for held in list(engine.pool._routes):
        engine.release(held)
    again = engine.pool.allocate()
    engine.append([(again, [1] * 40)])
    engine.append([(again, [1])])


def test_a_page_cut_open_by_a_fork_is_sealed_anew() -> None:
    """The only holder of a full page whose tail it does not hold writes in place."""
    engine = engine_of(canary=True)
    root = engine.pool.allocate()
    engine.append([(root, [1] * 32)])
    fork = engine.pool.fork(root, 20)
    engine.release(root)
    step = engine.reserve(fork, 12)
    assert step.replaced is None
    engine.storage.k[:, fork.pages[1], :, :, 4:] = 7.0
    engine.pool.commit([step])
    engine.append([(fork, [1])])
    engine.storage.k[:, fork.pages[1], :, :, 4:] = 8.0
    with pytest.raises(IntegrityError):
        engine.append([(fork, [1])])


def test_without_debug_and_canary_nothing_watches() -> None:
    engine = engine_of()
    assert engine.storage.guard is None and np.all(engine.storage.k.numpy() == 0)
