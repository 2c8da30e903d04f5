"""Attention of many rows of lanes over their pages, whose keys are written: bit for bit as `attention.decode`."""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.attention import pages_of, scores, unit_of, weigh
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.merging import first_column, merge


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks of up to `rows` rows: int32 [B, 4] of lane, first row, rows and position of the first row; the longest
    first."""

    blocks: Tensor
    rows: int


def plan(spans: np.ndarray, device: torch.device, head_dim: int, rows: int = 0) -> Plan:
    """Cut spans (lane, first row, rows, first position), int32 [S, 4], into blocks of up to `rows` rows, or as many as suit
    heads of `head_dim`."""
    rows = rows or (128 if head_dim <= 128 else 64)
    blocks = [
        (lane, first + at, min(rows, count - at), position + at)
        for lane, first, count, position in spans.tolist()
        for at in range(0, count, rows)
    ]
    blocks.sort(key=lambda block: -block[3])
    return Plan(torch.tensor(blocks, dtype=torch.int32).to(device), rows)


@jit
def seen_of(tile, low, end, TILE: tl.constexpr):
    """Which keys [TILE] of a tile lie in [low, end): what pages hold outside of it is anything."""
    key = tile * TILE + tl.arange(0, TILE)
    return (key >= low) & (key < end)


@jit
def one_tile(
    m, l, a, queries, position, k_pages, v_pages, page, tile, kv_head, low, end, scale, unit, cap,
    MASKED: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after one more tile, of which every row sees all keys, unless it is MASKED."""
    j = tl.arange(0, TILE)
    key = tile * TILE + j
    d = tl.arange(0, DP)
    wide = (d < D)[None, :]
    if MASKED:
        wide = seen_of(tile, low, end, TILE)[:, None] & wide
    # where a page begins, and apart from it what is the same in every tile
    within = ((kv_head * 16 + j % 16) * D)[:, None] + d[None, :]
    at = page.to(tl.int64)[:, None] * (KV * 16 * D)
    if MASKED or D < DP:
        k = tl.load(k_pages + within + at, mask=wide, other=0.0)
        v = tl.load(v_pages + within + at, mask=wide, other=0.0)
    else:
        k = tl.load(k_pages + within + at)
        v = tl.load(v_pages + within + at)
    s = scores(queries, k, scale, cap, CAP, PRECISION)
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    m_i, l_i, a_i = weigh(s, v, unit, TILE, DT, PRECISION)
    return merge(m, l, a, m_i, l_i, a_i)


@triton.jit(do_not_specialize=["width"])
def prefill_kernel(
    q, k_pages, v_pages, tables, blocks, out, width, scale, cap,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, CAP: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = blocks + tl.program_id(1) * 4
    lane = tl.load(block).to(tl.int64)
    row0, rows, start = tl.load(block + 1).to(tl.int64), tl.load(block + 2), tl.load(block + 3)
    head = tl.program_id(0)
    kv_head = head // (HEADS // KV)
    i = tl.arange(0, BM)
    d = tl.arange(0, DP)
    inside = (i < rows)[:, None] & (d < D)[None, :]
    at = (row0 + i)[:, None] * (HEADS * D) + head * D + d[None, :]
    queries = tl.load(q + at, mask=inside, other=0.0)
    position = start + i
    end = start + rows  # keys that anybody of the block sees
    low = 0
    if WINDOW > 0:
        low = tl.maximum(start - WINDOW + 1, 0)
    table = tables + lane * width
    unit = unit_of(scale, CAP)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM, 8], tl.float32)
    a = tl.zeros([BM, DP], tl.float32)
    # tiles of which all rows see all keys: up to the first row's position, and from the last row's window on
    tile = low // TILE
    whole = (start + 1) // TILE
    if WINDOW > 0:
        edge = tl.minimum(tl.maximum((end - WINDOW + TILE - 1) // TILE, tile), (end + TILE - 1) // TILE)
        for t in tl.range(tile, edge, num_stages=1):
            page = pages_of(table, t, seen_of(t, low, end, TILE), TILE)
            m, l, a = one_tile(
                m, l, a, queries, position, k_pages, v_pages, page, t, kv_head, low, end, scale, unit, cap,
                True, KV, D, DP, CAP, WINDOW, TILE, DT, PRECISION,
            )  # fmt: skip
        tile = edge
    none = tl.zeros([TILE], tl.int32)
    following = pages_of(table, tile, none + tile < whole, TILE)
    for t in tl.range(tile, whole, num_stages=STAGES):
        page = following
        following = pages_of(table, t + 1, none + t + 1 < whole, TILE)
        m, l, a = one_tile(
            m, l, a, queries, position, k_pages, v_pages, page, t, kv_head, low, end, scale, unit, cap,
            False, KV, D, DP, CAP, WINDOW, TILE, DT, PRECISION,
        )  # fmt: skip
    for t in tl.range(tl.maximum(tile, whole), (end + TILE - 1) // TILE, num_stages=1):
        page = pages_of(table, t, seen_of(t, low, end, TILE), TILE)
        m, l, a = one_tile(
            m, l, a, queries, position, k_pages, v_pages, page, t, kv_head, low, end, scale, unit, cap,
            True, KV, D, DP, CAP, WINDOW, TILE, DT, PRECISION,
        )  # fmt: skip
    total = first_column(l)[:, None]  # 0 of rows past the end that see nothing
    tl.store(out + at, (a / tl.where(total > 0.0, total, 1.0)).to(DT), mask=inside)


def prefill(
    q: Tensor,
    k_layer: Tensor,
    v_layer: Tensor,
    tables: Tensor,
    plan: Plan,
    out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    rows: int = 0,
    warps: int = 8,
    stages: int = 0,
) -> None:
    """Attention of every row over the keys [max(0, position - window + 1), position] of its lane.

    Args:
        q: DT [M, heads * head_dim], rotated; k_layer, v_layer: DT [pages, kv_heads, 16, head_dim].
        tables: int32 [lanes, width].
        plan: of these rows.
        out: DT [M, heads * head_dim].
        rows: of a program, the plan's unless given; it must not be less.
        warps, stages: of a program, 0 stages for what fits; change no bit.
    """
    rows = rows or plan.rows
    if (
        heads % kv_heads
        or q.shape != out.shape
        or q.shape[1] != heads * head_dim
        or k_layer.shape[1:] != (kv_heads, 16, head_dim)
        or v_layer.shape != k_layer.shape
        or {out.dtype, k_layer.dtype, v_layer.dtype} != {q.dtype}
        or tables.dtype is not torch.int32
        or rows < plan.rows
    ):
        raise InputError(
            f"prefill: queries {tuple(q.shape)} {q.dtype}, output {tuple(out.shape)} and pages {tuple(k_layer.shape)} "
            f"must be [rows, {heads} x {head_dim}] and [pages, {kv_heads}, 16, {head_dim}] of one type, blocks of "
            f"{plan.rows} rows at most {rows}"
        )
    # how many tiles have room in shared memory
    fits = 1 if q.element_size() == 4 else 3 if rows * head_dim <= 128 * 128 else 2
    prefill_kernel[(heads, len(plan.blocks))](
        q, k_layer, v_layer, tables, plan.blocks, out, tables.shape[1], scale, softcap,
        HEADS=heads, KV=kv_heads, D=head_dim, DP=nl.next_power_of_2(head_dim), BM=rows, CAP=softcap > 0, WINDOW=window,
        TILE=nl.tile_keys(head_dim), STAGES=stages or fits, DT=nl.TYPES[q.dtype], PRECISION=nl.precision(q.dtype),
        num_warps=warps, **nl.EXACT,
    )  # fmt: skip
