"""The scheduler with preemption, and cancellation at every point."""

from threading import Event
from typing import Any

import pytest

from numem import LM, Memory
from numem.runtime.request import Finish, Request, Token
from numem.runtime.sampling import Sampler
from tests.durable_fixtures import Log, Make, make, published
from tests.scheduler_fixtures import check, drive, prompt, same_as_alone, step

__all__ = ["make"]

# preemption


@pytest.mark.parametrize("rows", ["none", "prefill", "decode", "twice"])
@pytest.mark.parametrize("durable", [False, True])
def test_a_preempted_sequence_goes_on_as_if_nothing_happened(
    tiny_lm: LM, make: Make, memory: Memory, rows: str, durable: bool
) -> None:
    """Bytes, logits and tokens as alone; tokens are told once; rows that came again are counted apart (vllm#25780)."""
    told: list[Token] = []
    scheduler = make(
        2, memory=memory if durable else None, policy="restore" if durable else "recompute", on_token=told.append
    )
    request = Request("a", prompt(600), 12, Sampler(temperature=0.7, seed=5), witness=True)
    scheduler.submit(request)
    scheduler.submit(Request("b", prompt(50, seed=1), 40, witness=True))
    step(scheduler, {"none": 0, "prefill": 2, "decode": 7, "twice": 7}[rows])
    assert scheduler.preempt("a") is (rows != "none")
    check(scheduler)
    early = []
    if rows == "twice":
        while not [t for t in told if t.request_id == "a" and t.index == 6]:
            early += step(scheduler)
        assert scheduler.preempt("a")
    outcomes = {o.request.id: o for o in early} | drive(scheduler)
    a = outcomes["a"]
    same_as_alone(tiny_lm, a)
    same_as_alone(tiny_lm, outcomes["b"])
    assert [t.index for t in told if t.request_id == "a"] == list(range(12))
    assert a.preempted == {"none": 0, "prefill": 1, "decode": 1, "twice": 2}[rows]
    held = {"none": 0, "prefill": 512, "decode": 604, "twice": 604 + 606}[rows]
    assert sum(a.again.values()) == held
    assert a.computed == 600
    if durable and held:
        assert a.again["restored"] == 512 * a.preempted
        assert published(memory)[:2] == [(0, 256), (256, 256)]
    else:
        assert set(a.again) <= {"computed"}


def test_a_higher_priority_takes_pages_and_lane(tiny_lm: LM, make: Make) -> None:
    """The lowest priority goes first, of equals the latest; only as many as it takes, and only if it then fits."""
    log = Log()
    scheduler = make(3, pages=12, decisions=log)
    for name, priority in (("low", 0), ("mid", 1), ("late", 1)):
        scheduler.submit(Request(name, prompt(40, seed=ord(name[0])), 20, priority=priority, witness=True))
    step(scheduler, 4)
    assert scheduler.running == ("mid", "late", "low")
    scheduler.submit(Request("same", prompt(20, seed=5), 4, priority=0))
    step(scheduler)
    assert scheduler.running == ("mid", "late", "low")
    scheduler.submit(Request("high", prompt(60, seed=7), 30, priority=2, witness=True))
    step(scheduler)
    assert list(scheduler.running) == ["mid", "high"]
    (preemption,) = [d for d in log.decisions if d.kind == "preempt"]
    assert preemption.request == "high" and preemption.chosen.terms == {"sequences": 2}
    scheduler.submit(Request("huge", prompt(150, seed=8), 30, priority=1))
    outcomes = drive(scheduler)
    assert (outcomes["low"].preempted, outcomes["late"].preempted, outcomes["mid"].preempted) == (1, 1, 0)
    for name in ("low", "mid", "late", "high"):
        same_as_alone(tiny_lm, outcomes[name])


def test_pages_that_victims_share_count(tiny_lm: LM, make: Make) -> None:
    """Pages of two sequences, neither of which frees them alone."""
    scheduler = make(3, pages=12)
    scheduler.submit(Request("low", prompt(130), 20, samples=2, witness=True))
    step(scheduler, 3)
    scheduler.submit(Request("high", prompt(120, seed=7), 30, priority=1, witness=True))
    step(scheduler)
    assert scheduler.running == ("high",)
    outcomes = drive(scheduler)
    assert outcomes["low#0"].preempted == outcomes["low#1"].preempted == 1
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


def test_pages_that_wait_for_a_load_count(
    tiny_lm: LM, make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loads slowly holds nobody of a higher priority up."""
    drive(make(1, memory=memory), [Request("first", prompt(300), 1, publish=True)])
    read, go = memory.read, Event()

    def slow(*args: Any, **options: Any) -> Any:
        assert go.wait(60)
        return read(*args, **options)

    monkeypatch.setattr(memory, "read", slow)
    scheduler = make(2, pages=24, memory=memory, policy="restore")
    scheduler.submit(Request("low", prompt(300), 20, witness=True))
    step(scheduler, 2)
    scheduler.submit(Request("high", prompt(200, seed=7), 30, priority=1, witness=True))
    step(scheduler)
    assert scheduler.running == ("high",)
    go.set()
    outcomes = drive(scheduler)
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


def test_half_the_pages(tiny_lm: LM, make: Make) -> None:
    """With room for half of them all finish, exact."""
    scheduler = make(6, pages=18)
    requests = [Request(str(i), prompt(60, seed=i), 30, priority=i, witness=True) for i in range(6)]
    for request in requests:
        scheduler.submit(request)
        step(scheduler, 3)
    outcomes = drive(scheduler)
    assert sum(o.preempted for o in outcomes.values()) > 0
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


# cancellation

POINTS = ("submitted", "waiting", "following", "arriving", "loading", "decoding", "preempted", "samples", "told")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cancellation_at_every_point(tiny_lm: LM, make: Make, memory: Memory, point: str, keep: bool) -> None:
    """The sequence ends as cancelled with what it has, the others are as if alone, no page is lost."""
    with tiny_lm.session().start(prompt(600)) as c:
        c.publish(memory).wait()
    told: list[Token] = []
    scheduler = make(
        2, memory=memory, policy="restore", keep=keep, max_batched_tokens=64, prefill_chunk=64, on_token=told.append
    )
    seed = 0 if point == "loading" else 3
    samples = 3 if point == "samples" else 1
    subject = Request("x", prompt(600, seed=seed), 8, samples=samples, publish=point == "decoding", witness=True)
    other = Request("o", prompt(70, seed=1), 30, witness=True)
    if point == "waiting":
        scheduler.submit(Request("p", prompt(40, seed=2), 20, witness=True))
    if point == "following":
        scheduler.submit(Request("p", (*prompt(600, seed=3)[:500], 1, 2), 4, witness=True))
    scheduler.submit(other)
    step(scheduler, 2)
    scheduler.submit(subject)
    if point == "waiting" or point == "following":
        step(scheduler)
        assert "x" in scheduler.waiting
    elif point in ("arriving", "loading"):
        step(scheduler)
        assert "x" in scheduler.running
    elif point in ("decoding", "preempted", "told"):
        while not [t for t in told if t.request_id == "x" and t.index == 2]:
            step(scheduler)
        if point == "preempted":
            assert scheduler.preempt("x")
    elif point == "samples":
        while not [t for t in told if t.request_id == "x" and t.index == 2]:
            step(scheduler)
        assert "x" in scheduler.running and "x" in scheduler.waiting
    assert scheduler.cancel("x") and not scheduler.cancel("x")
    check(scheduler)
    outcomes = drive(scheduler)
    mine = [o for o in outcomes.values() if o.request.id == "x"]
    assert len(mine) == samples and {o.finish for o in mine} == {Finish.CANCELLED}
    if point in ("decoding", "preempted", "told"):
        assert len(mine[0].generated) == 3
    assert len([t for t in told if t.request_id == "x"]) == sum(len(o.generated) for o in mine)
    for outcome in outcomes.values():
        if outcome.request.id != "x":
            same_as_alone(tiny_lm, outcome)


def test_cancellation_from_the_callback(make: Make) -> None:
    scheduler = make(3)
    scheduler._on_token = lambda token: scheduler.cancel("b") if token.index == 2 else None  # type: ignore[assignment]
    outcomes = drive(scheduler, [Request(name, prompt(20, seed=ord(name)), 9) for name in "abc"])
    assert outcomes["b"].finish is Finish.CANCELLED and len(outcomes["b"].generated) == 3
    assert outcomes["a"].finish is Finish.LENGTH
