"""RMS and layer normalisation of float32 rows.

Natively sums run in 16 accumulators by column mod 16 (squares by fused multiply-adds), then in a fixed tree: the bits
of a row depend neither on other rows nor on threads nor on the instruction set.
"""

import ctypes

import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native

_normalise = native.function("nm_normalise")

_TILE = 16  # rows of a reference tile


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    offset: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """`(x / sqrt(mean(x ** 2) + eps)) * (offset + weight) (+ residual)` per row, or per head of a row.

    Args:
        x: float32 [M, D], rows contiguous; or [M, H * D] (a column range of wider rows is fine): each D columns are
            normalised by themselves.
        weight: float32 [D].
        eps: added to the mean of the squares.
        out: float32 of x's shape to write, rows contiguous; may be `x` or `residual`.
        offset: added to the weight (1 in models that store weight - 1).
        residual: float32 of x's shape, rows contiguous, added last.
    """
    return _norm("rms_norm", x, weight, None, eps, out, offset, residual, centred=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """`((x - mean) / sqrt(mean((x - mean) ** 2) + eps)) * (offset + weight) (+ bias)`, arguments as for `rms_norm`."""
    return _norm("layer_norm", x, weight, bias, eps, out, offset, None, centred=True)


def _norm(
    what: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
    offset: float,
    residual: Tensor | None,
    *,
    centred: bool,
) -> Tensor:
    rows, columns = x.shape
    if x.dtype is not torch.float32 or x.stride(1) != 1 or not x.is_cpu:
        raise InputError(f"{what}: input {tuple(x.shape)} {x.dtype} must be float32 rows on the CPU")
    width = weight.shape[0]
    if weight.ndim != 1 or not width or columns % width or weight.dtype is not torch.float32 or weight.stride(0) != 1:
        raise InputError(
            f"{what}: weight {tuple(weight.shape)} {weight.dtype} must be a contiguous float32 vector whose length "
            f"divides {columns}"
        )
    if bias is not None and (bias.shape != weight.shape or bias.dtype is not torch.float32 or bias.stride(0) != 1):
        raise InputError(f"{what}: bias {tuple(bias.shape)} {bias.dtype} must be contiguous float32 [{width}]")
    if out is None:
        out = torch.empty((rows, columns), dtype=torch.float32)
    for name, other in (("output", out), ("residual", residual)):
        if other is not None and (
            other.shape != x.shape or other.dtype is not torch.float32 or other.stride(1) != 1 or not other.is_cpu
        ):
            raise InputError(f"{what}: {name} {tuple(other.shape)} {other.dtype} must be float32 {tuple(x.shape)}")
    if not native.active:
        return reference(x, weight, bias, eps, out, offset, residual, centred=centred)
    arguments = native.Norm(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        out.stride(0),
        rows,
        columns // width,
        width,
        eps,
        offset,
    )
    _normalise(ctypes.addressof(arguments), centred)
    return out


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    offset: float,
    residual: Tensor | None,
    *,
    centred: bool,
) -> Tensor:
    """The torch form, in tiles of 16 rows: one shape for all reductions."""
    groups = x.shape[1] // len(weight)
    for start in range(0, len(x), _TILE):
        rows = x[start : start + _TILE]
        tile = torch.zeros((_TILE, groups, len(weight)))
        tile[: len(rows)] = rows.reshape(len(rows), groups, -1)
        if centred:
            tile -= tile.mean(2, keepdim=True)
        scale = 1.0 / torch.sqrt(tile.square().mean(2, keepdim=True) + eps)
        y = (tile * scale) * (offset + weight)
        if bias is not None:
            y += bias
        y = y[: len(rows)].reshape(rows.shape)
        out[start : start + _TILE] = y if residual is None else residual[start : start + _TILE] + y
    return out
