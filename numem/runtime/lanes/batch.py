"""Rows of one step: reserved, evaluated in one pass, tokens chosen; then all of it becomes part of the routes, or none.

decoding    | row | row | row |                    one pending token each, pages set aside at admission
arriving    | piece of a prompt .... | piece .. |  as the arrivals have work, cut at multiples of the chunk
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from numem.errors import CapacityError, ModelError
from numem.runtime.engine import Engine, Span
from numem.runtime.lanes.iteration import Demand, Kind, Limits, plan_iteration
from numem.runtime.lanes.sequence import Entry
from numem.runtime.paging.route import Reservation
from numem.runtime.restore.arrival import Work
from numem.runtime.sampling import Peak, Sampler, not_finite


@dataclass(slots=True)
class Batch:
    """What a step evaluated.

    Attributes:
        entries: whose rows: first those that decode, then those of `works`.
        reservations: of the decoding ones; works: of the arriving ones.
        rows: logits of each entry's last row, or nothing; until the next step, they are lent by the engine. Where a
            decoder chooses of them itself, they are there for witnesses alone.
        peaks: where the largest of each of them is, None of no logits.
        chosen: its next token, None where it has none yet, or why it has none.
        broken: entries that could not take part, and why.
    """

    entries: list[Entry] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    peaks: list[Peak | None] = field(default_factory=list)
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
            kept = engine.chooser is not None and not any(entry.request.witness for entry in batch.entries)
            batch.rows, batch.peaks = engine.evaluate_lent(spans, kept=kept)
            batch.chosen = choose(engine, batch, enumerate(batch.entries))
    except BaseException:
        _abort(engine, batch)
        raise
    return batch


def choose(engine: Engine, batch: Batch, asked: Iterable[tuple[int, Entry]]) -> list[int | ModelError | None]:
    """The next tokens of entries, each from the logits of the row that is named for it, by the decoder's own rule where
    it has one."""
    chosen: list[int | ModelError | None] = []
    there: list[tuple[int, int, Sampler, int]] = []  # on the device: place in `chosen`, row, sampler, position
    upto = list(itertools.accumulate(peak is not None for peak in batch.peaks))  # rows of logits up to each entry's
    for at, entry in asked:
        peak, sampler, position = batch.peaks[at], entry.sampler, len(entry.tokens) - 1
        if peak is None or not entry.request.max_new_tokens:
            chosen.append(None)
        elif engine.chooser is not None and sampler.temperature:
            there.append((len(chosen), upto[at] - 1, sampler, position))
            chosen.append(None)
        else:
            try:
                chosen.append(sampler.choose(batch.rows[at], position, engine.vocab, peak))
            except ModelError as error:
                chosen.append(error)
    if there and engine.chooser is not None:
        places, rows, samplers, positions = zip(*there, strict=True)
        tokens = engine.chooser.choose(list(zip(samplers, positions, strict=True)), engine.vocab, engine.storage, rows)
        for place, position, token in zip(places, positions, tokens, strict=True):
            chosen[place] = token if token >= 0 else not_finite(position)
    return chosen


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
