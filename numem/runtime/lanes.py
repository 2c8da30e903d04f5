"""Fixed-capacity lanes: many requests over one engine, each with the output it would have alone.

A request is admitted into a free lane: its prompt's rows come from resident pages of another lane (shared), from the
durable plane (restored) or from the model (computed), and its first token follows at once. Then all lanes step
together. One thread owns the engine.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from numem.errors import CapacityError, ContextLengthError, InputError
from numem.identity.chain import PAGE_TOKENS
from numem.runtime.continuation import Session
from numem.runtime.kv import raw, restore_rows
from numem.runtime.pool import Route
from numem.runtime.request import Finish, Outcome, Request
from numem.store.memory import Memory


@dataclass(slots=True)
class _Lane:
    outcome: Outcome
    tokens: list[int]
    route: Route


class Lanes:
    """Runs requests over a session with at most `capacity` at a time.

    Args:
        session: engine and identity.
        capacity: lanes.
        memory: durable plane to restore from, or None.
        tier: tier to restore from (default: the nearest).
        share: reuse resident pages of running requests.
    """

    def __init__(
        self,
        session: Session,
        capacity: int,
        *,
        memory: Memory | None = None,
        tier: str | None = None,
        share: bool = True,
    ) -> None:
        if capacity <= 0:
            raise InputError(f"lanes: capacity {capacity} must be positive")
        self.session = session
        self.capacity = capacity
        self.memory = memory
        self.tier = tier
        self.share = share
        self.decode_tokens = 0
        self.decode_ms = 0.0
        self._lanes: list[_Lane | None] = [None] * capacity

    def run(self, requests: Iterable[Request], progress: Callable[[], None] | None = None) -> Iterator[Outcome]:
        """Yield outcomes as requests finish. Leaving the iterator early releases every lane."""
        waiting = deque(requests)
        for request in waiting:
            self._check(request)
        try:
            while waiting or any(self._lanes):
                for index, lane in enumerate(self._lanes):
                    if lane is None and waiting and self._fits(waiting[0]):
                        yield from self._admit(index, waiting.popleft())
                if waiting and not any(self._lanes) and not self._fits(waiting[0]):
                    self._refuse(waiting[0])
                yield from self._step()
                if progress:
                    progress()
        finally:
            for index in range(self.capacity):
                self._retire(index)

    def _check(self, request: Request) -> None:
        limit = self.session.engine.max_position
        if not request.tokens or request.max_new_tokens < 0:
            raise InputError(f"request {request.id!r}: the prompt is empty or max_new_tokens is negative")
        if len(request.tokens) > limit:
            raise ContextLengthError(
                f"request {request.id!r}: {len(request.tokens)} tokens exceed max_position {limit}; "
                "load the model with a larger max_position or shorten the prompt"
            )

    def _need(self, request: Request) -> int:
        engine = self.session.engine
        return engine.pool.pages_for(min(len(request.tokens) + request.max_new_tokens, engine.max_position))

    def _fits(self, request: Request) -> bool:
        # What the other lanes may still grow by is kept for them, so that no lane ever starves another.
        engine = self.session.engine
        growth = sum(max(0, self._need(lane.outcome.request) - len(lane.route.pages)) for lane in self._lanes if lane)
        # One page more where a partial tail may be shared with a running lane and copied.
        return self._need(request) + growth + any(self._lanes) <= engine.pool.free

    def _refuse(self, request: Request) -> None:
        pool = self.session.engine.pool
        raise CapacityError(
            f"request {request.id!r}: needs {self._need(request)} pages and the pool has {pool.free} of {pool.physical} "
            "free with no lane running; open a larger pool"
        )

    def _admit(self, index: int, request: Request) -> Iterator[Outcome]:
        began = time.perf_counter()
        outcome = Outcome(request)
        tokens = list(request.tokens)
        engine = self.session.engine
        route, outcome.shared = self._resident(tokens)
        if self.memory is not None:
            try:
                route = self._restore(route, tokens, outcome)
            except BaseException:
                if not route.released:
                    engine.release(route)
                raise
        outcome.computed = len(tokens) - outcome.shared - outcome.restored
        lane = self._lanes[index] = _Lane(outcome, tokens, route)
        if request.max_new_tokens == 0:
            if outcome.computed > 1:
                engine.append([(route, tokens[route.length : -1])], logits="none")
            yield self._finish(index, Finish.LENGTH)
            return
        (logits,) = engine.append([(route, tokens[route.length :])])
        finish = self._accept(lane, logits, len(tokens) - 1)
        outcome.ttft_ms = (time.perf_counter() - began) * 1e3
        if finish:
            yield self._finish(index, finish)

    def _resident(self, tokens: Sequence[int]) -> tuple[Route, int]:
        """A route over the longest prefix that a running lane holds, and its length."""
        engine = self.session.engine
        best, length = None, 0
        wanted = np.asarray(tokens[:-1], dtype=np.int64)
        for lane in self._lanes if self.share else ():
            if lane is None:
                continue
            n = min(len(wanted), lane.route.length)
            differs = np.asarray(lane.tokens[:n], dtype=np.int64) != wanted[:n]
            common = int(np.argmax(differs)) if differs.any() else n
            if common > length:
                best, length = lane.route, common
        if best is None or length < PAGE_TOKENS:
            return engine.pool.allocate(), 0
        return engine.pool.fork(best, length), length

    def _restore(self, route: Route, tokens: Sequence[int], outcome: Outcome) -> Route:
        """Load durable rows beyond the resident ones."""
        assert self.memory is not None
        engine = self.session.engine
        route, outcome.restore, _ = restore_rows(
            self.memory, engine, self.session.identity.scope, route, tokens, tier=self.tier
        )
        outcome.restored = outcome.restore.tokens
        return route

    def _step(self) -> Iterator[Outcome]:
        active = [(i, lane) for i, lane in enumerate(self._lanes) if lane]
        if not active:
            return
        began = time.perf_counter()
        full = [i for i, lane in active if lane.route.length >= self.session.engine.max_position]
        for index in full:
            yield self._finish(index, Finish.CAPACITY)
        active = [(i, lane) for i, lane in active if i not in full]
        if not active:
            return
        rows = self.session.engine.append([(lane.route, lane.tokens[-1:]) for _, lane in active])
        ended = []
        for (index, lane), logits in zip(active, rows, strict=True):
            finish = self._accept(lane, logits, len(lane.tokens) - 1)
            if finish:
                ended.append((index, finish))
        elapsed = (time.perf_counter() - began) * 1e3
        self.decode_ms += elapsed
        self.decode_tokens += len(active)
        for _, lane in active:
            lane.outcome.step_ms += elapsed
        for index, finish in ended:
            yield self._finish(index, finish)

    def _accept(self, lane: _Lane, logits: np.ndarray, position: int) -> Finish | None:
        outcome = lane.outcome
        request = outcome.request
        token = request.sampler.choose(logits, position, self.session.engine.decoder.vocab)
        lane.tokens.append(token)
        outcome.generated.append(token)
        if request.witness:
            outcome.logits.append(logits.copy())
        if len(outcome.generated) >= request.max_new_tokens:
            return Finish.LENGTH
        return Finish.EOS if token in request.eos else None

    def _finish(self, index: int, finish: Finish) -> Outcome:
        lane = self._lanes[index]
        assert lane is not None
        lane.outcome.finish = finish
        if lane.outcome.request.witness:
            lane.outcome.kv = raw(self.session.engine.storage.save(lane.route.pages, 0, lane.route.length))
        self._retire(index)
        return lane.outcome

    def _retire(self, index: int) -> None:
        lane = self._lanes[index]
        self._lanes[index] = None
        if lane and not lane.route.released:
            self.session.engine.release(lane.route)
