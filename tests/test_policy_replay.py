"""Another policy on recorded decisions: exact numbers on decisions made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from numem import policy
from numem.errors import InputError
from numem.lineage.decisions import DecisionLog
from numem.policy.decision import Alternative, Decision, Measured, Recorded, Term
from numem.policy.replay import ARRIVE, EVICT, Arrivals, Evictions, arrivals, evictions
from tests.evict_fixtures import SIZE, open_small, read_ssd, singles
from tests.store_fixtures import put


def arrived(costs: dict[str, float | None], choice: str, *measured: tuple[str, float], declined: str = "") -> Recorded:
    found = tuple(
        Alternative(name, cost, {}, "no" if name == declined or cost is None else "") for name, cost in costs.items()
    )
    decision = Decision("arrive", "r", b"", "measured", {}, found, choice)
    return Recorded("", 0, decision, tuple(Measured(name, cost) for name, cost in measured))


PROMPTS = [
    # The prediction was right, and nothing else was tried.
    arrived({"recompute": 100.0, "restore:ssd": 40.0, "two-ended:ssd": 30.0}, "two-ended:ssd", ("two-ended:ssd", 32.0)),
    # Everything was executed: recomputing would have been best.
    arrived(
        {"recompute": 50.0, "restore:ssd": 40.0, "two-ended:ssd": 45.0},
        "restore:ssd",
        *(("restore:ssd", 80.0), ("recompute", 48.0), ("two-ended:ssd", 60.0)),
    ),
    # Nothing is durable.
    arrived({"recompute": 20.0, "restore": None, "two-ended": None}, "recompute", ("recompute", 22.0)),
    # Two tiers, the nearer one declined, no outcome.
    arrived({"recompute": 90.0, "restore:ssd": 10.0, "restore:object": 60.0}, "restore:object", declined="restore:ssd"),
]


@pytest.mark.parametrize(
    ("name", "differ", "predicted", "measured", "cost", "regret", "exact"),
    [
        ("recorded", 0, 30 + 40 + 20 + 60, (3, 32 + 80 + 22), 32 + 80 + 22 + 60, (0 + 0.4 + 0 + 0) / 4, 2),
        ("measured", 0, 30 + 40 + 20 + 60, (3, 32 + 80 + 22), 32 + 80 + 22 + 60, (0 + 0.4 + 0 + 0) / 4, 2),
        ("recompute", 3, 100 + 50 + 20 + 90, (2, 48 + 22), 100 + 48 + 22 + 90, (0.68 + 0 + 0 + 1 / 3) / 4, 2),
        ("restore", 1, 40 + 40 + 20 + 60, (2, 80 + 22), 40 + 80 + 22 + 60, (0.2 + 0.4 + 0 + 0) / 4, 2),
        ("two-ended", 2, 30 + 45 + 20 + 90, (3, 32 + 60 + 22), 32 + 60 + 22 + 90, (0 + 0.2 + 0 + 1 / 3) / 4, 2),
        ("hindsight", 1, 30 + 50 + 20 + 60, (3, 32 + 48 + 22), 32 + 48 + 22 + 60, 0.0, 2),
    ],
)
def test_policies_of_arrivals(
    name: str, differ: int, predicted: float, measured: tuple[int, float], cost: float, regret: float, exact: int
) -> None:
    found = arrivals(PROMPTS, name)
    assert found.regret == pytest.approx(regret, abs=1e-12)
    expected = Arrivals(name, 4, 0, differ, predicted, 4, measured[1], measured[0], cost, found.regret, exact)
    assert found == expected


def test_what_cannot_be_replayed_is_counted() -> None:
    stuck = arrived({"restore:ssd": None, "recompute": None}, "recompute")
    found = arrivals([stuck, *PROMPTS[:1]], "measured")
    assert (found.decisions, found.without) == (1, 1)
    assert arrivals([], "recorded").regret is None
    with pytest.raises(InputError, match="no policy 'best' of 'arrive' decisions; known: recorded, measured"):
        arrivals(PROMPTS, "best")
    with pytest.raises(InputError, match="known: recorded, lru"):
        evictions([], "two-ended")


def test_the_policy_of_the_runtime_is_replayed_to_the_same_choices() -> None:
    probe = Alternative("two-ended:cold", None, {"probe": True})
    one = arrived({"recompute": 1.0}, "recompute").decision
    decision = replace(one, alternatives=(*one.alternatives, probe), choice=probe.name)
    assert arrivals([Recorded("", 0, decision)], "measured").differ == 0


ID = {name: name.encode() * 32 for name in "abcd"}


def evicted(
    when: int, need: int, gone: str, candidates: Sequence[tuple[str, int, int, int, int]], *, stays: str = ""
) -> Recorded:
    """A plan; candidates are (name, bytes, rows, uses, idle)."""
    found = tuple(
        Alternative(
            f"evict:{ID[name].hex()}",
            terms={"bytes": size, "rows": rows, "uses": uses, "idle": idle},
            declined="what continues it is here" if name in stays else "",
        )
        for name, size, rows, uses, idle in candidates
    )
    subject, *others = (ID[name] for name in gone)
    known: dict[str, Term] = {"tier": "ssd", "need": need, "stray_bytes": 0}
    return Recorded(
        "", when, Decision("evict", "", subject, "x", known, found, f"evict:{subject.hex()}", tuple(others))
    )


def promoted(when: int, names: str) -> Recorded:
    first, *others = (ID[name] for name in names)
    return Recorded(
        "",
        when,
        Decision(
            "promote",
            "",
            first,
            "nearest",
            {"tier": "ssd"},
            (Alternative("from:object"),),
            "from:object",
            tuple(others),
        ),
    )


# a: old and often used; b: older than c, used twice; c: the youngest, used once; d is large and old, used once.
CANDIDATES = [("a", 100, 16, 9, 8), ("b", 100, 16, 2, 4), ("c", 100, 16, 1, 1), ("d", 400, 16, 1, 6)]


@pytest.mark.parametrize(
    ("name", "victims"),
    # lru: longest unused. lfu, slru: used least, of equals the longest unused. cost: rows per byte, times uses.
    [("recorded", "b"), ("lru", "a"), ("lfu", "d"), ("slru", "d"), ("cost", "d")],
)
def test_policies_of_evictions_name_other_victims_of_the_same_candidates(name: str, victims: str) -> None:
    plan = evicted(10, 100, "b", CANDIDATES)
    found = evictions([plan], name)
    size = sum(c[1] for c in CANDIDATES if c[0] in victims)
    assert found == Evictions(name, 1, 0, int(victims != "b"), size, 16, 0, 0, 0.0)


def test_a_victim_that_came_back_was_needed_again() -> None:
    """By a later promotion into the tier, or as a candidate with more uses; not by what was before the plan."""
    before = promoted(5, "abcd")
    plan = evicted(10, 100, "b", CANDIDATES)
    after = [promoted(20, "b"), evicted(30, 100, "d", [("a", 100, 16, 11, 1), ("d", 400, 16, 1, 9)])]
    history = [*after, plan, before]  # in any order
    assert evictions(history, "recorded") == Evictions("recorded", 2, 0, 0, 500, 32, 100, 16, 0.2)
    lru = evictions(history, "lru")  # a, which is used twice more; then d, which is not used again
    assert (lru.plans, lru.differ, lru.bytes, lru.again_bytes, lru.regret) == (2, 1, 500, 100, 0.2)
    assert evictions(history, "lfu").again_bytes == 0  # d, then d


def test_what_may_not_leave_stays_and_plans_without_enough_are_counted() -> None:
    held = evicted(10, 100, "b", CANDIDATES, stays="a")
    assert evictions([held], "lru").bytes == 400  # d, since a is continued
    bare = replace(held, decision=replace(held.decision, alternatives=(Alternative(held.decision.choice),)))
    cut = replace(held, decision=replace(held.decision, others=(b"\x07" * 32,)))
    for one in (bare, cut):
        for name in EVICT:
            assert (evictions([one], name).plans, evictions([one], name).without) == (0, 1)


@pytest.mark.parametrize("name", policy.NAMES)
def test_a_policy_agrees_with_its_own_recorded_plans(tmp_path: Path, name: str) -> None:
    """Where uses before the last one were at once, as they are here, the replay is the policy itself."""
    put_in = singles(6)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 4, name) as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes[:4]])
        read_ssd(memory, nodes[0], nodes[0], nodes[2])
        memory.promote([nodes[4].id])
        memory.promote([nodes[5].id])
        recorded = DecisionLog(memory).all()
        found = evictions(recorded, name)
        assert (found.plans, found.without, found.bytes) == (2, 0, 2 * SIZE)
        if name in ("lru", "lfu", "slru", "cost", "interval"):
            assert found.differ == 0
        assert evictions(recorded, "recorded").again_bytes == 0


def test_every_policy_has_a_name() -> None:
    assert set(EVICT) == {"recorded", *policy.NAMES}
    assert ARRIVE == ("recorded", "measured", "recompute", "restore", "two-ended", "hindsight")
