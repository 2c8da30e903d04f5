"""Products of few rows with a matrix of short rows (K < 4096), at the latency of a launch.

One chain of tensor-core steps over k would take 33 cycles a step, which no other work of so small a kernel hides. So the
sum is cut into eight segments of `segment(K)` columns: each is one chain, and the eight are added in order. A warp takes
a segment; weights are the tall side of the tensor core and rows its narrow side. A row's bits depend neither on the
other rows nor on the tile: `many_rows` walks the same segments one after another.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from numem.errors import InputError
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.cuda.merging import Parts, count_of, merged, tiles_of
from numem.kernels.cuda.norm import joined, rms_scale
from numem.kernels.cuda.unpack import scales_of, unpacked, words_of

LONG = 4096  # columns from which on a row is one chain
SEGMENTS = 8
BLOCK = 128  # columns of k that a warp loads at once
WARPS = nl.NORM_WARPS
FEW = 32  # rows that the kernel of few rows serves
FUSED_ROWS = 4  # rows that a program prepares one by one, with their norms
DESCRIBED = 1024  # rows from which on descriptors are worth the 15 us that they take the host
MERGED = 16  # tiles, times rows, times blocks of columns, that a program merges at most

Config = tuple[int, int, int, int, int]
"""Rows, columns, k, warps and stages of a program of `many_rows`; changes no bit."""


@dataclass(frozen=True, slots=True)
class Norm:
    """What precedes a product: x_out = x joined with a branch; h = DT(norm(x_out)).

    Attributes:
        x, x_out: float32 [M, K], different tensors; x_out is written where there is a branch.
        branch: DT [M, K], or None: then the sum of squares of more than 1,024 columns has an order of its own, as nothing
            of DT makes the compiler lay the row out as elsewhere.
        post: float32 [K], weight of the norm of the branch, or None.
        weight: float32 [K].
    """

    x: Tensor
    x_out: Tensor
    branch: Tensor | None
    post: Tensor | None
    weight: Tensor
    eps: float
    offset: float = 0.0


def segment(k: int) -> int:
    """Columns of one segment of a row of `k`."""
    return BLOCK * nl.cdiv(k, SEGMENTS * BLOCK)


@jit
def in_order(acc, A: tl.constexpr, B: tl.constexpr):
    """Sum of the slices of [8, A, B], one after another."""
    t = tl.permute(tl.reshape(acc, (2, 2, 2, A, B)), (3, 4, 0, 1, 2))
    even, odd = tl.split(t)
    e0, e1 = tl.split(even)
    o0, o1 = tl.split(odd)
    s0, s4 = tl.split(e0)
    s2, s6 = tl.split(e1)
    s1, s5 = tl.split(o0)
    s3, s7 = tl.split(o1)
    # from zero on, as the many-row form begins, so that a sum of negative zeros is the same zero
    return (((((((0.0 + s0) + s1) + s2) + s3) + s4) + s5) + s6) + s7


@jit
def settled(x, BITS: tl.constexpr, DT: tl.constexpr):
    """Unpacked weights x, in registers before the wait that follows.

    The assembler would unpack after the wait, where nothing hides it. So whether a fence, which changes nothing here, stands
    before the wait is made to depend on them.
    """
    if BITS == 16 or DT == tl.float32 or nl.IN_PYTHON:
        return x
    else:
        asm: tl.constexpr = (
            "{ .reg .pred p; .reg .b32 a, b; "
            "xor.b32 a, $8, $9; xor.b32 b, $10, $11; xor.b32 a, a, b; xor.b32 b, $12, $13; xor.b32 a, a, b; "
            "xor.b32 b, $14, $15; xor.b32 a, a, b; setp.eq.u32 p, a, 0x7FFF8001; @p membar.cta; "
            "mov.b32 $0, $8; mov.b32 $1, $9; mov.b32 $2, $10; mov.b32 $3, $11; "
            "mov.b32 $4, $12; mov.b32 $5, $13; mov.b32 $6, $14; mov.b32 $7, $15; }"
        )
        return tl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [x], dtype=x.dtype, is_pure=False, pack=16
        )


@triton.jit(do_not_specialize=["tiles"])
def few_rows_kernel(
    h, x, y, post, weight, x_out, words_ml, part_a, positions, w, scales, mins, bias, out,
    rows, N, tiles, eps, offset,
    K: tl.constexpr, KN: tl.constexpr, C: tl.constexpr, L: tl.constexpr, BN: tl.constexpr,
    NORM: tl.constexpr, JOIN: tl.constexpr, POST: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(column, N - 1)  # columns past the end repeat the last one
    m = tl.program_id(1) * L + tl.arange(0, L)
    s = tl.arange(0, 8)
    k = tl.arange(0, 128)
    inside = m < rows
    words, scale, low = (), (), ()
    words2, scale2, low2 = (), (), ()
    gains, posts = (), ()
    for c in tl.static_range(C):
        kk = s[:, None] * (128 * C) + c * 128 + k[None, :]
        begin = s * (128 * C) + c * 128
        words = words + (words_of(w, n, begin, K, BITS),)
        scale = scale + (scales_of(scales, n, begin, K, BITS),)
        if MINS:
            low = low + (scales_of(mins, n, begin, K, BITS),)
        else:
            low = low + (0.0,)
        if ACT != 0:
            words2 = words2 + (words_of(w, n + N, begin, K, BITS),)
            scale2 = scale2 + (scales_of(scales, n + N, begin, K, BITS),)
            if MINS:
                low2 = low2 + (scales_of(mins, n + N, begin, K, BITS),)
            else:
                low2 = low2 + (0.0,)
        if NORM:
            gains = gains + (offset + tl.load(weight + kk, mask=kk < K, other=0.0),)
            if POST:
                posts = posts + (offset + tl.load(post + kk, mask=kk < K, other=0.0),)
            else:
                posts = posts + (0.0,)
    i = tl.arange(0, KN)
    whole = i < K
    after = 0.0
    if NORM and POST:
        after = offset + tl.load(post + i, mask=whole, other=0.0)
    dense, dense2, counts = (), (), ()
    for c in tl.static_range(C):
        dense = dense + (settled(unpacked(words[c], scale[c], low[c], ZERO, 8, BN, BITS, MINS, DT), BITS, DT),)
        if ACT != 0:
            dense2 = dense2 + (settled(unpacked(words2[c], scale2[c], low2[c], ZERO, 8, BN, BITS, MINS, DT), BITS, DT),)
    if MOST > 0:
        for row in tl.static_range(ROWS):
            counts = counts + (count_of(tl.load(positions + row), WINDOW, TILE),)
    nl.wait(PDL)
    # All of x and its branch that the product needs is asked for before the sums that it waits for. Few rows are prepared
    # one by one, each thread with its own columns, and put among the rows of the product at the end.
    xs, ys, made, totals = (), (), (), ()
    if NORM:
        for row in tl.static_range(ROWS):
            for c in tl.static_range(C):
                kk = s[:, None] * (128 * C) + c * 128 + k[None, :]
                xs = xs + (tl.load(x + row * K + kk, mask=kk < K, other=0.0),)
                if JOIN:
                    ys = ys + (tl.load(y + row * K + kk, mask=kk < K, other=0.0).to(tl.float32),)
                else:
                    ys = ys + (0.0,)
        for row in tl.static_range(ROWS):
            # Sums run over a row of its own, in one dimension, as everywhere: the tree of the sum follows from the tile.
            total = tl.load(x + row * K + i, mask=whole, other=0.0)
            scale_y = 0.0
            if JOIN:
                branch = tl.load(y + row * K + i, mask=whole, other=0.0).to(tl.float32)
                if POST:
                    scale_y = rms_scale(tl.sum(branch * branch), K, eps)
                total = joined(total, branch, scale_y, after, POST)
            totals = totals + (total,)
            squares = tl.where(whole, total, 0.0)
            r = rms_scale(tl.sum(squares * squares), K, eps)
            for c in tl.static_range(C):
                v = xs[row * C + c]
                if JOIN:
                    v = joined(v, ys[row * C + c], scale_y, posts[c], POST)
                made = made + (((v * r) * gains[c]).to(DT),)
    elif MOST > 0:
        for row in tl.static_range(ROWS):
            for c in tl.static_range(C):
                start = s * (128 * C) + c * 128
                inside_k = (start[:, None] + k[None, :]) < K
                part = (row * HEADS + tl.minimum(start // D, HEADS - 1)) * tiles
                at_head = (start % D)[:, None] + k[None, :]
                parts = tiles_of(words_ml, part_a, part, at_head, inside_k, counts[row], 8, D, MOST)
                made = made + (merged(parts, counts[row], 8, 128, MOST).to(DT),)
    elif ROWS > 0:
        for row in tl.static_range(ROWS):
            for c in tl.static_range(C):
                kk = s[:, None] * (128 * C) + c * 128 + k[None, :]
                made = made + (tl.load(h + row * K + kk, mask=kk < K, other=0.0),)
    acc = tl.zeros([8, BN, L], tl.float32)
    acc2 = tl.zeros([8, BN, L], tl.float32)
    for c in tl.static_range(C):
        if ROWS > 0:
            # rows past the last one repeat the first, and are not stored
            a = tl.broadcast_to(made[c][:, None, :], [8, L, 128])
            for row in tl.static_range(1, ROWS):
                a = tl.where((m == row)[None, :, None], made[row * C + c][:, None, :], a)
        else:
            kk = s[:, None] * (128 * C) + c * 128 + k[None, :]
            ok = (kk < K)[:, None, :] & inside[None, :, None]
            a = tl.load(h + m[None, :, None] * K + kk[:, None, :], mask=ok, other=0.0)
        a = tl.permute(a, (0, 2, 1))
        acc = tl.dot(dense[c], a, acc, input_precision=PRECISION)
        if ACT != 0:
            acc2 = tl.dot(dense2[c], a, acc2, input_precision=PRECISION)
    result, up = 0.0, 0.0
    if ACT != 0:  # both in one exchange between the warps
        both = in_order(tl.reshape(tl.join(acc, acc2), (8, BN, 2 * L)), BN, 2 * L)
        result, up = tl.split(tl.reshape(both, (BN, L, 2)))
    else:
        result = in_order(acc, BN, L)
    result = nl.ended(result, up, bias, n, N, BIAS, ACT, DT)
    mask = inside[None, :] & (column[:, None] < N)
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], result.to(OUT), mask=mask)
    if NORM and JOIN:  # noqa: SIM102  apart, as the other is not known when this is compiled
        if tl.program_id(0) == 0:
            for row in tl.static_range(ROWS):
                tl.store(x_out + row * K + i, totals[row], mask=whole)


@jit
def many_rows_kernel(
    h, w, bias, out, M, N,
    K: tl.constexpr, SEGMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, DESCRIBED: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    down = tl.cdiv(M, BM)
    group = pid // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    first_m, first_n = (group * GROUP + pid % (GROUP * across) % height) * BM, pid % (GROUP * across) // height * BN
    m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    if not DESCRIBED:
        k = tl.arange(0, BK)
        # rows and columns past the end repeat the last ones and are not stored
        hp = h + tl.minimum(m, M - 1)[:, None].to(tl.int64) * K + k[None, :]
        wp = w + tl.minimum(n, N - 1)[None, :].to(tl.int64) * K + k[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    acc = tl.zeros([BM, BN], tl.float32)
    # one loop over all of k, so that the loads of a segment are under way while the one before is multiplied
    for at in tl.range(0, K, BK):
        if DESCRIBED:  # zeros past every end
            a = h.load([first_m, at])
            b = tl.trans(w.load([first_n, at]))
        elif K % BK == 0:
            a = tl.load(hp + at)
            b = tl.load(wp + at)
        else:
            a = tl.load(hp + at, mask=(at + k < K)[None, :], other=0.0)
            b = tl.load(wp + at, mask=(at + k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if (at + BK) % SEGMENT == 0:
            total += acc
            acc = tl.zeros([BM, BN], tl.float32)
    if K % SEGMENT > 0 or K % BK > 0:  # the last segment ends with k, not with a step
        total += acc
    if BIAS:
        total += tl.load(bias + tl.minimum(n, N - 1))[None, :]
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], total.to(DT), mask=(m[:, None] < M) & (n[None, :] < N))


def few_rows(
    matrix: Matrix,
    out: Tensor,
    *,
    h: Tensor | None = None,
    norm: "Norm | None" = None,
    parts: Parts | None = None,
    act: str | None = None,
    tile: int = 0,
    pdl: bool = False,
) -> None:
    """out = matrix of rows: of `h`, of what a norm gives, or of what tiles of attention left; with `act` the matrix is
    [gate | up] and out the gated half.

    Args:
        matrix: K < 4096.
        out: DT [M, N], or with `act` [M, N / 2]; float32 takes the sums as they are.
        h: DT [M, K].
        norm: of up to `FUSED_ROWS` rows, a norm of the residual stream, with the branch that joins it first.
        parts: tiles of attention, where `merges` says so.
        act: an activation of `nl.ACTIVATIONS`.
        tile: columns of a program, 16 or 32, else as `columns` has it; changes no bit.
    """
    rows, width = out.shape
    if rows > FUSED_ROWS and (norm is not None or parts is not None):
        raise InputError(
            f"few_rows: {rows} rows of a norm or of attention's tiles, and it serves {FUSED_ROWS}; give it `h`"
        )
    if act is not None and not gates(matrix):
        raise InputError(
            f"few_rows: an activation in a product of {matrix.in_features} columns; launch `gate.gate` after it"
        )
    k = matrix.in_features
    lanes = 8 if rows <= 8 else 16 if rows <= 16 else 32
    tile = tile or columns(matrix, width, lanes, act is not None)
    dtype = nl.TYPES[matrix.dtype]
    none = out
    x = norm.x if norm is not None else none
    joins = norm is not None and norm.branch is not None
    few_rows_kernel[(nl.cdiv(width, tile), nl.cdiv(rows, lanes))](
        none if h is None else h,
        x,
        norm.branch if norm is not None and norm.branch is not None else none,
        norm.post if norm is not None and norm.post is not None else none,
        norm.weight if norm is not None else none,
        norm.x_out if norm is not None else none,
        none if parts is None else parts.words,
        none if parts is None else parts.a,
        none if parts is None else parts.positions,
        matrix.weights,
        none if matrix.scales is None else matrix.scales,
        none if matrix.mins is None else matrix.mins,
        none if matrix.bias is None else matrix.bias,
        out,
        rows,
        width,
        0 if parts is None else parts.tiles,
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
        K=k,
        KN=nl.next_power_of_2(k),
        C=nl.cdiv(k, SEGMENTS * BLOCK),
        L=lanes,
        BN=tile,
        NORM=norm is not None,
        JOIN=joins,
        POST=norm is not None and norm.post is not None,
        MOST=0 if parts is None else nl.next_power_of_2(parts.most),
        ROWS=rows if rows <= FUSED_ROWS else 0,
        HEADS=1 if parts is None else parts.heads,
        D=BLOCK if parts is None else parts.head_dim,
        TILE=BLOCK if parts is None else nl.tile_keys(parts.head_dim),
        WINDOW=0 if parts is None else parts.window,
        BIAS=matrix.bias is not None,
        ACT=0 if act is None else nl.ACTIVATIONS[act],
        BITS=matrix.bits,
        ZERO=matrix.zero,
        MINS=matrix.mins is not None,
        DT=dtype,
        OUT=nl.TYPES[out.dtype],
        PRECISION=nl.precision(matrix.dtype),
        num_warps=WARPS,
        **nl.EXACT,
        **nl.launch(pdl),
    )


def many_rows(weight: Tensor, bias: Tensor | None, h: Tensor, out: Tensor, *, config: Config | None = None) -> None:
    """out DT [M, N] = h [M, K] @ weight [N, K].T (+ bias), bit for bit as the products of few rows.

    K >= 4096 is one segment.

    Args:
        config: rows, columns, k, warps and stages of a program, else by `settings`.
    """
    rows, k = h.shape
    n = len(weight)
    length = segment(k) if k < LONG else k
    bm, bn, bk, warps, stages = config or settings(weight, rows)
    described = rows >= DESCRIBED and nl.describable(weight)
    many_rows_kernel[(nl.cdiv(rows, bm) * nl.cdiv(n, bn),)](
        TensorDescriptor.from_tensor(h, [bm, bk]) if described else h,
        TensorDescriptor.from_tensor(weight, [bn, bk]) if described else weight,
        out if bias is None else bias, out, rows, n,
        K=k, SEGMENT=length, BM=bm, BN=bn, BK=bk, GROUP=8, BIAS=bias is not None, DESCRIBED=described,
        DT=nl.TYPES[weight.dtype], PRECISION=nl.precision(weight.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def settings(weight: Tensor, rows: int) -> Config:
    """Of `many_rows`, by what was measured on an H200: large tiles where they are two for every multiprocessor, as each
    number is read from shared memory for more products; else the largest that leaves few multiprocessors idle."""
    n, k = weight.shape
    if weight.dtype.itemsize == 4:
        return 32, 32, 32, 4, 4
    if nl.cdiv(rows, 128) * nl.cdiv(n, 128) >= 2 * nl.MULTIPROCESSORS:
        return (128, 128, 128, 8, 3) if min(n, k) >= 1024 else (64, 128, 64, 4, 3)
    for columns in (128, 64):
        if nl.cdiv(rows, 64) * nl.cdiv(n, columns) >= nl.MULTIPROCESSORS * 2 // 3:
            return 64, columns, 128, 4, 4
    return 64, 32, 128, 4, 4 if k < 2048 else 6


def merges(matrix: Matrix, rows: int, head_dim: int, tiles: int) -> bool:
    """Whether `few_rows` takes so many rows of attention as `parts`: every program merges them anew, all in registers."""
    size = rows * blocks(matrix) * nl.next_power_of_2(tiles)
    return serves(matrix) and rows <= FUSED_ROWS and size <= MERGED and head_dim % BLOCK == 0


def gates(matrix: Matrix) -> bool:
    """Whether `few_rows` takes an activation: gates and what they gate must have room together, dense weights in shared
    memory, unpacked ones in registers."""
    return blocks(matrix) <= (3 if matrix.bits == 16 else 2)


def blocks(matrix: Matrix) -> int:
    """Blocks of k in a segment."""
    return nl.cdiv(matrix.in_features, SEGMENTS * BLOCK)


def columns(matrix: Matrix, width: int, lanes: int, gated: bool) -> int:
    """Columns of a program: 32 where 16 would give some multiprocessors two programs, each of which prepares the rows anew,
    and where the weights of 32 leave room for programs of the next kernel: dense ones lie in shared memory, unpacked ones
    in registers."""
    size = blocks(matrix) * (1 + gated) * matrix.dtype.itemsize
    most = 4 if matrix.bits == 16 else 2
    return 32 if lanes == 8 and size <= most and nl.cdiv(width, 16) > nl.MULTIPROCESSORS else 16


def serves(matrix: Matrix) -> bool:
    """Whether products with this matrix are cut into segments."""
    return matrix.in_features < LONG
