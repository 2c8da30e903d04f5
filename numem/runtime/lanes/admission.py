"""Who gets a lane: sources of rows, pages set aside, room made for the first in line.

first in line   follows a leader?  -> parked until the leader holds the shared rows
                fits?              -> fork of the shared rows, pages set aside, arrival begins
                kept routes go?    -> residency.make_room
                lower priorities?  -> preempted, the lowest and latest first, only if that makes it fit
                                      else everybody waits: nobody overtakes the first for pages
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from numem.errors import CapacityError, ContextLengthError, InputError
from numem.identity.chain import pack_tokens
from numem.policy.decision import Alternative, Decision
from numem.runtime.engine import Engine
from numem.runtime.lanes.leaving import Leaving
from numem.runtime.lanes.sequence import Entry, State
from numem.runtime.lanes.sharing import Source, find_source, freed_pages, full_pages, pages_needed, tail_to_copy
from numem.runtime.lanes.waiting import Waiting
from numem.runtime.paging.pool import Route
from numem.runtime.request import Finish, Request
from numem.runtime.restore.arrivals import Arrivals

if TYPE_CHECKING:
    from numem.runtime.lanes.scheduler import Scheduler
    from numem.runtime.paging.residency import Log


class Admission:
    """Admits waiting entries of a scheduler.

    Args:
        leaving: holds pages of ended sequences until they are captured.
    """

    def __init__(
        self, scheduler: "Scheduler", leaving: Leaving, arrivals: Arrivals, decisions: "Log | None", share: bool
    ) -> None:
        self._scheduler = scheduler
        self._leaving = leaving
        self._arrivals = arrivals
        self._decisions = decisions
        self._share = share
        self._stuck: tuple[Entry, int] | None = None

    def changed(self) -> None:
        """Pages or lanes may have become free: the first in line may fit now."""
        self._stuck = None

    def admit(self, waiting: Waiting, running: dict[Entry, None]) -> None:
        """Admit from the front of the line until somebody does not fit."""
        apart = []
        try:
            while (entry := waiting.peek()) is not None:
                if entry.blocked:
                    apart.append(waiting.pop())
                elif not self._admit(entry, waiting, running):
                    break
        finally:
            for entry in apart:
                waiting.push(entry)

    def _admit(self, entry: Entry, waiting: Waiting, running: dict[Entry, None]) -> bool:
        """Admit, park or fail the first in line; whether the next may try."""
        s = self._scheduler
        if not self._may_fit(entry, running):
            return False
        source = self._source(entry, running)
        if source.leader is not None:
            waiting.park(source.leader, source.boundary)
            return True
        try:
            route, source = self._place(entry, source, running)
        except CapacityError as error:
            if running or len(self._leaving):
                self._stuck = (entry, s.engine.pool.free)
                return False
            s.failed(entry, error)
            return True
        waiting.discard(entry)
        self._begin(entry, route, source, running)
        return True

    def _may_fit(self, entry: Entry, running: dict[Entry, None]) -> bool:
        if self._stuck == (entry, self._scheduler.engine.pool.free):
            return False
        if len(running) < self._scheduler.capacity:
            return True
        return any(other.request.priority < entry.request.priority for other in running)

    def _source(self, entry: Entry, running: dict[Entry, None]) -> Source:
        s = self._scheduler
        return find_source(
            entry, running, s.engine.pool, s.residency, share=self._share, moving_since=s.steps - s.stall_steps
        )

    def _place(self, entry: Entry, source: Source, running: dict[Entry, None]) -> tuple[Route, Source]:
        """A route over the shared rows, with a lane free and the pages of all rows to come set aside; and what it shares.

        A partial tail takes a page more than the rows need, as long as its other holder stays. Where that does not fit,
        the full pages before it are shared.

        Raises:
            CapacityError: it does not fit; nothing has changed.
        """
        try:
            return self._fork(entry, source, running), source
        except CapacityError:
            full = full_pages(self._scheduler.engine.pool, source)
            if full.length == source.length:
                raise
            return self._fork(entry, full, running), full

    def _fork(self, entry: Entry, source: Source, running: dict[Entry, None]) -> Route:
        """`_place` with all of the shared rows."""
        pool = self._scheduler.engine.pool
        tail = tail_to_copy(pool, source.owner, source.length)
        need = pages_needed(pool, entry, source.length)
        # Fork first: what the fork holds stays, whoever has to go.
        route = pool.allocate() if source.route is None else pool.fork(source.route, source.length)
        try:
            self._room(entry, need + (tail is not None), running)
            entry.capacity = pool.capacity(need)
            self._set_tail_aside(source.owner, tail)
        except BaseException:
            self._scheduler.engine.release(route)
            raise
        return route

    def _set_tail_aside(self, owner: Entry | None, tail: tuple[int, int] | None) -> None:
        if tail is not None and owner is not None and owner.capacity is not None:
            # The same capacity: an arrival of the owner draws from it too.
            self._scheduler.engine.pool.extend(owner.capacity, 1)
            owner.tail = tail

    def _room(self, entry: Entry, pages: int, running: dict[Entry, None]) -> None:
        """Make a lane and pages free, by evictions first and preemptions where these are not enough.

        Raises:
            CapacityError: it cannot be done; nothing has changed.
        """
        s = self._scheduler
        pool, residency = s.engine.pool, s.residency
        available = pool.free
        if available < pages and residency is not None:
            if len(running) < s.capacity:
                plan = residency.make_room(pages, request=entry.request.id)
                if plan.admissible:
                    return
            else:
                plan = residency.plan(pages)
            available = plan.available_pages
        victims: list[Entry] = []
        able = [other for other in running if other.request.priority < entry.request.priority]
        able.sort(key=lambda other: (other.request.priority, -other.order))
        for other in able:
            if available + freed_pages(pool, victims) >= pages and len(running) - len(victims) < s.capacity:
                break
            victims.append(other)
        available += freed_pages(pool, victims)
        if available < pages or len(running) - len(victims) >= s.capacity:
            raise CapacityError(
                f"request {entry.request.id!r}: needs {pages} pages and {available} of {pool.physical} can be had; "
                "release continuations or open a larger pool"
            )
        if victims:
            self._record(entry, victims, able, pages)
            for other in victims:
                s.undo(other)
        if residency is not None and pool.free < pages:
            residency.make_room(pages, request=entry.request.id)

    def _record(self, entry: Entry, victims: Sequence[Entry], able: Sequence[Entry], pages: int) -> None:
        if self._decisions is None:
            return
        pool = self._scheduler.engine.pool
        chosen = ",".join(other.name for other in victims)
        alternatives = [
            Alternative(
                other.name,
                terms={"priority": other.request.priority, "pages": freed_pages(pool, (other,))},
            )
            for other in able
            if other.name != chosen
        ]
        self._decisions.record(
            Decision(
                kind="preempt",
                request=entry.request.id,
                subject=b"",
                policy="priority",
                inputs={"priority": entry.request.priority, "pages": pages, "free": pool.free},
                alternatives=(
                    Alternative("wait", declined="a lower priority runs"),
                    *alternatives,
                    Alternative(chosen, terms={"sequences": len(victims)}),
                ),
                choice=chosen,
            )
        )

    def _begin(self, entry: Entry, route: Route, source: Source, running: dict[Entry, None]) -> None:
        """Put an entry into a lane; its missing rows are on their way from now on."""
        s = self._scheduler
        now = s.clock()
        if entry.admitted is None:
            entry.admitted = now
            entry.outcome.queue_ms = (now - entry.submitted) * 1e3
        if s.residency is not None and source.route is not None and source.owner is None:
            s.residency.used(source.route)
        running[entry] = None
        entry.state, entry.shared, entry.moved, entry.origin = State.ARRIVING, source.length, s.steps, None
        entry.tickets = []
        if not entry.target:
            # One token and nothing to generate: there is no row to hold.
            entry.route, entry.outcome.computed = route, 1
            s.ended(entry, Finish.LENGTH)
            return
        try:
            entry.arrival = self._arrivals.begin(route, entry.target, request=entry.request.id, capacity=entry.capacity)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, it is this sequence that failed
            if not route.released:
                s.engine.release(route)
            s.failed(entry, error)

    def split(
        self, leader: Entry, samples: Sequence[Entry], running: dict[Entry, None], waiting: Waiting
    ) -> list[Entry]:
        """Those of the leader's samples that wait and can have a lane now: they continue from its whole prompt, and their
        first tokens are chosen from the logits of the leader's first. The others share the prompt's rows as any request
        does."""
        s = self._scheduler
        pool, started = s.engine.pool, []
        route = leader.route
        assert route is not None
        for entry in samples:
            if entry.state is not State.WAITING or entry.outcome.preempted:
                continue
            if len(running) >= s.capacity:
                break
            tail = tail_to_copy(pool, leader, route.length)
            need = pages_needed(pool, entry, route.length)
            if pool.free < need + (tail is not None):
                break
            entry.capacity = pool.capacity(need)
            self._set_tail_aside(leader, tail)
            waiting.discard(entry)
            now = s.clock()
            entry.admitted, entry.outcome.queue_ms = now, (now - entry.submitted) * 1e3
            entry.outcome.shared = entry.counted = route.length
            entry.seat(pool.fork(route))
            running[entry] = None
            started.append(entry)
        return started


def check_request(request: Request, engine: Engine, *, texts: bool, durable: bool) -> None:
    """Refuse a request that can never run.

    Args:
        texts: whether ids are made into text; durable: whether there is a memory to publish to.

    Raises:
        InputError: what is not there is asked for, no tokens, ids outside the vocabulary, a negative number of tokens to
            generate, no samples, a deadline that is no number.
        ContextLengthError: the prompt passes max_position.
        CapacityError: more pages than there are.
    """
    name, limit = f"request {request.id!r}", engine.max_position
    if request.stop and not texts:
        raise InputError(f"{name}: has stop strings, and the scheduler was made without `detokenize`")
    if request.publish and not durable:
        raise InputError(f"{name}: is to be published, and the scheduler was made without a memory")
    if not request.tokens or request.max_new_tokens < 0 or request.samples < 1:
        raise InputError(f"{name}: the prompt is empty, max_new_tokens is negative, or samples is not positive")
    if request.deadline_s is not None and math.isnan(request.deadline_s):
        raise InputError(f"{name}: deadline_s is no number")
    ids = np.frombuffer(pack_tokens(request.tokens), dtype=">i8")
    if any(isinstance(t, bool) for t in request.tokens) or ids.min() < 0 or ids.max() >= engine.decoder.vocab:
        raise InputError(f"{name}: token ids must be integers in [0, {engine.decoder.vocab})")
    if len(request.tokens) > limit:
        raise ContextLengthError(
            f"{name}: {len(request.tokens)} tokens exceed max_position {limit}; "
            "load the model with a larger max_position or shorten the prompt"
        )
    need = engine.pool.pages_for(min(len(request.tokens) + request.max_new_tokens - 1, limit))
    if need > engine.pool.physical:
        raise CapacityError(f"{name}: needs {need} pages and the pool has {engine.pool.physical}; open a larger pool")
