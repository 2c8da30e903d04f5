"""Products of few rows with a matrix of long rows (K >= 4096): one chain of tensor-core steps over k, at memory speed.

The library's product of many rows walks k the same way wherever it does not split it, so that it may serve those; see
`numem.kernels.cuda.linear`.
"""

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.cuda.unpack import scales_of, unpacked, words_at, words_of

Config = tuple[int, int, int, int]
"""Columns, k, warps and stages of a program; changes no bit."""


@jit
def weights_at(w, scales, mins, n, at, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Weights [BN, BK] at columns [at, at + BK); BK is 128 where they are packed."""
    if BITS == 16:
        k = at + tl.arange(0, BK)
        b = tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], mask=(k < K)[None, :], other=0.0)
    else:
        first = at + tl.zeros([1], tl.int32)
        low = 0.0
        if MINS:
            low = scales_of(mins, n, first, K, BITS)
        words, scale = words_of(w, n, first, K, BITS), scales_of(scales, n, first, K, BITS)
        b = tl.reshape(unpacked(words, scale, low, ZERO, 1, BN, BITS, MINS, DT), (BN, BK))
    return b


@jit
def prefetch(w, n, K: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Ask for the first columns of rows n [BN] of the weights, lines of 128 bytes, to be in the second-level cache."""
    EACH: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = COLUMNS * (8 * EACH if BITS == 16 else BITS) // 1024
    line = tl.arange(0, LINES)[None, :]
    row = n[:, None].to(tl.int64)
    if BITS == 16:
        at = row * K + line * (128 // EACH)
    else:  # those of 16 rows lie together, and each row asks for every sixteenth line
        at = words_at(row // 16 * 16, K, BITS) + (row % 16 + 16 * line) * 32
    where = (w + at).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where], tl.int32, False, 1)


@jit
def chain_kernel(
    h, w, block, scales, mins, bias, out, rows, N,
    K: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr,
    DESCRIBED: tl.constexpr, DT: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(column, N - 1)
    m = tl.program_id(1) * L + tl.arange(0, L)
    inside = m < rows
    if PDL:
        # while the kernel before ends: what the loop loads first
        prefetch(w, n, K, 4 * BK, BITS)
        if ACT != 0:
            prefetch(w, n + N, K, 4 * BK, BITS)
    nl.wait(PDL)
    acc = tl.zeros([BN, L], tl.float32)
    acc2 = tl.zeros([BN, L], tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        k = at + tl.arange(0, BK)
        a = tl.load(h + m[None, :].to(tl.int64) * K + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0.0)
        if DESCRIBED:  # rows past the end are not stored
            b = block.load([tl.program_id(0) * BN, at])
        else:
            b = weights_at(w, scales, mins, n, at, K, BK, BN, BITS, ZERO, MINS, DT)
        acc = tl.dot(b, a, acc, input_precision=PRECISION)
        if ACT != 0:
            if DESCRIBED:
                b2 = block.load([tl.program_id(0) * BN + N, at])
            else:
                b2 = weights_at(w, scales, mins, n + N, at, K, BK, BN, BITS, ZERO, MINS, DT)
            acc2 = tl.dot(b2, a, acc2, input_precision=PRECISION)
    # not before: programs of the next kernel would lie on some multiprocessors while others have yet to take this one's
    nl.let_next_start(PDL)
    result = nl.ended(0.0 + acc, 0.0 + acc2, bias, n, N, BIAS, ACT, DT)
    mask = inside[None, :] & (column[:, None] < N)
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], result.to(OUT), mask=mask)


def few_rows(
    matrix: Matrix,
    h: Tensor,
    out: Tensor,
    *,
    act: str | None = None,
    config: Config | None = None,
    pdl: bool = False,
) -> None:
    """out DT [M, N] = matrix of h DT [M, K]; with `act` the matrix is [gate | up] and out [M, N / 2] the gated half.

    Args:
        config: else by `settings`.
    """
    rows, width = out.shape
    lanes = 8 if rows <= 8 else 16 if rows <= 16 else 32
    bn, bk, warps, stages = config or settings(matrix, width, lanes, act is not None)
    none = out
    described = matrix.bits == 16 and nl.describable(matrix.weights)
    chain_kernel[(nl.cdiv(width, bn), nl.cdiv(rows, lanes))](
        h, matrix.weights, TensorDescriptor.from_tensor(matrix.weights, [bn, bk]) if described else none,
        none if matrix.scales is None else matrix.scales,
        none if matrix.mins is None else matrix.mins, none if matrix.bias is None else matrix.bias, out, rows, width,
        K=matrix.in_features, L=lanes, BN=bn, BK=bk, STAGES=stages, BIAS=matrix.bias is not None,
        ACT=0 if act is None else nl.ACTIVATIONS[act], BITS=matrix.bits, ZERO=matrix.zero, MINS=matrix.mins is not None,
        DESCRIBED=described, DT=nl.TYPES[matrix.dtype], OUT=nl.TYPES[out.dtype],
        PRECISION=nl.precision(matrix.dtype), num_warps=warps,
        **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip


_SETTINGS: dict[tuple[bool, bool], tuple[Config, Config, Config, Config]] = {
    # packed, more than 8 lanes: gated; wide; between; narrow
    (False, False): ((16, 128, 2, 3), (32, 128, 4, 4), (16, 128, 1, 6), (16, 128, 1, 8)),
    (False, True): ((64, 128, 4, 4), (64, 128, 4, 4), (32, 128, 2, 6), (32, 256, 2, 5)),
    (True, False): ((16, 128, 1, 4), (16, 128, 1, 6), (16, 128, 1, 6), (16, 128, 1, 6)),
    (True, True): ((32, 128, 2, 3), (32, 128, 2, 4), (16, 128, 1, 6), (32, 128, 4, 4)),
}


def settings(matrix: Matrix, width: int, lanes: int, gated: bool) -> Config:
    """Columns, k, warps and stages of a program, as measured on an H200 at the shapes of Llama-3.1-8B.

    A warp multiplies 16 columns; more of them would only wait for each other. Of few lanes, small programs lie several on a
    multiprocessor and wait by turns; of many, larger ones read the rows less often. Packed weights are unpacked by the warp
    that multiplies them, so more and smaller programs share the work.
    """
    if matrix.dtype.itemsize == 4 and matrix.bits == 16:
        return 32, 128, 4, 2
    kind = 0 if gated else 1 if width >= 8192 else 2 if width > 32 * nl.MULTIPROCESSORS else 3
    return _SETTINGS[matrix.bits != 16, lanes > 8][kind]
