"""The scheduler with a memory and a residency."""

import dataclasses
from concurrent.futures import Future
from typing import Any

import pytest

from numem import LM, Memory
from numem.errors import StoreError
from numem.identity.chain import CHUNK_TOKENS
from numem.runtime.continuation import Published
from numem.runtime.lanes.publisher import Publication, Publisher
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.residency import Residency
from numem.runtime.request import Finish, Outcome, Request
from tests.durable_fixtures import Log, Make, make, published
from tests.scheduler_fixtures import drive, empty, prompt, same_as_alone, step

__all__ = ["make"]


def test_close_gives_everything_back(make: Make, memory: Memory) -> None:
    scheduler = make(3, memory=memory)
    for i in range(5):
        scheduler.submit(Request(str(i), prompt(300, seed=i), 2 + i * 9, publish=True))
    step(scheduler, 7)
    scheduler.close()
    empty(scheduler)


# restoring and publishing


@pytest.mark.parametrize(
    ("policy", "lanes"), [("restore", 1), ("restore", 4), ("recompute", 4), ("two-ended", 4), ("measured", 1)]
)
def test_cold_restored_and_batched_are_equal(tiny_lm: LM, make: Make, memory: Memory, lanes: int, policy: str) -> None:
    """vllm#40896, sglang#34683: cold, restored, and in any number of lanes: equal bytes, and the rows were restored."""
    ids = prompt(1100)
    cold = drive(make(1), [Request("x", ids, 6, witness=True)])["x"]
    same_as_alone(tiny_lm, cold)
    with tiny_lm.session().start(ids) as c:
        c.publish(memory).wait()
    scheduler = make(lanes, pages=400, memory=memory, policy=policy)
    others = [Request(str(i), (*ids[: 300 * i + 10], 7, i), 6, witness=True) for i in range(3)]
    outcomes = drive(scheduler, [Request("x", ids, 6, witness=True), *others])
    if policy == "restore":
        assert outcomes["x"].restored == 1099 and outcomes["x"].restore.tokens == 1099
    if policy == "recompute":
        assert outcomes["x"].restored == 0
    assert outcomes["x"].generated == cold.generated
    assert outcomes["x"].kv is not None and cold.kv is not None
    assert outcomes["x"].kv.tobytes() == cold.kv.tobytes()
    assert [r.tobytes() for r in outcomes["x"].logits] == [r.tobytes() for r in cold.logits]
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


@pytest.mark.parametrize("length", [255, 256, 257, 512, 513])
def test_a_full_hit_leaves_one_token(tiny_lm: LM, make: Make, memory: Memory, length: int) -> None:
    """vllm#11186, vllm#55113, UCM#1130: all of the prompt is durable, and its last token is evaluated."""
    with tiny_lm.session().start((*prompt(length), 1)) as c:
        c.publish(memory).wait()
    (outcome,) = drive(
        make(1, memory=memory, policy="restore"), [Request("x", prompt(length), 4, witness=True)]
    ).values()
    assert (outcome.restored, outcome.computed) == (length - 1, 1)
    same_as_alone(tiny_lm, outcome)


def test_a_chunk_left_in_the_middle_gives_its_shared_pages(tiny_lm: LM, make: Make, memory: Memory) -> None:
    ids = prompt(600)
    with tiny_lm.session().start(ids) as c:
        c.publish(memory).wait()
    parting = (*ids[:300], (ids[300] + 1) % 256, *prompt(40, seed=6))
    (outcome,) = drive(make(1, memory=memory, policy="restore"), [Request("x", parting, 4, witness=True)]).values()
    assert outcome.restored == 288 and outcome.computed == len(parting) - 288
    same_as_alone(tiny_lm, outcome)


@pytest.mark.parametrize(
    ("length", "new", "chunks"),
    [
        (256, 1, [(0, 256)]),
        (256, 2, [(0, 256)]),
        (255, 2, [(0, 256)]),
        (250, 40, [(0, 256), (256, 33)]),
        (500, 30, [(0, 256), (256, 256), (512, 17)]),
        (20, 5, [(0, 24)]),
    ],
)
def test_chunks_are_published_once_and_whole(
    tiny_lm: LM, make: Make, memory: Memory, length: int, new: int, chunks: list[tuple[int, int]]
) -> None:
    """lmcache#653: the boundary advances by the chunk; a token after a full chunk is no chunk."""
    scheduler = make(1, memory=memory)
    (outcome,) = drive(scheduler, [Request("x", prompt(length), new, publish=True, witness=True)]).values()
    assert outcome.finish is Finish.LENGTH and not outcome.error
    assert published(memory) == chunks
    same_as_alone(tiny_lm, outcome)
    again = make(1, memory=memory, policy="restore")
    tokens = (*prompt(length), *outcome.generated)
    (more,) = drive(again, [Request("y", (*tokens, 3), 4, witness=True)]).values()
    assert more.restored == sum(count for _, count in chunks)
    same_as_alone(tiny_lm, more)


def test_publication_goes_on_beside_decoding(tiny_lm: LM, make: Make, memory: Memory) -> None:
    """The lane is free at once; the outcome comes when the state is durable; its pages are leased until captured."""
    scheduler = make(1, memory=memory)
    scheduler.submit(Request("a", prompt(300), 2, publish=True))
    scheduler.submit(Request("b", prompt(30, seed=1), 5, witness=True))
    while "a" in scheduler.running or "a" in scheduler.waiting:
        assert step(scheduler) == []
    outcomes = drive(scheduler)
    assert list(published(memory)) == [(0, 256), (256, 45)]
    assert outcomes["a"].error == "" and outcomes["a"].finish is Finish.LENGTH
    same_as_alone(tiny_lm, outcomes["b"])


@pytest.mark.parametrize("error", [StoreError, RuntimeError])
def test_a_failed_publication_is_in_the_outcome(
    make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error("the disk is gone")

    scheduler = make(1, memory=memory)
    monkeypatch.setattr(memory, "publish", refuse)
    (outcome,) = drive(scheduler, [Request("x", prompt(300), 3, publish=True)]).values()
    assert outcome.finish is Finish.LENGTH and len(outcome.generated) == 3
    assert outcome.error == "publish: the disk is gone"


def test_a_capture_that_ends_while_it_is_asked_for_gives_its_pages_back(tiny_lm: LM, memory: Memory) -> None:
    """Its thread may end it between any two questions of the thread that owns the pages."""

    class Ending(Future[Published]):
        asked = 0

        def done(self) -> bool:
            self.asked += 1
            return self.asked > 1

    session = tiny_lm.session(pages=8)
    publisher = Publisher(session, memory)
    captured = Ending()
    captured.set_result(Published((), ()))
    with session.start(prompt(20)) as c:
        c.advance(1)
        publisher._pending.append(Publication("x", session.engine.pool.lease(c.route), captured))
    while not publisher.collect():
        pass
    assert session.engine.pool.stats().free == 8
    publisher.close()


def test_a_failed_arrival_ends_its_sequence(
    tiny_lm: LM, make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(2, memory=memory)
    begin = scheduler._admission._arrivals.begin

    def fail(route: Any, tokens: Any, **options: Any) -> Any:
        if options["request"] == "bad":
            scheduler.engine.release(route)
            raise OSError("no such tier")
        return begin(route, tokens, **options)

    monkeypatch.setattr(scheduler._admission._arrivals, "begin", fail)
    outcomes = drive(scheduler, [Request("bad", prompt(60), 4), Request("b", (*prompt(50), 1, 2), 4, witness=True)])
    assert (outcomes["bad"].finish, outcomes["bad"].error) == (Finish.ERROR, "no such tier")
    same_as_alone(tiny_lm, outcomes["b"])


# kept routes


def test_kept_routes_serve_the_next_prompt(tiny_lm: LM, make: Make) -> None:
    """A conversation's next turn starts from the pages of the last one, at token granularity."""
    scheduler = make(1, keep=True)
    (first,) = drive(scheduler, [Request("1", prompt(100), 10, witness=True)]).values()
    turn = (*prompt(100), *first.generated, *prompt(9, seed=3))
    (second,) = drive(scheduler, [Request("2", turn, 5, witness=True)]).values()
    assert second.shared == 109 and second.computed == 10
    same_as_alone(tiny_lm, second)


def test_kept_routes_go_when_pages_are_needed(tiny_lm: LM, make: Make) -> None:
    scheduler = make(2, pages=20, keep=True)
    for i in range(8):
        outcomes = drive(scheduler, [Request(str(i), prompt(90 + i, seed=i), 20, witness=True)])
        same_as_alone(tiny_lm, outcomes[str(i)])
    assert scheduler.residency is not None and scheduler.residency.evicted >= 5
    stats = scheduler.engine.pool.stats()
    assert stats.reserved == 0 and stats.free + stats.resident == 20


@pytest.mark.parametrize("length", [32, 40])
def test_what_fits_alone_fits_beside_what_is_kept(tiny_lm: LM, make: Make, length: int) -> None:
    """The copy of a kept partial tail is not worth a request that would need every page."""
    scheduler = make(1, pages=10, keep=True)
    drive(scheduler, [Request("kept", prompt(length), 2)])
    outcomes = drive(scheduler, [Request("all", prompt(120), 41, witness=True)])
    same_as_alone(tiny_lm, outcomes["all"])
    assert outcomes["all"].shared == 32


def test_room_is_planned_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(2, pages=20, keep=True)
    residency = scheduler.residency
    assert residency is not None
    planned = []
    plan = Residency._plan

    def counted(self: Residency, *args: Any) -> Any:
        planned.append(args)
        return plan(self, *args)

    monkeypatch.setattr(Residency, "_plan", counted)
    for i in range(6):
        drive(scheduler, [Request(str(i), prompt(90 + i, seed=i), 20)])
    assert len(planned) == residency.evicted


def test_a_refusal_is_recorded(make: Make) -> None:
    """Where what is kept would not do, even all of it, that is a decision too."""
    log = Log()
    scheduler = make(2, pages=10)
    scheduler.residency = residency = Residency(scheduler.engine, decisions=log)
    drive(scheduler, [Request("kept", prompt(20), 2)])
    scheduler.submit(Request("a", prompt(60, seed=1), 20))
    step(scheduler)
    scheduler.submit(Request("big", prompt(100, seed=2), 12))
    step(scheduler)
    assert [(d.kind, d.request, d.choice) for d in log.decisions] == [("admit", "big", "refuse")]
    step(scheduler, 5)
    assert len(log.decisions) == 1 and len(residency) == 1
    assert drive(scheduler)["big"].finish is Finish.LENGTH


def test_published_routes_are_durable_to_the_residency(make: Make, memory: Memory) -> None:
    scheduler = make(1, memory=memory, keep=True)
    drive(scheduler, [Request("x", prompt(300), 3, publish=True)])
    assert scheduler.residency is not None
    (holder,) = scheduler.residency.snapshot().holders
    assert holder.durable and not holder.leased


def test_outcome_fields_are_those_of_its_sequence(make: Make, memory: Memory) -> None:
    """Restored rows and bytes are per sequence; samples do not share an outcome."""
    scheduler = make(4, memory=memory)
    outcomes = drive(scheduler, [Request("s", prompt(CHUNK_TOKENS + 5), 3, samples=2)])
    one, two = outcomes["s#0"], outcomes["s#1"]
    assert one is not two and one.restore is not two.restore
    assert dataclasses.asdict(one.restore)["tokens"] == 0
    assert (one.shared, two.shared) == (0, CHUNK_TOKENS + 5)


def test_a_long_prompt_ends_though_it_is_preempted_all_the_time(tiny_lm: LM) -> None:
    """One lane, no memory, a higher priority every few steps: kept pages let it go on where it stopped."""
    session = tiny_lm.session(pages=80, debug=True)
    residency = Residency(session.engine)
    scheduler = Scheduler(session, 1, residency=residency, max_batched_tokens=16)
    scheduler.submit(Request("long", prompt(240), 4, witness=True))
    ended: dict[str, Outcome] = {}
    for turn in range(60):
        scheduler.submit(Request(f"short {turn}", prompt(20, seed=turn + 1), 2, priority=1))
        for _ in range(7):
            ended |= {outcome.request.id: outcome for outcome in step(scheduler)}
    assert "long" in ended and ended["long"].preempted > 3
    same_as_alone(tiny_lm, ended["long"])
    assert ended["long"].computed == 240
    scheduler.close()
    residency.clear()
    empty(scheduler)
