"""Attention of rows over the paged keys and values of their lanes: causal, or bidirectional within a lane's length."""

import ctypes

import torch
from torch import Tensor

from numem.errors import CapacityError, InputError
from numem.kernels import native
from numem.kernels.rope import check_layer

PAGE, SPLIT = native.PAGE, native.SPLIT

_attention = native.function("nm_paged_attention")


# Widths of a head that the kernels take.
HEAD_DIMS = range(16, 257, 16)


def paged_attention(
    q: Tensor,
    k_layer: Tensor,
    v_layer: Tensor,
    block_tables: Tensor,
    row_lane: Tensor,
    positions: Tensor,
    out: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lengths: Tensor | None = None,
    right: int = -1,
) -> Tensor:
    """Attention of row m at position p over the keys [max(0, p - window + 1), p] of its lane (all of [0, p] without
    a window); the row's own key is already in its page. With `lengths` it is bidirectional: the row sees the keys
    [max(0, p - window + 1), min(lengths[lane], p + right + 1)), from 0 without a window and to the lane's length with
    right = -1. A row that sees nothing is zeros.

    Keys are cut into splits of 512 at absolute multiples. Per split: score = scale * (fma chain over head_dim), with a
    soft cap then cap * tanh(score / cap); weight = exp(score - max); sum of weights in 16 accumulators by key position mod 16 and a fixed tree; value = fma
    chain over the visible keys in order. Splits are merged in order. Masked keys are never multiplied, so whatever
    unwritten or stale bytes their pages hold cannot reach a row.

    Args:
        q: float32 [M, heads * head_dim], rows contiguous (a column range of wider rows is fine).
        k_layer: [pages, kv_heads, head_dim, 16], float32 or bfloat16.
        v_layer: [pages, kv_heads, 16, head_dim], of the same dtype.
        block_tables: int32 [lanes, width]: physical pages in logical order; only entries that a row sees are read.
        row_lane: int32 [M].
        positions: int64 [M]; < 0: an idle row, whose output is zeros.
        out: float32 [M, heads * head_dim] to write, rows contiguous.
        heads: a multiple of `kv_heads`.
        head_dim: a multiple of 16, up to 256.
        scale: multiplied to each score.
        window: keys seen by a row up to and with its own; 0 for all.
        softcap: largest size of a score; 0 for none.
        lengths: int32 [lanes], keys of each lane.
        right: keys seen behind a row's own, with `lengths` only; -1 for all.
    """
    rows, width = q.shape
    if (
        width != heads * head_dim
        or heads % kv_heads
        or head_dim not in HEAD_DIMS
        or q.dtype is not torch.float32
        or q.stride(1) != 1
        or not q.is_cpu
    ):
        raise InputError(
            f"paged_attention: queries {tuple(q.shape)} {q.dtype} must be float32 [rows, {heads} x {head_dim}] on the "
            f"CPU, heads a multiple of {kv_heads}, head_dim a multiple of 16 up to 256"
        )
    check_layer("paged_attention", k_layer, v_layer, kv_heads, head_dim)
    if (
        block_tables.ndim != 2
        or block_tables.dtype is not torch.int32
        or row_lane.shape != (rows,)
        or row_lane.dtype is not torch.int32
        or positions.shape != (rows,)
        or positions.dtype is not torch.int64
        or not block_tables.is_contiguous()
        or not row_lane.is_contiguous()
        or not positions.is_contiguous()
    ):
        raise InputError(
            f"paged_attention: block tables must be int32 [lanes, pages], lanes int32 [{rows}] and positions int64 "
            f"[{rows}], all contiguous"
        )
    if window < 0 or right < -1 or (right >= 0 and lengths is None) or not 0.0 <= softcap < float("inf"):
        raise InputError(
            f"paged_attention: window {window}, right {right} (with lengths only) and soft cap {softcap} must be 0 or "
            "more, right -1 or more"
        )
    if lengths is not None and (
        lengths.shape != block_tables.shape[:1] or lengths.dtype is not torch.int32 or not lengths.is_contiguous()
    ):
        raise InputError(f"paged_attention: lengths must be contiguous int32 [{len(block_tables)}]")
    if out is None:
        out = torch.empty((rows, width), dtype=torch.float32)
    elif out.shape != (rows, width) or out.dtype is not torch.float32 or out.stride(1) != 1 or not out.is_cpu:
        raise InputError(f"paged_attention: output {tuple(out.shape)} {out.dtype} must be float32 {(rows, width)}")
    if not native.active:
        return reference(
            q, k_layer, v_layer, block_tables, row_lane, positions, out,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=scale, window=window, softcap=softcap,
            lengths=lengths, right=right,
        )  # fmt: skip
    lanes, table_width = block_tables.shape
    arguments = native.Attention(
        q.data_ptr(),
        q.stride(0),
        k_layer.data_ptr(),
        v_layer.data_ptr(),
        k_layer.shape[0],
        block_tables.data_ptr(),
        lanes,
        table_width,
        row_lane.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        rows,
        heads,
        kv_heads,
        head_dim,
        window,
        None if lengths is None else lengths.data_ptr(),
        right,
        k_layer.dtype is torch.bfloat16,
        scale,
        softcap,
    )
    code = _attention(ctypes.addressof(arguments))
    if code > 0:
        raise _bad_row(code - 1, row_lane, positions)
    if code:
        raise CapacityError("paged_attention: no memory for its working buffers; the output is undefined")
    return out


def _bad_row(row: int, row_lane: Tensor, positions: Tensor) -> InputError:
    return InputError(
        f"paged_attention: row {row} (lane {int(row_lane[row])}, position {int(positions[row])}) needs a lane, page or "
        "length outside the block tables or the pool"
    )


def reference(
    q: Tensor,
    k_layer: Tensor,
    v_layer: Tensor,
    block_tables: Tensor,
    row_lane: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    softcap: float,
    lengths: Tensor | None,
    right: int,
) -> Tensor:
    """The torch form: one row at a time, each split padded to 512 keys, so that every row has the same shapes."""
    group = heads // kv_heads
    lanes, table_width = block_tables.shape
    pages = k_layer.shape[0]
    out.zero_()
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        lane = int(row_lane[row])
        if not 0 <= lane < lanes or position >= table_width * PAGE:
            raise _bad_row(row, row_lane, positions)
        low, high = max(0, position - window + 1) if window else 0, position + 1
        if lengths is not None:
            length = int(lengths[lane])
            if not 0 <= length <= table_width * PAGE:
                raise _bad_row(row, row_lane, positions)
            high = length if right < 0 else min(length, position + right + 1)
        if low >= high:
            continue
        query = q[row].reshape(kv_heads, group, head_dim).contiguous()
        state: tuple[Tensor, Tensor, Tensor] | None = None
        for base in range(low // SPLIT * SPLIT, high, SPLIT):
            first, last = max(low, base), min(high, base + SPLIT)
            table = block_tables[lane, first // PAGE : -(-last // PAGE)].long()
            if int(table.min()) < 0 or int(table.max()) >= pages:
                raise _bad_row(row, row_lane, positions)
            at = first // PAGE * PAGE - base
            keys = torch.zeros((kv_heads, head_dim, SPLIT))
            values = torch.zeros((kv_heads, SPLIT, head_dim))
            span = slice(at, at + len(table) * PAGE)
            keys[:, :, span] = k_layer[table].float().permute(1, 2, 0, 3).reshape(kv_heads, head_dim, -1)
            values[:, span] = v_layer[table].float().transpose(0, 1).reshape(kv_heads, -1, head_dim)
            seen = torch.zeros(SPLIT, dtype=torch.bool)
            seen[first - base : last - base] = True
            keys = torch.where(seen, keys, 0.0)
            values = torch.where(seen[:, None], values, 0.0)
            scores = torch.bmm(query, keys) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            scores = torch.where(seen, scores, -torch.inf)
            top = scores.amax(-1)
            weights = torch.exp(scores - top[..., None])
            part = (top, weights.sum(-1), torch.bmm(weights, values))
            state = part if state is None else _merge(state, part)
        if state is not None:
            out[row] = (state[2] / state[1][..., None]).reshape(-1)
    return out


def _merge(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    top = torch.maximum(a[0], b[0])
    left, right = torch.exp(a[0] - top), torch.exp(b[0] - top)
    return top, a[1] * left + b[1] * right, a[2] * left[..., None] + b[2] * right[..., None]
