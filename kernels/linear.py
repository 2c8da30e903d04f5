"""Linear layers on weights packed for the CPU.

Native: each output is a fused-multiply-add chain over k, cut at multiples of 64 into segments that each start from +0
and are added in order, then + bias, then + residual, each rounded; the bits of a row depend neither on the other rows
nor on threads nor on the instruction set. Segments, because the rounding error of one chain over 1,536 steps exceeds
that of blocked products several times.
A bfloat16 layer rounds its input rows to bfloat16 (denormals to zero), so that products are exact, and takes k in pairs,
the odd one first: the order of the processors' bfloat16 instruction, which every build follows.
Reference: `F.linear` in fixed tiles of 16 rows, whose rows do not depend on their companions either.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from numem.errors import CapacityError, InputError
from numem.kernels import native

_linear = native.function("nm_linear")
_rows = native.function("nm_rows")
_pack = native.function("nm_pack")

_TILE = 16  # rows of a reference tile
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in csrc/api.h


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest of the first `limit` elements of each row: of equals the first, and the first NaN where there is one.

    Attributes:
        index: int64 [M]; value: float32 [M]; contiguous.
    """

    limit: int
    index: Tensor
    value: Tensor

    @classmethod
    def of(cls, rows: int, limit: int) -> Self:
        return cls(limit, torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32))

    def check(self, rows: int, width: int) -> None:
        """Refuse a place of another size than `rows`, or a limit outside [1, width]."""
        if self.index.shape != (rows,) or self.value.shape != (rows,) or not 0 < self.limit <= width:
            raise InputError(
                f"linear: peaks of {tuple(self.index.shape)} up to {self.limit} do not fit [{rows}, {width}]"
            )

    def find(self, x: Tensor) -> None:
        """Note them of rows that are there already; by numpy, as torch does not promise the first of equals."""
        rows = x.numpy()[:, : self.limit]
        self.index.numpy()[:] = rows.argmax(axis=1)
        self.value.numpy()[:] = rows[range(len(rows)), self.index.numpy()]


class PackedLinear:
    """A weight matrix [N, K] (float32 or bfloat16, stored as such) and an optional bias [N] (kept as float32).

    Natively the weight is copied into panels of 32 columns, padded with zeros: [ceil(N / 32)][K][32], or for bfloat16
    [ceil(N / 32)][ceil(K / 2)][32][2];
    the given tensor is not kept. The choice between panels and reference is made here, at construction.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._build((weight,), weight.dtype, bias)

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None = None) -> Self:
        """The layer of `torch.cat([p.to(dtype) for p in parts])`, bit for bit, without that matrix in memory.

        Args:
            parts: [n_i, K] each, float32, float16 or bfloat16, mixed as they come; views of mapped files are read
                once, row by row.
            dtype: float32 or bfloat16.
            bias: [sum of n_i].
        """
        layer = cls.__new__(cls)
        layer._build(parts, dtype, bias)
        return layer

    def _build(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"linear: a weight of {dtype} cannot be held; use float32 or bfloat16")
        if not parts:
            raise InputError("linear: a weight of no parts")
        for part in parts:
            if part.ndim != 2 or part.dtype not in _TYPES or 0 in part.shape or part.shape[1] != parts[0].shape[1]:
                raise InputError(
                    f"linear: weight {tuple(part.shape)} {part.dtype} is not a float32, float16 or bfloat16 matrix "
                    "as wide as the others"
                )
        self.out_features, self.in_features = sum(len(part) for part in parts), parts[0].shape[1]
        if bias is not None and bias.shape != (self.out_features,):
            raise InputError(
                f"linear: bias {tuple(bias.shape)} does not fit weight {self.out_features, self.in_features}"
            )
        self.dtype = dtype
        # a copy, so that a caller's tensor (or mapped file) is never aliased
        self.bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self._matrix: native.Matrix | None = None
        if native.active:
            self._panels = _packed(parts, self.out_features, dtype)
            self._matrix = native.Matrix(
                self._panels.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                self.out_features,
                self.in_features,
                int(self.dtype is torch.bfloat16),
            )
            self._handle = ctypes.addressof(self._matrix)
        else:
            self._panels = torch.cat([part.detach().to(dtype).to(torch.float32) for part in parts])

    @property
    def handle(self) -> int | None:
        """Address of the extension's view of the matrix; None where the reference runs."""
        return None if self._matrix is None else self._handle

    @property
    def nbytes(self) -> int:
        """Bytes held: the panels (or the reference's float32 weight) and the bias."""
        return self._panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(
        self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None, peaks: Peaks | None = None
    ) -> Tensor:
        """`x @ weight.T (+ bias) (+ residual)`.

        Args:
            x: float32 [M, K], rows contiguous.
            out: float32 [M, N] to write, rows contiguous; may be `residual` itself, must not overlap `x`.
            residual: float32 [M, N], added last.
            peaks: where the largest of each row is noted, while the row is in the cache.
        """
        rows, width = x.shape
        if width != self.in_features or x.dtype is not torch.float32 or x.stride(1) != 1 or not x.is_cpu:
            raise InputError(
                f"linear: input {tuple(x.shape)} {x.dtype} must be float32 [rows, {self.in_features}] on the CPU "
                "with contiguous rows"
            )
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=torch.float32)
        else:
            self._check(out, rows, "output")
        if residual is not None:
            self._check(residual, rows, "residual")
        if peaks is not None:
            peaks.check(rows, self.out_features)
        if self._matrix is None:
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
            raise CapacityError(f"linear: no memory to round {rows} rows of {width} to bfloat16; lower the batch")
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` (int64 [M]) of the weight as float32 [M, K]: the embedding of a tied head."""
        if ids.ndim != 1 or ids.dtype is not torch.int64 or not ids.is_cpu:
            raise InputError(f"linear: row ids {tuple(ids.shape)} {ids.dtype} must be an int64 vector on the CPU")
        ids = ids.contiguous()
        if self._matrix is None:
            bad = ((ids < 0) | (ids >= self.out_features)).nonzero()
            if len(bad):
                raise self._bad_row(ids, int(bad[0]))
            return self._panels[ids]
        out = torch.empty((len(ids), self.in_features), dtype=torch.float32)
        code = _rows(self._handle, ids.data_ptr(), out.data_ptr(), len(ids))
        if code:
            raise self._bad_row(ids, code - 1)
        return out

    def _bad_row(self, ids: Tensor, at: int) -> InputError:
        return InputError(f"linear: row id {int(ids[at])} is outside [0, {self.out_features})")

    def _check(self, tensor: Tensor, rows: int, what: str) -> None:
        if (
            tensor.shape != (rows, self.out_features)
            or tensor.dtype is not torch.float32
            or tensor.stride(1) != 1
            or not tensor.is_cpu
        ):
            raise InputError(
                f"linear: {what} {tuple(tensor.shape)} {tensor.dtype} must be float32 [{rows}, {self.out_features}] "
                "on the CPU with contiguous rows"
            )

    def _reference(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Tensor:
        for start in range(0, len(x), _TILE):
            stop = min(start + _TILE, len(x))
            tile = torch.zeros((_TILE, self.in_features), dtype=torch.float32)
            tile[: stop - start] = x[start:stop] if self.dtype is torch.float32 else x[start:stop].to(self.dtype)
            y = torch.nn.functional.linear(tile, self._panels)[: stop - start]
            if self.bias is not None:
                y = y + self.bias
            out[start:stop] = y if residual is None else y + residual[start:stop]
        return out


def _packed(parts: Sequence[Tensor], n: int, dtype: torch.dtype) -> Tensor:
    k = parts[0].shape[1]
    # rows only need to be contiguous each; a transposed part is copied
    rows = [part.detach() if part.stride(1) == 1 else part.detach().contiguous() for part in parts]
    views = (native.Part * len(rows))(*(native.Part(r.data_ptr(), len(r), r.stride(0), _TYPES[r.dtype]) for r in rows))
    steps = (k, native.PANEL) if dtype is torch.float32 else (-(-k // 2), native.PANEL, 2)
    out = torch.empty((-(-n // native.PANEL), *steps), dtype=dtype)
    _pack(ctypes.addressof(views), len(rows), out.data_ptr(), k, dtype is torch.bfloat16)
    return out
