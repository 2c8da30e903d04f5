"""Packed weights to dense ones: in registers for products of few rows, single rows, and whole matrices."""

import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix


@jit
def words_of(w, n, first, K: tl.constexpr, BITS: tl.constexpr):
    """What is read of the weights [S, BN, 128] at rows n [BN] and the 128 columns from each of `first` [S]: values, or
    packed words."""
    if BITS == 16:
        kk = first[:, None] + tl.arange(0, 128)[None, :]
        at = n[None, :, None].to(tl.int64) * K + kk[:, None, :]
        return tl.load(w + at, mask=(kk < K)[:, None, :], other=0.0)
    else:
        PER: tl.constexpr = 32 // BITS
        WORDS: tl.constexpr = 128 // PER
        j = tl.arange(0, WORDS)
        at = n[None, :, None].to(tl.int64) * (tl.cdiv(K, 128) * WORDS) + (
            first[:, None, None] // PER + j[None, None, :]
        )
        if first.shape[0] > 1:
            # A thread takes the words of eight weights, 16 bytes of a row in shared memory: what neighbouring threads
            # write there lies in different banks, which it would not after loads of 16 bytes.
            at = tl.max_contiguous(tl.multiple_of(at, (1, 1, BITS // 4)), (1, 1, 2))
        return tl.load(w + at, mask=(first < K)[:, None, None], other=0)


@jit
def scales_of(scales, n, first, K: tl.constexpr, BITS: tl.constexpr):
    """Scales (or mins) [S, BN, 4] of the blocks of 32 in the 128 columns from each of `first` [S]."""
    if BITS == 16:
        return 0.0
    else:
        q = tl.arange(0, 4)
        at = n[None, :, None].to(tl.int64) * (tl.cdiv(K, 128) * 4) + (first[:, None, None] // 32 + q[None, None, :])
        return tl.load(scales + at, mask=(first < K)[:, None, None], other=0.0)


@jit
def number(words, base, I: tl.constexpr):
    """32768 + byte I of words as float32: the byte goes into the mantissa of `base`, in one instruction."""
    if nl.IN_PYTHON:
        bits = ((words >> (8 * I)) & 255) << 8 | 0x47000000
    elif I == 0:
        bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7604;", "=r,r,r", [words, base], tl.int32, True, 1)
    elif I == 1:
        bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7614;", "=r,r,r", [words, base], tl.int32, True, 1)
    elif I == 2:
        bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7624;", "=r,r,r", [words, base], tl.int32, True, 1)
    else:
        bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7634;", "=r,r,r", [words, base], tl.int32, True, 1)
    return bits.to(tl.float32, bitcast=True)


@jit
def base_of(words):
    """32768 as bits of float32, in a register: an instruction takes one constant, and the bytes' places are one."""
    if nl.IN_PYTHON:
        return words
    else:
        asm: tl.constexpr = (
            "{ .reg .u32 lane; mov.u32 lane, %laneid; shr.u32 lane, lane, 8; add.u32 $0, lane, 0x47000000; }"
        )
        return tl.inline_asm_elementwise(asm, "=r", [], tl.int32, True, 1)


@jit
def dense_of(words, base, I: tl.constexpr, scale, low, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr):
    """DT((byte I - zero) * scale (+ min)); without mins, low = -(32768 + zero) * scale."""
    code = number(words, base, I)
    if MINS:
        code -= 32768.0 + ZERO
    return tl.fma(code, scale, low).to(DT)


@jit
def of_words(x, S: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr):
    """Scales [S, BN, 4] of blocks as those of their words, float32 [S, BN, words]."""
    spread = tl.broadcast_to(x.to(tl.float32)[:, :, :, None], (S, BN, 4, BITS))
    return tl.reshape(spread, (S, BN, 4 * BITS))


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
    if BITS == 16:
        return words
    else:
        s, base = of_words(scale, S, BN, BITS), base_of(words)
        if MINS:
            b = of_words(low, S, BN, BITS)
        else:
            # 32896 = 257 * 2^7 and 32776 = 4097 * 2^3, and scales have 11 bits: the product is exact, and the fused step
            # rounds once, as (code - zero) * scale does
            b = of_words(scale.to(tl.float32) * -(32768.0 + ZERO), S, BN, BITS)
        if BITS == 8:
            v0 = dense_of(words, base, 0, s, b, ZERO, MINS, DT)
            v1 = dense_of(words, base, 1, s, b, ZERO, MINS, DT)
            v2 = dense_of(words, base, 2, s, b, ZERO, MINS, DT)
            v3 = dense_of(words, base, 3, s, b, ZERO, MINS, DT)
            v = tl.join(tl.join(v0, v2), tl.join(v1, v3))
        else:
            even, odd = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
            v0 = dense_of(even, base, 0, s, b, ZERO, MINS, DT)
            v1 = dense_of(odd, base, 0, s, b, ZERO, MINS, DT)
            v2 = dense_of(even, base, 1, s, b, ZERO, MINS, DT)
            v3 = dense_of(odd, base, 1, s, b, ZERO, MINS, DT)
            v4 = dense_of(even, base, 2, s, b, ZERO, MINS, DT)
            v5 = dense_of(odd, base, 2, s, b, ZERO, MINS, DT)
            v6 = dense_of(even, base, 3, s, b, ZERO, MINS, DT)
            v7 = dense_of(odd, base, 3, s, b, ZERO, MINS, DT)
            first, second = tl.join(tl.join(v0, v4), tl.join(v2, v6)), tl.join(tl.join(v1, v5), tl.join(v3, v7))
            v = tl.join(first, second)
        return nl.opaque(tl.reshape(v, (S, BN, 128)), DT)


@jit
def unpacked_row(table, scales, mins, row, i, inside, K: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Weights DT at columns i of a row; the layout is that of `Matrix`."""
    PER: tl.constexpr = 32 // BITS
    BLOCKS: tl.constexpr = (K + 127) // 128
    word = tl.load(table + row * (BLOCKS * 128 // PER) + i // PER, mask=inside, other=0)
    code = (word >> i % PER * BITS) & ((1 << BITS) - 1)
    value = (code - ZERO).to(tl.float32)
    scale = tl.load(scales + row * (BLOCKS * 4) + i // 32, mask=inside, other=0.0).to(tl.float32)
    if MINS:
        low = tl.load(mins + row * (BLOCKS * 4) + i // 32, mask=inside, other=0.0).to(tl.float32)
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
