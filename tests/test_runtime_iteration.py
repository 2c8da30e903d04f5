"""The pure plan of an iteration."""

import random

import pytest

from numem.errors import InputError
from numem.runtime.lanes.iteration import Demand, Kind, Limits, plan_iteration


def test_budget_66() -> None:
    """Seed §1.11: decodes by arrival, then one prefill chunk; nothing is left."""
    plan = plan_iteration(
        Limits(66, 3, prefill_chunk_size=64),
        [Demand("prefill", Kind.PREFILL, 500, 0), Demand("b", Kind.DECODE, 1, 2), Demand("a", Kind.DECODE, 1, 1)],
    )
    assert plan.scheduled == (("a", 1), ("b", 1), ("prefill", 64))
    assert (plan.deferred, plan.unused_tokens, plan.unused_sequences) == ((), 0, 0)


def test_minimum_share() -> None:
    """Seed §1.11: budget 4, minimum 1, four decodes and one prefill: decode 3 is deferred."""
    decodes = [Demand(str(i), Kind.DECODE, 1, i) for i in range(4)]
    plan = plan_iteration(Limits(4, 4, minimum_prefill_tokens=1), [*decodes, Demand("p", Kind.PREFILL, 9, 9)])
    assert plan.scheduled == (("0", 1), ("1", 1), ("2", 1), ("p", 1))
    assert plan.deferred == ("3",) and plan.unused_tokens == plan.unused_sequences == 0


def test_order_within_a_kind() -> None:
    """Kind, then priority, then arrival, then id."""
    demands = [
        Demand("r", Kind.REPAIR, 10, 0),
        Demand("late", Kind.DECODE, 1, 5, priority=1),
        Demand("b", Kind.DECODE, 1, 1),
        Demand("a", Kind.DECODE, 1, 1),
        Demand("p", Kind.PREFILL, 10, 0, priority=9),
    ]
    plan = plan_iteration(Limits(100, 10), demands)
    assert [id for id, _ in plan.scheduled] == ["late", "a", "b", "r", "p"]


@pytest.mark.parametrize(("budget", "lanes", "minimum"), [(1, 4, 1), (4, 1, 1), (4, 4, 4), (4, 4, 100)])
def test_a_reservation_leaves_one_decode(budget: int, lanes: int, minimum: int) -> None:
    """Seed row 49: a minimum of the whole budget, or one lane, never shuts decoding out."""
    plan = plan_iteration(
        Limits(budget, lanes, minimum_prefill_tokens=minimum),
        [Demand("d", Kind.DECODE, 1, 0), Demand("p", Kind.PREFILL, 50, 0)],
    )
    assert ("d", 1) in plan.scheduled
    if budget > 1 and lanes > 1:
        assert dict(plan.scheduled)["p"] == budget - 1


def test_pieces_end_at_absolute_multiples() -> None:
    rng = random.Random(1)
    for _ in range(200):
        chunk = rng.choice([1, 16, 64, 256])
        demands = [Demand(str(i), Kind.PREFILL, rng.randint(1, 600), i, position=rng.randint(0, 600)) for i in range(5)]
        plan = plan_iteration(Limits(rng.randint(1, 700), 4, prefill_chunk_size=chunk), demands)
        by_id = {d.id: d for d in demands}
        for id, count in plan.scheduled:
            position = by_id[id].position
            assert position // chunk == (position + count - 1) // chunk and 0 < count <= by_id[id].tokens
        assert {id for id, _ in plan.scheduled} | set(plan.deferred) == set(by_id)


def test_only_as_much_is_kept_as_prefill_wants() -> None:
    decodes = [Demand(str(i), Kind.DECODE, 1, i) for i in range(8)]
    plan = plan_iteration(Limits(8, 9, minimum_prefill_tokens=4), [*decodes, Demand("p", Kind.PREFILL, 1, 9)])
    assert len(plan.scheduled) == 8 and plan.deferred == ("7",)


def test_limits_are_positive() -> None:
    for bad in ({"max_batched_tokens": 0}, {"max_sequences": 0}, {"minimum_prefill_tokens": -1}):
        with pytest.raises(InputError):
            Limits(**{"max_batched_tokens": 1, "max_sequences": 1, **bad})
