"""A router and workers on a clock of logical ticks, with faults; what happened is a list that replays to equal states.

Messages take `network_delay` ticks each way. Of a partitioned worker they are lost; of a paused one everything waits;
a crashed one loses all that was under way and comes back, with the next epoch, when it is restarted.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from numem.errors import InputError
from numem.policy.cluster import router as routing
from numem.policy.cluster import worker as working
from numem.policy.cluster.events import ROUTER, After, Effect, Emit, End, Event, Report, Send
from numem.policy.cluster.router import Router
from numem.policy.cluster.worker import Serving

# Messages reach whatever epoch a worker is in; its own timers end with their epoch.
ANY = -1
FAULTS = ("partition", "heal", "pause", "resume", "crash", "restart")


@dataclass(frozen=True, slots=True)
class Fault:
    """At a tick something happens to a worker; `kind` is one of FAULTS."""

    tick: int
    kind: str
    worker: str

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise InputError(f"fault {self.kind!r}: use one of {', '.join(FAULTS)}")


@dataclass(frozen=True, slots=True)
class Step:
    """One transition that took place: who received what (None for a restart), and what followed."""

    tick: int
    at: str
    event: Event | None
    effects: tuple[Effect, ...]


@dataclass(slots=True)
class History:
    """What happened.

    Attributes:
        steps: every transition, in order.
        ends: request -> how it ended; emitted: request -> indices of tokens that the client received.
    """

    steps: list[Step] = field(default_factory=list)
    ends: dict[str, list[End]] = field(default_factory=dict)
    emitted: dict[str, list[int]] = field(default_factory=dict)


class Simulator:
    """Runs scripted events and faults until nothing is left to happen.

    Args:
        workers: by id; each reports itself at tick 0.
    """

    def __init__(self, workers: Iterable[Serving], *, router: Router | None = None, network_delay: int = 1) -> None:
        self.router = router or Router()
        self.workers = {serving.me.id: serving for serving in workers}
        self.history = History()
        self._delay = network_delay
        self._queue: list[tuple[int, int, str, Event | Fault, int]] = []
        self._count = 0
        self._down: set[str] = set()
        self._cut: set[str] = set()
        self._paused: set[str] = set()
        self._held: dict[str, list[tuple[Event, int]]] = {}
        for serving in self.workers.values():
            self._put(0, ROUTER, Report(serving.me))

    def run(
        self, script: Iterable[tuple[int, Event]] = (), faults: Iterable[Fault] = (), *, until: int = 100_000
    ) -> History:
        """Run to the end.

        Args:
            script: (tick, event) that clients send to the router.
        """
        for fault in faults:
            self._put(fault.tick, fault.worker, fault)
        for tick, asked in script:
            self._put(tick, ROUTER, asked)
        while self._queue and self._queue[0][0] <= until:
            tick, _, at, event, epoch = heapq.heappop(self._queue)
            if isinstance(event, Fault):
                self._fault(tick, event)
            elif at == ROUTER:
                self._step(tick, ROUTER, event)
            elif at in self._paused:
                self._held.setdefault(at, []).append((event, epoch))
            elif at in self.workers and at not in self._down and epoch in (ANY, self.workers[at].me.epoch):
                self._step(tick, at, event)
        return self.history

    def _fault(self, tick: int, fault: Fault) -> None:
        at = fault.worker
        match fault.kind:
            case "partition":
                self._cut.add(at)
            case "heal":
                self._cut.discard(at)
            case "pause":
                self._paused.add(at)
            case "resume":
                self._paused.discard(at)
                for event, epoch in self._held.pop(at, []):
                    self._put(tick, at, event, epoch)
            case "crash":
                self._down.add(at)
                self._paused.discard(at)
                self._held.pop(at, None)
            case _:
                if at in self._down:
                    self._down.discard(at)
                    self._step(tick, at, None)

    def _step(self, tick: int, at: str, event: Event | None) -> None:
        effects: tuple[Effect, ...] = ()
        if at != ROUTER:
            self.workers[at], effects = advance(self.workers[at], event)
        elif event is not None:
            self.router, effects = routing.transition(self.router, event)
        self.history.steps.append(Step(tick, at, event, effects))
        for effect in effects:
            self._do(tick, at, effect)

    def _do(self, tick: int, at: str, effect: Effect) -> None:
        match effect:
            case Send(to, event):
                if at not in self._cut and to not in self._cut:
                    self._put(tick + self._delay, to, event)
            case After(ticks, event):
                self._put(tick + ticks, at, event, self.workers[at].me.epoch if at != ROUTER else 0)
            case Emit(request, index):
                self.history.emitted.setdefault(request, []).append(index)
            case End(request):
                self.history.ends.setdefault(request, []).append(effect)

    def _put(self, tick: int, at: str, event: Event | Fault, epoch: int = ANY) -> None:
        heapq.heappush(self._queue, (tick, self._count, at, event, epoch))
        self._count += 1


def advance(serving: Serving, event: Event | None) -> tuple[Serving, tuple[Effect, ...]]:
    """A worker's transition; None is its restart."""
    return working.restarted(serving) if event is None else working.transition(serving, event)


def replay(
    steps: Iterable[Step], workers: Iterable[Serving], router: Router | None = None
) -> tuple[Router, Mapping[str, Serving]]:
    """The states that recorded steps lead to from the same beginning.

    Raises:
        InputError: a transition has other effects now than were recorded.
    """
    at_router = router or Router()
    states = {serving.me.id: serving for serving in workers}
    for number, step in enumerate(steps):
        effects: tuple[Effect, ...] = ()
        if step.at != ROUTER:
            states[step.at], effects = advance(states[step.at], step.event)
        elif step.event is not None:
            at_router, effects = routing.transition(at_router, step.event)
        if effects != step.effects:
            raise InputError(
                f"replay: step {number} at tick {step.tick} had other effects; it was recorded by other rules"
            )
    return at_router, states
