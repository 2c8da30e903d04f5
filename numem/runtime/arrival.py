"""Rows of one prompt on their way into pages: computed from the front, loaded from the back.

tokens      0 ............ start .......... front ...... back ............ end ........ n-1 | n
rows        |-- shared ---|-- computed ----|   missing  |----- loaded -----|-- computed ----| pending
                           engine, in steps              durable plane
"""

from collections.abc import Sequence
from dataclasses import dataclass

from numem.runtime.engine import Engine, Span
from numem.runtime.kv import Restored, restore_rows
from numem.runtime.pool import Reservation, Route
from numem.store.memory import Memory


@dataclass(frozen=True, slots=True)
class Work:
    """Rows to evaluate now. `settle` must be told what became of it."""

    span: Span
    reservation: Reservation

    @property
    def end(self) -> int:
        return self.span.start + len(self.span.tokens)


class Arrival:
    """The way of `tokens` into a route; its last token gives the logits of the first choice.

    One thread owns it, as it owns the pages. `next`, `settle` and `land` are called until `done`.

    Attributes:
        route: holds rows [0, route.length).
        restored: what the durable plane gave.
        computed: rows evaluated.
    """

    def __init__(
        self, engine: Engine, scope: bytes, route: Route, tokens: Sequence[int], memory: Memory | None, tier: str | None
    ) -> None:
        self.engine = engine
        self.route = route
        self.tokens = tokens
        self.restored = Restored()
        self.computed = 0
        if memory is not None:
            self.route, self.restored, _ = restore_rows(memory, engine, scope, route, tokens, tier=tier)

    @property
    def done(self) -> bool:
        """Whether every row, the last token's included, is in the route."""
        return self.route.length == len(self.tokens)

    def next(self, budget: int) -> Work | None:
        """Up to `budget` rows to evaluate now; None while waiting for loads is better.

        Raises:
            CapacityError: too few free pages; nothing has changed.
        """
        at = self.route.length
        part = self.tokens[at : at + budget]
        reservation = self.engine.reserve(self.route, len(part))
        last = at + len(part) == len(self.tokens)
        return Work(Span(reservation.pages, at, part, "last" if last else "none"), reservation)

    def settle(self, work: Work, evaluated: bool) -> None:
        """The rows of a piece of work are in their pages, or it failed and is given back."""
        if evaluated:
            self.engine.pool.commit([work.reservation])
            self.computed += len(work.span.tokens)
        else:
            self.engine.pool.abort([work.reservation])

    def land(self, wait_s: float = 0.0) -> bool:
        """Write what has been loaded since into pages, waiting up to `wait_s` for something; whether anything came."""
        return False

    def abort(self) -> None:
        """Stop the loads and release the route with all that was reserved."""
        if not self.route.released:
            self.engine.release(self.route)
