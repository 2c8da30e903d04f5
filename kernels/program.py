"""A forward pass as data: a list of kernel calls over named activation buffers, made once per model and run per call.

    body     evaluates every row; all keys and values are written when it ends
    tail     evaluates only the rows whose result is asked for, and ends with their last hidden state
    head     turns these into logits

Operations name columns of buffers (`Part`), never tensors of a call, so that a program serves any number of rows. Every
row of a call is computed as if it were alone: leaving rows out changes no bit of the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from numem.kernels.linear import Peaks

# Gets a copy of float32 [rows, hidden] at a named point of a layer; what it returns takes its place, None leaves it.
Tap = Callable[[str, int, np.ndarray], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Part:
    """Columns [start, start + width) of an activation buffer; `index` counts the parts of a program."""

    index: int
    buffer: int
    start: int
    width: int


class Buffers:
    """The activation buffers of a program while it is put together.

    Attributes:
        widths: columns of each buffer, float32.
        parts: every part that was named.
    """

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.parts: list[Part] = []

    def new(self, width: int) -> Part:
        """A buffer of its own, whole."""
        self.widths.append(width)
        return self._named(len(self.widths) - 1, 0, width)

    def columns(self, whole: Part, start: int, width: int) -> Part:
        """A column range of a buffer."""
        return self._named(whole.buffer, start, width)

    def _named(self, buffer: int, start: int, width: int) -> Part:
        part = Part(len(self.parts), buffer, start, width)
        self.parts.append(part)
        return part


@dataclass(slots=True)
class Call:
    """What one run is about.

    Attributes:
        tokens, positions, slots: int64 [M]; slots are page * 16 + offset.
        lane: int32 [M], index into `tables`, int32 [lanes, pages].
        wanted: int64 [R], rows whose result is asked for, ascending.
        k, v: pages of every layer; layers that share pages have a stride of 0.
        lengths: int32 [lanes], tokens of each lane, where rows see what follows them.
        out, peaks: where logits [R, vocab] and the largest of each go, or None.
        tap: called at the points of a program that has them.
        parts: the parts of the buffers, of the rows at hand; set by the program.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lane: Tensor
    tables: Tensor
    wanted: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor | None = None
    out: Tensor | None = None
    peaks: Peaks | None = None
    tap: Tap | None = None
    parts: list[Tensor] = field(default_factory=list)


class Op(Protocol):
    """One kernel call."""

    def run(self, call: Call) -> None:
        """Compute on `call.parts`."""


class Program:
    """The operations of a model.

    Args:
        buffers: what their parts are cut from.
        body, tail, head: see above.
        carried: parts that the tail reads of the body.
        result: where the tail leaves the last hidden state.

    The buffers are kept between runs and grow as needed: one run at a time.
    """

    def __init__(
        self,
        buffers: Buffers,
        body: Sequence[Op],
        tail: Sequence[Op],
        head: Sequence[Op],
        *,
        carried: Sequence[Part],
        result: Part,
    ) -> None:
        self.buffers, self.carried, self.result = buffers, tuple(carried), result
        self.body, self.tail, self.head = tuple(body), tuple(tail), tuple(head)
        self._tensors: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}

    def hidden(self, call: Call) -> Tensor:
        """Run body and tail; the last hidden state of the wanted rows, float32 [R, hidden], until the next run."""
        call.parts = self._parts(len(call.tokens))
        for op in self.body:
            op.run(call)
        self._select(call)
        if len(call.wanted):
            for op in self.tail:
                op.run(call)
        return call.parts[self.result.index]

    def logits(self, call: Call) -> Tensor | None:
        """Run everything; logits of the wanted rows, float32 [R, vocab], None where no row is wanted."""
        self.hidden(call)
        if not len(call.wanted):
            return None
        for op in self.head:
            op.run(call)
        return call.out

    def _select(self, call: Call) -> None:
        """Go on with the wanted rows alone."""
        wanted = call.wanted
        if len(wanted) == len(call.tokens):  # ascending, so that these are all
            return
        kept = self._parts(len(wanted))
        for part in self.carried:
            kept[part.index].copy_(call.parts[part.index][wanted])
        call.parts = kept
        call.positions, call.lane = call.positions[wanted], call.lane[wanted]

    def _parts(self, rows: int) -> list[Tensor]:
        views = self._views.get(rows)
        if views is None:
            if not self._tensors or len(self._tensors[0]) < rows:
                self._tensors = [torch.empty((rows, width)) for width in self.buffers.widths]
                self._views.clear()
            # Views of the last few row counts are kept: decoding repeats one for long.
            if len(self._views) >= 8:
                self._views.clear()
            views = self._views[rows] = [
                self._tensors[p.buffer][:rows, p.start : p.start + p.width] for p in self.buffers.parts
            ]
        return views
