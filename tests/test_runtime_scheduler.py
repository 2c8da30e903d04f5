"""The scheduler on a tiny random model: batching, order, ends, callers; every output as if alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from numem import LM
from numem.errors import CapacityError, ClosedError, ContextLengthError, InputError
from numem.runtime.engine import pages_for_lanes
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.request import Finish, Request
from tests.scheduler_fixtures import Clock, check, drive, empty, prompt, same_as_alone, step

Make = Callable[..., Scheduler]


@pytest.fixture
def make(tiny_lm: LM) -> Iterator[Make]:
    made: list[Scheduler] = []

    def build(capacity: int = 4, *, pages: int = 200, **options: Any) -> Scheduler:
        made.append(Scheduler(tiny_lm.session(pages=pages, debug=True), capacity, **options))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.close()
        empty(scheduler)


# batching


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_a_lane_is_as_if_alone(tiny_lm: LM, make: Make, lanes: int) -> None:
    """Batch of one = lane k of N for every k, late joiners too (imp#1314, omlx#3476, vllm#51226)."""
    requests = [Request(str(i), prompt(3 + 29 * i, seed=i), 4 + 3 * i, witness=True) for i in range(8)]
    scheduler = make(lanes, pages=pages_for_lanes(lanes, 280))
    outcomes = drive(scheduler, requests)
    assert len(outcomes) == 8
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)
    empty(scheduler)


@pytest.mark.parametrize("lane", range(8))
def test_every_lane_index(tiny_lm: LM, make: Make, lane: int) -> None:
    """imp#1314: alone, and with seven others, in every lane."""
    subject = Request("x", prompt(40, seed=99), 6, witness=True)
    others = [Request(str(i), prompt(20 + 7 * i, seed=i), 6) for i in range(7)]
    outcomes = drive(make(8), [*others[:lane], subject, *others[lane:]])
    same_as_alone(tiny_lm, outcomes["x"])


def test_prompts_prefill_together_on_the_grid(tiny_lm: LM, make: Make) -> None:
    """Prompts of 7, 64 and 513 tokens in one evaluation; no piece crosses a multiple of the chunk."""
    scheduler = make(4, prefill_chunk=32, max_batched_tokens=80)
    seen: list[list[tuple[int, int]]] = []
    evaluate = scheduler.engine.evaluate_lent

    def spy(spans: Any, **options: Any) -> Any:
        seen.append([(s.start, s.start + len(s.tokens)) for s in spans])
        return evaluate(spans, **options)

    scheduler.engine.evaluate_lent = spy  # type: ignore[method-assign]
    outcomes = drive(scheduler, [Request(str(n), prompt(n, seed=n), 3, witness=True) for n in (7, 64, 513)])
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)
    assert len(seen[0]) == 3
    for spans in seen:
        assert sum(b - a for a, b in spans) <= 80
        assert all(a // 32 == (b - 1) // 32 for a, b in spans)


@pytest.mark.parametrize("chunk", [1, 17, 256, 10_000])
def test_chunked_equals_whole(tiny_lm: LM, make: Make, chunk: int) -> None:
    (outcome,) = drive(make(1, prefill_chunk=chunk), [Request("x", prompt(300), 5, witness=True)]).values()
    same_as_alone(tiny_lm, outcome)


def test_decoding_goes_on_while_prompts_arrive(make: Make) -> None:
    """One evaluation has decode rows and prefill pieces; with a tight budget both sides progress (seed row 49)."""
    scheduler = make(4, max_batched_tokens=4, minimum_prefill_tokens=1)
    for i in range(3):
        scheduler.submit(Request(str(i), prompt(4, seed=i), 60))
    step(scheduler, 8)
    before = scheduler.decode_tokens
    scheduler.submit(Request("late", prompt(10, seed=9), 5))
    step(scheduler, 12)
    assert "late" in scheduler.running and scheduler.decode_tokens - before >= 30
    assert drive(scheduler)["late"].finish is Finish.LENGTH


def test_a_decode_row_is_deferred_where_the_budget_is_full(tiny_lm: LM, make: Make) -> None:
    scheduler = make(6, max_batched_tokens=3)
    outcomes = drive(scheduler, [Request(str(i), prompt(5, seed=i), 7, witness=True) for i in range(6)])
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


# order and ends


def test_priorities_go_first(make: Make) -> None:
    scheduler = make(1)
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", 9)):
        scheduler.submit(Request(name, prompt(5), 2, priority=priority))
    assert scheduler.waiting == ("d", "b", "c", "a")
    assert list(drive(scheduler)) == ["d", "b", "c", "a"]


def test_reasons_in_order(tiny_lm: LM, make: Make) -> None:
    """Length, eos, stop, capacity: where several hold at once the first is given; the eos token is in the output."""
    with tiny_lm.session().start(prompt(20)) as c:
        tokens = c.advance(6)
    eos = frozenset({tokens[2]})
    first = tokens.index(tokens[2]) + 1
    outcomes = drive(
        make(4),
        [
            Request("eos", prompt(20), 6, eos=eos),
            Request("both", prompt(20), first, eos=eos),
            Request("length", prompt(20), 6),
            Request("nothing", prompt(20), 0, witness=True),
        ],
    )
    assert outcomes["eos"].finish is Finish.EOS and outcomes["eos"].generated == tokens[:first]
    assert outcomes["both"].finish is Finish.LENGTH and outcomes["both"].generated == tokens[:first]
    assert outcomes["length"].generated == tokens
    assert outcomes["nothing"].finish is Finish.LENGTH and outcomes["nothing"].generated == []
    same_as_alone(tiny_lm, outcomes["nothing"])
    (single,) = drive(make(1), [Request("one", prompt(1), 0)]).values()
    assert (single.finish, single.computed) == (Finish.LENGTH, 1)


@pytest.mark.parametrize("length", [61, 64])
def test_context_ends_at_max_position(tiny_lm: LM, length: int) -> None:
    """pegainfer#220, vllm#17924: the last position is used, and none after it."""
    from numem import load_lm

    scheduler = Scheduler(load_lm(tiny_lm.directory, max_position=64).session(), 1)
    (outcome,) = drive(scheduler, [Request("x", prompt(length), 10)]).values()
    assert len(outcome.generated) == 64 - length + 1 and outcome.finish is Finish.CAPACITY
    with pytest.raises(ContextLengthError, match="max_position"):
        scheduler.submit(Request("y", prompt(65), 1))
    scheduler.close()
    empty(scheduler)


def test_deadlines_count_from_submission(make: Make) -> None:
    """Checked before every step, for those that wait too; what was generated by then is in the outcome."""
    clock = Clock()
    scheduler = make(1, clock=clock)
    scheduler.submit(Request("a", prompt(5), 50, deadline_s=10))
    scheduler.submit(Request("b", prompt(6), 50, deadline_s=5))
    scheduler.submit(Request("c", prompt(7), 2))
    assert step(scheduler, 3) == []
    clock.now = 5.0
    (b,) = step(scheduler)
    assert (b.request.id, b.finish, b.generated) == ("b", Finish.DEADLINE, [])
    clock.now = 9.5
    assert step(scheduler) == []
    clock.now = 10.0
    (a,) = step(scheduler)
    assert (a.request.id, a.finish, len(a.generated)) == ("a", Finish.DEADLINE, 5)
    assert drive(scheduler)["c"].finish is Finish.LENGTH
    assert a.queue_ms == 0.0


def test_what_ended_before_its_deadline_is_forgotten(make: Make) -> None:
    scheduler = make(2)
    for i in range(200):
        drive(scheduler, [Request(str(i), prompt(3, seed=i), 1, deadline_s=3600.0)])
    assert len(scheduler._deadlines) <= 64


def test_times_are_of_the_clock(make: Make) -> None:
    clock = Clock()
    scheduler = make(1, clock=clock)
    scheduler.submit(Request("a", prompt(5), 2))
    scheduler.submit(Request("b", prompt(5, seed=1), 2))
    clock.now = 1.0
    step(scheduler)
    clock.now = 3.0
    (a,) = step(scheduler)
    (b,) = drive(scheduler).values()
    assert (a.queue_ms, a.ttft_ms) == (1000.0, 0.0) and b.queue_ms == 3000.0


def test_an_error_ends_one_sequence(tiny_lm: LM, make: Make) -> None:
    """Logits that are not numbers end their own sequence; the others are as if alone, and no page is lost."""
    scheduler = make(3)
    for name in ("a", "bad", "c"):
        scheduler.submit(Request(name, prompt(20, seed=ord(name[0])), 8, witness=True))
    step(scheduler, 3)
    evaluate = scheduler.engine.evaluate_lent

    def damage(spans: Any, **options: Any) -> Any:
        rows, peaks = evaluate(spans, **options)
        peaks[1] = 7, float("nan")
        return rows, peaks

    scheduler.engine.evaluate_lent = damage  # type: ignore[method-assign]
    (bad,) = step(scheduler)
    scheduler.engine.evaluate_lent = evaluate  # type: ignore[method-assign]
    assert (bad.request.id, bad.finish, len(bad.generated)) == ("bad", Finish.ERROR, 3)
    assert "not finite" in bad.error
    outcomes = drive(scheduler)
    for name in ("a", "c"):
        same_as_alone(tiny_lm, outcomes[name])


def test_a_failed_pass_leaves_all_as_before(tiny_lm: LM, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the forward pass is raised, and the next step does what this one would have done."""
    scheduler = make(4)
    common = prompt(50)
    for i in range(3):
        scheduler.submit(Request(str(i), (*common, *prompt(5, seed=i)), 40, witness=True))
    step(scheduler, 2)
    scheduler.submit(Request("late", (*common, *prompt(300, seed=8)), 4, witness=True))
    decoder = scheduler.engine.decoder
    for _ in range(25):

        def fail(rows: object, storage: object) -> torch.Tensor:
            raise RuntimeError("no")

        before = scheduler.engine.pool.stats().resident
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "forward", fail)
            with pytest.raises(RuntimeError, match="no"):
                scheduler.step()
        check(scheduler)
        assert scheduler.engine.pool.stats().resident >= before
        step(scheduler)
    outcomes = drive(scheduler)
    assert len(outcomes) >= 3
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


# callers


def test_run_is_lazy_and_releases_all(make: Make) -> None:
    scheduler = make(2)
    pulled = []

    def requests() -> Iterator[Request]:
        for i in range(100):
            pulled.append(i)
            yield Request(str(i), prompt(5 + i % 7, seed=i), 3)

    outcomes: Any = scheduler.run(requests())
    assert [next(outcomes).request.id for _ in range(5)] == ["0", "1", "2", "3", "4"]
    assert len(pulled) <= 12
    outcomes.close()
    empty(scheduler)
    assert scheduler.idle
    assert len(list(scheduler.run(Request(str(i), prompt(5), 2) for i in range(9)))) == 9


def test_refusals(make: Make, tiny_lm: LM) -> None:
    scheduler = make(2, pages=4)
    good = Request("a", prompt(5), 4)
    scheduler.submit(good)
    for bad, error in (
        (good, InputError),
        (Request("b", (), 4), InputError),
        (Request("b", (1, -1), 4), InputError),
        (Request("b", (1, 10**6), 4), InputError),
        (Request("b", (True, 1), 4), InputError),
        (Request("b", (1,), -1), InputError),
        (Request("b", (1,), 1, samples=0), InputError),
        (Request("b", (1,), 1, stop=("x",)), InputError),
        (Request("b", (1,), 1, publish=True), InputError),
        (Request("b", (1,), 1, deadline_s=float("nan")), InputError),
        (Request("b", prompt(60), 20), CapacityError),
    ):
        with pytest.raises(error):
            scheduler.submit(bad)
    assert list(drive(scheduler)) == ["a"]
    scheduler.submit(Request("a", prompt(5), 4))
    drive(scheduler)
    with pytest.raises(InputError):
        make(0)
    scheduler.close()
    with pytest.raises(ClosedError):
        scheduler.step()


def test_what_cannot_fit_now_waits_or_fails(make: Make) -> None:
    """Pages of others than the scheduler: with lanes running the first in line waits, with none it ends in an error."""
    scheduler = make(2, pages=10)
    blocker = scheduler.session.start(prompt(60))
    scheduler.submit(Request("a", prompt(20), 12))
    scheduler.submit(Request("big", prompt(90, seed=2), 12))
    step(scheduler, 3)
    assert scheduler.running == ("a",) and scheduler.waiting == ("big",)
    outcomes = drive(scheduler)
    assert outcomes["a"].finish is Finish.LENGTH
    assert outcomes["big"].finish is Finish.ERROR and "pages" in outcomes["big"].error
    blocker.close()
    assert drive(scheduler, [Request("big", prompt(90, seed=2), 12)])["big"].finish is Finish.LENGTH
