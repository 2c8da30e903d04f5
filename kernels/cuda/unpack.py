"""Packed weights to dense ones: in registers for products of few rows, single rows, and whole matrices."""

import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix


@jit
def words_of(w, n, first, K: tl.constexpr, BITS: tl.constexpr):
    """What is read of the weights [S, BN, 128] at rows n [BN] and the 128 columns from each of `first` [S]: values, or
    packed words [8, S, BN / 16, 2, H, 16], half a row of them, or all, being 16 words.

    A thread takes four words of the rows g and g + 8 of 16: of the columns that it hands to the tensor core. The compiler
    spreads threads over the last dimension, of neighbours in memory, and then over the first ones.
    """
    BN: tl.constexpr = n.shape[0]
    if BITS == 16:
        kk = first[:, None] + tl.arange(0, 128)[None, :]
        at = n[None, :, None].to(tl.int64) * K + kk[:, None, :]
        return tl.load(w + at, mask=(kk < K)[:, None, :], other=0.0)
    else:
        row = words_at(rows_of(n, BN).to(tl.int64), K, BITS)
        half = tl.arange(0, BITS // 4)[None, None, None, None, :, None] * 256
        start = first[None, :, None, None, None, None] // 128 * (64 * BITS)
        inside = first[None, :, None, None, None, None] < K
        at = row + start + half + tl.arange(0, 16)[None, None, None, None, None, :]
        return tl.load(w + at, mask=inside, other=0)


@jit
def rows_of(n, BN: tl.constexpr):
    """Rows n [BN] as [8, 1, BN / 16, 2, 1, 1]: rows g and g + 8 of 16 are the same thread's."""
    return tl.reshape(tl.permute(tl.reshape(n, (BN // 16, 2, 8)), (2, 0, 1)), (8, 1, BN // 16, 2, 1, 1))


@jit
def scales_of(scales, n, first, K: tl.constexpr, BITS: tl.constexpr):
    """Scales (or mins) [8, S, BN / 16, 2, 1, 16] of the blocks of 32 in the 128 columns from each of `first` [S]: the four
    of a row, four times, as four threads share a row."""
    BN: tl.constexpr = n.shape[0]
    if BITS == 16:
        return 0.0
    else:
        row = scales_at(rows_of(n, BN).to(tl.int64), K)
        start = first[None, :, None, None, None, None] // 128 * 64
        inside = first[None, :, None, None, None, None] < K
        at = row + start + (tl.arange(0, 16) % 4)[None, None, None, None, None, :]
        return tl.load(scales + at, mask=inside, other=0.0)


@jit
def words_at(row, K: tl.constexpr, BITS: tl.constexpr):
    """Where the words of a row begin, 256 before the next 64 columns (of 8 bits) or 128 (of 4)."""
    return row // 16 * (tl.cdiv(K, 128) * (64 * BITS)) + row % 16 * 16


@jit
def scales_at(row, K: tl.constexpr):
    """Where the scales of the first block of a row lie."""
    return row // 16 * (tl.cdiv(K, 128) * 64) + row % 16 * 4


@jit
def number(words, base, I: tl.constexpr):
    """Byte I of words added to 32768, or to 65536 where I is odd, as float32: it goes into the mantissa of `base`, in one
    instruction, of which two kinds take turns, as each has a unit of its own."""
    if nl.IN_PYTHON:
        bits = ((words >> (8 * I)) & 255) << 8 - I % 2 | 0x47000000 | I % 2 << 23
    elif I == 0:
        bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7604;", "=r,r,r", [words, base], tl.int32, True, 1)
    elif I == 1:  # the byte times 128
        bits = tl.inline_asm_elementwise("dp4a.u32.u32 $0, $1, 0x8000, $2;", "=r,r,r", [words, base], tl.int32, True, 1)
    elif I == 2:
        bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7624;", "=r,r,r", [words, base], tl.int32, True, 1)
    else:
        bits = tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, 0x80000000, $2;", "=r,r,r", [words, base], tl.int32, True, 1
        )
    return bits.to(tl.float32, bitcast=True)


@jit
def base_of(words, ODD: tl.constexpr):
    """32768 or 65536 as bits of float32, in a register: an instruction takes one constant, and the bytes' places are one."""
    if nl.IN_PYTHON:
        return words
    else:
        even: tl.constexpr = "mov.u32 lane, %laneid; shr.u32 lane, lane, 8; add.u32 $0, lane, 0x47000000;"
        odd: tl.constexpr = "mov.u32 lane, %laneid; shr.u32 lane, lane, 8; add.u32 $0, lane, 0x47800000;"
        asm: tl.constexpr = "{ .reg .u32 lane; " + (odd if ODD else even) + " }"
        return tl.inline_asm_elementwise(asm, "=r", [], tl.int32, True, 1)


@jit
def dense_of(words, bases, I: tl.constexpr, scale, lows, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr):
    """DT((byte I - zero) * scale (+ min)); of bases and lows, the even and the odd bytes'. Without mins, low =
    -(32768 or 65536 + zero) * scale."""
    ODD: tl.constexpr = I % 2
    code = number(words, bases[ODD], I)
    if MINS:
        code -= (32768 << ODD) + ZERO
    return tl.fma(code, scale, lows[ODD]).to(DT)


@jit
def of_words(x, S: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr):
    """Scales of `scales_of` as those of the words of `words_of`, float32."""
    W: tl.constexpr = BN // 16
    if BITS == 8:  # a word of half c and columns 16 s + ... belongs to block 2 c + s // 2
        x = tl.permute(tl.reshape(x, (8, S, W, 2, 4, 2, 2)), (0, 1, 2, 3, 5, 4, 6))
        x = tl.broadcast_to(x[:, :, :, :, :, :, :, None], (8, S, W, 2, 2, 4, 2, 2))
        x = tl.reshape(x, (8, S, W, 2, 2, 16))
    return x


@jit
def unpacked(
    words,
    scale,
    low,
    ZERO: tl.constexpr,
    S: tl.constexpr,
    BN: tl.constexpr,
    BITS: tl.constexpr,
    MINS: tl.constexpr,
    DT: tl.constexpr,
):
    """Weights [S, BN, 128] of packed words: DT(((code - zero) * scale (+ min)))."""
    W: tl.constexpr = BN // 16
    if BITS == 16:
        return words
    else:
        scale, base = scale.to(tl.float32), (base_of(words, False), base_of(words, True))
        s = of_words(scale, S, BN, BITS)
        if MINS:
            least = of_words(low.to(tl.float32), S, BN, BITS)
            b = (least, least)
        else:
            # 32768 + 128 = 257 * 2^7, 65536 + 8 = 8193 * 2^3 and so on, and scales have 11 bits: the product is exact, and
            # the fused step rounds once, as (code - zero) * scale does
            b = (
                of_words(scale * -(32768.0 + ZERO), S, BN, BITS),
                of_words(scale * -(65536.0 + ZERO), S, BN, BITS),
            )
        # bytes are (h, e), of columns 8 h + e; in 4 bits the lower half of one is of 16 columns before the upper. Columns
        # e are joined last, as two of them lie in one register.
        if BITS == 8:
            v0 = dense_of(words, base, 0, s, b, ZERO, MINS, DT)
            v1 = dense_of(words, base, 1, s, b, ZERO, MINS, DT)
            v2 = dense_of(words, base, 2, s, b, ZERO, MINS, DT)
            v3 = dense_of(words, base, 3, s, b, ZERO, MINS, DT)
            v = tl.join(tl.join(v0, v2), tl.join(v1, v3))
            #       0  1  2  3  4  5  6  7  8
            # from  g  S  W  A  c  t  s  h  e
            v = tl.permute(tl.reshape(v, (8, S, W, 2, 2, 4, 4, 2, 2)), (1, 2, 3, 0, 4, 6, 7, 5, 8))
        else:
            even, odd = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
            v0 = dense_of(even, base, 0, s, b, ZERO, MINS, DT)
            v1 = dense_of(even, base, 1, s, b, ZERO, MINS, DT)
            v2 = dense_of(even, base, 2, s, b, ZERO, MINS, DT)
            v3 = dense_of(even, base, 3, s, b, ZERO, MINS, DT)
            v4 = dense_of(odd, base, 0, s, b, ZERO, MINS, DT)
            v5 = dense_of(odd, base, 1, s, b, ZERO, MINS, DT)
            v6 = dense_of(odd, base, 2, s, b, ZERO, MINS, DT)
            v7 = dense_of(odd, base, 3, s, b, ZERO, MINS, DT)
            first, second = tl.join(tl.join(v0, v2), tl.join(v4, v6)), tl.join(tl.join(v1, v3), tl.join(v5, v7))
            v = tl.join(first, second)
            #       0  1  2  3  4  5     6  7  8
            # from  g  S  W  A  t  c, s  h  s  e
            v = tl.permute(tl.reshape(v, (8, S, W, 2, 4, 4, 2, 2, 2)), (1, 2, 3, 0, 5, 7, 6, 4, 8))
        return nl.opaque(tl.reshape(v, (S, BN, 128)), DT)


@jit
def unpacked_row(table, scales, mins, row, i, inside, K: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Weights DT at columns i of a row; the layout is that of `Matrix`."""
    if BITS == 8:
        at, shift = i // 64 * 256 + i // 2 % 4 * 4 + i // 16 % 4, 8 * (i // 8 % 2 * 2 + i % 2)
    else:
        at, shift = i // 128 * 256 + i // 2 % 4 * 4 + i // 32 % 4, 8 * (i // 8 % 2 * 2 + i % 2) + i // 16 % 2 * 4
    word = tl.load(table + words_at(row, K, BITS) + at, mask=inside, other=0)
    code = (word >> shift) & ((1 << BITS) - 1)
    value = (code - ZERO).to(tl.float32)
    block = scales_at(row, K) + i // 128 * 64 + i // 32 % 4
    scale = tl.load(scales + block, mask=inside, other=0.0).to(tl.float32)
    if MINS:
        low = tl.load(mins + block, mask=inside, other=0.0).to(tl.float32)
        value = tl.fma(value, scale, low)
    else:
        value = value * scale
    return value.to(DT)


@jit
def unpack_kernel(table, scales, mins, out, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < K
    v = unpacked_row(table, scales, mins, row, i, inside, K, BITS, ZERO, MINS, DT)
    tl.store(out + row * K + i, v, mask=inside)


def unpack(matrix: Matrix, out: Tensor) -> Tensor:
    """The weights [N, K] of a packed matrix, DT, written to `out`."""
    n, k = matrix.out_features, matrix.in_features
    assert matrix.scales is not None
    block = min(1024, nl.next_power_of_2(k))
    unpack_kernel[(n, nl.cdiv(k, block))](
        matrix.weights, matrix.scales, matrix.scales if matrix.mins is None else matrix.mins, out,
        K=k, BLOCK=block, BITS=matrix.bits, ZERO=matrix.zero, MINS=matrix.mins is not None,
        DT=nl.TYPES[matrix.dtype], num_warps=4, **nl.EXACT,
    )  # fmt: skip
    return out
