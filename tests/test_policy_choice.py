"""Restore or recompute: exact predictions, stable reasons, and two-ended restore on a clock on which costs are exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.errors import InputError
from numem.policy.choice import Held, Prompt, Source, alternatives, choose, choose_cache_source, sources
from numem.policy.costs import Configured, Costs, TierCost
from numem.policy.decision import Alternative
from numem.policy.two_ended import Piece, beaten, expected, landed_ms, simulate, step_helps

CHUNK_BYTES = 1000


def known(prefill: float = 1.0, **tiers: TierCost) -> Costs:
    """Exact costs, all of them measured: 0 ms to write pages but for 1 ms a chunk, 10 ms a step."""
    costs = Costs(Configured(decode_ms=10.0, page_bytes_per_ms=CHUNK_BYTES, tiers=tiers))
    costs.observe_prefill(0, 256, 256 * prefill)
    return costs


def held(chunks: int, *tiers: str, start: int = 0) -> tuple[Held, ...]:
    return tuple(Held(256 * k, 256 * k + 256, CHUNK_BYTES, tiers) for k in range(start, start + chunks))


def by_name(found: tuple[Alternative, ...]) -> dict[str, Alternative]:
    return {a.name: a for a in found}


def test_the_prediction_is_the_sum_of_its_terms() -> None:
    """Seed §1.13: max(queue, load) + pages + missing rows + one step, with loads and writes pipelined."""
    costs = known(ssd=TierCost(2.0, 500.0))  # 4 ms a chunk
    found = by_name(alternatives(Prompt(1100, held=held(4, "ssd"), queue_ms=5.0), costs))
    assert list(found) == ["resident", "restore:ssd", "recompute", "two-ended:ssd"]
    restore = found["restore:ssd"]
    assert restore.cost_ms == 4 * 4 + 1 + (1099 - 1024) + 10
    assert restore.terms == {
        "tokens": 1024,
        "compute_tokens": 76,
        "bytes": 4000,
        "load_ms": 16.0,
        "page_ms": 4.0,
        "landed_ms": 17.0,
        "compute_ms": 75.0,
        "queue_ms": 5.0,
        "first_token_ms": 10.0,
    }
    assert found["recompute"].cost_ms == 5 + 1099 + 10
    assert found["two-ended:ssd"].cost_ms == restore.cost_ms
    assert choose(tuple(found.values())) is restore
    # A queue longer than the load hides it.
    (late,) = [
        a for a in alternatives(Prompt(1100, held=held(4, "ssd"), queue_ms=50.0), costs) if a.name == restore.name
    ]
    assert late.cost_ms == 50 + 75 + 10


def test_resident_rows_are_credited() -> None:
    """A chunk that begins among them is read whole and gives the rest of its rows."""
    costs = known(ssd=TierCost(0.0, 10.0))  # 100 ms a chunk
    prompt = Prompt(1025, resident=300, held=held(3, "ssd", start=1))
    found = by_name(alternatives(prompt, costs))
    assert found["resident"].cost_ms == (1024 - 300) + 10
    assert found["recompute"].cost_ms == 1024 + 10
    assert found["restore:ssd"].terms["tokens"] == 724 and found["restore:ssd"].terms["bytes"] == 3000
    assert found["restore:ssd"].cost_ms == 300 + 1 + 10
    assert prompt.matched == 1024


def test_two_ended_meets_in_the_middle() -> None:
    """4 chunks of 256 ms to compute, 200 ms to load: chunks 3 and 2 are loaded by 401, chunk 0 and 1 cannot both be
    computed by then; 1 computed and 3 loaded takes 600 + 1 ms."""
    costs = known(ssd=TierCost(0.0, 5.0))
    found = by_name(alternatives(Prompt(1025, held=held(4, "ssd")), costs))
    assert found["restore:ssd"].cost_ms == 800 + 1 + 10
    assert found["recompute"].cost_ms == 1024 + 10
    two = found["two-ended:ssd"]
    # Chunk 0 by 256, chunk 1 by 512; meanwhile chunks 3 and 2 at 200 and 400, written at 513 and 514.
    assert two.terms["tokens"] == 512 and two.cost_ms == 512 + 2 + 10
    assert choose(tuple(found.values())) is two


@pytest.mark.parametrize(
    ("prompt", "name", "declined"),
    [
        (Prompt(100), "restore", "no durable prefix"),
        (Prompt(100), "two-ended", "no durable prefix"),
        (Prompt(100), "resident", "nothing resident"),
        (Prompt(16, held=(Held(0, 15, 100, ("ssd",)),)), "restore", "prefix shorter than a page"),
        (Prompt(300, resident=250, held=held(1, "ssd")), "two-ended", "prefix shorter than a page"),
        (Prompt(300, held=held(1, "tape")), "restore:tape", "cost unknown"),
        (Prompt(300, held=held(1, "ssd"), pages_needed=19, pages_free=18), "restore:ssd", "insufficient pages"),
        (Prompt(300, held=held(1, "ssd"), pages_needed=19, pages_free=18), "two-ended:ssd", "insufficient pages"),
        (Prompt(300, held=held(1, "ssd"), max_position=299), "restore:ssd", "context capacity exceeded"),
        (Prompt(300, held=held(1, "ssd"), max_position=299), "recompute", "context capacity exceeded"),
    ],
)
def test_reasons_are_stable(prompt: Prompt, name: str, declined: str) -> None:
    found = by_name(alternatives(prompt, known(ssd=TierCost(0.0, 1.0))))
    assert found[name].declined == declined


def test_what_fits_exactly_is_not_declined() -> None:
    prompt = Prompt(300, held=held(1, "ssd"), pages_needed=19, pages_free=19, max_position=300)
    assert not by_name(alternatives(prompt, known(ssd=TierCost(0.0, 1.0))))["restore:ssd"].declined


def test_every_tier_that_holds_all_chunks_is_an_alternative() -> None:
    costs = known(ssd=TierCost(1.0, 1e3), object=TierCost(5.0, 1e2))
    assert sources(Prompt(600, held=held(2, "ssd", "object")), costs) == {
        "ssd": ("ssd",) * 2,
        "object": ("object",) * 2,
    }
    mixed = (*held(1, "ssd", "object"), *held(1, "object", start=1))
    # Only the object tier holds both.
    assert sources(Prompt(600, held=mixed), costs) == {"object": ("object", "object")}
    # None holds both: each from its nearest, named after the slowest used.
    apart = (*held(1, "ssd"), *held(1, "object", start=1))
    assert sources(Prompt(600, held=apart), costs) == {"object": ("ssd", "object")}
    assert sources(Prompt(600, held=(*held(1, "ssd"), *held(1, "tape", start=1))), costs) == {"tape": ("ssd", "tape")}
    # A preferred tier is read wherever it has the rows.
    assert sources(Prompt(600, held=held(2, "ssd", "object"), prefer="object"), costs) == {"object": ("object",) * 2}
    assert sources(Prompt(600, held=mixed, prefer="ssd"), costs) == {"object": ("ssd", "object")}


def test_an_unmeasured_tier_gets_a_probe() -> None:
    """Computing goes on while the read is under way, so that exploring costs little."""
    costs = known(ssd=TierCost(0.0, 1e6))
    found = alternatives(Prompt(600, held=held(2, "ssd", "tape")), costs)
    assert choose(found).name == "two-ended:tape"
    costs.observe_load("tape", 1 << 20, 1, 1e6)
    assert choose(alternatives(Prompt(600, held=held(2, "ssd", "tape")), costs)).name == "restore:ssd"
    # Nothing was ever computed: the first arrival does a little of both.
    fresh = Costs(Configured(tiers={"ssd": TierCost(0.0, 1e6)}))
    assert choose(alternatives(Prompt(600, held=held(2, "ssd")), fresh)).name == "two-ended:ssd"


COSTS = (Source("recompute-exact", 12.0), Source("restore-exact", 8.0), Source("modular-repair", 3.0, 0.97))


def test_a_cache_source_is_exact_unless_asked_otherwise() -> None:
    """Seed §1.11: costs 12/8/3 with quality 0.97."""
    assert choose_cache_source(COSTS).kind == "restore-exact"
    assert choose_cache_source(COSTS, approximate=True, minimum_quality=0.95).kind == "modular-repair"
    assert choose_cache_source(COSTS, approximate=True, minimum_quality=0.99).kind == "restore-exact"
    assert choose_cache_source(COSTS, minimum_quality=0.95).kind == "restore-exact"


def test_equal_cache_sources_have_an_order() -> None:
    order = ("resident-exact", "restore-exact", "recompute-exact", "modular-repair")
    for first in range(4):
        equal = [Source(kind, 5.0) for kind in reversed(order[first:])]
        assert choose_cache_source(equal, approximate=True, minimum_quality=0.0).kind == order[first]
    with pytest.raises(InputError, match="unknown"):
        choose_cache_source([Source("guess", 1.0)])
    with pytest.raises(InputError, match="none is exact"):
        choose_cache_source([Source("modular-repair", 1.0, 0.5)], approximate=True, minimum_quality=0.6)


def test_loads_and_writes_are_pipelined() -> None:
    assert landed_ms([]) == 0
    assert landed_ms([(10, 1), (10, 1), (10, 1)]) == 31
    assert landed_ms([(1, 10), (1, 10), (1, 10)]) == 31
    assert landed_ms([(10, 1), (10, 1)], busy_ms=50) == 52


def test_a_step_helps_only_where_it_ends_first() -> None:
    assert step_helps(29, 87, [(10, 1)] * 3)
    assert not step_helps(32, 96, [(10, 1)] * 3)
    assert not step_helps(5, 10, [(1, 1)])
    assert step_helps(1e6, 2e6, [(10, 1), (1e7, 1)])
    # The first of two steps gains nothing alone, but both together do.
    assert step_helps(16, 32, [(0, 33), (0, 0)]) and not step_helps(16, 34, [(0, 33), (0, 0)])


def test_what_is_overdue_is_not_waited_for() -> None:
    """Predicted 10 ms: after 4 there are 6 left, after 10 none, after 30 as much again as it is late by."""
    for elapsed, left in ((0, 10), (4, 6), (10, 0), (30, 20)):
        assert expected([(0, 1)], [(6, 1), (4, 1)], elapsed, [(5, 1)]) == [(0, 1), (left, 1), (0, 1), (5, 1)]
    # Not begun, for want of a thread.
    assert expected([], [], 30, [(10, 1), (10, 1)]) == [(20, 1), (10, 1)]
    assert expected([(7, 1)], [], 30, []) == [(0, 1)]


def test_a_load_that_computing_beats_is_not_begun() -> None:
    def prefill(start: int, count: int) -> float:
        return float(count)

    assert beaten(0, [(256, 100.0), (512, 1000.0)], prefill) == 0
    assert beaten(0, [(256, 256.0), (512, 512.0), (768, 767.0), (1024, 5000.0)], prefill) == 512
    assert beaten(100, [(256, 156.0)], prefill) == 256


def growing(start: int, count: int) -> float:
    """Prefill whose cost per token grows from 0.1 ms by 0.1 ms every 4,096 positions."""
    return sum(0.1 + 0.1 * position / 4096 for position in range(start, start + count))


# ms to load a chunk, from far below to far above what computing it costs (26 to 77 ms).
MIXES = [(tier, length) for tier in (1.0, 12.0, 40.0, 150.0, 4000.0) for length in (256, 1024, 4096, 8192)]


@pytest.mark.parametrize(("tier", "length"), MIXES)
def test_two_ended_is_never_slower_than_the_better_end(tier: float, length: int) -> None:
    """20 mixes of tier speed and length on a simulated clock with exact costs: within 5 % of min(restore, recompute)."""
    pieces = [Piece(start, start + 256, tier, 0.5) for start in range(0, length, 256)]
    runs = {policy: simulate(policy, pieces, growing) for policy in ("restore", "recompute", "two-ended")}
    best = min(runs["restore"].ms, runs["recompute"].ms)
    assert runs["two-ended"].ms <= 1.05 * best
    assert all(run.loaded + run.computed == length for run in runs.values())
    assert runs["restore"].computed == runs["recompute"].loaded == 0


def test_two_ended_beats_both_ends_where_they_are_equal() -> None:
    pieces = [Piece(start, start + 256, 256.0, 0.0) for start in range(0, 4096, 256)]
    assert simulate("restore", pieces, lambda a, n: float(n)).ms == 4096
    assert simulate("two-ended", pieces, lambda a, n: float(n)).ms == 2048


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1000.0), st.floats(0.0, 50.0)), min_size=1, max_size=20),
    st.floats(0.001, 4.0),
    st.floats(0.0, 0.001),
    st.sampled_from([16, 100, 256]),
)
def test_two_ended_with_any_costs(loads: list[tuple[float, float]], rate: float, growth: float, step: int) -> None:
    """Whatever the chunks cost: no later than either end, and every row comes from exactly one."""

    def prefill(start: int, count: int) -> float:
        return count * (rate + growth * (start + count / 2))

    pieces = [Piece(256 * k, 256 * k + 256, load, page) for k, (load, page) in enumerate(loads)]
    runs = {p: simulate(p, pieces, prefill, step=step) for p in ("restore", "recompute", "two-ended")}
    assert runs["two-ended"].ms <= min(runs["restore"].ms, runs["recompute"].ms) * (1 + 1e-9) + 1e-9
    assert runs["two-ended"].loaded + runs["two-ended"].computed == 256 * len(pieces)
