"""Steps in which nothing is to be done but to decode, several at a time where the engine can.

reserve k rows a lane | k steps are under way on the device | the first tokens come: commit | take and tell them, ...

Where a sequence ends or loses its lane before its last row, `Entry.cut` gives up the rows behind that; the device may
still be writing them, and whatever is done with their pages afterwards comes after that on it.

What is generated does not depend on k: tokens, ends and what is told come in the order of single steps.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from numem.errors import CapacityError, InputError
from numem.runtime.ahead import AHEAD_STEPS
from numem.runtime.device.state import Step
from numem.runtime.lanes.sequence import Entry, State
from numem.runtime.paging.route import Reservation
from numem.runtime.sampling import not_finite

if TYPE_CHECKING:
    from numem.runtime.lanes.scheduler import Scheduler

_NO_ROW = np.empty(0, dtype=np.float32)


class DecodeAhead:
    """Decodes the lanes of a scheduler ahead.

    Args:
        most_ms: a token is told so much later at most than by single steps.

    Raises:
        InputError: a step of more rows than the decoder runs at once, of which it could not choose.
    """

    def __init__(self, scheduler: "Scheduler", most_ms: float) -> None:
        engine, rows = scheduler.engine, scheduler.limits.max_batched_tokens
        if engine.chooser is not None and rows > engine.decoder.max_rows:
            raise InputError(
                f"scheduler: max_batched_tokens {rows} exceeds the {engine.decoder.max_rows} rows of one pass on a device"
            )
        self._scheduler = scheduler
        self._most_ms = most_ms
        self._pace_ms: float | None = None

    def run(self, running: Iterable[Entry], soonest: float | None) -> bool:
        """Decode all lanes and take their tokens, if nobody is arriving and nobody wants logits; whether it was done.

        Args:
            soonest: deadline after which no step is to begin.

        Raises:
            What decoding raises: all is as before, but for tokens that came before it did. What telling a token raises:
            those behind it were not decoded.
        """
        s = self._scheduler
        if s.engine.ahead is None:
            return False
        entries = list(running)
        if not 0 < len(entries) <= s.limits.max_batched_tokens or any(
            e.state is not State.DECODING or e.request.witness or not e.request.max_new_tokens for e in entries
        ):
            return False
        began = s.clock()
        steps = self._steps(entries, None if soonest is None else soonest - began)
        pieces = self._decode(entries, steps)
        if pieces is None:
            return False
        try:
            self._tell(entries, pieces, began)
        finally:
            for entry in entries:  # where telling failed, or the pass behind its first tokens
                if entry.state is State.DECODING:
                    entry.cut(s.engine.pool)
        self._paced((s.clock() - began) * 1e3 / steps)
        return True

    def _steps(self, entries: Sequence[Entry], left_s: float | None) -> int:
        """Steps until the first lane has all its tokens, as far as they fit into the time that tokens may wait."""
        steps = min(AHEAD_STEPS, *(entry.most_rows - len(entry.tokens) + 1 for entry in entries))
        if self._pace_ms is None:
            return 1
        ms = self._most_ms if left_s is None else min(self._most_ms, left_s * 1e3)
        return max(1, int(min(steps, ms / self._pace_ms))) if self._pace_ms else steps

    def _paced(self, step_ms: float) -> None:
        """Note how long a step took; one that took longer than others counts for little at first."""
        pace = self._pace_ms
        self._pace_ms = step_ms if pace is None or step_ms < pace else pace + (step_ms - pace) / 8

    def _decode(self, entries: Sequence[Entry], steps: int) -> Iterable[np.ndarray] | None:
        """Tokens [some steps, lanes] whose rows are part of the routes now; None where there are too few pages."""
        engine = self._scheduler.engine
        reserved: list[Reservation] = []
        lanes: list[Step] = []
        try:
            for entry in entries:
                assert entry.route is not None
                try:
                    made = engine.reserve(entry.route, steps, entry.capacity)
                except CapacityError:
                    self._abort(entries, reserved)
                    return None
                reserved.append(made)
                lanes.append(Step(entry.tokens[-1], made.expected, entry.tabulate(made), entry.sampler))
            pieces = engine.decode(lanes, steps)
            first = next(pieces)
        except BaseException:
            self._abort(entries, reserved)
            raise
        engine.pool.commit(reserved)
        return itertools.chain((first,), pieces)

    def _abort(self, entries: Sequence[Entry], reserved: Sequence[Reservation]) -> None:
        self._scheduler.engine.pool.abort(reserved)
        for entry, _ in zip(entries, reserved, strict=False):
            entry.retable()

    def _tell(self, entries: Sequence[Entry], pieces: Iterable[np.ndarray], began: float) -> None:
        """Take and tell tokens step by step, until a deadline comes or telling fails; what follows was not decoded."""
        s = self._scheduler
        for piece in pieces:
            came = s.clock()
            step_ms, began = (came - began) * 1e3 / len(piece), came
            for row in piece.tolist():
                self._take(entries, row, step_ms)
                s.tell()
                s.expire()

    def _take(self, entries: Sequence[Entry], tokens: Sequence[int], step_ms: float) -> None:
        """Give the lanes that still decode their next tokens."""
        s = self._scheduler
        s.decode_ms += step_ms
        for entry, token in zip(entries, tokens, strict=True):
            if entry.state is State.DECODING:
                s.decode_tokens += 1
                entry.outcome.step_ms += step_ms
                s.take(entry, token if token >= 0 else not_finite(len(entry.tokens) - 1), _NO_ROW)
