"""Attention of one row per lane over the pages of its lane: norms, rotation and page write included, in one launch.

Keys are walked in tiles of 128, or 64 where heads are wide, at absolute multiples. A tile has a softmax of its own: with
s = q k^T and u = scale log2 e (of soft-capped s: u = log2 e), m = u max(s), p = 2^(u s - m), the exponent one fused step,
rounded to DT, l = sum of the rounded p and a = p V, both by the tensor core (so that neither depends on how warps share the
keys). Tiles are merged in order (`numem.kernels.cuda.merging`). Programs compute tiles of a lane side by side; the one that
ends last merges them, so what it computes does not depend on which that is; where tiles are many and lanes few, a second
launch merges by columns; where both are few, the product that follows does. The form for many rows,
`numem.kernels.cuda.attention_prefill`, does the same one tile after another.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.merging import AHEAD, Parts, end_tile, first_column, merge_kernel, merge_tiles
from numem.kernels.cuda.rotary import HeadNorms, angles, check_heads, head_rows, partner

GROUP_LIMIT = 31
"""Query heads of a key head."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where tiles leave their results: words int64 [lanes, heads, tiles], the float32 m and l of each, and a, float32
    [lanes, heads, tiles, head_dim]; and how many programs of a lane and key head have ended, int32 [lanes * heads], zero
    between calls."""

    words: Tensor
    a: Tensor
    count: Tensor
    tiles: int

    @classmethod
    def of(cls, lanes: int, heads: int, head_dim: int, tiles: int, device: torch.device) -> "Scratch":
        rows = lanes * heads * tiles
        words = torch.empty(rows, dtype=torch.int64, device=device)
        a = torch.empty((rows, head_dim), device=device)
        count = torch.zeros(lanes * heads, dtype=torch.int32, device=device)
        return cls(words, a, count, tiles)


@jit
def pages_of(table, tile, seen, TILE: tl.constexpr):
    """Pages [TILE] of the keys of a tile that are seen, else 0.

    Loops over tiles load them one tile ahead: if the compiler did, it would wait for them, and so for all keys and values
    that it had asked for before them.
    """
    return tl.load(table + (tile * TILE + tl.arange(0, TILE)) // 16, mask=seen, other=0)


@jit
def scores(q, k, scale, cap, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """q k^T, or that scaled and soft-capped; [rows, keys]."""
    return capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, cap, CAP)


@jit
def capped(s, scale, cap, CAP: tl.constexpr):
    """Products of queries and keys as `scores`."""
    if CAP:
        s = nl.softcap(s * scale, cap)
    return s


@jit
def unit_of(scale, CAP: tl.constexpr):
    """What turns `scores` into powers of two."""
    unit = scale * nl.LOG2E
    if CAP:
        unit = nl.LOG2E + scale * 0.0
    return unit


@jit
def weigh(s, v, unit, KEYS: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """(m [rows], l [rows, 8], a [rows, D]) of masked scores and values."""
    m = tl.max(s, 1) * unit
    low = -tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(tl.fma(s, unit, low[:, None])).to(DT)
    ones = tl.full([KEYS, 8], 1.0, DT)
    return m, tl.dot(p, ones, input_precision=PRECISION), tl.dot(p, v, input_precision=PRECISION)


@jit
def column_of(x, at, C: tl.constexpr):
    """Column `at` of float32 [R, C], as bits, so that it stays what it is: [R]."""
    words = tl.where((tl.arange(0, C) == at)[None, :], x.to(tl.int32, bitcast=True), 0)
    return tl.sum(words, 1).to(tl.float32, bitcast=True)


# Lengths of tables are not compiled in: a step does not wait for a compiler whenever its longest lane has grown.
@triton.jit(do_not_specialize=["width", "tiles"])
def decode_kernel(
    qkv, q_norm, k_norm, cos, sin, k_pages, v_pages, tables, positions, out, part_ml, words, part_a, ended,
    width, tiles, eps, offset, scale, cap,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, GH: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    EACH: tl.constexpr, STAGES: tl.constexpr, LEAVE: tl.constexpr, AHEAD: tl.constexpr, DT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    kv_head = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    # Of what is read here, the launches before this one write qkv alone: older keys and values may be on their way already.
    position = tl.load(positions + lane)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
    first, last = (low // TILE).to(tl.int32), (position // TILE).to(tl.int32)
    begin = first + tl.program_id(1) * EACH
    end = tl.minimum(begin + EACH, last + 1)
    if (position >= 0) & (begin < end):
        M: tl.constexpr = max(16, GP)
        g = tl.arange(0, GP)
        d = tl.arange(0, DP)
        j = tl.arange(0, TILE)
        wide = d < D
        table = tables + lane * width
        unit = unit_of(scale, CAP)
        # rows 0..GROUP-1 are the queries, row GROUP is the new key
        row = qkv + lane * ((HEADS + 2 * KV) * D)
        column = tl.where(g < GROUP, kv_head * GROUP + g, HEADS + kv_head)
        w, w_partner = 0.0, 0.0
        if NORM:
            other = partner(d, W)
            is_query = (g < GROUP)[:, None]
            w_q, w_k = tl.load(q_norm + d, mask=wide, other=0.0), tl.load(k_norm + d, mask=wide, other=0.0)
            w = offset + tl.where(is_query, w_q[None, :], w_k[None, :])
            w_q, w_k = tl.load(q_norm + other, mask=wide, other=0.0), tl.load(k_norm + other, mask=wide, other=0.0)
            w_partner = offset + tl.where(is_query, w_q[None, :], w_k[None, :])
        every = d[None, :] + g[:, None] * 0  # in the layout of the rows, so that nothing is exchanged between threads
        c, s = angles(cos, position, every, W, 1.0), angles(sin, position, every, W, 0.0)
        own = (tl.load(table + position // 16).to(tl.int64) * KV + kv_head) * (16 * D) + position % 16 * D
        i = tl.arange(0, M) % GP  # row of the product
        part = (lane * HEADS + kv_head * GROUP + i) * tiles - first
        rows = tl.arange(0, M) < GROUP
        if EACH == 1:
            # one tile, on its way before the launch before has ended; the own row is put in after that
            key = begin * TILE + j
            seen, mine = (key <= position) & (key >= low), key == position
            page = tl.load(table + key // 16, mask=seen, other=0).to(tl.int64)
            at = ((page * KV + kv_head) * (16 * D) + (key % 16) * D)[:, None] + d[None, :]
            both = (seen & (key < position))[:, None] & wide[None, :]
            k = tl.load(k_pages + at, mask=both, other=0.0)
            v = tl.load(v_pages + at, mask=both, other=0.0)
        nl.wait(PDL)
        x = head_rows(row + column[:, None] * D, (g <= GROUP)[:, None], w, w_partner, c, s, eps, D, DP, W, NORM, DT)
        if EACH == 1:
            here = mine[:, None] & wide[None, :]
            v = tl.load(row + (HEADS + KV + kv_head) * D + d[None, :] + j[:, None] * 0, mask=here, other=v)
        if last < end:
            v_new = tl.load(row + (HEADS + KV + kv_head) * D + d, mask=wide, other=0.0)
            tl.store(k_pages + own + every, x, mask=(g == GROUP)[:, None] & wide[None, :])
            tl.store(v_pages + own + d, v_new, mask=wide)
            if EACH > 1:
                tl.debug_barrier()  # this program reads them again
        q = x
        if GP < 16:
            q = tl.broadcast_to(x[None, :, :], [16 // GP, GP, DP]).reshape([16, DP])
        if EACH == 1:
            # the new key lies in a row of q: its scores come from a product of their own, so that the tile of older keys
            # need not wait for it
            e = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            e_new = column_of(tl.dot(q, tl.trans(q), input_precision=PRECISION), GROUP, M)
            e = capped(tl.where(mine[None, :], e_new[:, None], e), scale, cap, CAP)
            m, l8, a = weigh(tl.where(seen[None, :], e, float("-inf")), v, unit, TILE, DT, PRECISION)
            if LEAVE or first < last:
                end_tile(m, l8, a, part_ml, part_a, part + begin, rows, D, DP)
            else:
                to = out + lane * (HEADS * D) + (kv_head * GROUP + i)[:, None] * D + d[None, :]
                tl.store(to, (a / first_column(l8)[:, None]).to(DT), mask=rows[:, None] & wide[None, :])
        else:
            # pages one tile ahead, by the loop itself; see `pages_of`
            following = pages_of(table, begin, (begin * TILE + j <= position) & (begin * TILE + j >= low), TILE)
            for tile in tl.range(begin, end, num_stages=STAGES):
                key = tile * TILE + j
                seen = (key <= position) & (key >= low)
                at = (following.to(tl.int64) * KV + kv_head) * (16 * D) + (key % 16) * D
                following = pages_of(table, tile + 1, key + TILE <= position, TILE)
                both = seen[:, None] & wide[None, :]
                k = tl.load(k_pages + at[:, None] + d[None, :], mask=both, other=0.0)
                v = tl.load(v_pages + at[:, None] + d[None, :], mask=both, other=0.0)
                e = scores(q, k, scale, cap, CAP, PRECISION)
                m, l8, a = weigh(tl.where(seen[None, :], e, float("-inf")), v, unit, TILE, DT, PRECISION)
                end_tile(m, l8, a, part_ml, part_a, part + tile, rows, D, DP)
        if not LEAVE and ((EACH > 1) | (first < last)):
            tl.debug_barrier()
            others = tl.atomic_add(ended + lane * KV + kv_head, 1, sem="acq_rel")
            if others == (last - first) // EACH:
                tl.debug_barrier()
                h = tl.arange(0, GH)
                head = kv_head * GROUP + tl.minimum(h, GROUP - 1)
                to = out + lane * (HEADS * D) + head[:, None] * D + d[None, :]
                merge_tiles(
                    to, words, part_a, (lane * HEADS + head) * tiles, d,
                    (h < GROUP)[:, None] & wide[None, :], last - first + 1, GH, DP, D, AHEAD, DT,
                )  # fmt: skip
                tl.store(ended + lane * KV + kv_head, 0)
    else:
        nl.wait(PDL)


def decode(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos: Tensor,
    sin: Tensor,
    k_layer: Tensor,
    v_layer: Tensor,
    tables: Tensor,
    positions: Tensor,
    out: Tensor,
    scratch: Scratch,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    tiles: int,
    split: tuple[int, int] | None = None,
    warps: int = 0,
    merge: str | None = None,
    pdl: bool = False,
) -> Parts | None:
    """Attention of row i, of lane i, over the keys [max(0, position - window + 1), position] of its lane.

    Args:
        qkv: DT [L, (heads + 2 kv_heads) head_dim], neither normalised nor rotated; norms, cos, sin: see `rope_write`.
        k_layer, v_layer: DT [pages, kv_heads, 16, head_dim]; the row's own key and value are written to them.
        tables: int32 [L, width]; positions: int64 [L], < 0: an idle lane, of which nothing is read or written.
        out: DT [L, heads * head_dim].
        tiles: tiles of `nl.tile_keys` keys that the longest lane has, at most `scratch.tiles`.
        split: tiles of a program and stages of its loads, else by `config`; changes no bit.
        warps: of a program, 0 by `config`; changes no bit.
        merge: who merges the tiles: "last", the program that ends last; "apart", a second launch; "next", the launch that
            takes the result: `out` is not written and what it needs is returned. Else by `config`; changes no bit.
    """
    check_heads("decode", qkv, norms, cos, sin, k_layer, v_layer, heads, kv_heads, head_dim)
    lanes, group = len(qkv), heads // kv_heads
    if (
        group > GROUP_LIMIT
        or out.shape != (lanes, heads * head_dim)
        or not out.is_contiguous()
        or out.dtype is not qkv.dtype
        or positions.shape != (lanes,)
        or len(tables) < lanes
        or tables.dtype is not torch.int32
        or tiles > scratch.tiles
        or len(scratch.words) < lanes * heads * scratch.tiles
    ):
        raise InputError(
            f"decode: output {tuple(out.shape)}, positions {tuple(positions.shape)}, tables {tuple(tables.shape)} and "
            f"scratch of {scratch.tiles} tiles must be of {lanes} rows and {tiles} tiles, and at most {GROUP_LIMIT} "
            f"heads (not {group}) share a key head"
        )
    keys, tiles = nl.tile_keys(head_dim), seen_tiles(tiles, window, head_dim)
    chosen = config(head_dim, group, lanes * kv_heads, tiles, qkv.element_size())
    each, stages = split or (chosen.each, chosen.stages)
    merge = merge or ("apart" if chosen.apart else "last")
    dt = nl.TYPES[qkv.dtype]
    decode_kernel[(kv_heads, nl.cdiv(tiles, each), lanes)](
        qkv, cos if norms is None else norms.q, cos if norms is None else norms.k, cos, sin, k_layer, v_layer, tables,
        positions, out, scratch.words.view(torch.float32), scratch.words, scratch.a, scratch.count, tables.shape[1], scratch.tiles,
        0.0 if norms is None else norms.eps, 0.0 if norms is None else norms.offset, scale, softcap,
        HEADS=heads, KV=kv_heads, GROUP=group, GP=max(4, nl.next_power_of_2(group + 1)), GH=nl.next_power_of_2(group),
        D=head_dim, DP=nl.next_power_of_2(head_dim), W=cos.shape[1], NORM=norms is not None, CAP=softcap > 0,
        WINDOW=window, TILE=keys, EACH=each, STAGES=stages, LEAVE=merge != "last", AHEAD=AHEAD,
        DT=dt, PRECISION=nl.precision(qkv.dtype),
        num_warps=warps or chosen.warps, **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip
    if merge == "next":
        return Parts(scratch.words, scratch.a, scratch.tiles, positions, heads, head_dim, window, tiles)
    if merge == "apart":
        columns = 32
        merge_kernel[(heads, nl.cdiv(head_dim, columns), lanes)](
            positions, out, scratch.words, scratch.a, scratch.tiles, HEADS=heads, D=head_dim, C=columns,
            WINDOW=window, TILE=keys, DT=dt, num_warps=1, **nl.EXACT, **nl.launch(pdl),
        )  # fmt: skip
    return None


def seen_tiles(tiles: int, window: int, head_dim: int) -> int:
    """Of a lane's tiles, how many a row sees keys of at most."""
    return min(tiles, nl.cdiv(window - 1, nl.tile_keys(head_dim)) + 1) if window else tiles


@dataclass(frozen=True, slots=True)
class Config:
    """How decode is cut: warps of a program, tiles it walks, stages of its loads, and whether a launch of its own merges
    the tiles rather than the program that ends last. None of it changes a bit."""

    warps: int
    each: int
    stages: int
    apart: bool


def config(head_dim: int, group: int, programs: int, tiles: int, size: int) -> Config:
    """What suits so many tiles of so many (lane, key head), `size` bytes a component: one tile a program where programs
    are few, for the shortest way, else several, of which a multiprocessor has three that wait by turns."""
    apart = tiles > 32 and programs < 128
    if tiles * programs < 1024 or size > 2:
        return Config(8 if head_dim > 128 else 4, 1, 1, apart)  # a tile in registers
    return Config(4 if group < 16 else 8, 2 if programs <= 16 else 4, 2, apart)
