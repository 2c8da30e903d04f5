"""RMS normalisation of float32 rows."""

import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native

_rms_norm = native.function("nm_rms_norm")

_TILE = 16  # rows of a reference tile


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, offset: float = 0.0) -> Tensor:
    """`(x / sqrt(mean(x ** 2) + eps)) * (offset + weight)` per row, or per head of a row.

    Natively the squares are summed by fused multiply-adds in 16 accumulators by column mod 16, then in a fixed tree.

    Args:
        x: float32 [M, D], rows contiguous; or [M, H * D] (a column range of wider rows is fine): each D columns are
            normalised by themselves.
        weight: float32 [D].
        eps: added to the mean of the squares.
        out: float32 of x's shape to write, rows contiguous; may be `x`.
        offset: added to the weight (1 in models that store weight - 1).
    """
    rows, columns = x.shape
    if x.dtype is not torch.float32 or x.stride(1) != 1 or not x.is_cpu:
        raise InputError(f"rms_norm: input {tuple(x.shape)} {x.dtype} must be float32 rows on the CPU")
    width = weight.shape[0]
    if weight.ndim != 1 or not width or columns % width or weight.dtype is not torch.float32 or weight.stride(0) != 1:
        raise InputError(
            f"rms_norm: weight {tuple(weight.shape)} {weight.dtype} must be a contiguous float32 vector whose length "
            f"divides {columns}"
        )
    if out is None:
        out = torch.empty((rows, columns), dtype=torch.float32)
    elif out.shape != x.shape or out.dtype is not torch.float32 or out.stride(1) != 1 or not out.is_cpu:
        raise InputError(f"rms_norm: output {tuple(out.shape)} {out.dtype} must be float32 {tuple(x.shape)}")
    if not native.active:
        return reference(x, weight, eps, out, offset)
    _rms_norm(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        eps,
        offset,
        out.data_ptr(),
        out.stride(0),
        rows,
        columns // width,
        width,
    )
    return out


def reference(x: Tensor, weight: Tensor, eps: float, out: Tensor, offset: float = 0.0) -> Tensor:
    """The torch form, in tiles of 16 rows: one shape for all reductions."""
    groups = x.shape[1] // len(weight)
    for start in range(0, len(x), _TILE):
        rows = x[start : start + _TILE]
        tile = torch.zeros((_TILE, groups, len(weight)))
        tile[: len(rows)] = rows.reshape(len(rows), groups, -1)
        scale = 1.0 / torch.sqrt(tile.square().mean(2, keepdim=True) + eps)
        out[start : start + _TILE] = ((tile * scale) * (offset + weight))[: len(rows)].reshape(rows.shape)
    return out
