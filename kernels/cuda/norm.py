"""RMS norms of the residual stream, with the sum of a branch before them."""

import torch
import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit


@jit
def rms_scale(square_sum, D: tl.constexpr, eps):
    """1 / sqrt(mean square + eps)."""
    return 1.0 / tl.sqrt(square_sum / D + eps)


@jit
def joined(x, y, r, post, POST: tl.constexpr):
    """x + y, or x + y * r * post as one fused step after the first product."""
    if POST:
        return tl.fma(y * r, post, x)
    else:
        return x + y


@jit
def add_norm_kernel(
    x, y, post, weight, out, x_out, eps, offset,
    D: tl.constexpr, DP: tl.constexpr, JOIN: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
    DT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    i = tl.arange(0, DP)
    inside = i < D
    g, p = 0.0, 0.0
    if NORM:
        g = offset + tl.load(weight + i, mask=inside, other=0.0)
    if POST:
        p = offset + tl.load(post + i, mask=inside, other=0.0)
    nl.wait(PDL)
    v = tl.load(x + row + i, mask=inside, other=0.0)
    if JOIN:
        b = tl.load(y + row + i, mask=inside, other=0.0).to(tl.float32)
        r = 0.0
        if POST:
            r = rms_scale(tl.sum(b * b), D, eps)
        v = joined(v, b, r, p, POST)
        tl.store(x_out + row + i, v, mask=inside)
    if NORM:
        v = tl.where(inside, v, 0.0)
        scale = rms_scale(tl.sum(v * v), D, eps)
        tl.store(out + row + i, ((v * scale) * g).to(DT), mask=inside)


def add_norm(
    x: Tensor,
    y: Tensor | None,
    post: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    x_out: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    pdl: bool = False,
) -> None:
    """x_out = x (+ y, or + norm(y; post)); out = DT(norm(x_out; weight)), norm(v; w) = v / rms(v) * (offset + w).

    Args:
        x, x_out: float32 [M, D], contiguous, the same or not; x_out is written where there is a y.
        y: DT [M, D].
        post, weight: float32 [D].
        out: DT [M, D]; None where only the sum is wanted.

    The sum of squares runs over a row in one dimension, by `nl.NORM_WARPS` warps in every kernel: its order is always
    the same.
    """
    rows, width = x.shape
    given = y if out is None else out
    dtype = torch.float32 if given is None else given.dtype
    add_norm_kernel[(rows,)](
        x, x if y is None else y, x if post is None else post, x if weight is None else weight,
        x if out is None else out, x_out, eps, offset,
        D=width, DP=nl.next_power_of_2(width), JOIN=y is not None, POST=post is not None, NORM=out is not None,
        DT=nl.TYPES[dtype], num_warps=nl.NORM_WARPS, **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip


def reference(
    x: Tensor, y: Tensor | None, post: Tensor | None, weight: Tensor, *, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(x_out, norm of it in float32), by torch."""

    def norm(v: Tensor, w: Tensor) -> Tensor:
        return v / torch.sqrt(v.square().mean(1, keepdim=True) + eps) * (offset + w)

    total = x if y is None else x + (y.float() if post is None else norm(y.float(), post))
    return total, norm(total, weight)
