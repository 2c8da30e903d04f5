"""Several workers: predictions computed by hand, reasons and ranks in order, and a simulator in which all requests end."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.errors import InputError
from numem.policy.cluster.events import (
    Accept,
    After,
    Assignment,
    Cancel,
    Complete,
    Delta,
    Emit,
    End,
    Event,
    Fail,
    Offer,
    Reject,
    Report,
    Send,
    Submit,
    Timer,
    Withdraw,
)
from numem.policy.cluster.ranking import Stored, Wish, Worker, candidates, declined, rank, required_pages
from numem.policy.cluster.router import Phase, Router, transition
from numem.policy.cluster.simulator import FAULTS, Fault, Simulator, replay
from numem.policy.cluster.worker import Serving
from numem.policy.cluster.worker import transition as work
from numem.policy.costs import TierCost

FP = "model"


def worker(id: str = "w1", **values: Any) -> Worker:
    known: dict[str, Any] = {
        "models": frozenset({FP}),
        "queue_ms": 10.0,
        "free_pages": 100,
        "max_context": 2048,
        "prefill_ms_per_token": 0.5,
        "first_token_ms": 4.0,
        "restore_bytes_per_ms": 1000.0,
        "tiers": {"ssd": TierCost(2.0, 500.0), "object": TierCost(20.0, 100.0)},
        "object_store": True,
    }
    return Worker(id=id, node=f"node-{id}", **(known | values))


def chunk(k: int, *copies: tuple[str, str], nbytes: int = 4000) -> Stored:
    return Stored(bytes([k]) * 32, 256 * (k + 1), nbytes, copies)


SSD, OBJECT = ("ssd", "node-w1"), ("object", "")
WISH = Wish("r", FP, 1025, 31, (chunk(0, SSD, OBJECT), chunk(1, SSD), chunk(2, OBJECT), chunk(3)))


def test_every_boundary_of_a_worker_is_a_candidate() -> None:
    """By hand: ssd 2 + 4000/500 = 10 ms a part, object 20 + 4000/100 = 60; 4 ms to write 4,000 bytes."""
    me = worker(resident=frozenset({(FP, bytes([1]) * 32), ("other", bytes([0]) * 32)}))
    found = [(c.tier, c.cached, c.nbytes, c.load_ms, c.ttft_ms, c.required_pages) for c in candidates(WISH, me)]
    pages = 66  # (1024 + 31) / 16, rounded up
    assert found == [
        ("none", 0, 0, 0.0, 10 + 0 + 1024 * 0.5 + 4, pages),
        ("gpu", 512, 0, 0.0, 10 + 0 + 512 * 0.5 + 4, pages - 32),
        ("ssd", 256, 4000, 10.0, 10 + 4 + 768 * 0.5 + 4, pages),
        ("ssd", 512, 8000, 20.0, 20 + 8 + 512 * 0.5 + 4, pages),
        # The slowest tier is named, and the first chunk that cannot be read ends the search.
        ("object", 768, 12000, 80.0, 80 + 12 + 256 * 0.5 + 4, pages),
    ]
    (best, *_) = rank(WISH, [me])
    assert (best.tier, best.cached) == ("object", 768) and best.ttft_ms == 224


def test_a_source_must_be_within_reach() -> None:
    """Another node's ssd is none; the object store is one only where it is reached; of several the fastest is taken."""
    far = worker("w2")
    assert [c.cached for c in candidates(WISH, far)] == [0, 256]
    assert candidates(WISH, far)[1].tier == "object"
    assert [c.cached for c in candidates(WISH, replace(far, object_store=False))] == [0]
    assert [c.cached for c in candidates(WISH, worker(tiers={}))] == [0]
    slow = worker(tiers={"ssd": TierCost(500.0, 1.0), "object": TierCost(0.0, 1e6)})
    assert candidates(replace(WISH, chunks=WISH.chunks[:1]), slow)[1].tier == "object"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"online": False, "models": frozenset(), "max_context": 1, "free_pages": 0}, "worker-offline"),
        ({"models": frozenset({"other"}), "max_context": 1, "free_pages": 0}, "model-not-loaded"),
        ({"max_context": 1054, "free_pages": 0}, "context-capacity-exceeded"),
        ({"free_pages": 60, "evictable_pages": 5}, "insufficient-pages"),
    ],
)
def test_reasons_come_in_order(values: dict[str, Any], reason: str) -> None:
    me = worker(**values)
    assert {c.declined for c in candidates(WISH, me)} == {reason}
    assert declined(WISH, [me]) == {"w1": reason} and rank(WISH, [me]) == ()


def test_what_fits_exactly_is_not_declined() -> None:
    assert not candidates(WISH, worker(max_context=1055))[0].declined
    assert not candidates(WISH, worker(free_pages=60, evictable_pages=6))[0].declined
    # Resident pages are credited only where they are used.
    me = worker(free_pages=34, resident=frozenset({(FP, bytes([1]) * 32)}))
    assert [c.declined for c in candidates(WISH, me)][:3] == ["insufficient-pages", "", "insufficient-pages"]
    assert required_pages(WISH, me) == 66 and required_pages(WISH, me, 512) == 34
    assert required_pages(replace(WISH, tokens=2, max_new=0), me, 512) == 0


def test_a_prefix_that_is_longer_than_the_request() -> None:
    short = replace(WISH, tokens=512)
    assert [c.declined for c in candidates(short, worker())] == ["", "", "prefix-longer-than-request"] + [
        "prefix-longer-than-request"
    ]
    assert not candidates(replace(WISH, tokens=513), worker())[2].declined


def test_ranks_break_ties_by_cached_tokens_and_id() -> None:
    same = [worker(id, tiers={}) for id in ("w9", "w10", "w2")]
    assert [c.worker for c in rank(WISH, same)] == ["w10", "w2", "w9"]
    free = worker(
        prefill_ms_per_token=0.0, resident=frozenset({(FP, bytes([0]) * 32), (FP, bytes([1]) * 32)}), tiers={}
    )
    assert [c.cached for c in rank(WISH, [free])] == [512, 256, 0]


# the router, message by message

SMALL = Wish("r", FP, 17, 2)
A1, A2 = Assignment("r", 1), Assignment("r", 2)


def told(state: Router, *events: Event) -> tuple[Router, list[object]]:
    effects: list[object] = []
    for event in events:
        state, more = transition(state, event)
        effects += more
    return state, effects


def routing() -> Router:
    """Two workers have reported, the first the better one, and one request is offered to it."""
    state, effects = told(
        Router(), Report(worker("w1", queue_ms=1.0)), Report(worker("w2", queue_ms=2.0)), Submit(SMALL)
    )
    assert effects == [Send("w1", Offer(A1, SMALL)), After(10, Timer(A1, -1))]
    return state


def test_a_request_goes_through_its_phases() -> None:
    state = routing()
    assert state.requests["r"].phase == Phase.OFFERED
    state, effects = told(state, Accept(A1))
    assert (state.requests["r"].phase, effects) == (Phase.ASSIGNED, [After(100 + 1 + 8 + 4, Timer(A1, 0))])
    state, effects = told(state, Delta(A1, 0), Delta(A1, 1), Complete(A1, 2))
    assert [e for e in effects if not isinstance(e, After)] == [Emit("r", 0), Emit("r", 1), End("r", "completed")]
    assert state.requests["r"].phase == Phase.COMPLETED


def test_stale_and_repeated_events_do_nothing() -> None:
    state, _ = told(routing(), Accept(A1), Delta(A1, 0))
    for event in (
        Submit(SMALL),
        Accept(A1),
        Accept(A2),
        Delta(A1, 0),
        Delta(A1, 2),
        Delta(A2, 1),
        Complete(A2, 1),
        Fail(A2, "?"),
        Timer(A1, -1),
        Timer(A1, 0),
        Cancel("other"),
        Report(worker("w1", queue_ms=1.0)),
        Delta(Assignment("other", 1), 0),
        Offer(A1, SMALL),
    ):
        assert transition(state, event) == (state, ())
    ended, _ = told(state, Delta(A1, 1), Complete(A1, 2))
    for event in (Accept(A1), Delta(A1, 2), Complete(A1, 2), Fail(A1, "?"), Timer(A1, 2), Cancel("r"), Submit(SMALL)):
        assert transition(ended, event) == (ended, ())


@pytest.mark.parametrize("event", [Reject(A1, "insufficient-pages"), Timer(A1, -1), Fail(A1, "out of memory")])
def test_the_next_candidate_is_tried_before_the_first_token(event: Event) -> None:
    state, effects = told(routing(), event)
    assert Send("w2", Offer(A2, SMALL)) in effects
    assert (Send("w1", Withdraw(A1)) in effects) == isinstance(event, Timer)
    # What the first says now is stale.
    assert transition(state, Accept(A1)) == (state, ())
    state, effects = told(state, Reject(A2, "model-not-loaded"))
    assert effects == [End("r", "failed", "model-not-loaded")]


def test_nothing_is_retried_after_the_first_token() -> None:
    """Another worker's continuation would not be the client's."""
    for event in (Fail(A1, "lost"), Timer(A1, 1), Report(worker("w1", epoch=1))):
        state, effects = told(routing(), Accept(A1), Delta(A1, 0), event)
        assert [e.outcome for e in effects if isinstance(e, End)] == ["failed"]
        assert "after 1 tokens" in state.requests["r"].reason
        assert not any(isinstance(e, Send) and e.to == "w2" for e in effects)


def test_a_result_that_overtakes_its_acceptance_counts() -> None:
    """Fenced by assignment, not by phase: the late acceptance must not leave the request hanging."""
    state, effects = told(routing(), Delta(A1, 0), Accept(A1), Delta(A1, 1), Complete(A1, 2))
    assert effects[-1] == End("r", "completed")
    state, effects = told(routing(), Complete(A1, 0))
    assert effects == [End("r", "completed")] and transition(state, Accept(A1)) == (state, ())


def test_lost_tokens_are_not_a_completion() -> None:
    _, effects = told(routing(), Delta(A1, 0), Complete(A1, 2))
    assert effects[-1] == End("r", "failed", "1 of 2 tokens arrived")


def test_a_restart_is_noticed_by_its_epoch() -> None:
    state, effects = told(routing(), Report(worker("w1", epoch=1)))
    assert effects[0] == Send("w2", Offer(A2, SMALL))
    # An older observation, delayed on its way, does not count.
    assert transition(state, Report(worker("w1", epoch=0, sequence=99))) == (state, ())


def test_a_client_cancels() -> None:
    state, effects = told(routing(), Accept(A1), Cancel("r"))
    assert effects[-2:] == [Send("w1", Withdraw(A1)), End("r", "cancelled", "cancelled by the client")]
    assert transition(state, Complete(A1, 0)) == (state, ())


def test_nobody_can_serve() -> None:
    _, effects = told(Router(), Submit(SMALL))
    assert effects == [End("r", "failed", "no worker")]
    _, effects = told(Router(), Report(worker(online=False)), Submit(SMALL))
    assert effects == [End("r", "failed", "w1: worker-offline")]


# the worker

ONE = Wish("r", FP, 1025, 2, WISH.chunks[:2])


def test_a_worker_goes_through_its_phases() -> None:
    state = Serving(worker())
    effects: list[object] = []
    phases = []
    state, more = work(state, Offer(A1, ONE))
    while more:
        effects += more
        phases.append(state.tasks[A1].phase.value)
        timers = [e for e in more if isinstance(e, After)]
        if not timers:
            break
        state, more = work(state, timers[0].event)
    assert phases == ["restoring", "prefilling", "decoding", "decoding", "decoding", "completed"]
    said = [e.event for e in effects if isinstance(e, Send) and not isinstance(e.event, Report)]
    assert said == [Accept(A1), Delta(A1, 0), Delta(A1, 1), Complete(A1, 2)]
    ticks = [e.ticks for e in effects if isinstance(e, After)]
    assert ticks == [20 + 8, 256, 4, 4, 4]
    assert state.me.free_pages == 100 and state.me.sequence == 2
    assert work(state, Offer(A1, ONE)) == (state, ())


def test_a_worker_admits_against_its_present_pages() -> None:
    """What the router believed may be old: the pages are counted again."""
    state = Serving(worker(free_pages=70))
    state, first = work(state, Offer(A1, WISH))
    assert Send("router", Accept(A1)) in first and state.me.free_pages == 4
    state, second = work(state, Offer(A2, WISH))
    assert second == (Send("router", Reject(A2, "insufficient-pages")),)
    state, _ = work(state, Withdraw(A1))
    assert state.me.free_pages == 70
    assert work(state, Withdraw(A1)) == (state, ())
    # The same offer again stays refused: its assignment has ended.
    assert work(state, Offer(A2, WISH)) == (state, ())


def test_a_withdrawal_that_overtakes_its_offer() -> None:
    state, effects = work(Serving(worker()), Withdraw(A1))
    assert effects == () and work(state, Offer(A1, ONE)) == (state, ())


# the simulator

PLAIN = replace(WISH, chunks=())


def cluster(count: int = 3) -> list[Serving]:
    return [Serving(worker(f"w{k}", queue_ms=float(k), free_pages=70)) for k in range(count)]


def test_requests_of_a_healthy_cluster_complete() -> None:
    simulator = Simulator(cluster())
    script = [(5 * k, Submit(replace(PLAIN, id=f"r{k}", max_new=3))) for k in range(3)]
    history = simulator.run(script)
    assert {id: [e.outcome for e in ends] for id, ends in history.ends.items()} == {
        f"r{k}": ["completed"] for k in range(3)
    }
    assert all(history.emitted[f"r{k}"] == [0, 1, 2] for k in range(3))
    # Offered at tick 0, heard at 1, accepted at 2.
    first = next(step for step in history.steps if step.at == "w0")
    assert (first.tick, first.event) == (1, Offer(Assignment("r0", 1), replace(PLAIN, id="r0", max_new=3)))
    assert [s.tick for s in history.steps if s.event == Accept(Assignment("r0", 1))] == [2]


def test_an_offer_to_a_partitioned_worker_times_out() -> None:
    history = Simulator(cluster(2)).run([(1, Submit(replace(PLAIN, max_new=1)))], [Fault(0, "partition", "w0")])
    offers = [
        (s.tick, e.to) for s in history.steps for e in s.effects if isinstance(e, Send) and isinstance(e.event, Offer)
    ]
    assert offers == [(1, "w0"), (11, "w1")]
    assert [e.outcome for e in history.ends["r"]] == ["completed"]


def test_a_paused_worker_is_too_late() -> None:
    """It takes up the offer when it goes on, but the assignment has moved; the withdrawal frees its pages."""
    simulator = Simulator(cluster(2))
    history = simulator.run(
        [(1, Submit(replace(PLAIN, max_new=1)))], [Fault(0, "pause", "w0"), Fault(30, "resume", "w0")]
    )
    assert [e.outcome for e in history.ends["r"]] == ["completed"]
    assert simulator.router.requests["r"].worker == "w1"
    assert all(serving.me.free_pages == 70 for serving in simulator.workers.values())


def test_a_crash_before_the_first_token_is_another_workers_work() -> None:
    simulator = Simulator(cluster(2))
    history = simulator.run(
        [(1, Submit(replace(PLAIN, max_new=1)))], [Fault(20, "crash", "w0"), Fault(25, "restart", "w0")]
    )
    assert simulator.workers["w0"].me.epoch == 1
    assert [e.outcome for e in history.ends["r"]] == ["completed"] and simulator.router.requests["r"].attempt == 2


def test_a_recording_of_other_rules_is_noticed() -> None:
    history = Simulator(cluster()).run([(1, Submit(WISH))])
    changed = [replace(step, effects=()) if step.effects else step for step in history.steps]
    with pytest.raises(InputError, match="other effects"):
        replay(changed, cluster())
    with pytest.raises(InputError, match="fault"):
        Fault(0, "explode", "w0")


IDS = [f"r{k}" for k in range(6)]


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(IDS), st.integers(2, 1100), st.integers(0, 6)), max_size=8),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(IDS)), max_size=3),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(FAULTS), st.sampled_from(["w0", "w1", "w2"])), max_size=10),
    st.integers(1, 4),
)
def test_every_request_ends_exactly_once(
    wishes: list[tuple[int, str, int, int]],
    cancels: list[tuple[int, str]],
    faults: list[tuple[int, str, str]],
    delay: int,
) -> None:
    """Whatever fails: completed, failed or cancelled, once; tokens in order without holes; pages come back; the same
    again when it is run or replayed again."""

    def script() -> list[tuple[int, Event]]:
        asked: list[tuple[int, Event]] = [
            (tick, Submit(Wish(id, FP, tokens, max_new, WISH.chunks))) for tick, id, tokens, max_new in wishes
        ]
        return asked + [(tick, Cancel(id)) for tick, id in cancels]

    first, second = Simulator(cluster(), network_delay=delay), Simulator(cluster(), network_delay=delay)
    history = first.run(script(), [Fault(*fault) for fault in faults])
    again = second.run(script(), [Fault(*fault) for fault in faults])
    asked = {id for _, id, _, _ in wishes}
    assert set(history.ends) == asked and all(len(ends) == 1 for ends in history.ends.values())
    assert all(ends[0].outcome in ("completed", "failed", "cancelled") for ends in history.ends.values())
    for id, ends in history.ends.items():
        emitted = history.emitted.get(id, [])
        assert emitted == list(range(len(emitted)))
        if ends[0].outcome == "completed":
            assert len(emitted) == first.router.requests[id].wish.max_new
    assert (history.steps, first.router, first.workers) == (again.steps, second.router, second.workers)
    assert replay(history.steps, cluster()) == (first.router, first.workers)
    stopped = {at for _, kind, at in faults if kind in ("crash", "pause")}
    for id, serving in first.workers.items():
        if id not in stopped:
            assert serving.me.free_pages + serving.me.evictable_pages == 70
