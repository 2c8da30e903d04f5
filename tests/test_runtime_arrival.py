"""Arrivals: rows computed from the front and loaded from the back give the bytes of computing alone, whatever fails."""

import time

import pytest

from numem import LM, Memory
from numem.lineage.decisions import DecisionLog
from numem.policy.costs import Costs, TierCost
from numem.runtime.continuation import Continuation
from numem.runtime.restore.arrivals import Arrivals
from tests.arrival_fixtures import (
    CHUNKS,
    LENGTH,
    WAIT_S,
    Shaky,
    known,
    publish,
    run,
    session_of,
    settled,
    shaky,
    step,
)
from tests.test_runtime_exact import prompt

__all__ = ["shaky"]


@pytest.mark.parametrize("policy", ["recompute", "restore", "two-ended", "measured"])
@pytest.mark.parametrize("budget", [100, 2000])
def test_every_policy_gives_the_bytes_of_computing_alone(tiny_lm: LM, memory: Memory, policy: str, budget: int) -> None:
    session = session_of(tiny_lm)
    for length in (1, 17, 600, LENGTH):
        ids = prompt(length)
        expected = publish(session, memory, ids)
        with Arrivals(session, memory, policy=policy) as arrivals:
            arrival = arrivals.begin(session.engine.pool.allocate(), ids)
            assert run(session, arrival, budget) == expected
            assert arrival.computed + arrival.restored.tokens == length
            if policy == "restore" and length > 16:
                assert (arrival.restored.tokens, arrival.computed) == (length - 1, 1)
            if policy == "recompute":
                assert arrival.computed == length
        settled(session)
    assert memory.stats()["leases"] == 0


@pytest.mark.parametrize("met", [0, 1, 100, 256, 257, 512, 700, 1024, 1279, 1280])
def test_every_meeting_point(tiny_lm: LM, shaky: Shaky, met: int) -> None:
    """Rows [0, met) are computed while every load is held up; then all that is left is loaded, none overwritten."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(*range(CHUNKS))
    # Nothing is known of the tier: computing helps as long as nothing has come.
    with Arrivals(session, shaky, policy="two-ended", costs=Costs()) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        while arrival.front < met:
            before = arrival.front
            step(session, arrival, min(256, met - before))
            assert before < arrival.front <= met
        assert arrival.front == met
        shaky.let(*range(CHUNKS))
        until = time.monotonic() + WAIT_S
        while arrival.loading and time.monotonic() < until:
            arrival.land(1.0)
        assert not arrival.loading
        assert (arrival.computed, arrival.restored.tokens) == (met, LENGTH - 1 - met)
        assert run(session, arrival) == expected
    settled(session)


@pytest.mark.parametrize("policy", ["restore", "two-ended"])
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (3,), (4,), (0, 4), (1, 2, 3), (0, 1, 2, 3, 4)])
def test_chunks_that_fail_are_computed(tiny_lm: LM, shaky: Shaky, policy: str, bad: tuple[int, ...]) -> None:
    """vllm#49250: output byte-equal to a cold run, with the load failing at every chunk; later chunks stay valid."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.spoil(*bad)
    with Arrivals(session, shaky, policy=policy) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, arrival) == expected
    settled(session)
    failures = arrival.restored.failures
    if policy == "restore":
        assert arrival.computed == 1 + 256 * len(bad)
        assert [f"chunk [{256 * k}, {256 * k + 256})" in f for k, f in zip(reversed(bad), failures, strict=True)]
    assert all(f.endswith("; recomputed") and "spoiled" in f for f in failures)
    assert shaky.stats()["leases"] == 0


@pytest.mark.parametrize("late", range(CHUNKS))
def test_nothing_is_read_before_its_load_has_ended(tiny_lm: LM, shaky: Shaky, late: int) -> None:
    """sglang#22811, FlexKV#225: the load of each chunk in turn comes last; no row is evaluated before it is there."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(late)
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert shaky.began[late].wait(WAIT_S)
        for _ in range(3):
            assert arrival.next(256) is None
            arrival.land(0.01)
        assert arrival.front <= 256 * late and arrival.route.length == 0
        shaky.let(late)
        assert run(session, arrival) == expected
        assert arrival.computed == 1
    settled(session)


def test_a_stalled_tier_is_computed_around(tiny_lm: LM, shaky: Shaky) -> None:
    """A load that was predicted to be quick and does not come is not waited for, unless that is forced."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(*range(CHUNKS))
    with Arrivals(session, shaky, costs=known()) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert arrival.decision is not None and arrival.decision.choice == "restore:object"
        assert run(session, arrival) == expected
        assert arrival.restored.tokens == 0
        shaky.let(*range(CHUNKS))
    settled(session)
    assert shaky.stats()["leases"] == 0


def test_a_slow_tier_is_recomputed_with_its_terms(tiny_lm: LM, memory: Memory) -> None:
    """dynamo#6101, llm-d-router#2833: below the break-even bandwidth the decision is to recompute, and says why."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, memory, ids)
    costs = known(0.01, {"object": TierCost(5.0, 100.0)})
    log = DecisionLog(memory)
    with Arrivals(session, memory, costs=costs, decisions=log) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids, request="r1")
        assert run(session, arrival) == expected
    decision = arrival.decision
    assert decision is not None and decision.choice == "recompute" and arrival.computed == LENGTH
    by_name = {a.name: a for a in decision.alternatives}
    assert list(by_name) == ["resident", "restore:object", "recompute", "two-ended:object"]
    nbytes = sum(len(node.pieces) * 2 * 3 * 256 * 64 * 4 for node in memory.nodes())
    restore = by_name["restore:object"]
    assert restore.terms["bytes"] == decision.inputs["bytes:object"] == nbytes
    assert restore.terms["tokens"] == decision.inputs["matched"] == LENGTH - 1
    assert restore.terms["load_ms"] == pytest.approx(5 * CHUNKS + nbytes / 100)
    assert by_name["recompute"].cost_ms == pytest.approx((LENGTH - 1) * 0.01 + 20)
    (recorded,) = log.all("arrive")
    assert (recorded.decision.choice, recorded.decision.request) == ("recompute", "r1")
    assert recorded.decision.subject == memory.nodes()[-1].id
    assert recorded.took is not None and recorded.took.cost_ms == pytest.approx(arrival.took_ms)
    assert recorded.took.terms["computed"] == LENGTH
    settled(session)


def test_the_fastest_tier_is_chosen(tiny_lm: LM, memory: Memory) -> None:
    """Of tiers that hold all chunks the measured cost decides, not the name."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, memory, ids)
    memory.promote([node.id for node in memory.nodes()], "ssd")
    for slow, fast in (("ssd", "object"), ("object", "ssd")):
        costs = known(1.0, {slow: TierCost(50.0, 1e4), fast: TierCost(0.0, 1e9)})
        with Arrivals(session, memory, costs=costs) as arrivals:
            arrival = arrivals.begin(session.engine.pool.allocate(), ids)
            assert arrival.decision is not None and arrival.decision.choice == f"restore:{fast}"
            assert run(session, arrival) == expected
        assert set(arrival.restored.by_tier) <= {fast}
    settled(session)


def test_a_tier_that_was_never_read_is_probed_once(tiny_lm: LM, memory: Memory) -> None:
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, memory, ids)
    costs = Costs()
    with Arrivals(session, memory, costs=costs) as arrivals:
        first = arrivals.begin(session.engine.pool.allocate(), ids)
        assert first.decision is not None and first.decision.choice == "two-ended:object"
        assert first.decision.chosen.terms["probe"] is True and first.decision.chosen.cost_ms is None
        assert run(session, first) == expected
        while not costs.measured("object"):  # computing may have won; the read under way still told
            again = arrivals.begin(session.engine.pool.allocate(), ids)
            assert run(session, again) == expected
        assert costs.prefill_measured
        second = arrivals.begin(session.engine.pool.allocate(), ids)
        assert second.decision is not None and "probe" not in second.decision.chosen.terms
        assert run(session, second) == expected
    settled(session)


@pytest.mark.parametrize("resident", [1, 15, 16, 250, 256, 300, 511, 512, 599])
def test_resident_rows_are_never_overwritten(tiny_lm: LM, memory: Memory, resident: int) -> None:
    """lmcache#2206: rows below the resident boundary keep their bytes, also where a stored chunk overlaps them."""
    session, ids = session_of(tiny_lm, 600, 3), prompt(600)
    publish(session, memory, ids)
    route = session.engine.pool.allocate()
    session.engine.append([(route, ids[:resident])], logits="none")
    # Other bytes than the stored ones, so that an overwritten row shows.
    session.engine.storage.v[:, route.pages] += 1.0
    with Continuation(session, ids[: resident + 1], session.engine.pool.fork(route)) as c:
        before = c.kv().tobytes()
    with Arrivals(session, memory, policy="restore") as arrivals:
        arrival = arrivals.begin(route, ids)
        run_on = arrival.route
        while arrival.loading:
            step(session, arrival)
        with Continuation(session, ids[: resident + 1], session.engine.pool.fork(run_on, resident)) as c:
            assert c.kv().tobytes() == before
        if 600 - 1 - resident >= 16:
            assert arrival.restored.tokens == 599 - resident
        arrival.abort()
    settled(session)


@pytest.mark.parametrize("policy", ["restore", "two-ended", "recompute"])
def test_abort_at_every_point(tiny_lm: LM, shaky: Shaky, policy: str) -> None:
    """Pages come back at once, leases when the read under way has ended, each exactly once."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    publish(session, shaky, ids)
    for turns in range(9):
        with Arrivals(session, shaky, policy=policy) as arrivals:
            arrival = arrivals.begin(session.engine.pool.allocate(), ids)
            for _ in range(turns):
                if not arrival.done:
                    step(session, arrival, 256)
            arrival.abort()
            arrival.abort()
            settled(session)
        assert shaky.stats()["leases"] == 0


@pytest.mark.parametrize("policy", ["restore", "two-ended"])
def test_abort_while_a_read_is_under_way(tiny_lm: LM, shaky: Shaky, policy: str) -> None:
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(CHUNKS - 1)
    arrivals = Arrivals(session, shaky, policy=policy)
    arrival = arrivals.begin(session.engine.pool.allocate(), ids)
    assert shaky.began[CHUNKS - 1].wait(WAIT_S)
    if policy == "two-ended":
        work = arrival.next(256)
        assert work is not None
    arrival.abort()
    settled(session)
    # The pages go to somebody else while the read still runs.
    with session.start(ids) as other:
        shaky.let(CHUNKS - 1)
        arrivals.close()
        other.step()
        assert other.kv().tobytes() == expected[0]
    assert shaky.stats()["leases"] == 0
    settled(session)


def test_evaluation_that_fails_is_given_back(tiny_lm: LM, shaky: Shaky) -> None:
    """A step that failed leaves its rows missing; they are loaded or computed all the same."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(*range(CHUNKS))
    with Arrivals(session, shaky, policy="two-ended") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        work = arrival.next(256)
        assert work is not None and arrival.land(0.0) is False
        arrival.settle(work, False)
        assert arrival.front == 0
        shaky.let(*range(CHUNKS))
        assert run(session, arrival) == expected
    settled(session)
