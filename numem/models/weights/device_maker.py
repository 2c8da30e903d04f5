"""Weights on a GPU, in slabs from the mapped checkpoint: the host never holds a second copy of a matrix.

A quantised matrix keeps its codes and scales where a kernel reads them as they are: q8, q4 and q4a with their own scales,
q4k with the products of its two, in float16 where that holds all of a matrix exactly, else in float32. The blocks of 16 and the 6 bits of q6k have
no kernel: such a matrix is held as the weights that it stands for, rounded to the dtype of products, as those of every
format are when they are multiplied.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from numem.kernels import formats
from numem.kernels.cuda.matrix import STEP, TILE, Matrix, Stack
from numem.kernels.operations import Linear

_SLAB = 32 << 20  # weights that are on their way at a time


class DeviceMaker:
    """Makes matrices of `numem.kernels.cuda`.

    Args:
        device: where they lie.
        dtype: DT, of the weights of products.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def dense(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Linear:
        """Rounded once, from the stored dtype to `dtype`."""
        n, k = sum(map(len, parts)), parts[0].shape[1]
        weight = torch.empty((n, k), dtype=dtype, device=self.device)
        at = 0
        for part in parts:
            for rows in _slabs(len(part), k, 1):
                weight[at + rows.start : at + rows.stop] = part[rows].to(dtype)
            at += len(part)
        return _linear(Matrix(n, k, weight, 16, dtype, self._bias(bias)))

    def quantised(self, format: str, n: int, k: int, planes: formats.Planes, bias: Tensor | None) -> Linear:
        f = formats.format_of(format)
        if f.code not in (4, 8) or f.block != STEP:
            return self._plain(format, n, k, planes, bias)
        words = torch.empty(0)
        small: list[list[Tensor]] = []
        for rows in _slabs(n, k, formats.COLUMNS):
            part = self._packed(f, k, planes, rows)
            at = rows.start // TILE  # panels are whole tiles
            if at == 0:
                words = torch.empty((-(-n // TILE), *part.weights.shape[1:]), dtype=torch.int32, device=self.device)
            words[at : at + len(part.weights)] = part.weights
            small.append([t for t in (part.scales, part.mins) if t is not None])
        # of slabs whose types differ the wider one
        scales, *mins = (torch.cat(each) for each in zip(*small, strict=True))
        return _linear(
            Matrix(
                n, k, words, f.code, self.dtype, self._bias(bias), scales, mins[0] if mins else None, f.zero
            )
        )  # fmt: skip

    def stack(self, matrices: Sequence[Linear]) -> Sequence[Linear]:
        """One matrix; dense where formats differ."""
        return cast(Sequence[Linear], Stack.of(cast(Sequence[Matrix], matrices)))

    def vector(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def _packed(self, f: formats.Format, k: int, planes: formats.Planes, rows: slice) -> Matrix:
        """Rows of a matrix, packed on the device; `rows` starts at a panel."""
        panels = slice(rows.start // formats.COLUMNS, -(-rows.stop // formats.COLUMNS))
        count = rows.stop - rows.start
        grid = formats.unpack(planes["records"][panels].to(self.device), f)
        scales, mins = grid.scales, grid.mins
        if f.nested:
            scales, mins = grid.effective()
        return Matrix.packed(
            grid.codes[:count, :k],
            scales[:count],
            planes["units"][rows].to(self.device),
            zero=f.zero,
            bits=f.code,
            dtype=self.dtype,
            device=self.device,
            mins=None if mins is None else mins[:count],
        )

    def _plain(self, format: str, n: int, k: int, planes: formats.Planes, bias: Tensor | None) -> Linear:
        weight = torch.empty((n, k), dtype=self.dtype, device=self.device)
        for rows in _slabs(n, k, formats.COLUMNS):
            panels = slice(rows.start // formats.COLUMNS, -(-rows.stop // formats.COLUMNS))
            weight[rows] = formats.dequantise(planes, format, n, k, panels)[: rows.stop - rows.start].to(self.dtype)
        return _linear(Matrix(n, k, weight, 16, self.dtype, self._bias(bias)))

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self.device, torch.float32)


def _slabs(n: int, k: int, unit: int) -> Iterator[slice]:
    """Rows [0, n) in slices that start at multiples of `unit`."""
    step = max(1, _SLAB // (k * unit)) * unit
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _linear(matrix: Matrix) -> Linear:
    """A program only names its matrices; those of a device are called by its launches."""
    return cast(Linear, matrix)
