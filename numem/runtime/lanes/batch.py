"""Rows of one step: reserved, evaluated in one pass, tokens chosen; then all of it becomes part of the routes, or none.

decoding    | row | row | row |                    one pending token each, pages set aside at admission
arriving    | piece of a prompt .... | piece .. |  as the arrivals have work, cut at multiples of the chunk
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from numem.errors import CapacityError, ModelError
from numem.runtime.engine import Engine, Span
from numem.runtime.lanes.iteration import Demand, Kind, Limits, plan_iteration
from numem.runtime.lanes.sequence import Entry
from numem.runtime.paging.route import Reservation
from numem.runtime.restore.arrival import Work
from numem.runtime.sampling import Peak


@dataclass(slots=True)
class Batch:
    """What a step evaluated.

    Attributes:
        entries: whose rows: first those that decode, then those of `works`.
        reservations: of the decoding ones; works: of the arriving ones.
        rows: logits of each entry's last row, or nothing; until the next step, they are lent by the engine.
        chosen: its next token, None where it has none yet, or why it has none.
        broken: entries that could not take part, and why.
    """

    entries: list[Entry] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    chosen: list[int | ModelError | None] = field(default_factory=list)
    broken: list[tuple[Entry, Exception]] = field(default_factory=list)

    @property
    def decoding(self) -> int:
        """Leading entries that decode."""
        return len(self.reservations)

    @property
    def evaluated(self) -> int:
        """Rows."""
        return self.decoding + sum(len(work.span.tokens) for work in self.works)


def grants(limits: Limits, running: Iterable[Entry]) -> tuple[list[Entry], list[tuple[Entry, int]]]:
    """Entries that decode in this step, and arriving ones with the rows they may evaluate."""
    decoding: list[Entry] = []
    arriving: list[Entry] = []
    for entry in running:
        (decoding if entry.arrival is None else arriving).append(entry)
    if not arriving and len(decoding) <= limits.max_batched_tokens:
        return decoding, []
    demands = [Demand(e.name, Kind.DECODE, 1, e.order, e.request.priority) for e in decoding]
    for e in arriving:
        assert e.arrival is not None
        at = e.arrival.front
        demands.append(Demand(e.name, Kind.PREFILL, len(e.target) - at, e.order, e.request.priority, at))
    granted = dict(plan_iteration(limits, demands).scheduled)
    return (
        [e for e in decoding if e.name in granted],
        [(e, granted[e.name]) for e in arriving if e.name in granted],
    )


def evaluate(engine: Engine, decoding: list[Entry], arriving: list[tuple[Entry, int]]) -> Batch:
    """Reserve, evaluate and choose; nothing is committed.

    Raises:
        What the forward pass raises; every reservation is given back, and all is as before.
    """
    batch = Batch()
    spans: list[Span] = []
    try:
        for entry in decoding:
            assert entry.route is not None
            try:
                reservation = engine.reserve(entry.route, 1, entry.capacity)
            except CapacityError as error:
                batch.broken.append((entry, error))
                continue
            batch.entries.append(entry)
            batch.reservations.append(reservation)
            spans.append(Span(entry.tabulate(reservation), reservation.expected, entry.tokens[-1:]))
        for entry, budget in arriving:
            assert entry.arrival is not None
            try:
                work = entry.arrival.next(budget)
            except Exception as error:  # noqa: BLE001 - whatever an arrival raises, it is this sequence that failed
                batch.broken.append((entry, error))
                continue
            if work is not None:
                batch.entries.append(entry)
                batch.works.append(work)
                spans.append(work.span)
        if spans:
            batch.rows, peaks = engine.evaluate_lent(spans)
            vocab = engine.vocab
            found = zip(batch.entries, batch.rows, peaks, strict=True)
            batch.chosen = [choose(entry, row, peak, vocab) for entry, row, peak in found]
    except BaseException:
        _abort(engine, batch)
        raise
    return batch


def choose(entry: Entry, row: np.ndarray, peak: Peak | None, vocab: int) -> int | ModelError | None:
    """An entry's next token from logits, whose largest is `peak` (None: not known)."""
    if not len(row) or not entry.request.max_new_tokens:
        return None
    try:
        return entry.sampler.choose(row, len(entry.tokens) - 1, vocab, peak)
    except ModelError as error:
        return error


def commit(engine: Engine, batch: Batch, elapsed_ms: float) -> None:
    """Make what was evaluated part of the routes, but for rows whose logits are of no use."""
    good = batch.reservations
    bad = [r for r, token in zip(good, batch.chosen, strict=False) if isinstance(token, ModelError)]
    if bad:
        engine.pool.abort(bad)
        good = [r for r in good if r not in bad]
    engine.pool.commit(good)
    evaluated = batch.evaluated
    for at, work in enumerate(batch.works, batch.decoding):
        arrival = batch.entries[at].arrival
        assert arrival is not None
        ms = elapsed_ms * len(work.span.tokens) / evaluated
        arrival.settle(work, not isinstance(batch.chosen[at], ModelError), ms)


def _abort(engine: Engine, batch: Batch) -> None:
    engine.pool.abort(batch.reservations)
    for entry in batch.entries[: batch.decoding]:
        entry.retable()
    for entry, work in zip(batch.entries[batch.decoding :], batch.works, strict=True):
        assert entry.arrival is not None
        entry.arrival.settle(work, False)
