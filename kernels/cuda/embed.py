"""Rows of the embedding table as the residual stream, and the norm that the first layer begins with."""

import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.cuda.norm import rms_scale
from numem.kernels.cuda.unpack import unpacked_row


@jit
def embed_kernel(
    tokens, table, scales, mins, x, weight, h, factor, eps, offset,
    K: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr,
    NORM: tl.constexpr, DT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    i = tl.arange(0, KP)
    inside = i < K
    g = 0.0
    if NORM:
        g = offset + tl.load(weight + i, mask=inside, other=0.0)
    nl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if BITS == 16:
        v = tl.load(table + token * K + i, mask=inside, other=0.0)
    else:
        v = unpacked_row(table, scales, mins, token, i, inside, K, BITS, ZERO, MINS, DT)
    v = v.to(tl.float32) * factor
    tl.store(x + row * K + i, v, mask=inside)
    if NORM:
        v = tl.where(inside, v, 0.0)
        r = rms_scale(tl.sum(v * v), K, eps)
        tl.store(h + row * K + i, ((v * r) * g).to(DT), mask=inside)


def embed(
    matrix: Matrix,
    tokens: Tensor,
    x: Tensor,
    factor: float,
    *,
    weight: Tensor | None = None,
    h: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    pdl: bool = False,
) -> None:
    """x float32 [M, K] = rows `tokens` int64 [M] of a table, times `factor`; with `weight` float32 [K], h = DT(norm(x)).

    Args:
        h: DT [M, K]; see `norm.add_norm`, whose order the sum of squares has.
    """
    none = matrix.weights
    embed_kernel[(len(tokens),)](
        tokens, matrix.weights, none if matrix.scales is None else matrix.scales,
        none if matrix.mins is None else matrix.mins, x, x if weight is None else weight, x if h is None else h,
        factor, eps, offset,
        K=matrix.in_features, KP=nl.next_power_of_2(matrix.in_features), BITS=matrix.bits, ZERO=matrix.zero,
        MINS=matrix.mins is not None, NORM=weight is not None, DT=nl.TYPES[matrix.dtype], num_warps=nl.NORM_WARPS,
        **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip
