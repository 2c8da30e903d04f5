"""Rows of the embedding table as the residual stream."""

import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.cuda.unpack import unpacked_row


@jit
def embed_kernel(
    tokens, table, scales, mins, x, factor,
    K: tl.constexpr, KP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr,
    DT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    i = tl.arange(0, KP)
    inside = i < K
    nl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if BITS == 16:
        v = tl.load(table + token * K + i, mask=inside, other=0.0)
    else:
        v = unpacked_row(table, scales, mins, token, i, inside, K, BITS, ZERO, MINS, DT)
    tl.store(x + row * K + i, v.to(tl.float32) * factor, mask=inside)


def embed(matrix: Matrix, tokens: Tensor, x: Tensor, scale: float, *, pdl: bool = False) -> None:
    """x float32 [M, K] = rows `tokens` int64 [M] of a table, times `scale`."""
    none = matrix.weights
    embed_kernel[(len(tokens),)](
        tokens, matrix.weights, none if matrix.scales is None else matrix.scales,
        none if matrix.mins is None else matrix.mins, x, scale,
        K=matrix.in_features, KP=nl.next_power_of_2(matrix.in_features), BITS=matrix.bits, ZERO=matrix.zero,
        MINS=matrix.mins is not None, DT=nl.TYPES[matrix.dtype], num_warps=4, **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip
