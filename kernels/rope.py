"""Rotary position embedding of queries and keys, and the write of keys and values to their pages."""

import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native

PAGE = native.PAGE

_rope_write = native.function("nm_rope_write")


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_layer: Tensor,
    v_layer: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Rotate the queries and keys of each row in place and write its key and value to a page.

    Halves of the first `dim` components are paired, dim being twice the tables' width: x1' = x1 cos - x2 sin,
    x2' = x2 cos + x1 sin, each product and sum rounded. The components behind them stay; tables of width 0 rotate
    nothing.

    Args:
        qkv: float32 [M, (heads + 2 kv_heads) head_dim], rows contiguous: queries, keys, values.
        cos, sin: float32 [P, dim / 2], contiguous, dim <= head_dim.
        positions: int64 [M] in [0, P); < 0: an idle row, left alone.
        k_layer: [pages, kv_heads, head_dim, 16], float32 or bfloat16, contiguous.
        v_layer: [pages, kv_heads, 16, head_dim], of the same dtype, contiguous.
        slots: int64 [M], page * 16 + offset; < 0: nothing is written.

    Bfloat16 pages take the nearest value, ties to even. Nothing is changed when an argument is refused.
    """
    rows, width = qkv.shape
    pages = k_layer.shape[0]
    if (
        width != (heads + 2 * kv_heads) * head_dim
        or head_dim % 2
        or qkv.dtype is not torch.float32
        or qkv.stride(1) != 1
        or not qkv.is_cpu
    ):
        raise InputError(
            f"rope_write: rows {tuple(qkv.shape)} {qkv.dtype} must be float32 [rows, ({heads} + 2 x {kv_heads}) x "
            f"{head_dim}] on the CPU, head_dim even"
        )
    if (
        cos.shape != sin.shape
        or cos.ndim != 2
        or cos.shape[1] * 2 > head_dim
        or cos.dtype is not torch.float32
        or sin.dtype is not torch.float32
        or not cos.is_contiguous()
        or not sin.is_contiguous()
    ):
        raise InputError(
            f"rope_write: tables {tuple(cos.shape)}, {tuple(sin.shape)} must be float32 [P, up to {head_dim // 2}]"
        )
    check_layer("rope_write", k_layer, v_layer, kv_heads, head_dim)
    if (
        positions.shape != (rows,)
        or slots.shape != (rows,)
        or positions.dtype is not torch.int64
        or slots.dtype is not torch.int64
        or not positions.is_contiguous()
        or not slots.is_contiguous()
    ):
        raise InputError(f"rope_write: positions and slots must be contiguous int64 [{rows}]")
    if not native.active:
        bad = ((positions >= len(cos)) | (slots >= pages * PAGE)).nonzero()
        if len(bad):
            raise _bad_row(int(bad[0]), positions, slots, len(cos), pages)
        reference(qkv, cos, sin, positions, k_layer, v_layer, slots, heads, kv_heads, head_dim)
        return
    code = _rope_write(
        qkv.data_ptr(),
        qkv.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[0],
        positions.data_ptr(),
        slots.data_ptr(),
        k_layer.data_ptr(),
        v_layer.data_ptr(),
        pages,
        rows,
        heads,
        kv_heads,
        head_dim,
        cos.shape[1],
        k_layer.dtype is torch.bfloat16,
    )
    if code:
        raise _bad_row(code - 1, positions, slots, len(cos), pages)


def check_layer(what: str, k_layer: Tensor, v_layer: Tensor, kv_heads: int, head_dim: int) -> None:
    """Refuse pages of one layer that are not float32 or bfloat16 in the layouts of `numem.kernels.pages`."""
    pages = k_layer.shape[0]
    if (
        k_layer.shape != (pages, kv_heads, head_dim, PAGE)
        or v_layer.shape != (pages, kv_heads, PAGE, head_dim)
        or k_layer.dtype not in (torch.float32, torch.bfloat16)
        or v_layer.dtype is not k_layer.dtype
        or not k_layer.is_contiguous()
        or not v_layer.is_contiguous()
        or not k_layer.is_cpu
    ):
        raise InputError(
            f"{what}: pages {tuple(k_layer.shape)}, {tuple(v_layer.shape)} {k_layer.dtype} must be contiguous float32 "
            f"or bfloat16 [pages, {kv_heads}, {head_dim}, 16] and [pages, {kv_heads}, 16, {head_dim}]"
        )


def _bad_row(row: int, positions: Tensor, slots: Tensor, limit: int, pages: int) -> InputError:
    return InputError(
        f"rope_write: row {row} has position {int(positions[row])} and slot {int(slots[row])}, but the tables end at "
        f"{limit} and the pool at {pages * PAGE}"
    )


def reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_layer: Tensor,
    v_layer: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """The torch form."""
    half = cos.shape[1]
    live = (positions >= 0).nonzero().squeeze(1)
    shape, step = (len(qkv), heads + 2 * kv_heads, head_dim), qkv.stride(0)
    x = qkv.as_strided(shape, (step, head_dim, 1))
    turned = x[live, : heads + kv_heads]
    c, s = cos[positions[live]].unsqueeze(1), sin[positions[live]].unsqueeze(1)
    a, b = turned[..., :half], turned[..., half : 2 * half]
    x[live, : heads + kv_heads] = torch.cat((a * c - b * s, b * c + a * s, turned[..., 2 * half :]), dim=-1)
    write = ((positions >= 0) & (slots >= 0)).nonzero().squeeze(1)
    page, token = slots[write] // PAGE, slots[write] % PAGE
    k_layer[page, :, :, token] = x[write, heads : heads + kv_heads].to(k_layer.dtype)
    v_layer[page, :, token] = x[write, heads + kv_heads :].to(v_layer.dtype)
