"""The search for the grid of each block of weights.

For every block several numbers of steps across its range are tried, then the scale (and minimum) of least squares for
the codes found; the one of least squared error is kept, the earlier of equals. Every try rounds its scale to float16
first and its codes, ties to even, against the rounded scale. Blocks lie along the last axis of [length, blocks]
tensors, so that every operation runs over whole vectors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_TOP = 14  # a row's largest magnitude lies in [2^14, 2^15) units
_FINEST = -126  # exponent of the smallest unit

_Q8_STEPS = tuple(float(n) for n in range(127, 95, -1))
_Q4_STEPS = tuple(-n / 8 for n in range(68, 36, -1))
_Q6_STEPS = tuple(-float(n) for n in range(32, 19, -1))
_Q4A_STEPS = (15.0, 14.0, 13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 15.5, 16.0, 16.5)


@dataclass(frozen=True, slots=True)
class Grid:
    """Codes and scales of rows.

    Attributes:
        codes: uint8 [N, K], as stored.
        scales: float16 [N, blocks]; in super-blocks uint8 (with mins) or int8 multiples of `tops`.
        mins: float16 [N, blocks], or int8 multiples of `top_mins`, or None.
        tops, top_mins: float16 [N, super-blocks], or None.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None
    tops: Tensor | None = None
    top_mins: Tensor | None = None

    def effective(self) -> tuple[Tensor, Tensor | None]:
        """Scales and mins as float32 [N, blocks], in units."""
        return _spread(self.scales, self.tops), None if self.mins is None else _spread(self.mins, self.top_mins)

    def quantum(self) -> Tensor:
        """Least step of each block, in units: that of nested mins, and of float16."""
        least = torch.full(self.scales.shape, 2.0**-24)
        if self.top_mins is None:
            return least
        each = self.scales.shape[1] // self.top_mins.shape[1]
        return torch.maximum(least, self.top_mins.float().repeat_interleave(each, 1))


def _spread(small: Tensor, top: Tensor | None) -> Tensor:
    if top is None:
        return small.float()
    return (small.view(*top.shape, -1).float() * top.float()[..., None]).flatten(1)


def units(rows: Tensor) -> Tensor:
    """The power of two of each row, float32 [N]; 1 of a row of zeros."""
    largest = rows.abs().amax(1)
    exponent = (torch.frexp(largest).exponent - 1 - _TOP).clamp_(min=_FINEST)
    return torch.where(largest > 0, (exponent + 127 << 23).view(torch.float32), 1.0)


def fit(x: Tensor, format: str) -> Grid:
    """The grid of rows [N, K] that are in units already, K a multiple of the format's span."""
    n = len(x)
    if format == "q6k":
        return _nested_symmetric(x)
    blocks = x.view(-1, 32).T.contiguous()
    if format == "q8":
        scale, codes = symmetric(blocks, -127, 127, _Q8_STEPS)
        return Grid(_rows(codes.add_(128), n), scale.half().view(n, -1))
    if format == "q4":
        scale, codes = symmetric(blocks, -8, 7, _Q4_STEPS)
        return Grid(_rows(codes.add_(8), n), scale.half().view(n, -1))
    scale, low, codes = asymmetric(blocks)
    if format == "q4a":
        return Grid(_rows(codes, n), scale.half().view(n, -1), low.half().view(n, -1))
    return _nested_asymmetric(blocks, scale, low, n)


def _rows(codes: Tensor, n: int) -> Tensor:
    return codes.to(torch.uint8).T.contiguous().view(n, -1)


def _stored(x: Tensor) -> Tensor:
    return x.half().float() + 0.0  # no negative zero


def _sum(x: Tensor) -> Tensor:
    """Along the first axis (a power of two) as a tree: a library's sum has an order of its own on each machine."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def _divisor(scale: Tensor) -> Tensor:
    """The scale, infinite where it is zero as stored: what is divided by it is zero then."""
    return torch.where(scale == 0, torch.inf, scale)


class Search:
    """The scale (and minimum) of least squared error of each block so far."""

    def __init__(self, x: Tensor, lowest: int, highest: int) -> None:
        self._x, self._range = x, (lowest, highest)
        self._codes, self._off = torch.empty_like(x), torch.empty_like(x)
        self.scale, self.low = torch.zeros_like(x[0]), torch.zeros_like(x[0])
        self.error = torch.full_like(x[0], torch.inf)

    def codes(self, scale: Tensor, low: Tensor | None) -> Tensor:
        """Codes of all blocks for these scales; valid until the next call."""
        source = self._x if low is None else torch.sub(self._x, low, out=self._codes)
        torch.mul(source, torch.where(scale == 0, 0.0, 1.0 / scale), out=self._codes)
        return self._codes.round_().clamp_(*self._range)

    def offer(self, scale: Tensor, low: Tensor | None, limit: float | None = None) -> None:
        """Take these scales, already rounded to their storage, where they are better.

        Args:
            limit: only where no weight is further off than so many steps.
        """
        codes = self.codes(scale, low)
        off = torch.mul(codes, scale, out=self._off).sub_(self._x)
        if low is not None:
            off += low
        far = None if limit is None else off.abs().amax(0)
        error = _sum(off.square_())
        better = error < self.error
        if far is not None and limit is not None:
            better &= far <= limit * scale.abs()
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if low is not None:
            self.low = torch.where(better, low, self.low)


def symmetric(x: Tensor, lowest: int, highest: int, steps: Iterable[float]) -> tuple[Tensor, Tensor]:
    """(scale [blocks], codes [length, blocks]) of x = scale * code; scale = (signed value of largest magnitude) / steps."""
    top, bottom = x.amax(0), x.amin(0)
    peak = torch.where(top >= -bottom, top, bottom)
    best = Search(x, lowest, highest)
    limit = 0.5625 if highest == 127 else 1.0
    for n in steps:
        # more steps than codes: the peak itself is left off
        best.offer(_stored(peak * (1.0 / n)), None, limit if n < lowest else None)
    for _ in range(2):
        codes = best.codes(best.scale, None)
        best.offer(_stored(_sum(codes * x) / _divisor(_sum(codes.square()))), None, limit)
    return best.scale, best.codes(best.scale, None)


def asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, minimum, codes 0..15) of x = scale * code + minimum; scale = range / steps."""
    bottom = x.amin(0)
    spread = x.amax(0) - bottom
    best = Search(x, 0, 15)
    for n in _Q4A_STEPS:
        scale = _stored(spread * (1.0 / n))
        # more than 15 steps: what does not fit is left off at both ends
        best.offer(scale, _stored(bottom + max(0.0, n - 15.0) / 2.0 * scale))
    mean = _sum(x) / 32
    for _ in range(2):
        codes = best.codes(best.scale, best.low)
        middle = _sum(codes) / 32
        codes -= middle
        scale = _stored(_sum(codes * x) / _divisor(_sum(codes.square())))
        best.offer(scale, _stored(mean - scale * middle), limit=1.0)
    return best.scale, best.low, best.codes(best.scale, best.low)


def _multiples(x: Tensor, top: Tensor, lowest: int, highest: int) -> tuple[Tensor, Tensor]:
    """The two multiples of `top` beside x, the one further from zero first, which is never zero unless x is."""
    ratio = x / _divisor(top)
    near = ratio.trunc()
    far = torch.where(ratio == near, near, near + ratio.sign())
    return far.clamp_(lowest, highest), near.clamp_(lowest, highest)


def _nested_asymmetric(x: Tensor, scale: Tensor, low: Tensor, n: int) -> Grid:
    """Scales 0..255 and mins -127..127 times those of the super-block: of the two resolutions the better one."""
    scales, lows = scale.view(-1, 8), low.view(-1, 8)
    found: tuple[Tensor, ...] = ()
    error = torch.full((len(scales),), torch.inf)
    for scale_steps, min_steps in ((63, 63), (255, 127)):
        top = _stored(scales.amax(1) * (1.0 / scale_steps))[:, None]
        top_min = _stored(lows.abs().amax(1) * (1.0 / min_steps))[:, None]
        whole_min = (lows / _divisor(top_min)).round_().clamp_(-127, 127)
        best = Search(x, 0, 15)
        for i, whole in enumerate(_multiples(scales, top, 0, 255)):
            best.offer((whole * top).view(-1), (whole_min * top_min).view(-1), limit=1.0 if i else None)
        whole = (best.scale.view(-1, 8) / _divisor(top)).round_()
        total = _sum(best.error.view(-1, 8).T)
        better = (total < error)[:, None]
        error = torch.minimum(error, total)
        new = (whole, whole_min, top, top_min)
        found = tuple(torch.where(better, a, b) for a, b in zip(new, found or new, strict=True))
    whole, whole_min, top, top_min = found
    codes = best.codes((whole * top).view(-1), (whole_min * top_min).view(-1))
    return Grid(
        _rows(codes, n),
        whole.to(torch.uint8).view(n, -1),
        whole_min.to(torch.int8).view(n, -1),
        top.half().view(n, -1),
        top_min.half().view(n, -1),
    )


def _nested_symmetric(x: Tensor) -> Grid:
    """Blocks of 16 with scales -128..127 times that of the super-block."""
    n = len(x)
    blocks = x.view(-1, 16).T.contiguous()
    scale, _ = symmetric(blocks, -32, 31, _Q6_STEPS)
    scales = scale.view(-1, 16)
    top, bottom = scales.amax(1), scales.amin(1)
    tops = _stored(torch.where(top >= -bottom, top, bottom) * (1.0 / -128))[:, None]
    best = Search(blocks, -32, 31)
    for i, whole in enumerate(_multiples(scales, tops, -128, 127)):
        best.offer((whole * tops).view(-1), None, limit=1.0 if i else None)
    whole = (best.scale.view(-1, 16) / _divisor(tops)).round_()
    codes = best.codes(best.scale, None)
    return Grid(_rows(codes.add_(32), n), whole.to(torch.int8).view(n, -1), None, tops.half().view(n, -1))
