"""The scheduler: many requests over one engine, each with the output it would have alone.

submit -> waiting -> admitted into a lane: pages set aside, shared rows forked, the others on their way (arrival)
                       each step: one evaluation of a decode row per decoding lane and prefill pieces of arriving ones
       <- preempted    |
                       ended: outcome out; state published, kept by the residency, or released

One thread calls every method and owns pages and model. What a sequence generates depends on its request alone.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from numem.errors import ClosedError, InputError, ModelError
from numem.identity.chain import CHUNK_TOKENS
from numem.runtime.ahead import AHEAD_MS
from numem.runtime.continuation import Session
from numem.runtime.lanes.admission import Admission, check_request
from numem.runtime.lanes.ahead import DecodeAhead
from numem.runtime.lanes.batch import Batch, choose, commit, evaluate, grants
from numem.runtime.lanes.iteration import Limits
from numem.runtime.lanes.leaving import Leaving
from numem.runtime.lanes.sequence import Entry, State, Text
from numem.runtime.lanes.waiting import Deadlines, Waiting
from numem.runtime.request import Finish, Outcome, Request, Token, TokenStream
from numem.runtime.restore.arrivals import Arrivals
from numem.runtime.sampling import Sampler

if TYPE_CHECKING:
    from numem.lineage.decisions import DecisionLog
    from numem.runtime.paging.residency import Residency
    from numem.store.memory import Memory

__all__ = ["Scheduler", "Token"]

# The longest that an idle step waits for loads and publications.
PAUSE_S = 0.02


class Scheduler:
    """Runs requests over a session with at most `capacity` at a time.

    Args:
        session: engine and identity.
        capacity: lanes.
        memory: durable plane to restore from and publish to, or None.
        tier: tier to restore from (default: the nearest).
        arrivals: how rows of a prompt come into pages; default: by what is measured to be soonest there, restored from
            the memory, computed, or both at once.
        residency: keeps the pages of ended sequences for prompts to come; None: nothing is kept.
        decisions: where preemptions are recorded, or None.
        detokenize: makes a stream that turns ids into text, for texts and stop strings.
        max_batched_tokens: rows of one step.
        prefill_chunk: no prefill piece crosses a multiple of it.
        minimum_prefill_tokens: rows of a step kept for prefill while any waits. Default: an eighth of a step with more
            than one lane, else none. It matters only where lanes outnumber the other rows: prompts then arrive at an
            eighth of the full rate at least, and decoding loses an eighth of its rows at most.
        share: use the pages of running and kept sequences with a common prefix.
        clock: seconds; deadlines and all times are read from it.
        on_token: told each generated token, at the end of the step that chose it.
        ahead_ms: on a device, the time that tokens may wait to be told while those behind them are decoded.
    """

    def __init__(
        self,
        session: Session,
        capacity: int,
        *,
        memory: "Memory | None" = None,
        tier: str | None = None,
        arrivals: Arrivals | None = None,
        residency: "Residency | None" = None,
        decisions: "DecisionLog | None" = None,
        detokenize: Callable[[], TokenStream] | None = None,
        max_batched_tokens: int = 512,
        prefill_chunk: int = CHUNK_TOKENS,
        minimum_prefill_tokens: int | None = None,
        share: bool = True,
        clock: Callable[[], float] = time.monotonic,
        on_token: Callable[[Token], None] | None = None,
        ahead_ms: float = AHEAD_MS,
    ) -> None:
        if minimum_prefill_tokens is None:
            minimum_prefill_tokens = max(1, max_batched_tokens // 8) if capacity > 1 else 0
        self.limits = Limits(max_batched_tokens, capacity, prefill_chunk, minimum_prefill_tokens=minimum_prefill_tokens)
        self.session = session
        self.engine = session.engine
        self.capacity = capacity
        self.stall_steps = 32  # without a new row, after which an arriving sequence is no longer waited for
        self.memory = memory
        self.decode_tokens = 0
        self.decode_ms = 0.0
        self.steps = 0
        self._detokenize = detokenize
        self.clock = clock
        self._on_token = on_token
        self._order = 0
        self._entries: dict[str, list[Entry]] = {}
        self._waiting = Waiting()
        self._running: dict[Entry, None] = {}
        self._leaving = Leaving(session, memory, residency)
        self._deadlines = Deadlines()
        self._outcomes: list[Outcome] = []
        self._told: deque[Token] = deque()
        self._closed = False
        self._owns_arrivals = arrivals is None
        self._arrivals = arrivals or Arrivals(session, memory, tier=tier, decisions=decisions)
        self._admission = Admission(self, self._leaving, self._arrivals, decisions, share)
        self._ahead = DecodeAhead(self, ahead_ms)

    # callers

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of requests with a sequence that has no lane, the first in line first."""
        return tuple(dict.fromkeys(entry.request.id for entry in self._waiting))

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of requests with a sequence in a lane, in order of admission."""
        return tuple(dict.fromkeys(entry.request.id for entry in self._running))

    @property
    def residency(self) -> "Residency | None":
        """What keeps the pages of ended sequences; may be changed between steps."""
        return self._leaving.residency

    @residency.setter
    def residency(self, residency: "Residency | None") -> None:
        self._leaving.residency = residency

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do, publish or tell."""
        return not (self._running or len(self._waiting) or self._outcomes or len(self._leaving) or self._told)

    def submit(self, request: Request) -> None:
        """Let a request wait for lanes, one per sample.

        Raises:
            InputError: a prompt without tokens or with ids outside the vocabulary, an id that has not ended, stop
                strings without a tokenizer, publication without a memory.
            ContextLengthError: the prompt passes max_position.
            CapacityError: more pages than the pool has.
        """
        self._check(request)
        self._enter(request)

    def cancel(self, request_id: str) -> bool:
        """End all sequences of a request as cancelled, wherever they are; whether there were any."""
        entries = tuple(self._entries.get(request_id, ()))
        for entry in entries:
            self.ended(entry, Finish.CANCELLED)
        return bool(entries)

    def preempt(self, request_id: str) -> bool:
        """Take the lanes of a request's sequences; they wait again in their place. Whether any had one.

        The full chunks of what they hold are published, if there is a memory; the pages are given back.
        """
        mine = [entry for entry in self._running if entry.request.id == request_id]
        for entry in mine:
            self.undo(entry)
        return bool(mine)

    def fork(
        self, request_id: str, new_id: str, sampler: Sampler | None = None, max_new_tokens: int | None = None
    ) -> None:
        """Let the first running sequence of a request continue as two.

        The new one is a request of its own: its prompt is all tokens so far, its output begins after them.

        Args:
            sampler: default: that of the sequence.
            max_new_tokens: default: as many as the sequence has left.

        Raises:
            InputError: no sequence of the request is decoding; or as `submit`.
        """
        origin = next((e for e in self._running if e.request.id == request_id and e.state is State.DECODING), None)
        if origin is None:
            raise InputError(f"fork: no sequence of request {request_id!r} is decoding")
        request = origin.continued(new_id, sampler, max_new_tokens)
        self._check(request)
        self._enter(request, origin)

    def step(self) -> list[Outcome]:
        """One iteration; outcomes that ended since the last one.

        Raises:
            What the forward pass or `on_token` raises. After a failed pass everything is as before the step.
        """
        if self._closed:
            raise ClosedError("scheduler: used after close")
        self.steps += 1
        self._collect()
        self.expire()
        self._land()
        self._admission.admit(self._waiting, self._running)
        if not (self._ahead.run(self._running, self._deadlines.soonest) or self._iterate()):
            self._pause()
        self.tell()
        ended, self._outcomes = self._outcomes, []
        return ended

    def run(self, requests: Iterable[Request], progress: Callable[[], None] | None = None) -> Iterator[Outcome]:
        """Yield outcomes as requests end. Requests are taken as lanes become free, a few ahead.

        Leaving the iterator early ends what it took and has not ended, and releases all it held.
        """
        source, mine = iter(requests), set[str]()
        more = True
        try:
            while more or not self.idle:
                while more and len(self._waiting) < self.capacity:
                    request = next(source, None)
                    if request is None:
                        more = False
                        break
                    self.submit(request)
                    mine.add(request.id)
                for outcome in self.step():
                    if outcome.request.id not in self._entries:
                        mine.discard(outcome.request.id)
                    yield outcome
                if progress:
                    progress()
        finally:
            for request_id in mine:
                self.cancel(request_id)
            self._outcomes = [o for o in self._outcomes if o.request.id not in mine]

    def close(self) -> None:
        """End everything as cancelled and give all pages back; what is being published is captured first."""
        for request_id in list(self._entries):
            self.cancel(request_id)
        self._leaving.close()
        if self._owns_arrivals and not self._closed:
            self._arrivals.close()
        self._closed = True

    # entering and leaving

    def _check(self, request: Request) -> None:
        if self._closed:
            raise ClosedError("scheduler: used after close")
        if request.id in self._entries or request.id in self._leaving:
            raise InputError(f"request {request.id!r}: this id is in use by a request that has not ended")
        check_request(request, self.engine, texts=self._detokenize is not None, durable=self.memory is not None)

    def _enter(self, request: Request, origin: Entry | None = None) -> None:
        now = self.clock()
        deadline = None if request.deadline_s is None else now + request.deadline_s
        entries = []
        for sample in range(request.samples):
            text = Text(self._detokenize(), request.stop) if self._detokenize is not None else None
            entry = Entry(request, sample, self._order, now, deadline, self.engine.max_position, text)
            entry.origin = origin
            self._order += 1
            entries.append(entry)
        self._entries[request.id] = entries
        for entry in entries.copy():
            self._waiting.push(entry)
            self._deadlines.push(entry)

    def ended(self, entry: Entry, finish: Finish, error: str = "") -> None:
        """End a sequence wherever it is."""
        if self._leaving.end(entry, finish, error):
            self._outcomes.append(entry.outcome)
        self._waiting.discard(entry)
        mine = self._entries[entry.request.id]
        mine.remove(entry)
        if not mine:
            del self._entries[entry.request.id]
        self._vacated(entry)

    def undo(self, entry: Entry) -> None:
        """Preempt a running entry."""
        self._leaving.undo(entry)
        self._waiting.push(entry)
        self._vacated(entry)

    def _vacated(self, entry: Entry) -> None:
        """Its lane is free; followers go their own way."""
        self._running.pop(entry, None)
        self._waiting.release(entry)
        self._admission.changed()

    def failed(self, entry: Entry, error: Exception) -> None:
        """End one sequence by its error; the others go on."""
        self.ended(entry, Finish.ERROR, str(error) or type(error).__name__)

    # one iteration

    def _collect(self) -> None:
        published = self._leaving.collect()
        if published:
            self._outcomes += published
            self._admission.changed()

    def expire(self) -> None:
        """End the sequences whose time is up."""
        while (entry := self._deadlines.pop(self.clock())) is not None:
            self.ended(entry, Finish.DEADLINE)

    def _land(self, wait_s: float = 0.0) -> bool:
        """Write what was loaded into pages; whether anything came."""
        came = False
        for entry in [e for e in self._running if e.arrival is not None]:
            assert entry.arrival is not None
            try:
                if entry.arrival.land(0.0 if came else wait_s):
                    came = True
                    self._advanced(entry)
            except Exception as error:  # noqa: BLE001 - whatever a loader raises, it is this sequence that failed
                self.failed(entry, error)
        self._waiting.release_stalled(self.steps - self.stall_steps)
        return came

    def _advanced(self, entry: Entry) -> None:
        entry.moved = self.steps
        route = entry.held
        if route is not None and route.pending is None:
            self._waiting.wake(entry, route.length)

    def _iterate(self) -> bool:
        """Evaluate, choose and commit, then take the tokens; whether there was anything to evaluate."""
        began = self.clock()
        batch = evaluate(self.engine, *grants(self.limits, self._running))
        elapsed_ms = (self.clock() - began) * 1e3
        commit(self.engine, batch, elapsed_ms)
        decoding = batch.decoding
        if decoding:
            self.decode_tokens += decoding
            self.decode_ms += elapsed_ms * decoding / batch.evaluated
        for at, entry in enumerate(batch.entries):
            if at < decoding:
                entry.outcome.step_ms += elapsed_ms
            else:
                self._arrived(entry)
            token = batch.chosen[at]
            if token is not None:
                self._chosen(entry, token, batch, at)
            elif entry.state is State.DECODING:
                self.ended(entry, Finish.LENGTH)
        for entry, error in batch.broken:
            self.failed(entry, error)
        return bool(batch.entries or batch.broken)

    def _arrived(self, entry: Entry) -> None:
        """A piece of an arrival is settled: let followers know, and decode if it was the last."""
        self._advanced(entry)
        arrival = entry.arrival
        assert arrival is not None
        if arrival.done:
            arrival.finish()
            entry.account()
            entry.seat(arrival.route)

    def _chosen(self, entry: Entry, token: int | ModelError, batch: Batch, at: int) -> None:
        """An entry's token was chosen from a row of a batch; other samples of its request choose their first from the
        same one."""
        if not (entry.outcome.generated or isinstance(token, ModelError)):
            assert entry.admitted is not None
            entry.outcome.ttft_ms = (self.clock() - entry.admitted) * 1e3
            samples = self._entries[entry.request.id]
            for sample in self._admission.split(entry, samples, self._running, self._waiting):
                (first,) = choose(self.engine, batch, [(at, sample)])
                assert first is not None
                self._chosen(sample, first, batch, at)
        self.take(entry, token, batch.rows[at])

    def take(self, entry: Entry, token: int | ModelError, row: np.ndarray) -> None:
        """Give an entry its next token, or the error it ends with."""
        if isinstance(token, ModelError):
            self.failed(entry, token)
            return
        try:
            finish, text = entry.accept(token, row)
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises, it is this sequence that failed
            entry.text = None
            self.failed(entry, error)
            return
        if self._on_token is not None:
            self._told.append(entry.told(text))
        if finish is not None:
            self.ended(entry, finish)

    def tell(self) -> None:
        """Tell the tokens taken since the last time."""
        while self._told and self._on_token is not None:
            self._on_token(self._told.popleft())

    def _pause(self) -> None:
        """Nothing to evaluate: wait a little for what is on its way."""
        if self._land(PAUSE_S) or self._outcomes:
            return
        self._leaving.wait(self._waiting, PAUSE_S)
