"""Norms and rotation of queries and keys by head, and the write of keys and values to their pages.

The sum of squares of a head is taken in integers: each square is rounded down to a multiple of 2^-38 of the power of two
at or below the largest, so that the sum has no order, and tiles of any shape and any number of warps agree.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.norm import rms_scale

PAGE = 16

ELEMENTS = 4096
"""Of the tile of a program of `rope_write`."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of the queries and keys: weights float32 [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float


@jit
def partner(d, W: tl.constexpr):
    """Column that is rotated with column d: halves of the first 2 W are paired, the others stay."""
    return tl.where(d < W, d + W, tl.where(d < 2 * W, d - W, d))


@jit
def square_sum(a):
    """Sums of squares of the rows of float32 [R, DP], DP up to 4,096, in no order."""
    squares = a * a
    # the biased exponent of the largest square, from 2^-87 up so that the unit below is an ordinary number
    exponent = tl.maximum(tl.max(squares, 1).to(tl.int32, bitcast=True) >> 23, 40)
    unit = ((292 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^38 over the power of two
    total = tl.sum((squares * unit[:, None]).to(tl.int64), 1)
    return total.to(tl.float32) * ((exponent - 38) << 23).to(tl.float32, bitcast=True)


@jit
def angles(table, at, d, W: tl.constexpr, other: tl.constexpr):
    """Row `at` of the table of cosines or sines for the columns d; `other` where nothing turns."""
    return tl.load(table + at * W + tl.where(d < W, d, d - W), mask=d < 2 * W, other=other)


@jit
def head_rows(at, inside, w, w_partner, c, s, eps, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Heads DT [R, DP], normalised and rotated (x1 c - x2 s, x2 c + x1 s), zeros where not `inside` [R, 1].

    `at` [R, 1] points at their first columns; w, w_partner: offset + weight for the columns and their partners; c, s:
    float32 [1 or R, DP].
    """
    d = tl.arange(0, DP)[None, :]
    real = inside & (d < D)
    a = tl.load(at + d, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + partner(d, W), mask=real, other=0.0).to(tl.float32)
    if NORM:
        r = rms_scale(square_sum(a), D, eps)[:, None]
        a = (a * r) * w
        b = (b * r) * w_partner
    turned = tl.where(d < W, a * c - b * s, a * c + b * s)
    return tl.where(real, tl.where(d < 2 * W, turned, a), 0.0).to(DT)


@jit
def rope_write_kernel(
    qkv, q_norm, k_norm, cos, sin, positions, slots, k_pages, v_pages, q_out, rows, eps, offset,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    wide = (d < D)[None, :]
    position = tl.load(positions + m, mask=m < rows, other=-1)
    live = position >= 0
    start = qkv + m[:, None] * ((HEADS + 2 * KV) * D)
    w, w_partner = 0.0, 0.0
    if NORM:
        # of both, as one branch of a pointer would lose what is known of it
        w_q, w_k = tl.load(q_norm + d, mask=d < D, other=0.0), tl.load(k_norm + d, mask=d < D, other=0.0)
        w = offset + tl.where(head < HEADS, w_q, w_k)[None, :]
        other = partner(d, W)
        w_q, w_k = tl.load(q_norm + other, mask=d < D, other=0.0), tl.load(k_norm + other, mask=d < D, other=0.0)
        w_partner = offset + tl.where(head < HEADS, w_q, w_k)[None, :]
    at = tl.maximum(position, 0)[:, None]
    c, s = angles(cos, at, d[None, :], W, 1.0), angles(sin, at, d[None, :], W, 0.0)
    x = head_rows(start + head * D, live[:, None], w, w_partner, c, s, eps, D, DP, W, NORM, DT)
    if head < HEADS:
        tl.store(q_out + m[:, None] * (HEADS * D) + head * D + d[None, :], x, mask=live[:, None] & wide)
    else:
        slot = tl.load(slots + m, mask=live, other=-1)
        written = (slot >= 0)[:, None] & wide
        kv_head = head - HEADS
        to = ((slot // 16 * KV + kv_head) * (16 * D) + slot % 16 * D)[:, None] + d[None, :]
        tl.store(k_pages + to, x, mask=written)
        v = tl.load(start + (head + KV) * D + d[None, :], mask=written, other=0.0)
        tl.store(v_pages + to, v, mask=written)


def check_heads(
    what: str, qkv: Tensor, norms: HeadNorms | None, cos: Tensor, sin: Tensor, k_layer: Tensor, v_layer: Tensor,
    heads: int, kv_heads: int, head_dim: int,
) -> None:  # fmt: skip
    """Refuse rows, tables or pages of one layer that are not of these sizes, or whose types differ."""
    pages = len(k_layer)
    if (
        heads % kv_heads
        or qkv.ndim != 2
        or qkv.shape[1] != (heads + 2 * kv_heads) * head_dim
        or not qkv.is_contiguous()
        or qkv.dtype not in nl.TYPES
    ):
        raise InputError(
            f"{what}: rows {tuple(qkv.shape)} {qkv.dtype} must be contiguous [rows, ({heads} + 2 x {kv_heads}) x "
            f"{head_dim}], heads a multiple of key heads"
        )
    if (
        k_layer.shape != (pages, kv_heads, PAGE, head_dim)
        or v_layer.shape != k_layer.shape
        or k_layer.dtype is not qkv.dtype
        or v_layer.dtype is not qkv.dtype
        or not k_layer.is_contiguous()
        or not v_layer.is_contiguous()
    ):
        raise InputError(
            f"{what}: pages {tuple(k_layer.shape)}, {tuple(v_layer.shape)} {k_layer.dtype} must be contiguous "
            f"{qkv.dtype} [pages, {kv_heads}, {PAGE}, {head_dim}]"
        )
    if (
        cos.shape != sin.shape
        or cos.ndim != 2
        or cos.shape[1] * 2 > head_dim
        or {cos.dtype, sin.dtype} != {torch.float32}
        or not cos.is_contiguous()
        or not sin.is_contiguous()
    ):
        raise InputError(
            f"{what}: tables {tuple(cos.shape)}, {tuple(sin.shape)} must be float32 [positions, up to {head_dim // 2}]"
        )
    if norms is not None and any(w.shape != (head_dim,) or w.dtype is not torch.float32 for w in (norms.q, norms.k)):
        raise InputError(f"{what}: weights of the norms must be float32 [{head_dim}]")


def rope_write(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_layer: Tensor,
    v_layer: Tensor,
    q_out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    warps: int = 4,
) -> None:
    """Normalise by head and rotate queries and keys; queries go to `q_out`, keys and values to the pages.

    Args:
        qkv: DT [M, (heads + 2 kv_heads) head_dim]: queries, keys, values; left as it is.
        cos, sin: float32 [P, W], W <= head_dim / 2; positions must be below P.
        positions: int64 [M]; < 0: an idle row.
        slots: int64 [M], page * 16 + offset; < 0: nothing is written.
        k_layer, v_layer: DT [pages, kv_heads, 16, head_dim].
        q_out: DT [M, heads * head_dim].
        warps: of a program; changes no bit.
    """
    check_heads("rope_write", qkv, norms, cos, sin, k_layer, v_layer, heads, kv_heads, head_dim)
    rows, padded = len(qkv), nl.next_power_of_2(head_dim)
    if (
        q_out.shape != (rows, heads * head_dim)
        or q_out.dtype is not qkv.dtype
        or not q_out.is_contiguous()
        or positions.shape != (rows,)
        or slots.shape != (rows,)
    ):
        raise InputError(
            f"rope_write: output {tuple(q_out.shape)}, positions {tuple(positions.shape)} and slots "
            f"{tuple(slots.shape)} must be contiguous, of {rows} rows"
        )
    each = ELEMENTS // padded
    rope_write_kernel[(heads + kv_heads, nl.cdiv(rows, each))](
        qkv, cos if norms is None else norms.q, cos if norms is None else norms.k, cos, sin, positions, slots,
        k_layer, v_layer, q_out, rows, 0.0 if norms is None else norms.eps, 0.0 if norms is None else norms.offset,
        HEADS=heads, KV=kv_heads, D=head_dim, DP=padded, W=cos.shape[1], NORM=norms is not None, ROWS=each,
        DT=nl.TYPES[qkv.dtype], num_warps=warps, **nl.EXACT,
    )  # fmt: skip


def reference(
    qkv: Tensor, norms: HeadNorms | None, cos: Tensor, sin: Tensor, positions: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values float64 [M, heads, head_dim] by torch, of rows none of which is idle."""
    x = qkv.double().view(len(qkv), heads + 2 * kv_heads, -1)
    parts = [x[:, :heads], x[:, heads : heads + kv_heads]]
    if norms is not None:
        for i, weight in enumerate((norms.q, norms.k)):
            mean = parts[i].square().mean(-1, keepdim=True)
            parts[i] = parts[i] / torch.sqrt(mean + norms.eps) * (norms.offset + weight.double())
    half = cos.shape[1]
    c, s = cos[positions, None].double(), sin[positions, None].double()
    for i, part in enumerate(parts):
        a, b = part[..., :half], part[..., half : 2 * half]
        parts[i] = torch.cat((a * c - b * s, b * c + a * s, part[..., 2 * half :]), -1)
    return parts[0], parts[1], x[:, heads + kv_heads :]
