"""One sequence of a request, from submission to outcome: its tokens, rows, text and accounts.

WAITING -> ARRIVING -> DECODING -> ENDED        a preemption leads back to WAITING, with the tokens chosen so far
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from numem.identity.chain import PAGE_TOKENS
from numem.runtime.paging.pool import Capacity, PagePool, Reservation, Route
from numem.runtime.request import Finish, Outcome, Request, Token, TokenStream
from numem.runtime.sampling import Sampler
from numem.runtime.stops import StopStrings

if TYPE_CHECKING:
    from numem.runtime.restore.arrival import Arrival
    from numem.store.memory import Ticket


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    ARRIVING = "arriving"
    DECODING = "decoding"
    ENDED = "ended"


class Text:
    """What a sequence says, up to its first stop string."""

    def __init__(self, stream: TokenStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stops = StopStrings(stop)

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string ended it."""
        return self._stops.push(self._stream.push(token))

    def finish(self) -> str:
        """Text held back until now."""
        text, stopped = self._stops.push(self._stream.finish())
        return text if stopped else text + self._stops.finish()


@dataclass(eq=False, slots=True)
class Entry:
    """A sequence under way.

    Attributes:
        order: of submission; deadline: on the scheduler's clock, or None.
        tokens: prompt and generated ones; while decoding the last one is pending.
        ids: the same as int64, with room for all that may follow.
        route: its rows while decoding; `arrival` has them before that.
        capacity: pages set aside for all that it may still need.
        table: int32 [pages], its page table while decoding, followed by unused entries.
        origin: the entry it was forked from.
        counted: leading rows whose source is in the outcome already.
        tail: (pages of the route, physical page) of a partial tail for whose copy a page was set aside.
        moved: the step in which it last gained rows.
        tickets: of chunks published at its preemption.
    """

    request: Request
    sample: int
    order: int
    submitted: float
    deadline: float | None
    limit: int
    text: Text | None
    state: State = State.WAITING
    sampler: Sampler = field(init=False)
    outcome: Outcome = field(init=False)
    tokens: list[int] = field(init=False)
    ids: np.ndarray = field(init=False)
    table: np.ndarray = field(init=False)
    route: Route | None = None
    arrival: "Arrival | None" = None
    capacity: Capacity | None = None
    origin: "Entry | None" = None
    shared: int = 0
    counted: int = 0
    tail: tuple[int, int] | None = None
    moved: int = 0
    admitted: float | None = None
    tickets: "list[Ticket]" = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.sampler = request.sampler
        if self.sample:
            self.sampler = replace(request.sampler, seed=request.sampler.seed + self.sample)
        self.outcome = Outcome(request, self.sample)
        self.tokens = list(request.tokens)
        self.ids = np.empty(min(len(self.tokens) + request.max_new_tokens, self.limit + 1), dtype=np.int64)
        self.ids[: len(self.tokens)] = self.tokens

    @property
    def name(self) -> str:
        """Unique among all sequences of a scheduler."""
        return f"{self.request.id}#{self.sample}/{self.order}"

    @property
    def target(self) -> list[int]:
        """Tokens that an arrival brings in: all, or all but the pending one where nothing is to be chosen."""
        return self.tokens if self.request.max_new_tokens else self.tokens[:-1]

    @property
    def most_rows(self) -> int:
        """Rows that it may hold in the end: the last token chosen is never evaluated."""
        return min(len(self.request.tokens) + self.request.max_new_tokens - 1, self.limit)

    @property
    def held(self) -> Route | None:
        """The route with its rows, if it has any."""
        return self.arrival.route if self.arrival is not None else self.route

    @property
    def blocked(self) -> bool:
        """Whether what it published at its preemption is still on its way."""
        return any(not ticket.published.done() for ticket in self.tickets)

    def continued(self, new_id: str, sampler: Sampler | None, max_new_tokens: int | None) -> Request:
        """A request that goes on from here; see `Scheduler.fork`."""
        left = self.request.max_new_tokens - len(self.outcome.generated)
        return replace(
            self.request,
            id=new_id,
            tokens=tuple(self.tokens),
            max_new_tokens=left if max_new_tokens is None else max_new_tokens,
            sampler=sampler or self.sampler,
            samples=1,
        )

    def seat(self, route: Route) -> None:
        """Begin to decode on a route that holds every row but the pending token's."""
        self.state, self.route, self.arrival = State.DECODING, route, None
        self.table = np.zeros(-(-max(self.most_rows, route.length) // PAGE_TOKENS) + 1, dtype=np.int32)
        self.retable()

    def retable(self) -> None:
        """Take the page table from the route anew."""
        assert self.route is not None
        self.table[: len(self.route.pages)] = self.route.pages

    def tabulate(self, reservation: Reservation) -> np.ndarray:
        """The page table with a pending append, brought up to date by what the append changes."""
        pages = len(reservation.pages)
        if reservation.added or reservation.replaced:
            fresh = len(reservation.added) + (reservation.replaced is not None)
            self.table[pages - fresh : pages] = reservation.pages[pages - fresh :]
        return self.table[:pages]

    def cut(self, pool: PagePool) -> None:
        """Give up the rows that were decoded ahead of the tokens taken."""
        route = self.route
        if route is not None and route.length >= len(self.tokens):
            self.route = pool.fork(route, len(self.tokens) - 1)
            freed = pool.release(route)
            if self.capacity is not None:
                pool.extend(self.capacity, len(freed))

    def accept(self, token: int, row: np.ndarray) -> tuple[Finish | None, str]:
        """Take a chosen token; why the sequence ends with it, if it does, and the text that is certain now."""
        outcome, request = self.outcome, self.request
        self.ids[len(self.tokens)] = token
        self.tokens.append(token)
        outcome.generated.append(token)
        if request.witness:
            outcome.logits.append(np.array(row, dtype=np.float32))
        text, stopped = self.text.push(token) if self.text is not None else ("", False)
        if len(outcome.generated) >= request.max_new_tokens:
            finish = Finish.LENGTH
        elif token in request.eos:
            finish = Finish.EOS
        elif stopped:
            finish = Finish.STOP
        elif len(self.tokens) > self.limit:
            finish = Finish.CAPACITY
        else:
            outcome.text += text
            return None, text
        if self.text is not None:
            text += self.text.finish()
            self.text = None
        outcome.text += text
        return finish, text

    def told(self, text: str) -> Token:
        """The newest token as it is told."""
        at = len(self.outcome.generated) - 1
        return Token(self.request.id, self.sample, at, self.outcome.generated[at], text)

    def account(self) -> None:
        """Write down where the rows of an arrival came from that has ended, or is being given up.

        Shared rows lie first, then restored ones, then computed ones. Those that were held before, by an admission that a
        preemption undid, go to `again`.
        """
        arrival = self.arrival
        assert arrival is not None
        outcome = self.outcome
        rows = len(self.tokens) if arrival.done else arrival.route.length
        at = 0
        for source, count in (
            ("shared", min(self.shared, rows)),
            ("restored", min(arrival.restored.tokens, max(0, rows - self.shared))),
            ("computed", rows),
        ):
            end = min(rows, at + count)
            again = min(end, self.counted) - at
            if again > 0:
                outcome.again[source] = outcome.again.get(source, 0) + again
            first = min(end, len(self.request.tokens)) - max(at, self.counted)
            if first > 0:
                setattr(outcome, source, getattr(outcome, source) + first)
            at = end
        self.counted = max(self.counted, rows)
        outcome.restore.lookup_ms += arrival.restored.lookup_ms
        outcome.restore.add(arrival.restored)
