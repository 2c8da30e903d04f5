"""Formats of quantised weights: what they are, their bytes, and the readable reference (docs/quantisation.md).

A weight of row n in block b is `unit[n] * (scale[n, b] * (code - zero) + min[n, b])`. The unit is a power of two of the
row, so that the scales, stored as float16, neither overflow nor vanish whatever the size of the weights: the row's
largest magnitude lies in [2^14, 2^15) units. Codes are rounded (ties to even) against the scales as stored. Scales are
searched (`numem.kernels.grids`): data that already lie on a grid of the format's width come back as they were.

Bounds, in steps (|scale|) of the block, next to 2^-10 of the largest |code| and of |min| / scale for the rounding of
scales and mins: q8 1/2; q4, q4a, q4k and q6k 1/2 where a code is not clamped and 1 where it is; plus, for blocks smaller
than 2^-22 of their row, 127 * 2^-25 units.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from numem.errors import CheckpointError, InputError
from numem.kernels import grids, native

COLUMNS = 32  # output columns of a panel
STEP = 32  # k of a record
SUPER = 8  # records of a super-block
_SLAB = 1 << 18  # weights that are worked on at once: their buffers stay in the second-level cache

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_quantise = native.function("nm_quantise")

Planes = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantised weights.

    Attributes:
        name: key in `FORMATS`.
        index: number in the kernels.
        version: raised when the bytes of the same weights change.
        code: bits of a code.
        zero: the code of the value 0 (of the minimum, where the format has one).
        block: weights that share a scale.
        mins: whether a block has a minimum.
        nested: whether scales are small integers times the float16 scale of a super-block of 256.
    """

    name: str
    index: int
    version: int
    code: int
    zero: int
    block: int
    mins: bool
    nested: bool

    @property
    def record(self) -> int:
        """Bytes of the codes and scales of 32 columns by 32 k."""
        scales = COLUMNS * (STEP // self.block) * (1 if self.nested else 2)
        return COLUMNS * STEP * self.code // 8 + scales * (2 if self.mins else 1)

    @property
    def head(self) -> int:
        """Bytes of the scales of 32 columns by one super-block, ahead of its records."""
        return COLUMNS * 2 * (2 if self.mins else 1) if self.nested else 0

    @property
    def span(self) -> int:
        """Weights that a row is padded to a multiple of."""
        return STEP * SUPER if self.nested else STEP

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included, without the row's unit."""
        records = self.span // STEP
        return 8 * (records * self.record + self.head) / (COLUMNS * self.span)

    def fits(self, k: int) -> bool:
        """Whether rows of `k` weights need no padding."""
        return k % self.span == 0

    def shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Shape of the records' plane: panels of 32 columns, spans, bytes of a span."""
        return -(-n // COLUMNS), -(-k // self.span), self.head + self.span // STEP * self.record


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        f.name: f
        for f in (
            Format("q8", 0, 2, code=8, zero=128, block=32, mins=False, nested=False),
            Format("q4", 1, 2, code=4, zero=8, block=32, mins=False, nested=False),
            Format("q4a", 2, 2, code=4, zero=0, block=32, mins=True, nested=False),
            Format("q4k", 3, 2, code=4, zero=0, block=32, mins=True, nested=True),
            Format("q6k", 4, 2, code=6, zero=32, block=16, mins=False, nested=True),
        )
    }
)


def format_of(name: str) -> Format:
    """The format of that name; InputError where there is none."""
    if name not in FORMATS:
        raise InputError(f"quantisation format {name!r} is unknown; use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def quantise(weight: Tensor | Sequence[Tensor], format: str, name: str = "weight") -> Planes:
    """Quantise a matrix [N, K] of float32, float16 or bfloat16, or several stacked by rows.

    Returns:
        records: uint8 [ceil(N / 32), spans, bytes] as `Format.shape` says; units: float32 [ceil(N / 32) * 32].

    Raises:
        CheckpointError: a weight is NaN or infinite; the message names `name`.
    """
    f = format_of(format)
    parts = [weight] if isinstance(weight, Tensor) else list(weight)
    n, k = sum(len(p) for p in parts), parts[0].shape[1] if parts and parts[0].ndim == 2 else 0
    if not k or not n or any(p.ndim != 2 or p.shape[1] != k or not p.is_floating_point() for p in parts):
        raise InputError(f"quantise {name}: parts {[tuple(p.shape) for p in parts]} are not matrices of one width")
    panels, spans, size = f.shape(n, k)
    records = torch.empty((panels, spans, size), dtype=torch.uint8)
    units = torch.ones(panels * COLUMNS)
    if native.active and all(p.dtype in _TYPES for p in parts):
        bad = _native(parts, f, records, units)
        if bad:
            raise _refused(name, bad - 1)
        return {"records": records, "units": units}
    for first, rows in _slabs(parts, spans * f.span):
        if not bool(torch.isfinite(rows).all()):
            row = first + int((~torch.isfinite(rows)).any(1).nonzero()[0])
            raise _refused(name, row)
        unit = grids.units(rows)
        grid = grids.fit(rows / unit[:, None], f.name)
        at = slice(first // COLUMNS, first // COLUMNS + len(rows) // COLUMNS)
        records[at] = pack(grid, f)
        units[first : first + len(rows)] = unit
    return {"records": records, "units": units}


def dequantise(planes: Planes, format: str, n: int, k: int, rows: slice = slice(None)) -> Tensor:
    """The weights that planes stand for, float32 [N, K]; or only those panels of 32 rows that `rows` counts."""
    f = format_of(format)
    values, _ = _values(planes, f, rows)
    return values[: n - (rows.start or 0) * COLUMNS, :k].contiguous()


def error(weight: Tensor, format: str) -> float:
    """The largest |w - dequantise(quantise(w))|, in steps of its block.

    A step is the block's scale; at least the step in which its minimum is stored, and 2^-24 units.
    """
    f = format_of(format)
    n, k = weight.shape
    worst = 0.0
    rows = max(1, 4 * _SLAB // (k * COLUMNS)) * COLUMNS
    for first in range(0, n, rows):
        part = weight[first : first + rows].float()
        values, steps = _values(quantise(part, format), f, slice(None))
        off = (part - values[: len(part), :k]).abs_().div_(steps[: len(part), :k])
        worst = max(worst, float(off.max()))
    return worst


def _native(parts: Sequence[Tensor], f: Format, records: Tensor, units: Tensor) -> int:
    """Fill the planes; 0, or one more than the first row with a NaN or infinity."""
    rows = [p.detach() if p.stride(1) == 1 else p.detach().contiguous() for p in parts]
    views = (native.Part * len(rows))(*(native.Part(r.data_ptr(), len(r), r.stride(0), _TYPES[r.dtype]) for r in rows))
    at = records.data_ptr(), units.data_ptr()
    return _quantise(ctypes.addressof(views), len(rows), rows[0].shape[1], f.index, *at)


def _refused(name: str, row: int) -> CheckpointError:
    return CheckpointError(f"{name}: row {row} has a NaN or infinite weight; it cannot be quantised")


def _slabs(parts: Sequence[Tensor], width: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, float32 [rows, width]) of the stacked parts; rows a multiple of 32, zeros where there is nothing."""
    n, k = sum(len(p) for p in parts), parts[0].shape[1]
    rows = max(1, _SLAB // (width * COLUMNS)) * COLUMNS
    for first in range(0, n, rows):
        slab = torch.zeros((min(rows, -(-(n - first) // COLUMNS) * COLUMNS), width))
        start = 0  # of the part among all rows
        for part in parts:
            lo, hi = max(first, start), min(first + len(slab), start + len(part))
            if lo < hi:
                slab[lo - first : hi - first, :k] = part[lo - start : hi - start]
            start += len(part)
        yield first, slab


def pack(grid: grids.Grid, f: Format) -> Tensor:
    """The records of whole panels, uint8 [rows / 32, spans, bytes]."""
    rows, width = grid.codes.shape
    panels, spans, size = f.shape(rows, width)
    records, steps = f.span // STEP, width // STEP
    out = torch.empty((panels, spans, size), dtype=torch.uint8)
    body = out[:, :, f.head :].view(panels, spans, records, f.record)
    # [panel, half, column, step, group of 4 k], each group one 32-bit lane
    lanes = grid.codes.view(torch.int32).view(panels, 2, 16, steps, 8)
    if f.code == 8:
        whole = lanes
    elif f.code == 4:
        whole = lanes[..., :4] | lanes[..., 4:] << 4
    else:
        four = lanes.view(panels, 2, 16, steps, 2, 4)
        low = four & 0x0F0F0F0F
        high = four >> 4 & 0x03030303
        nibbles = (low[..., :2] | low[..., 2:] << 4).flatten(-2)
        pairs = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
        whole = torch.cat((nibbles, pairs), -1)
    # [panel, step, half, group, column]; 6-bit codes: all nibbles, then all pairs of bits
    order = whole.permute(0, 3, 1, 4, 2)
    pieces = [order] if f.code != 6 else [order[:, :, :, :4], order[:, :, :, 4:]]
    at = 0
    for piece in [*pieces, *(_columns(t, panels, steps) for t in (grid.scales, grid.mins) if t is not None)]:
        raw = piece.contiguous().view(torch.uint8).view(panels, spans, records, -1)
        body[..., at : at + raw.shape[-1]] = raw
        at += raw.shape[-1]
    at = 0
    for top in (grid.tops, grid.top_mins):
        if top is not None:
            out[:, :, at : at + 2 * COLUMNS] = _columns(top, panels, spans).contiguous().view(torch.uint8)
            at += 2 * COLUMNS
    return out


def unpack(records: Tensor, f: Format) -> grids.Grid:
    """The inverse of `pack`."""
    panels, spans, _ = records.shape
    count = f.span // STEP
    rows, steps = panels * COLUMNS, spans * count
    body = records[:, :, f.head :].reshape(panels, steps, f.record)

    def lanes(at: int, groups: int) -> Tensor:
        raw = body[..., at : at + groups * 128].contiguous().view(torch.int32)
        return raw.view(panels, steps, 2, groups, 16).permute(0, 2, 4, 1, 3)

    def columns(source: Tensor, at: int, size: int, dtype: torch.dtype, each: int = 1) -> Tensor:
        raw = source[..., at : at + COLUMNS * each * size].contiguous().view(dtype)
        return raw.view(panels, -1, each, COLUMNS).permute(0, 3, 1, 2).reshape(rows, -1).contiguous()

    if f.code == 8:
        codes = lanes(0, 8)
    elif f.code == 4:
        packed = lanes(0, 4)
        codes = torch.cat((packed & 0x0F0F0F0F, packed >> 4 & 0x0F0F0F0F), -1)
    else:
        packed, pairs = lanes(0, 4).reshape(panels, 2, 16, steps, 2, 2), lanes(512, 2)
        low = torch.cat((packed & 0x0F0F0F0F, packed >> 4 & 0x0F0F0F0F), -1)
        high = torch.stack([pairs >> 2 * j & 0x03030303 for j in range(4)], -1)
        codes = (low | high << 4).flatten(-2)
    at = COLUMNS * STEP * f.code // 8
    each = STEP // f.block
    small: tuple[int, torch.dtype] = (1, torch.int8) if f.nested else (2, torch.float16)
    mins = columns(body, at + COLUMNS * each * small[0], *small) if f.mins else None
    # the scales of q4k are unsigned
    scale_type = torch.uint8 if f.nested and f.mins else small[1]
    return grids.Grid(
        codes.contiguous().view(torch.uint8).view(rows, -1),
        columns(body, at, small[0], scale_type, each),
        mins,
        columns(records, 0, 2, torch.float16) if f.nested else None,
        columns(records, 2 * COLUMNS, 2, torch.float16) if f.nested and f.mins else None,
    )


def _columns(scales: Tensor, panels: int, steps: int) -> Tensor:
    """[rows, steps * each] to [panel, step, each, column]."""
    return scales.view(panels, COLUMNS, steps, -1).permute(0, 2, 3, 1).reshape(panels, steps, -1)


def _values(planes: Planes, f: Format, panels: slice) -> tuple[Tensor, Tensor]:
    """(weights, steps), float32, of padded rows and widths."""
    grid = unpack(planes["records"][panels], f)
    rows, width = grid.codes.shape
    unit = planes["units"].view(-1, COLUMNS)[panels].reshape(rows, 1, 1)
    scale, low = grid.effective()
    values = scale[..., None] * (grid.codes.view(rows, -1, f.block).float() - f.zero)
    if low is not None:
        values += low[..., None]
    step = torch.maximum(scale.abs(), grid.quantum())[..., None].expand_as(values) * unit
    return (values * unit).view(rows, width), step.reshape(rows, width)
