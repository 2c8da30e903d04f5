"""Copies between host memory and the pages of a device, on side streams, beside what the device computes.

    up     host slot ──one copy──> staging ──scatter──> pages      computing waits for the event before it reads the rows
    down   pages ──gather──> staging ──one copy──> host slot       the host waits for the event, nobody else does

There are two side streams each way, each with staging memory of its own, so that one chunk is copied while the kernel
of the one before it runs. All parts of a chunk travel in one copy: copies of 16 KiB reach 1 GB/s, of 1 MiB 48 GB/s.

Order: rows are written after the event `after`, behind which nobody reads or fills their pages any more; who gives
pages back while rows are on their way to them joins these first.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from numem.errors import InputError
from numem.identity.chain import CHUNK_TOKENS, PAGE_TOKENS
from numem.kernels.cuda import pages as moves
from numem.runtime.device.ring import Ring, Slot, Source
from numem.runtime.device.streams import Event, Streams

ALIGN = 256
DOWN_SLOTS = 4

Layers = tuple[int, ...] | None
"""Layers of a part, in payload order; None for all."""


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where the parts of a chunk begin, back to back but aligned, and where the last one ends."""
    at, starts = 0, []
    for nbytes in sizes:
        starts.append(at)
        at += -(-nbytes // ALIGN) * ALIGN
    return starts, at


@dataclass(slots=True)
class _Side:
    """A side stream with its staging memory, which is used again in the stream's order."""

    stream: Any
    staging: Tensor


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows [start, start + count) of a page table, to be fetched; `layers` of each part."""

    pages: Sequence[int]
    start: int
    count: int
    layers: Sequence[Layers]


@dataclass(slots=True)
class Pending:
    """Rows on their way to the host, in a slot of `ring`."""

    _ring: Ring
    _event: Event
    _slot: Slot
    _parts: list[Tensor]

    def result(self) -> list[Tensor]:
        """The parts, [2, layers, n, width] each, in memory of their own; waits for this copy alone. To be called once."""
        try:
            self._event.synchronize()
            return [part.clone() for part in self._parts]
        finally:
            self._slot.release()

    def drop(self) -> None:
        """Nobody wants the rows any more."""
        self._ring.retire(self._event, self._slot)


class Transfers:
    """Moves of the rows of one pair of page tensors.

    One thread uploads, the one that owns the pages; any may download.

    Args:
        k, v: pages [layers, pages, kv_heads, 16, head_dim].
        slot_bytes: of one chunk; what is larger has memory made for it.
        slots: chunks that may lie in page-locked memory on their way up.

    Attributes:
        ring: slots for the way up.
        slot_bytes: see above.
    """

    def __init__(self, streams: Streams, k: Tensor, v: Tensor, slot_bytes: int, slots: int) -> None:
        self.streams = streams
        self.slot_bytes = slot_bytes
        self.ring = Ring(streams, slot_bytes, slots)
        self._k, self._v = k, v
        self._down_ring = Ring(streams, slot_bytes, DOWN_SLOTS)
        self._sides = (self._make(), self._make())
        self._layers: dict[Layers, Tensor | None] = {None: None}
        self._lock = Lock()

    def fence(self) -> Event:
        """The point behind everything that the calling thread has computed so far."""
        return self.streams.record()

    def join(self, event: Event) -> None:
        """What the calling thread computes from now on begins after the event. The host does not wait."""
        self.streams.wait(event)

    def slot(self, sizes: Sequence[int], *, wait: bool) -> tuple[Slot, list[Tensor]] | None:
        """A slot and its memory for parts of these sizes, uint8 each; None where they do not fit, or none is free and
        the caller does not wait."""
        starts, end = places(sizes)
        if end > self.slot_bytes:
            return None
        slot = self.ring.acquire() if wait else self.ring.at_once()
        if slot is None:
            return None
        return slot, [slot.buffer[at : at + nbytes] for at, nbytes in zip(starts, sizes, strict=True)]

    def upload(
        self,
        parts: Sequence[Tensor],
        source: Source | None,
        pages: Sequence[int],
        start: int,
        layers: Sequence[Layers],
        *,
        after: Event,
        skip: int = 0,
        count: int | None = None,
    ) -> Event:
        """Write rows [skip, count) of a chunk at positions [start + skip, start + count) of a page table.

        Args:
            parts: [2, layers, rows, width] each, contiguous host memory, of the pages' dtype.
            source: owner of that memory, released when the copy is done, also after an error; None: it is copied
                before this returns.
            pages: page table from position 0 on.
            layers: those of each part.
            after: behind it nobody reads, writes or fills these rows' pages.

        Returns:
            Behind it the rows are in their pages.
        """
        side, count = self._next(0), parts[0].shape[2] if count is None else count
        whole = False
        try:
            with self.streams.on(side.stream):
                staged = self._stage(side, parts, source)
                table, first = self._table(pages, start + skip, start + count)
                self.streams.wait(after, side.stream)
                for part, which in zip(staged, layers, strict=True):
                    rows = part if count == part.shape[2] else part[:, :, :count].contiguous()
                    moves.scatter_rows(
                        rows, self._k, self._v, table, start - first, layers=self._index(which), skip=skip
                    )
            whole = True
        finally:  # what was begun reads the source and writes the pages, whatever became of the rest
            done = self.streams.record(side.stream)
            if source is not None:
                self.ring.retire(done, source)
            if not whole:
                self.join(done)
        return done

    def download(self, wanted: Wanted, *, after: Event) -> Pending:
        """Begin to fetch rows; waits where every slot down is in use.

        Args:
            wanted: all its parts together are at most a slot.
            after: behind it the rows are written.
        """
        return self._download(self._down_ring.acquire(), wanted, after)

    def downloads(self, jobs: Iterable[Wanted], *, after: Event) -> Iterator[list[Tensor]]:
        """The parts of one job after another; the next one is on its way while the caller has one in hand."""
        ahead: Pending | None = None
        try:
            for wanted in jobs:
                slot = self._down_ring.at_once() if ahead is not None else self._down_ring.acquire()
                if slot is None:
                    assert ahead is not None
                    before, ahead = ahead, None
                    yield before.result()
                    slot = self._down_ring.acquire()
                last, ahead = ahead, self._download(slot, wanted, after)
                if last is not None:
                    yield last.result()
            if ahead is not None:
                before, ahead = ahead, None
                yield before.result()
        finally:
            if ahead is not None:
                ahead.drop()

    def save(
        self, pages: Sequence[int], start: int, count: int, layers: Layers, *, after: Event | None = None
    ) -> Tensor:
        """Rows [start, start + count) as a payload [2, layers, count, width] in host memory.

        Args:
            after: see `download`; default: behind what the calling thread has computed.
        """
        shape = self._shape(layers, count)
        out = torch.empty(shape, dtype=self._k.dtype)
        step = min(CHUNK_TOKENS, self.slot_bytes // (shape[0] * shape[1] * shape[3] * out.element_size()))
        jobs = [Wanted(pages, start + at, min(step, count - at), [layers]) for at in range(0, count, step)]
        for job, (rows,) in zip(jobs, self.downloads(jobs, after=after or self.fence()), strict=True):
            out[:, :, job.start - start : job.start - start + job.count] = rows
        return out

    def _download(self, slot: Slot, wanted: Wanted, after: Event) -> Pending:
        k, start, count = self._k, wanted.start, wanted.count
        shapes = [self._shape(layers, count) for layers in wanted.layers]
        sizes = [math.prod(shape) * k.element_size() for shape in shapes]
        starts, end = places(sizes)
        try:
            if end > self.slot_bytes:
                raise InputError(f"download: {count} rows are {end} bytes, a slot has {self.slot_bytes}; ask for fewer")
            with self._lock:
                side = self._next(1)
                with self.streams.on(side.stream):
                    self.streams.wait(after, side.stream)
                    table, first = self._table(wanted.pages, start, start + count)
                    for at, nbytes, shape, layers in zip(starts, sizes, shapes, wanted.layers, strict=True):
                        out = side.staging[at : at + nbytes].view(k.dtype).view(shape)
                        moves.gather_rows(k, self._v, table, start - first, count, out, layers=self._index(layers))
                    slot.buffer[:end].copy_(side.staging[:end], non_blocking=True)
                    event = self.streams.record(side.stream)
        except BaseException:
            slot.release()
            raise
        parts = [
            slot.buffer[at : at + nbytes].view(k.dtype).view(shape)
            for at, nbytes, shape in zip(starts, sizes, shapes, strict=True)
        ]
        return Pending(self._down_ring, event, slot, parts)

    def _shape(self, layers: Layers, count: int) -> tuple[int, int, int, int]:
        pool_layers, _, kv_heads, _, head_dim = self._k.shape
        return 2, pool_layers if layers is None else len(layers), count, kv_heads * head_dim

    def _stage(self, side: _Side, parts: Sequence[Tensor], source: Source | None) -> list[Tensor]:
        """The parts in device memory: by one copy where they lie in a slot."""
        starts, end = places([part.nbytes for part in parts])
        fits = end <= len(side.staging)
        staging = side.staging if fits else torch.empty(end, dtype=torch.uint8, device=self._k.device)
        raw = [staging[at : at + part.nbytes] for at, part in zip(starts, parts, strict=True)]
        if isinstance(source, Slot):
            staging[:end].copy_(source.buffer[:end], non_blocking=True)
        else:
            for target, part in zip(raw, parts, strict=True):
                target.copy_(part.reshape(-1).view(torch.uint8), non_blocking=source is not None)
        return [piece.view(part.dtype).view(part.shape) for piece, part in zip(raw, parts, strict=True)]

    def _table(self, pages: Sequence[int], start: int, end: int) -> tuple[Tensor, int]:
        """The pages of positions [start, end) on the device, and the position at which their table begins."""
        first = start // PAGE_TOKENS
        wanted = [int(page) for page in pages[first : -(-end // PAGE_TOKENS)]]
        if (
            start < 0
            or (first + len(wanted)) * PAGE_TOKENS < end
            or not 0 <= min(wanted) <= max(wanted) < self._k.shape[1]
        ):
            raise InputError(f"transfer: positions [{start}, {end}) lie outside the {len(pages)} pages of their table")
        table = torch.tensor(wanted, dtype=torch.int32, pin_memory=self.streams.page_locked)
        return table.to(self._k.device, non_blocking=True), first * PAGE_TOKENS

    def _index(self, layers: Layers) -> Tensor | None:
        if layers not in self._layers:
            self._layers[layers] = torch.tensor(layers, dtype=torch.int32).to(self._k.device)
            self.streams.record().synchronize()  # once: every stream reads it from now on
        return self._layers[layers]

    def _next(self, way: int) -> _Side:
        """The next of the side streams up (0) or down (1)."""
        return next(self._sides[way])

    def _make(self) -> "cycle[_Side]":
        device = self._k.device
        return cycle(
            [
                _Side(self.streams.make(), torch.empty(self.slot_bytes, dtype=torch.uint8, device=device))
                for _ in range(2)
            ]
        )
