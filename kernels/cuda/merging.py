"""Partial results of attention tiles, and their merge in order.

A tile leaves m = max of the scores as powers of two, l = sum of the weights and a = weights times values. Merged from left
to right: m' = max(m, m_i), a' = a 2^(m - m') + a_i 2^(m_i - m'), l likewise. A tile without visible keys changes nothing.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit

AHEAD = 8
"""Tiles whose results are loaded together."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What tiles of attention left of up to `most` tiles a row, for the product that follows to merge.

    Attributes:
        words: int64 [rows, heads, tiles], the float32 m and l of a tile; a: float32 [rows, heads, tiles, head_dim].
        positions: int64 [rows], < 0: nothing was left, and zeros are taken.
        window: of the attention, 0 for none.
    """

    words: Tensor
    a: Tensor
    tiles: int
    positions: Tensor
    heads: int
    head_dim: int
    window: int
    most: int


@jit
def count_of(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Tiles that the row at `position` sees keys of; 0 where it is negative."""
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
    return tl.where(position < 0, 0, position // TILE - low // TILE + 1).to(tl.int32)


@jit
def merge(m, l, a, m_i, l_i, a_i):
    """The state m [R], l [R, any], a [R, DP] after one more tile, which some row sees a key of."""
    top = tl.maximum(m, m_i)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(m - safe), tl.exp2(m_i - safe)
    return top, tl.fma(l, old[:, None], l_i * new[:, None]), tl.fma(a, old[:, None], a_i * new[:, None])


@jit
def first_column(x):
    """Column 0 of [R, 8] as [R]: the others hold the same."""
    return tl.sum(tl.where(tl.arange(0, 8)[None, :] == 0, x, 0.0), 1)


@jit
def both_of(word):
    """m and l, float32, of a word int64 that holds one behind the other."""
    return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def end_tile(m, l8, a, part_ml, part_a, part, rows, D: tl.constexpr, DP: tl.constexpr):
    """Leave the result of a tile for whoever merges: row i, where rows[i], at part[i].

    It is read soon, and its place written again by the next layer: keys and values, which pass once, must not drive it out
    of the cache.
    """
    d = tl.arange(0, DP)
    two = tl.arange(0, 8)[None, :]
    ml, mask = tl.where(two == 0, m[:, None], l8), rows[:, None] & (two < 2)
    tl.store(part_ml + part[:, None] * 2 + two, ml, mask=mask, eviction_policy="evict_last")
    mask = rows[:, None] & (d < D)[None, :]
    tl.store(part_a + part[:, None] * D + d[None, :], a, mask=mask, eviction_policy="evict_last")


@jit
def merge_tiles(to, words, part_a, part, d, inside, count, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Merge `count` tiles of R rows, of which tile 0 lies at part [R], and write columns d [C] where inside [R, C]."""
    m = tl.full([R], float("-inf"), tl.float32)
    l = tl.zeros([R, 1], tl.float32)
    a = tl.zeros([R, C], tl.float32)
    for t in tl.range(0, count, AHEAD, num_stages=1):
        for i in tl.static_range(AHEAD):
            real = t + i < count
            at = part + tl.minimum(t + i, count - 1)
            m_i, l_i = both_of(tl.load(words + at, cache_modifier=".cg"))
            a_i = tl.load(part_a + at[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            m_n, l_n, a_n = merge(m, l, a, m_i, l_i[:, None], a_i)
            m, l, a = tl.where(real, m_n, m), tl.where(real, l_n, l), tl.where(real, a_n, a)
    tl.store(to, (a / l).to(DT), mask=inside)


@jit
def tiles_of(words, part_a, part, d, inside, count, R: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr):
    """Asks for m and l, one word [R], and columns d [R, C] of a of `count` tiles, at most MOST, of which tile 0 lies at
    part [R]."""
    ml, values = (), ()
    for i in tl.static_range(MOST):
        real = tl.full([R], i, tl.int32) < count
        ml = ml + (tl.load(words + part + i, mask=real, other=0),)
        values = values + (tl.load(part_a + (part + i)[:, None] * D + d, mask=inside & real[:, None], other=0.0),)
    return ml + values


@jit
def merged(tiles, count, R: tl.constexpr, C: tl.constexpr, MOST: tl.constexpr):
    """The merge [R, C] of what `tiles_of` gave; zeros of no tile."""
    m = tl.full([R], float("-inf"), tl.float32)
    l = tl.zeros([R, 1], tl.float32)
    a = tl.zeros([R, C], tl.float32)
    for i in tl.static_range(MOST):
        if count > i:
            m_i, l_i = both_of(tiles[i])
            m, l, a = merge(m, l, a, m_i, l_i[:, None], tiles[MOST + i])
    return a / tl.where(count > 0, l, 1.0)


@triton.jit(do_not_specialize=["tiles"])
def merge_kernel(
    positions, out, words, part_a, tiles,
    HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, DT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Columns C of one head of a lane, where many tiles of few lanes would keep one program too long."""
    nl.let_next_start(PDL)
    head = tl.program_id(0)
    d = tl.program_id(1) * C + tl.arange(0, C)
    lane = tl.program_id(2).to(tl.int64)
    nl.wait(PDL)
    position = tl.load(positions + lane)
    if position >= 0:
        count = count_of(position, WINDOW, TILE)
        part = (lane * HEADS + head) * tiles + tl.zeros([1], tl.int64)
        to = out + lane * (HEADS * D) + head * D + d[None, :]
        merge_tiles(to, words, part_a, part, d, (d < D)[None, :], count, 1, C, D, 32, DT)
