"""A worker as a pure transition: it admits against its present pages, and goes through the phases of a request.

accepted -> restoring -> prefilling -> decoding -> completed | failed
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from numem.policy.cluster.events import (
    ROUTER,
    Accept,
    After,
    Assignment,
    Complete,
    Delta,
    Effect,
    Event,
    Offer,
    Reject,
    Report,
    Send,
    Timer,
    Withdraw,
)
from numem.policy.cluster.ranking import COMPUTED, RESIDENT, Candidate, Wish, Worker, candidates, rank


class Phase(StrEnum):
    """Where a task stands."""

    ACCEPTED = "accepted"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    COMPLETED = "completed"
    FAILED = "failed"


ENDED = (Phase.COMPLETED, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class Task:
    """One accepted assignment.

    Attributes:
        way: how its prefix comes.
        pages: taken for it, given back when it ends.
        timers: phases that ended so far; the mark of the timer that is awaited.
        sent: tokens.
    """

    wish: Wish
    way: Candidate
    phase: Phase
    pages: int
    timers: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """Everything a worker knows.

    Attributes:
        me: what it would report now.
        tasks: by assignment; ended ones stay, so that repeated messages do nothing.
        ms_per_tick: of the simulated clock.
    """

    me: Worker
    tasks: Mapping[Assignment, Task] = field(default_factory=dict)
    ms_per_tick: float = 1.0

    def put(self, assignment: Assignment, task: Task) -> "Serving":
        return replace(self, tasks={**self.tasks, assignment: task})


Result = tuple[Serving, tuple[Effect, ...]]


def transition(state: Serving, event: Event) -> Result:
    """The next state and its effects. What is stale, repeated or unknown changes nothing and has none."""
    match event:
        case Offer(assignment, wish):
            return (state, ()) if assignment in state.tasks else _offered(state, assignment, wish)
        case Withdraw(assignment):
            task = state.tasks.get(assignment)
            if task is None:
                # Withdrawn before the offer came: it must not be taken up.
                return state.put(assignment, _refused(state, Wish("", "", 1, 0))), ()
            return (state, ()) if task.phase in ENDED else _end(state, assignment, task, Phase.FAILED)
        case Timer(assignment, mark):
            task = state.tasks.get(assignment)
            if task is None or task.phase in ENDED or task.timers != mark:
                return state, ()
            return _on(state, assignment, replace(task, timers=mark + 1))
        case _:
            return state, ()


def restarted(state: Serving) -> Result:
    """The worker after a crash: a new epoch, empty pages, nothing under way."""
    held = sum(task.pages for task in state.tasks.values() if task.phase not in ENDED)
    me = replace(
        state.me,
        epoch=state.me.epoch + 1,
        sequence=0,
        resident=frozenset(),
        free_pages=state.me.free_pages + state.me.evictable_pages + held,
        evictable_pages=0,
    )
    return replace(state, me=me, tasks={}), (Send(ROUTER, Report(me)),)


def _offered(state: Serving, assignment: Assignment, wish: Wish) -> Result:
    best = next(iter(rank(wish, [state.me])), None)
    if best is None:
        reason = candidates(wish, state.me)[0].declined
        return state.put(assignment, _refused(state, wish)), (Send(ROUTER, Reject(assignment, reason)),)
    evicted = max(0, best.required_pages - state.me.free_pages)
    me = replace(
        state.me,
        free_pages=state.me.free_pages + evicted - best.required_pages,
        evictable_pages=state.me.evictable_pages - evicted,
        # Whoever goes is not told apart here: after an eviction nothing is promised to be resident.
        resident=frozenset() if evicted else state.me.resident,
    )
    state, said = _report(replace(state, me=me))
    task = Task(wish, best, Phase.ACCEPTED, best.required_pages)
    state, effects = _on(state, assignment, task)
    return state, (Send(ROUTER, Accept(assignment)), said, *effects)


def _on(state: Serving, assignment: Assignment, task: Task) -> Result:
    """Enter the next phase, or send the next token."""
    way = task.way
    match task.phase:
        case Phase.ACCEPTED if way.tier not in (COMPUTED, RESIDENT):
            return _phase(state, assignment, replace(task, phase=Phase.RESTORING), way.load_ms + way.write_ms)
        case Phase.ACCEPTED | Phase.RESTORING:
            return _phase(state, assignment, replace(task, phase=Phase.PREFILLING), way.compute_ms)
        case Phase.PREFILLING:
            return _phase(state, assignment, replace(task, phase=Phase.DECODING), way.first_token_ms)
        case _ if task.sent < task.wish.max_new:
            later = replace(task, sent=task.sent + 1)
            state, effects = _phase(state, assignment, later, state.me.first_token_ms)
            return state, (Send(ROUTER, Delta(assignment, task.sent)), *effects)
        case _:
            state, effects = _end(state, assignment, task, Phase.COMPLETED)
            return state, (Send(ROUTER, Complete(assignment, task.sent)), *effects)


def _phase(state: Serving, assignment: Assignment, task: Task, ms: float) -> Result:
    ticks = max(1, math.ceil(ms / state.ms_per_tick))
    return state.put(assignment, task), (After(ticks, Timer(assignment, task.timers)),)


def _end(state: Serving, assignment: Assignment, task: Task, phase: Phase) -> Result:
    me = replace(state.me, free_pages=state.me.free_pages + task.pages)
    state, said = _report(replace(state, me=me))
    return state.put(assignment, replace(task, phase=phase, pages=0)), (said,)


def _report(state: Serving) -> tuple[Serving, Send]:
    me = replace(state.me, sequence=state.me.sequence + 1)
    return replace(state, me=me), Send(ROUTER, Report(me))


def _refused(state: Serving, wish: Wish) -> Task:
    return Task(wish, candidates(wish, state.me)[0], Phase.FAILED, 0)
