"""What the bookkeeping of pages costs: each operation alone, on a pool without tensors."""

import time
from collections.abc import Callable
from typing import Any

from numem.bench.pairs import figure
from numem.bench.store_read import quartiles
from numem.runtime.paging.pool import PagePool, Route

BAR_US = 20


def pool_operations(tokens: int, repetitions: int) -> dict[str, Any]:
    """`pool_op_us`: the largest median of all operations on a route of `tokens` tokens, in us.

    Reservations are of one token, on a page boundary (a page is taken) and inside a page. `release_fork` gives back
    pages that another route holds, `release_last` pages that become free.
    """
    pool = PagePool(4 * pool_pages(tokens))
    route = _grown(pool, tokens)
    inside = _grown(pool, tokens - pool.page_tokens // 2)
    samples: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        out = call(*args)
        samples.setdefault(name, []).append((time.perf_counter() - began) * 1e6)
        return out

    for _ in range(repetitions):
        fork = timed("fork", pool.fork, route)
        reservation = timed("reserve", pool.reserve, fork, 1)
        timed("commit", pool.commit, [reservation])
        timed("release_fork", pool.release, fork)
        pending = timed("reserve_inside_page", pool.reserve, inside, 1)
        timed("abort", pool.abort, [pending])
        lease = timed("lease", pool.lease, route)
        timed("release_lease", lease.release)
        capacity = timed("capacity", pool.capacity, 8)
        timed("release_capacity", capacity.release)
        timed("release_last", pool.release, _grown(pool, tokens))
    found = {name: quartiles(values) for name, values in samples.items()}
    worst = max(found, key=lambda name: found[name]["median"])
    return {
        "pool_op_us": figure(samples[worst], most=BAR_US, tokens=tokens, operation=worst, operations=found),
    }


def pool_pages(tokens: int) -> int:
    """Pages of 16 tokens, and one more."""
    return -(-tokens // 16) + 1


def _grown(pool: PagePool, tokens: int) -> Route:
    route = pool.allocate()
    pool.commit([pool.reserve(route, tokens)])
    return route
