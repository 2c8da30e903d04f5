"""The router as a pure transition: state and event give the next state and what is to be done.

received -> offered -> assigned -> completed | failed | cancelled
              ^  |         |
              |  +-- rejected, timed out, worker restarted: the next candidate, as long as no token was delivered
              +------------+
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from numem.policy.cluster.events import (
    Accept,
    After,
    Assignment,
    Cancel,
    Complete,
    Delta,
    Effect,
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
from numem.policy.cluster.ranking import Candidate, Wish, Worker, candidates, declined, rank

NOT_ACCEPTED = -1


class Phase(StrEnum):
    """Where a request stands."""

    RECEIVED = "received"
    OFFERED = "offered"
    ASSIGNED = "assigned"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED)


@dataclass(frozen=True, slots=True)
class Routed:
    """A request under way.

    Attributes:
        attempt: of the current assignment, from 1.
        worker, epoch: to whom it is offered or assigned.
        patience: ticks that its first token may take at the worst, by what the worker reported.
        tried: workers that had their chance.
        delivered: tokens that the client has.
        reason: why the last attempt did not do.
    """

    wish: Wish
    phase: Phase = Phase.RECEIVED
    attempt: int = 0
    worker: str = ""
    epoch: int = 0
    patience: int = 0
    tried: frozenset[str] = frozenset()
    delivered: int = 0
    reason: str = ""

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.wish.id, self.attempt)


@dataclass(frozen=True, slots=True)
class Router:
    """Everything a router knows.

    Attributes:
        offer_timeout: ticks until an offer counts as refused.
        progress_timeout: ticks without a token until an assigned request counts as lost, beyond those that its prompt
            takes at the worst.
        ms_per_tick: of the logical clock.
    """

    offer_timeout: int = 10
    progress_timeout: int = 100
    ms_per_tick: float = 1.0
    workers: Mapping[str, Worker] = field(default_factory=dict)
    requests: Mapping[str, Routed] = field(default_factory=dict)

    def put(self, request: Routed) -> "Router":
        return replace(self, requests={**self.requests, request.wish.id: request})


Result = tuple[Router, tuple[Effect, ...]]


def transition(state: Router, event: Event) -> Result:
    """The next state and its effects. What is stale, repeated or unknown changes nothing and has none."""
    match event:
        case Submit(wish):
            if wish.id in state.requests:
                return state, ()
            return _offer(state, Routed(wish))
        case Report(worker):
            return _report(state, worker)
        case Cancel(id):
            request = state.requests.get(id)
            if request is None or request.phase in ENDED:
                return state, ()
            gone, effects = _end(state, request, Phase.CANCELLED, "cancelled by the client")
            return gone, (Send(request.worker, Withdraw(request.assignment)), *effects)
        case Accept() | Reject() | Delta() | Complete() | Fail() | Timer():
            request = state.requests.get(event.assignment.request)
            if request is None or request.phase in ENDED or request.assignment != event.assignment:
                return state, ()
            return _told(state, request, event)
        case _:
            return state, ()


def _told(state: Router, request: Routed, event: Accept | Reject | Delta | Complete | Fail | Timer) -> Result:
    """Something about the current assignment. Messages are fenced by it and not by the phase: a token or a result that
    overtakes its acceptance counts as one."""
    match event:
        case Accept():
            if request.phase is Phase.ASSIGNED:
                return state, ()
            return _assigned(state, request)
        case Delta(_, index):
            if index != request.delivered:
                return state, ()
            request = replace(request, delivered=index + 1)
            later, effects = _assigned(state, request)
            return later, (Emit(request.wish.id, index), *effects)
        case Complete(_, count):
            if count != request.delivered:
                return _end(state, request, Phase.FAILED, f"{request.delivered} of {count} tokens arrived")
            return _end(state, request, Phase.COMPLETED)
        case Reject(_, reason) | Fail(_, reason):
            return _again(state, request, reason)
        case Timer(_, mark):
            if mark != (NOT_ACCEPTED if request.phase is Phase.OFFERED else request.delivered):
                return state, ()
            what = "offer timed out" if mark == NOT_ACCEPTED else "no progress"
            later, effects = _again(state, request, what)
            return later, (Send(request.worker, Withdraw(request.assignment)), *effects)


def _report(state: Router, worker: Worker) -> Result:
    known = state.workers.get(worker.id)
    if known is not None and (worker.epoch, worker.sequence) <= (known.epoch, known.sequence):
        return state, ()
    state = replace(state, workers={**state.workers, worker.id: worker})
    effects: list[Effect] = []
    for request in list(state.requests.values()):
        # What a worker had before its restart is gone.
        if request.phase not in ENDED and request.worker == worker.id and request.epoch < worker.epoch:
            state, more = _again(state, request, "worker restarted")
            effects += more
    return state, tuple(effects)


def _offer(state: Router, request: Routed) -> Result:
    """Offer to the best worker that was not tried yet."""
    workers = [w for w in state.workers.values() if w.id not in request.tried]
    best: Candidate | None = next(iter(rank(request.wish, workers)), None)
    if best is None:
        reasons = declined(request.wish, workers)
        why = request.reason or ", ".join(f"{id}: {reasons[id]}" for id in sorted(reasons)) or "no worker"
        return _end(state, request, Phase.FAILED, why)
    worker = state.workers[best.worker]
    request = replace(
        request,
        phase=Phase.OFFERED,
        attempt=request.attempt + 1,
        worker=best.worker,
        epoch=worker.epoch,
        patience=math.ceil(max(c.ttft_ms for c in candidates(request.wish, worker)) / state.ms_per_tick),
        tried=request.tried | {best.worker},
    )
    offer = Send(best.worker, Offer(request.assignment, request.wish))
    return state.put(request), (offer, After(state.offer_timeout, Timer(request.assignment, NOT_ACCEPTED)))


def _assigned(state: Router, request: Routed) -> Result:
    request = replace(request, phase=Phase.ASSIGNED)
    ticks = state.progress_timeout + (0 if request.delivered else request.patience)
    return state.put(request), (After(ticks, Timer(request.assignment, request.delivered)),)


def _again(state: Router, request: Routed, reason: str) -> Result:
    """The next candidate; none once the client has tokens, of which another worker's need not be the continuation."""
    if request.delivered:
        return _end(state, request, Phase.FAILED, f"{reason} after {request.delivered} tokens")
    return _offer(state, replace(request, reason=reason))


def _end(state: Router, request: Routed, phase: Phase, reason: str = "") -> Result:
    return state.put(replace(request, phase=phase, reason=reason)), (End(request.wish.id, phase.value, reason),)
