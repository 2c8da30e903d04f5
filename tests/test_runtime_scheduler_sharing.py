"""The scheduler: common prefixes of running sequences, samples, forks; tokens, texts and stop strings as they come."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from numem import LM
from numem.errors import InputError
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.request import Finish, Outcome, Request, Token
from numem.runtime.sampling import Sampler
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


# sharing


@pytest.mark.parametrize("chunk", [32, 10])
def test_followers_wait_for_a_leader(tiny_lm: LM, make: Make, chunk: int) -> None:
    """Requests that arrive together compute their common prefix once, though the first has not finished it; it goes on
    from a tail that they share."""
    scheduler = make(8, prefill_chunk=chunk, max_batched_tokens=64)
    common = prompt(100)
    requests = [Request(str(i), (*common, *prompt(10, seed=i + 1)), 6, witness=True) for i in range(6)]
    outcomes = drive(scheduler, requests)
    assert [outcomes[str(i)].shared for i in range(6)] == [0] + [100] * 5
    assert scheduler.engine.rows_computed == 110 + 5 * 10 + 6 * 5
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


def test_without_sharing_nothing_is_shared(tiny_lm: LM, make: Make) -> None:
    requests = [Request(str(i), (*prompt(100), i), 3, witness=True) for i in range(4)]
    outcomes = drive(make(4, share=False), requests)
    for outcome in outcomes.values():
        assert outcome.shared == 0
        same_as_alone(tiny_lm, outcome)


@pytest.mark.parametrize("event", ["cancel", "deadline", "preempt"])
def test_a_follower_becomes_the_leader(tiny_lm: LM, make: Make, event: str) -> None:
    clock = Clock()
    scheduler = make(4, prefill_chunk=16, max_batched_tokens=16, clock=clock)
    common = prompt(90)
    for i in range(3):
        deadline = 5.0 if i == 0 and event == "deadline" else None
        scheduler.submit(Request(str(i), (*common, 10 + i), 4, deadline_s=deadline, witness=True))
    step(scheduler, 2)
    assert scheduler.running == ("0",) and scheduler.waiting == ("1", "2")
    if event == "cancel":
        scheduler.cancel("0")
    elif event == "preempt":
        scheduler.preempt("0")
    else:
        clock.now = 6.0
    outcomes = drive(scheduler)
    for name in ("1", "2") if event != "preempt" else ("0", "1", "2"):
        same_as_alone(tiny_lm, outcomes[name])
    assert outcomes["2"].shared == 90
    if event != "preempt":
        assert outcomes["1"].shared == 0


def test_a_leader_without_progress_is_not_waited_for(tiny_lm: LM, make: Make) -> None:
    scheduler = make(4, prefill_chunk=16, max_batched_tokens=16)
    scheduler.stall_steps = 3
    common = prompt(90)
    scheduler.submit(Request("0", (*common, 1), 4, witness=True))
    step(scheduler)
    (leader,) = scheduler._running
    assert leader.arrival is not None
    following, leader.arrival.next = leader.arrival.next, lambda budget: None  # type: ignore[method-assign]
    scheduler.submit(Request("1", (*common, 2), 4, witness=True))
    step(scheduler, 3)
    assert scheduler.waiting == ("1",)
    step(scheduler, 3)
    assert scheduler.running == ("0", "1")
    leader.arrival.next = following  # type: ignore[method-assign]
    for outcome in drive(scheduler).values():
        same_as_alone(tiny_lm, outcome)


def test_partial_tails_are_shared_and_copied(tiny_lm: LM, make: Make) -> None:
    """A later prompt continues a running sequence at token granularity, its generated tokens too.

    A shared tail is copied by whoever writes; both do where they write in one step.
    """
    scheduler = make(3)
    scheduler.submit(Request("a", prompt(37), 30, witness=True))
    step(scheduler, 6)
    (running,) = scheduler._running
    tokens = tuple(running.tokens)
    copies = scheduler.engine.page_copies
    scheduler.submit(Request("b", (*tokens, 3, 4, 5), 6, witness=True))
    scheduler.submit(Request("c", (*tokens[:21], 9, 9, 9), 6, witness=True))
    outcomes = drive(scheduler)
    assert outcomes["b"].shared == len(tokens) - 1
    assert outcomes["c"].shared == 21
    assert scheduler.engine.page_copies - copies == 3
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


def test_a_tail_that_others_share_never_runs_out_of_pages(tiny_lm: LM, make: Make) -> None:
    """Each fork of a running tail costs one copy, whoever writes first; the pages are set aside for it."""
    scheduler = make(8, pages=24)
    scheduler.submit(Request("a", prompt(18), 14, witness=True))
    step(scheduler, 2)
    for i in range(5):
        (first, *_) = scheduler._running
        scheduler.submit(Request(str(i), (*first.tokens, 7), 3, witness=True))
        step(scheduler, 2)
    for outcome in drive(scheduler).values():
        same_as_alone(tiny_lm, outcome)


def test_a_page_that_is_a_tail_again_is_set_aside_again(tiny_lm: LM, make: Make) -> None:
    """A tail that was copied, and whose page came back as a later tail: its copy needs a page of its own."""
    scheduler = make(2, pages=5)
    scheduler.submit(Request("a", prompt(18), 30, witness=True))
    step(scheduler, 3)
    (a,) = scheduler._running
    scheduler.submit(Request("b", (*a.tokens, 7), 1, witness=True))
    outcomes: dict[str, Outcome] = {}
    while a.route is None or len(a.route.pages) < 3 or a.route.length % 16 < 2:
        outcomes |= {o.request.id: o for o in step(scheduler)}
    assert "b" in outcomes
    (first, _, last) = a.route.pages
    assert (first, last) == (0, 1)
    with scheduler.session.start(prompt(10, seed=5)) as other:
        other.advance(1)
        outcomes |= drive(scheduler, [Request("c", (*a.tokens, 7), 1, witness=True)])
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


def test_a_prompt_that_is_resident_leaves_one_token(tiny_lm: LM, make: Make) -> None:
    """vllm#11186, vllm#55113: with every row there, the last token is evaluated all the same."""
    for length in (255, 256, 257, 512):
        scheduler = make(2, pages=120)
        scheduler.submit(Request("a", prompt(length), 20, witness=True))
        step(scheduler, 5)
        scheduler.submit(Request("b", prompt(length), 4, witness=True))
        outcomes = drive(scheduler)
        assert (outcomes["b"].shared, outcomes["b"].computed) == (length - 1, 1)
        for outcome in outcomes.values():
            same_as_alone(tiny_lm, outcome)


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_samples_compute_the_prompt_once(tiny_lm: LM, make: Make, lanes: int) -> None:
    """Sample i uses seed + i and is as if it had been asked for alone."""
    scheduler = make(lanes, pages=200)
    request = Request("s", prompt(45), 9, Sampler(temperature=0.9, seed=4), samples=4, witness=True)
    outcomes = drive(scheduler, [request])
    assert sorted(outcomes) == [f"s#{i}" for i in range(4)]
    if lanes == 8:
        assert scheduler.engine.rows_computed == 45 + 4 * 8
    assert len({tuple(o.generated) for o in outcomes.values()}) == 4
    for outcome in outcomes.values():
        same_as_alone(tiny_lm, outcome)


def test_fork_continues_as_two(tiny_lm: LM, make: Make) -> None:
    scheduler = make(4)
    scheduler.submit(Request("a", prompt(40), 20, witness=True))
    step(scheduler, 5)
    scheduler.fork("a", "b", Sampler(temperature=0.8, seed=3))
    scheduler.fork("a", "c", max_new_tokens=3)
    outcomes = drive(scheduler)
    a, b, c = (outcomes[name] for name in "abc")
    assert b.request.tokens == c.request.tokens == (*prompt(40), *a.generated[:5])
    assert (b.shared, b.computed) == (44, 1) and len(b.generated) == 15
    assert c.generated == a.generated[5:8]
    for outcome in (a, b, c):
        same_as_alone(tiny_lm, outcome)
    with pytest.raises(InputError, match="fork"):
        scheduler.fork("a", "d")


# tokens and text


class Letters:
    """A tokenizer whose id n is the n-th letter; ids in pairs come out together."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token: int) -> str:
        self.held += chr(97 + token % 26)
        if len(self.held) < 2:
            return ""
        out, self.held = self.held, ""
        return out

    def finish(self) -> str:
        out, self.held = self.held, ""
        return out


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + t % 26) for t in tokens)


def test_tokens_are_told_once_and_in_order(make: Make) -> None:
    """Indices without holes; the texts joined are the outcome's; a preemption tells nothing again."""
    told: list[Token] = []
    scheduler = make(2, detokenize=Letters, on_token=told.append)
    for i in range(2):
        scheduler.submit(Request(str(i), prompt(20, seed=i), 9))
    step(scheduler, 4)
    assert scheduler.preempt("0") and scheduler.preempt("1")
    outcomes = drive(scheduler)
    for name, outcome in outcomes.items():
        mine = [t for t in told if t.request_id == name]
        assert [t.index for t in mine] == list(range(9))
        assert [t.token for t in mine] == outcome.generated and outcome.preempted == 1
        assert "".join(t.text for t in mine) == outcome.text == letters(outcome.generated)


def test_stop_strings_over_token_boundaries(make: Make) -> None:
    """The text ends before the first stop string, wherever tokens were cut; nothing of it was told."""
    (plain,) = drive(make(1), [Request("x", prompt(20), 24)]).values()
    text = letters(plain.generated)
    for at in range(3, 8):
        stop = text[at : at + 5]
        told: list[Token] = []
        scheduler = make(1, detokenize=Letters, on_token=told.append)
        (outcome,) = drive(scheduler, [Request("x", prompt(20), 24, stop=("#", stop))]).values()
        assert outcome.finish is Finish.STOP and outcome.text == text[: text.index(stop)]
        assert "".join(t.text for t in told) == outcome.text
        assert len(outcome.generated) < 24


def test_a_callback_that_raises_loses_nothing(make: Make) -> None:
    told: list[Token] = []

    def once(token: Token) -> None:
        if not told and token.index == 1:
            told.append(token)
            raise RuntimeError("reader is gone")

    scheduler = make(2, on_token=once)
    scheduler.submit(Request("a", prompt(5), 2))
    step(scheduler)
    with pytest.raises(RuntimeError, match="reader"):
        scheduler.step()
    check(scheduler)
    (outcome,) = step(scheduler)
    assert outcome.finish is Finish.LENGTH
