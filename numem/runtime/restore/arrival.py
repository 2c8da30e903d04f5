"""Rows of one prompt on their way into pages: computed from the front, loaded from the back.

tokens      0 ............ start .......... front ...... back ............ end ........ n-1 | n
rows        |-- shared ---|-- computed ----|   missing  |----- loaded -----|-- computed ----| pending
                           engine, in steps              durable plane
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numem.errors import InputError
from numem.policy.costs import Costs
from numem.policy.decision import Decision
from numem.policy.two_ended import Part, beaten, expected, step_helps
from numem.runtime.engine import Engine, Span
from numem.runtime.paging.pool import Capacity, Reservation, Route
from numem.runtime.restore.kv import Restored, floors_after, place
from numem.runtime.restore.loader import Load, Loader, Wanted, observe
from numem.runtime.restore.payload import drop

if TYPE_CHECKING:
    from numem.runtime.device.streams import Event

# Fewer rows of one step tell of the step, not of the rows.
PREFILL_ROWS = 16


@dataclass(frozen=True, slots=True)
class Work:
    """Rows to evaluate now. `settle` must be told what became of it.

    Attributes:
        reservation: of these rows alone; None where the arrival holds the pages of all that it loads.
    """

    span: Span
    reservation: Reservation | None

    @property
    def end(self) -> int:
        return self.span.start + len(self.span.tokens)


class Arrival:
    """The way of `tokens` into a route; its last token gives the logits of the first choice.

    One thread owns it, as it owns the pages. `next`, `settle` and `land` are called until `done`. While rows are being
    loaded the route has a pending append over all of them and keeps its length; it is committed when the rows computed
    from the front meet those loaded from the back.

    Attributes:
        route: holds rows [0, route.length).
        front: first row that is not there yet; what `next` gives begins here.
        restored: what the durable plane gave.
        computed: rows evaluated.
        decision: why they come as they do; decision_id of its record.
        took_ms: from the beginning until the last row was there.
        on_done: called then, once.
    """

    def __init__(
        self,
        engine: Engine,
        costs: Costs,
        route: Route,
        tokens: Sequence[int],
        *,
        capacity: Capacity | None = None,
        decision: Decision | None = None,
    ) -> None:
        self.route = route
        self.tokens = tokens
        self.front = route.length
        self.restored = Restored()
        self.computed = 0
        self.decision = decision
        self.decision_id = ""
        self.took_ms = 0.0
        self.on_done: Callable[[Arrival], None] | None = None
        self._began = time.perf_counter()
        self._engine = engine
        self._costs = costs
        self._capacity = capacity
        self._loader: Loader | None = None
        self._load: Load | None = None
        self._wanted: tuple[Wanted, ...] = ()
        self._waits = False
        self._reservation: Reservation | None = None
        # On a device the rows of a chunk are there behind its event; nobody reads them before `_meet` passes over them.
        self._landed: dict[int, tuple[int, Event | None]] = {}
        self._after: Event | None = None
        self._whole = route.length
        self._floors = route.floors
        self._work: Work | None = None
        self._worked = 0.0

    def expect(
        self, loader: Loader, load: Load, wanted: Sequence[Wanted], reservation: Reservation, waits: bool
    ) -> None:
        """Take rows from a load, into pages that are reserved for all of them.

        Args:
            wanted: contiguous chunks from the front.
            waits: compute nothing that the load will bring, however long it takes.
        """
        self._loader, self._load, self._wanted = loader, load, tuple(wanted)
        self._reservation, self._waits = reservation, waits
        # Behind it nobody reads or fills the pages, which were free: what lands need not wait for later steps.
        self._after = self._engine.storage.fence()
        # Said before the first row lands, so that nobody takes what is left out for rows.
        self._set_floors()

    @property
    def done(self) -> bool:
        """Whether every row, the last token's included, is in the route."""
        return self.route.length == len(self.tokens)

    @property
    def loading(self) -> bool:
        """Whether rows may still come from the durable plane."""
        return self._load is not None

    def next(self, budget: int) -> Work | None:
        """Up to `budget` rows to evaluate now; None while waiting for loads is better, and when done.

        Raises:
            CapacityError: too few free pages; nothing has changed.
        """
        if self._work is not None:
            raise InputError("arrival: the last piece of work is not settled; settle it before the next")
        self.land()
        if self.done or budget <= 0:
            return None
        if self._load is not None:
            assert self._reservation is not None and self._loader is not None
            chunk = next(w for w in self._wanted if self.front < w.end)
            if not self._step_helps(self._loader, self._load, chunk):
                return None
            part = self.tokens[self.front : min(self.front + budget, chunk.end)]
            self._loader.claim(self._load, max(self.front + len(part), self._beaten()))
            self._work = Work(Span(self._reservation.pages, self.front, part, "none"), None)
        else:
            part = self.tokens[self.front : self.front + budget]
            reservation = self._engine.reserve(self.route, len(part), self._capacity)
            last = self.front + len(part) == len(self.tokens)
            self._work = Work(Span(reservation.pages, self.front, part, "last" if last else "none"), reservation)
        self._worked = time.perf_counter()
        return self._work

    def settle(self, work: Work, evaluated: bool, ms: float | None = None) -> None:
        """The rows of a piece of work are in their pages, or it failed and is given back.

        Args:
            ms: this work's part of the evaluation; default the time since `next`.
        """
        if work is not self._work:
            raise InputError("arrival: this piece of work is not the pending one")
        self._work = None
        rows = len(work.span.tokens)
        if evaluated:
            if work.reservation is not None:
                self._engine.pool.commit([work.reservation])
            self.computed += rows
            self.front += rows
            if self._whole == work.span.start:
                self._whole = self.front
            self._measure(work, (time.perf_counter() - self._worked) * 1e3 if ms is None else ms)
            self._meet()
        elif work.reservation is not None:
            self._engine.pool.abort([work.reservation])
        elif self._load is not None and self._loader is not None:
            self._loader.claim(self._load, self.front)

    def land(self, wait_s: float = 0.0) -> bool:
        """Write what has been loaded since into pages, waiting up to `wait_s` for something; whether anything came.

        Nothing lands while a piece of work is not settled.
        """
        if self._load is None or self._work is not None:
            return False
        assert self._loader is not None and self._reservation is not None
        taken = self._loader.take(self._load, wait_s)
        news = self._hear()
        nbytes = 0
        began = time.perf_counter()
        try:
            for loaded in taken:
                wanted = loaded.wanted
                if wanted.end <= self.front:
                    loaded.payload.drop()
                    continue
                first = max(self.front, wanted.hit.node.start)
                pages = self._reservation.pages
                event = place(self._engine, pages, wanted.hit, loaded.payload, self.front, self._after)
                self._landed[first] = (wanted.end, event)
                self.restored.tokens += wanted.end - first
                nbytes += wanted.nbytes
        except BaseException:
            drop([loaded.payload for loaded in taken])
            raise
        if nbytes:
            ms = (time.perf_counter() - began) * 1e3
            self.restored.load_ms += ms
            self._costs.observe_page(nbytes, ms)
        self._meet()
        return bool(taken) or news

    def abort(self) -> None:
        """Stop the loads and release the route with all that was reserved."""
        route = self.stop()
        if not route.released:
            self._engine.release(route)

    def stop(self) -> Route:
        """Stop the loads and give back what was reserved; the route, with the rows that it holds, is the caller's."""
        if self._load is not None and self._loader is not None:
            self._loader.cancel(self._load)
            self._load = None
        self._join_landed()
        pending = self._work.reservation if self._work is not None else None
        self._work = None
        for reservation in (pending, self._reservation):
            if reservation is not None:
                self._engine.pool.abort([reservation])
        self._reservation = None
        return self.route

    def finish(self) -> None:
        """Take note of what it cost, once; done when the last row is settled, and harmless afterwards."""
        if not self.done or self.took_ms:
            return
        self.took_ms = (time.perf_counter() - self._began) * 1e3
        if self.on_done is not None:
            self.on_done(self)

    def _step_helps(self, loader: Loader, load: Load, chunk: Wanted) -> bool:
        """Whether to compute rows of `chunk`, the lowest that is missing, rather than to wait."""
        ready, reading, elapsed, pending = loader.snapshot(load)
        pending = [w for w in pending if w.end > self.front]
        if all(w.hit is not chunk.hit for w in (*ready, *reading, *pending)):
            return True  # nothing will bring it
        if self._waits:
            return False
        costs = self._costs
        if not costs.prefill_measured or any(costs.load_ms(w.source, w.nbytes) is None for w in (*reading, *pending)):
            return True  # what is under way will tell
        top = max(w.end for w in (*ready, *reading, *pending))
        return step_helps(
            costs.prefill_ms(self.front, chunk.end - self.front),
            costs.prefill_ms(self.front, top - self.front),
            expected(self._parts(ready), self._parts(reading), elapsed, self._parts(pending)),
        )

    def _beaten(self) -> int:
        """Up to where loads that have not begun would come too late."""
        costs = self._costs
        if self._waits or not costs.prefill_measured:
            return self.front
        missing = ((w.end, costs.load_ms(w.source, w.nbytes) or 0.0) for w in self._wanted if w.end > self.front)
        return beaten(self.front, missing, costs.prefill_ms)

    def _parts(self, chunks: Sequence[Wanted]) -> list[Part]:
        """Predicted cost of chunks; what has been computed meanwhile is not written into pages."""
        costs = self._costs
        return [
            (costs.load_ms(w.source, w.nbytes) or 0.0, costs.page_ms(w.nbytes) if w.end > self.front else 0.0)
            for w in chunks
        ]

    def _measure(self, work: Work, ms: float) -> None:
        rows = len(work.span.tokens)
        if rows == 1:
            self._costs.observe_decode(ms)
        elif rows >= PREFILL_ROWS:
            self._costs.observe_prefill(work.span.start, rows, ms)

    def _hear(self) -> bool:
        """Take note of reads and failures; whether there were failures."""
        assert self._loader is not None and self._load is not None
        reads, failures = self._loader.report(self._load)
        for read in reads:
            nbytes = sum(read.by_tier.values())
            self.restored.bytes += nbytes
            self.restored.read_ms += read.ms
            for tier, part in read.by_tier.items():
                self.restored.by_tier[tier] = self.restored.by_tier.get(tier, 0) + part
            observe(self._costs, read)
        self.restored.failures += failures
        return bool(failures)

    def _set_floors(self) -> None:
        hits = [wanted.hit for wanted in self._wanted]
        self._engine.pool.set_floors(
            self.route, floors_after(self._engine.decoder.spec, hits, self._whole, self._floors)
        )

    def _join_landed(self) -> None:
        """Let nobody write to pages before what is on its way to them is there."""
        for _, event in self._landed.values():
            self._engine.storage.join(event)
        self._landed.clear()

    def _meet(self) -> None:
        """Pass over what has landed at the front; where nothing is missing any more the rows join the route."""
        while self.front in self._landed:
            self.front, event = self._landed.pop(self.front)
            self._engine.storage.join(event)
        if self._load is not None and self.front >= self._wanted[-1].end:
            assert self._loader is not None and self._reservation is not None
            self._loader.cancel(self._load)
            self._hear()
            self._load = None
            # What was computed has the rows of every group, those that the load was to leave out as well.
            self._set_floors()
            self._engine.pool.commit([self._reservation])
            self._reservation = None
        self.finish()
