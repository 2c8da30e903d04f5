"""Value, eligibility and order of holders, and plans that free pages: exact, and against brute force."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numem.errors import InputError
from numem.policy.admission_plan import AdmissionPlan, Snapshot, evictable_pages, plan_admission, required_pages
from numem.policy.reuse import MOST_USES, ReuseRate
from numem.policy.value import Holder, Worth, declined, victims

COLD = Worth(0.1, 10, 5)
HOT = Worth(0.9, 20, 2)


def snapshot(*holders: Holder, free: int = 0, others: dict[int, int] | None = None) -> Snapshot:
    """Of holders and of page references that others have."""
    size = 1 + max((page for h in holders for page in h.pages), default=0)
    references = [sum(page in h.pages for h in holders) + (others or {}).get(page, 0) for page in range(size)]
    return Snapshot(holders, tuple(references), free)


def test_value_per_page_is_the_published_one() -> None:
    assert COLD.value == pytest.approx(0.5) and HOT.value == pytest.approx(16.2)
    assert Holder("cold", (0, 1), COLD.value).per_page == pytest.approx(0.25)
    assert Holder("hot", (2, 3), HOT.value).per_page == pytest.approx(8.1)
    assert Worth(0.5, 3, 9, sharing_bonus=1, slo_bonus=2).value == 3, "a reload that costs more saves nothing"
    assert Holder("empty", (), 4.0).per_page == 4.0


@pytest.mark.parametrize("p_reuse", [-0.1, 1.1, math.nan])
def test_a_probability_out_of_range_is_refused(p_reuse: float) -> None:
    with pytest.raises(InputError, match="p_reuse"):
        Worth(p_reuse, 1, 1)


@pytest.mark.parametrize("name", ["recompute_ms", "reload_ms", "sharing_bonus", "slo_bonus"])
@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_a_cost_below_zero_is_refused(name: str, cost: float) -> None:
    with pytest.raises(InputError, match=name):
        Worth(**{"p_reuse": 0.5, "recompute_ms": 1.0, name: cost})


def test_victims_go_by_value_per_page_then_last_access_then_id() -> None:
    """The last tie is broken by the id as text, so that the order is total: "10" goes before "9"."""
    holders = [
        Holder("dear", (0,), 9.0, 1),
        Holder("wide", (1, 2, 3, 4), 4.0, 9),
        Holder("9", (5,), 2.0, 3),
        Holder("10", (6,), 2.0, 3),
        Holder("older", (7,), 2.0, 2),
    ]
    assert [h.id for h in victims(reversed(holders))] == ["wide", "older", "10", "9", "dear"]


def test_what_may_not_go_and_why() -> None:
    holders = [
        Holder("durable", (0,), 1),
        Holder("new", (1,), 0, durable=False),
        Holder("pinned", (2,), 0, pinned=True),
        Holder("growing", (3,), 0, pending=True),
        Holder("leased", (4,), 0, leased=True),
        Holder("protected", (5,), 0),
    ]
    why = {h.id: declined(h, {"protected"}) for h in holders}
    assert why == {
        "durable": "",
        "new": "not durable",
        "pinned": "pinned",
        "growing": "pending append",
        "leased": "leased",
        "protected": "protected",
    }
    assert [h.id for h in victims(holders, {"protected"})] == ["durable"]


def test_admitting_eight_tokens_evicts_the_cold_route_only() -> None:
    before = snapshot(Holder("hot", (2, 3), HOT.value), Holder("cold", (0, 1), COLD.value))
    plan = plan_admission(before, required_pages(8, 4))
    assert plan == AdmissionPlan(True, 2, 4, ("cold",), 2)


def test_both_forks_of_a_page_go_for_it() -> None:
    """Two forks on one page and another route: one page costs both forks, where they are worth less."""
    forks = (Holder("a", (0,), 0.1), Holder("b", (0,), 0.2))
    before = snapshot(*forks, Holder("other", (1,), 5.0))
    assert plan_admission(before, 1) == AdmissionPlan(True, 1, 2, ("a", "b"), 1)


def test_a_growing_route_is_protected_and_counts_what_it_holds() -> None:
    """One page held, 16 tokens wanted in pages of 4, 2 pages free: 3 are required, and the cold route goes."""
    running = Holder("running", (0,), 0.0)
    before = snapshot(running, Holder("cold", (1, 2), COLD.value), free=2)
    required = required_pages(16, 4, resident=1)
    assert required == 3
    assert plan_admission(before, required, protected={"running"}) == AdmissionPlan(True, 3, 4, ("cold",), 4)


def test_a_page_of_two_forks_is_evictable_once_and_not_at_all_if_one_stays() -> None:
    before = snapshot(Holder("a", (0,), 1), Holder("b", (0,), 1))
    assert evictable_pages(before) == 1
    assert evictable_pages(before, {"b"}) == 0
    assert evictable_pages(snapshot(Holder("a", (0, 1), 1), others={1: 1})) == 1, "a running sequence holds page 1"


def test_what_a_partial_tail_may_cost() -> None:
    assert required_pages(16, 4, resident=2, tail_copy=True) == 3
    assert required_pages(5, 4) == 2
    assert required_pages(4, 4, resident=3) == 0
    with pytest.raises(InputError, match="required pages"):
        required_pages(-1, 4)


def test_an_inadmissible_plan_names_its_shortfall_and_no_eviction() -> None:
    before = snapshot(Holder("a", (0, 1), 1), Holder("b", (2,), 1, pinned=True), free=1)
    assert plan_admission(before, 5) == AdmissionPlan(False, 5, 3, (), 1, 2)
    with pytest.raises(InputError, match="-1 pages"):
        plan_admission(before, -1)


def test_an_eviction_that_turns_out_not_to_be_needed_is_left_out() -> None:
    """The small route goes first and frees one page of four; the large one that follows makes it unnecessary."""
    before = snapshot(Holder("small", (0,), 1.0), Holder("large", (1, 2, 3, 4), 40.0))
    assert plan_admission(before, 4).evictions == ("large",)
    assert plan_admission(before, 5).evictions == ("small", "large")


def test_no_listed_victim_is_removable_beside_a_pinned_fork() -> None:
    """Routes that free nothing because a pinned fork holds their pages are not listed (seed-systems, trap 39)."""
    pinned = Holder("pinned", (0, 1), 9, pinned=True)
    before = snapshot(pinned, Holder("a", (0, 1), 0.1), Holder("b", (0, 1), 0.2), Holder("c", (2, 3), 5))
    assert plan_admission(before, 2).evictions == ("c",)


def test_a_given_order_comes_first_and_value_after_it() -> None:
    before = snapshot(*(Holder(name, (page,), 1.0, page) for page, name in enumerate("abcd")))
    assert plan_admission(before, 2, order=["d"]).evictions == ("d", "a")
    assert plan_admission(before, 2, order=["d", "b", "gone"], protected={"d"}).evictions == ("b", "a")


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[Snapshot, int, frozenset[str]]:
    pages = draw(st.integers(1, 8))
    flags = st.sampled_from(["", "", "", "", "durable", "pinned", "pending", "leased"])
    holders = []
    for name in "abcdef"[: draw(st.integers(0, 6))]:
        flag = draw(flags)
        holders.append(
            Holder(
                name,
                tuple(draw(st.lists(st.integers(0, pages - 1), unique=True, max_size=5))),
                draw(st.integers(0, 3)) / 2,
                draw(st.integers(0, 3)),
                **({flag: flag != "durable"} if flag else {}),
            )
        )
    others = draw(st.dictionaries(st.integers(0, pages - 1), st.integers(1, 2), max_size=3))
    protected = draw(st.frozensets(st.sampled_from("abcdef"), max_size=2))
    return snapshot(*holders, free=draw(st.integers(0, 2)), others=others), draw(st.integers(0, 10)), protected


def free_after(before: Snapshot, evicted: tuple[str, ...]) -> int:
    """Brute force: pages of which every reference is one of an evicted holder."""
    held = [page for h in before.holders if h.id in evicted for page in h.pages]
    return before.free + sum(held.count(page) == before.references[page] for page in set(held))


@given(snapshots())
def test_plans_agree_with_brute_force(case: tuple[Snapshot, int, frozenset[str]]) -> None:
    before, required, protected = case
    able = tuple(h.id for h in before.holders if not declined(h, protected))
    plan = plan_admission(before, required, protected=protected)
    most = free_after(before, able)
    assert plan.available_pages == most == before.free + evictable_pages(before, protected)
    assert plan.admissible == (most >= required)
    assert plan.shortfall_pages == max(0, required - most)
    assert set(plan.evictions) <= set(able)
    assert plan.free_pages_after_eviction == free_after(before, plan.evictions)
    if not plan.admissible:
        assert not plan.evictions
        return
    assert plan.free_pages_after_eviction >= required
    for count in range(len(plan.evictions)):
        for fewer in combinations(plan.evictions, count):
            assert free_after(before, fewer) < required, "an eviction that could be left out"
    ordered = [h.id for h in victims(before.holders, protected)]
    assert list(plan.evictions) == [id for id in ordered if id in plan.evictions]


@given(snapshots(), st.permutations("abcdef"))
def test_any_order_gives_a_smallest_plan(case: tuple[Snapshot, int, frozenset[str]], order: list[str]) -> None:
    before, required, protected = case
    plan = plan_admission(before, required, protected=protected, order=order)
    assert plan.admissible == plan_admission(before, required, protected=protected).admissible
    for left_out in plan.evictions:
        assert free_after(before, tuple(id for id in plan.evictions if id != left_out)) < required


def test_reuse_is_learnt_by_uses() -> None:
    rate = ReuseRate()
    assert rate.probability(0) == 0.5
    for _ in range(8):
        rate.kept()
    for _ in range(4):
        rate.used(0)
    assert rate.probability(0) == 5 / 10
    assert rate.probability(1) == (0 + 2 * 0.5) / 6, "four were used once, none of them again"
    assert rate.probability(2) == rate.probability(1), "nothing is known of what was used twice"
    for uses in range(1, 50):
        rate.used(uses)
    assert rate.probability(1) == (1 + 2 * 0.5) / 6
    assert rate.probability(MOST_USES) == rate.probability(MOST_USES + 7)
    assert 0 < rate.probability(MOST_USES) < 1
