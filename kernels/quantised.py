"""Linear layers on quantised weights (formats: `numem.kernels.formats`, docs/quantisation.md).

Activations are quantised per block of 32 to 16 bits in two bytes: t = x * (127 / largest), high byte t rounded, low byte
the rest * 256 rounded within 127, ties to even; scale d = largest / 127 / 256; a block below 2^-100 counts as zeros, one
with a NaN or infinity makes its row NaN. An output is one chain over the blocks
in order, acc = fma(scale * d, integer sum of products, acc), then with mins acc = fma(min, d * sum of codes, acc); at
the end * unit, + bias, + residual. The bits of a row depend neither on the other rows nor on threads nor on the
instruction set. The reference has the same order, each fused step in float64.
"""

import ctypes
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from numem.errors import CapacityError, InputError
from numem.kernels import formats, native
from numem.kernels.linear import Peaks

_linear = native.function("nm_quantised_linear")
_rows = native.function("nm_quantised_rows")

_SMALLEST = 2.0**-100


class QuantisedLinear:
    """A weight matrix [N, K] in a format of `formats.FORMATS` and an optional bias [N] (kept as float32).

    The surface is that of `PackedLinear`; weights that are given are not kept.
    """

    def __init__(self, weight: Tensor, format: str, bias: Tensor | None = None, name: str = "weight") -> None:
        """Quantise; CheckpointError naming `name` where a weight is NaN or infinite."""
        planes = formats.quantise(weight, format, name)
        self._hold(format, weight.shape[0], weight.shape[1], planes, bias)

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor], format: str, bias: Tensor | None = None, name: str = "weight") -> Self:
        """Of matrices [n_i, K] stacked by rows, float32, float16 or bfloat16, without stacking them first."""
        planes = formats.quantise(parts, format, name)
        return cls.of_planes(format, sum(len(p) for p in parts), parts[0].shape[1], planes, bias)

    @classmethod
    def of_planes(cls, format: str, n: int, k: int, planes: formats.Planes, bias: Tensor | None = None) -> Self:
        """Of what `planes` gave, kept as it is (not copied); InputError where sizes do not fit."""
        layer = cls.__new__(cls)
        layer._hold(format, n, k, planes, bias)
        return layer

    def _hold(self, format: str, n: int, k: int, planes: formats.Planes, bias: Tensor | None) -> None:
        self.format = formats.format_of(format)
        self.out_features, self.in_features = n, k
        if set(planes) != {"records", "units"}:
            raise InputError(f"quantised linear: planes {sorted(planes)} are not records and units")
        self._records, self._units = planes["records"], planes["units"]
        shape = self.format.shape(n, k)
        if min(n, k) < 1 or self._records.shape != shape or self._records.dtype is not torch.uint8:
            raise InputError(
                f"quantised linear: records {tuple(self._records.shape)} {self._records.dtype} are not those of a "
                f"{format} matrix [{n}, {k}]: uint8 {shape}"
            )
        if self._units.shape != (shape[0] * formats.COLUMNS,) or self._units.dtype is not torch.float32:
            raise InputError(
                f"quantised linear: units {tuple(self._units.shape)} {self._units.dtype} do not fit {n} rows"
            )
        if not (self._records.is_contiguous() and self._units.is_contiguous()):
            raise InputError("quantised linear: planes must be contiguous")
        if bias is not None and bias.shape != (n,):
            raise InputError(f"quantised linear: bias {tuple(bias.shape)} does not fit {n} outputs")
        self.bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self._matrix = native.Quantised(
            self._records.data_ptr(),
            self._units.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            n,
            k,
            self.format.index,
        )
        self._handle = ctypes.addressof(self._matrix)
        self._native = native.active

    @property
    def handle(self) -> int | None:
        """Address of the extension's view of the matrix; None where the reference runs."""
        return self._handle if self._native else None

    @property
    def nbytes(self) -> int:
        """Bytes held: records, units and the bias."""
        return self._records.nbytes + self._units.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def planes(self) -> formats.Planes:
        """The buffers themselves, for a cache: not to be written to."""
        return {"records": self._records, "units": self._units}

    def __call__(
        self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None, peaks: Peaks | None = None
    ) -> Tensor:
        """`x @ weight.T (+ bias) (+ residual)`; see `PackedLinear.__call__`."""
        rows, width = x.shape
        if width != self.in_features or x.dtype is not torch.float32 or x.stride(1) != 1 or not x.is_cpu:
            raise InputError(
                f"quantised linear: input {tuple(x.shape)} {x.dtype} must be float32 [rows, {self.in_features}] on the "
                "CPU with contiguous rows"
            )
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=torch.float32)
        else:
            self._check(out, rows, "output")
        if residual is not None:
            self._check(residual, rows, "residual")
        if peaks is not None:
            peaks.check(rows, self.out_features)
        if not self._native:
            self._reference(x, out, residual)
            if peaks is not None:
                peaks.find(out)
            return out
        failed = _linear(
            self._handle,
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            out.stride(0),
            rows,
            0 if peaks is None else peaks.limit,
            None if peaks is None else peaks.index.data_ptr(),
            None if peaks is None else peaks.value.data_ptr(),
        )
        if failed:
            raise CapacityError(f"quantised linear: no memory to quantise {rows} rows of {width}; lower the batch")
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` (int64 [M]) of the weight as float32 [M, K]: the embedding of a tied head."""
        if ids.ndim != 1 or ids.dtype is not torch.int64 or not ids.is_cpu:
            raise InputError(f"quantised linear: row ids {tuple(ids.shape)} {ids.dtype} must be an int64 vector")
        ids = ids.contiguous()
        if not self._native:
            bad = ((ids < 0) | (ids >= self.out_features)).nonzero()
            if len(bad):
                raise self._bad_row(ids, int(bad[0]))
            panels, at = torch.unique(torch.div(ids, formats.COLUMNS, rounding_mode="floor"), return_inverse=True)
            units = self._units.view(-1, formats.COLUMNS)[panels].flatten()
            some = {"records": self._records[panels], "units": units}
            values = formats.dequantise(some, self.format.name, len(units), self.in_features)
            return values[at * formats.COLUMNS + ids % formats.COLUMNS]
        out = torch.empty((len(ids), self.in_features), dtype=torch.float32)
        code = _rows(self._handle, ids.data_ptr(), out.data_ptr(), len(ids))
        if code:
            raise self._bad_row(ids, code - 1)
        return out

    def _bad_row(self, ids: Tensor, at: int) -> InputError:
        return InputError(f"quantised linear: row id {int(ids[at])} is outside [0, {self.out_features})")

    def _check(self, tensor: Tensor, rows: int, what: str) -> None:
        fits = tensor.shape == (rows, self.out_features) and tensor.dtype is torch.float32
        if not fits or tensor.stride(1) != 1 or not tensor.is_cpu:
            raise InputError(
                f"quantised linear: {what} {tuple(tensor.shape)} {tensor.dtype} must be float32 "
                f"[{rows}, {self.out_features}] on the CPU with contiguous rows"
            )

    def _reference(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """The kernels' chain, a panel at a time: sums of products are exact integers in float64 in any order."""
        codes, scales, sums = quantise_activations(x, self.format.span, self.format.block)
        for panel in range(len(self._records)):
            grid = formats.unpack(self._records[panel : panel + 1], self.format)
            scale, low = grid.effective()
            weights = grid.codes.view(formats.COLUMNS, -1, self.format.block).double() - self.format.zero
            acc = torch.zeros((len(x), formats.COLUMNS))
            for b in range(scale.shape[1]):
                step = (codes[:, b, None, :].double() * weights[None, :, b, :]).sum(-1).float()
                acc = _fused(scale[:, b] * scales[:, b, None], step, acc)
                if low is not None:
                    acc = _fused(low[:, b], (scales[:, b] * sums[:, b])[:, None], acc)
            at = slice(panel * formats.COLUMNS, min((panel + 1) * formats.COLUMNS, self.out_features))
            y = (acc * self._units[panel * formats.COLUMNS :][: formats.COLUMNS])[:, : at.stop - at.start]
            if self.bias is not None:
                y = y + self.bias[at]
            out[:, at] = y if residual is None else y + residual[:, at]


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def quantise_activations(x: Tensor, span: int = 32, block: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and sums of codes of rows [M, K], K padded to a multiple of `span`; all float32.

    Scales are of blocks of 32, repeated for each `block` of 16 where weights have those.

    Returns:
        codes [M, K / block, block] of integers, 256 * high + low; scales and sums [M, K / block].
    """
    rows, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % span)).view(rows, -1, 32)
    largest = padded.abs().amax(2)
    whole = torch.isfinite(padded).all(2)
    used = whole & (largest >= _SMALLEST)
    safe = torch.where(used, largest, 1.0)
    exact = torch.where(used[..., None], padded * (127.0 / safe)[..., None], 0.0)
    high = exact.round()
    codes = 256.0 * high + ((exact - high) * 256.0).round_().clamp_(-127.0, 127.0)
    scales = torch.where(used, safe / 127.0 / 256.0, torch.where(whole, 0.0, torch.nan))
    codes = codes.view(rows, -1, block)
    return codes, scales.repeat_interleave(32 // block, 1), codes.sum(2)
