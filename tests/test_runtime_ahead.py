"""Decoding several steps at a time in the scheduler: what is generated, told and kept is that of single steps."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numem import LM, Memory
from numem.errors import CapacityError, InputError
from numem.runtime.device.state import LaneState, Step, settings_of
from numem.runtime.lanes import ahead
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.residency import Residency
from numem.runtime.request import Finish, Outcome, Request, Token
from numem.runtime.sampling import Sampler
from tests.ahead_fixtures import AheadDecoder, Letters, ahead_session
from tests.scheduler_fixtures import Clock, check, drive, empty, prompt, step

STEPS = [1, 2, 7, 32]
WARM = Sampler(temperature=1.5, seed=3)

Make = Callable[..., Scheduler]


@pytest.fixture
def make(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A scheduler that decodes `steps` at a time; 0: by single evaluations, with the decoder's rule of choice."""
    made: list[Scheduler] = []

    def build(
        steps: int, lanes: int = 4, *, pages: int = 200, broken: int = -1, canary: bool = False, **options: Any
    ) -> Scheduler:
        session, _ = ahead_session(tiny_lm, pages=pages, broken=broken, canary=canary)
        if not steps:
            session.engine.ahead = None
        monkeypatch.setattr(ahead, "AHEAD_STEPS", max(1, steps))
        options = {"detokenize": Letters, "clock": Clock(), **options}
        made.append(Scheduler(session, lanes, **options))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.close()
        if scheduler.residency is not None:
            scheduler.residency.clear()
        empty(scheduler)


def calls(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Steps and lanes of each time that was decoded ahead."""
    decoder = scheduler.engine.decoder
    assert isinstance(decoder, AheadDecoder)
    return decoder.calls


def result(outcome: Outcome) -> tuple[object, ...]:
    return outcome.request.id, outcome.sample, outcome.generated, outcome.text, outcome.finish, outcome.error


def results(outcomes: dict[str, Outcome]) -> dict[str, tuple[object, ...]]:
    return {name: result(outcome) for name, outcome in outcomes.items()}


def mixed() -> list[Request]:
    """Requests with every way to end, some of one prefix, greedy and sampled."""
    text = prompt(70, seed=9)
    return [
        Request("greedy", prompt(20), 40),
        Request("eos", prompt(33, seed=1), 60, WARM, eos=frozenset(range(0, 256, 9))),
        Request("stop", prompt(5, seed=2), 60, replace(WARM, top_k=20), stop=("ab", "e", "ezz", "xyz")),
        Request("short", text, 1, WARM),
        Request("none", text, 0),
        Request("samples", text, 19, replace(WARM, top_p=0.9), samples=3, eos=frozenset(range(3, 256, 17))),
        Request("prefix", (*text[:50], 3, 4), 50, WARM),
    ]


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("steps", STEPS)
def test_outcomes_are_those_of_single_steps(make: Make, steps: int, lanes: int) -> None:
    expected = results(drive(make(0, lanes), mixed()))
    assert {finish for *_, finish, _ in expected.values()} == {Finish.LENGTH, Finish.EOS, Finish.STOP}
    scheduler = make(steps, lanes, canary=True)
    assert results(drive(scheduler, mixed())) == expected
    assert max(calls(scheduler))[0] == steps or lanes == 8


@pytest.mark.parametrize("steps", [0, 7])
def test_every_path_chooses_by_the_decoders_rule(make: Make, tiny_lm: LM, steps: int) -> None:
    """From a prompt's last piece beside pieces of others, for samples, in single steps and ahead: as alone."""
    requests = [Request("long", prompt(90, seed=4), 20, WARM), Request("some", prompt(14), 20, WARM, samples=3)]
    outcomes = drive(make(steps, 4, prefill_chunk=16), requests)
    session, _ = ahead_session(tiny_lm)
    for outcome in outcomes.values():
        with session.start(outcome.request.tokens) as alone:
            seed = WARM.seed + outcome.sample
            assert alone.advance(20, replace(WARM, seed=seed)) == outcome.generated


def test_the_cache_ends_where_max_position_does(make: Make, tiny_lm: LM) -> None:
    request = Request("x", prompt(tiny_lm.max_position - 20), 60, WARM)
    expected = drive(make(0, 1, pages=300), [request])["x"]
    found = drive(make(32, 1, pages=300), [request])["x"]
    assert result(found) == result(expected) and found.finish is Finish.CAPACITY and len(found.generated) == 21


# at random

EVENTS = ["cancel", "preempt", "fork", "submit"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Request], dict[tuple[str, int], str], dict[str, int]]:
    """Requests, what is done when a token of one is told, and the sizes of the scheduler."""
    requests = []
    for at in range(draw(st.integers(1, 5))):
        ids = prompt(draw(st.sampled_from([1, 15, 16, 17, 40, 100])), seed=draw(st.integers(0, 2)))
        warm = Sampler(draw(st.sampled_from([0.0, 0.8, 3.0])), draw(st.sampled_from([0, 5])), seed=at)
        requests.append(
            Request(
                str(at),
                ids,
                draw(st.integers(0, 45)),
                warm,
                frozenset(range(0, 256, draw(st.sampled_from([5, 30, 300])))),
                draw(st.sampled_from([(), ("k",), ("ab", "abc", "zz")])),
                draw(st.sampled_from([1, 1, 1, 2])),
                draw(st.integers(0, 1)),
                witness=draw(st.integers(0, 9)) == 0,
            )
        )
    names = [r.id for r in requests if r.samples == 1]
    told = st.tuples(st.sampled_from(names), st.integers(0, 30)) if names else st.nothing()
    events = draw(st.dictionaries(told, st.sampled_from(EVENTS), max_size=4)) if names else {}
    sizes = {
        "steps": draw(st.sampled_from(STEPS)),
        "lanes": draw(st.integers(1, 4)),
        "pages": draw(st.sampled_from([12, 24, 100])),
        "max_batched_tokens": draw(st.sampled_from([3, 64])),
    }
    return requests, events, sizes


def run(
    build: Make, requests: list[Request], events: dict[tuple[str, int], str], **sizes: Any
) -> tuple[dict[str, tuple[object, ...]], dict[tuple[str, int], list[Token]]]:
    """Results, and what was told of each sequence, where events happen in the middle of it."""
    told: dict[tuple[str, int], list[Token]] = {}

    def on_token(token: Token) -> None:
        told.setdefault((token.request_id, token.sample), []).append(token)
        event = events.get((token.request_id, token.index))
        if event == "cancel":
            scheduler.cancel(token.request_id)
        elif event == "preempt":
            scheduler.preempt(token.request_id)
        elif event == "submit":
            scheduler.submit(Request(f"late {token.request_id} {token.index}", prompt(30, seed=7), 20, WARM))
        elif event == "fork" and token.request_id in scheduler.running:
            scheduler.fork(token.request_id, f"fork {token.request_id} {token.index}", WARM, 9)

    scheduler = build(on_token=on_token, **sizes)
    found = results(drive(scheduler, requests))
    return found, told


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(worlds())
def test_any_requests_and_events(
    make: Make, world: tuple[list[Request], dict[tuple[str, int], str], dict[str, int]]
) -> None:
    """Cancelled, preempted, forked and submitted in the middle of what was decoded ahead, with few pages and lanes."""
    requests, events, sizes = world
    steps, pages = sizes["steps"], sizes["pages"]
    requests = [r for r in requests if -(-(len(r.tokens) + r.max_new_tokens) // 16) < pages]
    assert run(make, requests, events, **sizes) == run(make, requests, events, **{**sizes, "steps": 0})
    assert steps


# ends in the middle


@pytest.mark.parametrize("at", [0, 1, 5, 11])
def test_a_cancelled_sequence_has_the_tokens_told(make: Make, at: int) -> None:
    def on_token(token: Token) -> None:
        if token.index == at and token.request_id == "a":
            scheduler.cancel("a")

    scheduler = make(7, 2, on_token=on_token)
    outcomes = drive(scheduler, [Request("a", prompt(10), 30, WARM), Request("b", prompt(12), 30, WARM)])
    assert outcomes["a"].finish is Finish.CANCELLED and len(outcomes["a"].generated) == at + 1
    assert outcomes["b"].finish is Finish.LENGTH and max(calls(scheduler))[0] == 7


def test_logits_that_are_not_finite_end_one_sequence(make: Make) -> None:
    """The tokens before are those of single steps, and the others go on."""
    requests = [Request("a", prompt(10), 30, WARM), Request("b", prompt(50, seed=1), 30)]
    expected = results(drive(make(0, broken=27), requests))
    for steps in STEPS:
        scheduler = make(steps, broken=27)
        assert results(drive(scheduler, requests)) == expected
        assert "not finite" in str(expected["a"]) and "not finite" not in str(expected["b"])


def test_a_failed_pass_leaves_everything_as_before(make: Make) -> None:
    request = [Request("a", prompt(10), 30, WARM), Request("b", prompt(16), 30)]
    expected = results(drive(make(0), request))
    scheduler = make(7)
    for each in request:
        scheduler.submit(each)
    step(scheduler, 3)
    decoder = scheduler.engine.decoder
    assert isinstance(decoder, AheadDecoder) and decoder.calls
    routes = [(list(e.route.pages), e.route.length) for e in scheduler._running if e.route]
    before = scheduler.engine.pool.stats()
    decoder.fail = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        scheduler.step()
    assert scheduler.engine.pool.stats() == before
    assert [(e.route.pages, e.route.length) for e in scheduler._running if e.route] == routes
    # Tokens that came before a failure are taken, and what it left of the rows is given back.
    decoder.fail, decoder.fail_at = RuntimeError("lost"), 4
    with pytest.raises(RuntimeError, match="lost"):
        scheduler.step()
    assert [e.route.length for e in scheduler._running if e.route] == [length + 4 for _, length in routes]
    check(scheduler)
    assert results(drive(scheduler)) == expected


def test_what_a_caller_raises_loses_no_token(make: Make) -> None:
    told: list[int] = []

    def on_token(token: Token) -> None:
        told.append(token.index)
        if token.index in (4, 5, 9):
            raise KeyError(token.index)

    scheduler = make(7, on_token=on_token)
    scheduler.submit(Request("a", prompt(10), 20, WARM))
    outcomes, raised = list[Outcome](), 0
    while not scheduler.idle:
        try:
            outcomes += step(scheduler)
        except KeyError:
            raised += 1
    assert raised == 3 and told == list(range(20)) and len(outcomes[0].generated) == 20


def raised(make: Make, steps: int, then: str) -> tuple[object, ...]:
    """What a sequence has where telling its sixth token raised, and `then` (cancel, preempt) follows."""

    def on_token(token: Token) -> None:
        if token.index == 5:
            raise KeyError(token.index)

    scheduler = make(steps, 1, on_token=on_token)
    scheduler.submit(Request("a", prompt(10), 60, WARM))
    with pytest.raises(KeyError):
        while True:
            step(scheduler)
    check(scheduler)
    (entry,) = scheduler._running
    assert entry.route is not None
    held = list(entry.tokens), entry.route.length, scheduler.engine.pool.free
    assert getattr(scheduler, then)("a")
    return *held, results(drive(scheduler))


@pytest.mark.parametrize("then", ["cancel", "preempt"])
def test_where_telling_fails_nothing_behind_it_was_decoded(make: Make, then: str) -> None:
    assert raised(make, 32, then) == raised(make, 0, then)


class Failing(Letters):
    """Fails for good at its eighth token."""

    def __init__(self) -> None:
        self.seen = 0

    def push(self, token: int) -> str:
        self.seen += 1
        return super().push(token) if self.seen < 8 else self.finish()

    def finish(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("steps", [0, 32])
def test_what_a_tokenizer_raises_ends_one_sequence(make: Make, steps: int) -> None:
    requests = [Request("a", prompt(10), 30, WARM), Request("b", prompt(12), 30, WARM)]
    expected = drive(make(0), requests)
    kinds = iter([Failing, Letters])
    found = drive(make(steps, detokenize=lambda: next(kinds)()), requests)
    assert result(found["b"]) == result(expected["b"])
    assert (found["a"].finish, found["a"].error) == (Finish.ERROR, "no text")
    assert found["a"].generated == expected["a"].generated[:8]


def test_where_pages_lack_single_steps_decide(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request("a", prompt(10), 30, WARM), Request("b", prompt(16), 30)]
    expected = results(drive(make(0), requests))
    scheduler = make(7)
    reserve = scheduler.engine.reserve

    def short(route: Any, count: int, capacity: Any = None) -> Any:
        if count > 1 and route.length > 20:
            raise CapacityError("no pages")
        return reserve(route, count, capacity)

    monkeypatch.setattr(scheduler.engine, "reserve", short)
    assert results(drive(scheduler, requests)) == expected


# how many steps


def test_nothing_is_decoded_ahead_of_arrivals_and_witnesses(make: Make) -> None:
    scheduler = make(32, prefill_chunk=16)
    scheduler.submit(Request("a", prompt(10), 40, WARM))
    step(scheduler, 1)
    scheduler.submit(Request("b", prompt(100), 10, WARM))
    step(scheduler, 6)
    assert not calls(scheduler) and "b" in scheduler.running
    drive(scheduler, [Request("c", prompt(100), 10, WARM, witness=True)])
    assert max(lanes for _, lanes in calls(scheduler)) <= 2


@pytest.mark.parametrize(("deadline", "steps"), [(None, 10), (0.0045, 4), (0.0105, 10)])
def test_tokens_wait_no_longer_than_they_may(make: Make, deadline: float | None, steps: int) -> None:
    """A millisecond a step: ten at a time, fewer before a deadline, one while nothing is known."""
    clock = Clock()
    scheduler = make(32, clock=clock)
    decode = scheduler.engine.decode

    def slow(lanes: Any, steps: int) -> Iterator[np.ndarray]:
        clock.now += steps / 1000
        return decode(lanes, steps)

    scheduler.engine.decode = slow  # type: ignore[method-assign]
    scheduler.submit(Request("a", prompt(10), 60, WARM, deadline_s=None if deadline is None else deadline + 0.001))
    step(scheduler, 3)
    assert [count for count, _ in calls(scheduler)][:2] == [1, steps]
    scheduler.cancel("a")


def test_a_deadline_that_comes_while_tokens_are_told_ends_a_sequence(make: Make) -> None:
    """Also where nothing told of it when they were decoded."""

    def told(steps: int) -> dict[str, tuple[object, ...]]:
        clock = Clock()

        def on_token(token: Token) -> None:
            clock.now += 100 if token.index == 5 else 0

        scheduler = make(steps, clock=clock, on_token=on_token)
        requests = [Request("a", prompt(10), 30, WARM, deadline_s=50.0), Request("b", prompt(12), 30, WARM)]
        return results(drive(scheduler, requests))

    assert told(32) == told(0) and Finish.DEADLINE in told(32)["a"]


def accounts(make: Make, steps: int, fails: bool) -> tuple[object, ...]:
    """What is written down of steps of a millisecond each; `fails`: telling one of the tokens raises."""
    clock = Clock()

    def on_token(token: Token) -> None:
        if fails and token.index == 9:
            raise KeyError(token.index)

    scheduler = make(steps, clock=clock, on_token=on_token, ahead_ms=1e9)
    engine = scheduler.engine
    decode, evaluate = engine.decode, engine.evaluate_lent

    def slow_decode(lanes: Any, steps: int) -> Iterator[np.ndarray]:
        for piece in decode(lanes, steps):
            clock.now += len(piece) / 1000
            yield piece

    def slow_evaluate(*args: Any, **options: Any) -> Any:
        clock.now += 1 / 1000
        return evaluate(*args, **options)

    engine.decode = slow_decode  # type: ignore[method-assign]
    engine.evaluate_lent = slow_evaluate  # type: ignore[method-assign]
    some = frozenset(range(0, 256, 9))
    for request in [Request("a", prompt(10), 40, WARM, eos=some), Request("b", prompt(12), 40, WARM)]:
        scheduler.submit(request)
    found = dict[str, tuple[object, ...]]()
    while not scheduler.idle:
        try:
            for o in step(scheduler):
                found[o.request.id] = len(o.generated), round(o.step_ms, 6), round(o.ttft_ms, 6)
        except KeyError:
            assert fails
    return found, scheduler.decode_tokens, round(scheduler.decode_ms, 6)


@pytest.mark.parametrize("fails", [False, True])
def test_accounts_are_those_of_single_steps(make: Make, fails: bool) -> None:
    """A sequence that ends early took part in no step behind its end, and a step counts whatever telling it raises."""
    found = accounts(make, 32, fails)
    assert found == accounts(make, 0, fails)
    assert found == ({"a": (12, 11.0, 1.0), "b": (40, 39.0, 1.0)}, 50, 39.0)


def test_a_device_bounds_the_rows_of_a_step(make: Make) -> None:
    with pytest.raises(InputError, match="4096 exceeds"):
        make(2, max_batched_tokens=4096)


# what is kept


def test_published_rows_are_those_of_the_tokens_taken(make: Make, memory: Memory, tiny_lm: LM) -> None:
    """What lies behind an end is neither published nor kept for prompts to come."""
    request = Request("a", prompt(200), 300, WARM, eos=frozenset(range(0, 256, 40)), publish=True)
    scheduler = make(32, 1, memory=memory)
    scheduler.residency = Residency(scheduler.engine)
    outcome = drive(scheduler, [request])["a"]
    assert outcome.finish is Finish.EOS and not outcome.error
    ids = [*request.tokens, *outcome.generated]
    rows = len(ids) - 1
    kept = scheduler.residency.match(ids)
    assert kept is not None and kept[1] == rows == kept[0].length
    session, _ = ahead_session(tiny_lm)
    with session.restore(memory, [*ids, 1]) as restored, session.start([*ids, 1]) as cold:
        assert restored.restored.tokens >= rows - rows % 256
        assert restored.kv().tobytes() == cold.kv().tobytes()
    again = Request("b", (*ids, 5), 8, witness=True)
    found = drive(scheduler, [again])["b"]
    assert found.shared == rows
    with session.start(again.tokens) as alone:
        assert alone.advance(8) == found.generated and found.kv is not None
        assert alone.kv().tobytes() == found.kv.tobytes()


@pytest.mark.parametrize("sampler", [Sampler(top_k=2**40), Sampler(1.0, 2**31, seed=2**70 + 3)])
def test_settings_of_any_size_are_loaded(sampler: Sampler) -> None:
    """More ids than there are keeps all of them; one such request is no end of those beside it."""
    place = torch.device("cpu")
    state = LaneState(1, 1, place)
    state.load([Step(1, 0, [0], sampler)])
    _, top_k, _, seed = settings_of([sampler], place)
    assert state.top_k.tolist() == top_k.tolist() == [min(sampler.top_k, 2**31 - 1)]
    assert state.seed.tolist() == seed.tolist() == [sampler.seed % 2**64]
