"""Logits of rows, float32, and the largest of each row.

    product     logits of a tile of ids, and the largest of the tile: one word that holds value and id
    finish      the largest word of a row

A word is the float32 in its integer order, NaN above all others, over the id from the top down: the largest word is the
largest value, of equals the one with the lowest id, or the first NaN. -0 counts as 0.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import language as nl
from numem.kernels.cuda import walk
from numem.kernels.cuda.chain import prefetch
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix

BLOCK = 4096
LEAST = tl.constexpr(-2147483648)

Config = tuple[int, int, int, int]
"""Ids, columns of k, warps and stages of a program; changes no bit."""

_rooms: dict[tuple[torch.device, int, int], Tensor] = {}


@dataclass(frozen=True, slots=True)
class Parts:
    """Words int64 [R, tiles]: the largest of each tile of a row."""

    words: Tensor


@jit
def ordered(x):
    """int32 in the order of float32 values: NaN the largest, -0 as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x <= float("inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), 2147483647)


@jit
def words_of_values(x, column, limit):
    """Words int64; those of ids from `limit` on are less than all others."""
    key = tl.where(column < limit, ordered(x), LEAST)
    return (key.to(tl.int64) << 32) | (column ^ 0x7FFFFFFF).to(tl.int64)


@jit
def id_of(word):
    """The id in a word."""
    return (word & 0x7FFFFFFF) ^ 0x7FFFFFFF


@jit
def is_finite(word):
    """Whether the value in a word is a finite number."""
    key = word >> 32
    return (key < 0x7F800000) & (key > -2139095041)


@jit
def head_kernel(
    h, w, scales, mins, bias, out, words, rows, N, limit, cap,
    K: tl.constexpr, SEGMENT: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    # tiles of rows are next to each other, so that all but one find their weights in the cache
    m = tl.program_id(0) * L + tl.arange(0, L)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    n = tl.minimum(column, N - 1)
    inside = m < rows
    if PDL and K >= 512:
        prefetch(w, n, K, 512, BITS)  # while the kernel before ends: what the walk loads first
    nl.wait(PDL)
    result = walk.walk(h, m, inside, w, scales, mins, n, K, SEGMENT, L, BN, BK, STAGES, BITS, ZERO, MINS, DT, PRECISION)
    if BIAS:
        result += tl.load(bias + n)[:, None]
    if CAP:
        result = nl.softcap(result, cap)
    mask = inside[None, :] & (column[:, None] < N)
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], result, mask=mask)
    top = tl.max(words_of_values(result, column[:, None], limit), 0)
    tl.store(words + m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), top, mask=inside)


@jit
def block_words_kernel(logits, words, V, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    nl.let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nl.wait(PDL)
    v = tl.load(logits + row * V + i, mask=i < limit, other=float("-inf"))
    tl.store(words + row * tl.num_programs(1) + tl.program_id(1), tl.max(words_of_values(v, i, limit), 0))


@jit
def largest_word(words, row, parts, BLOCK: tl.constexpr):
    """The largest word of a row."""
    i = tl.arange(0, BLOCK)
    return tl.max(tl.load(words + row * parts + i, mask=i < parts, other=-9223372036854775808), 0)


@jit
def finish_kernel(logits, words, index, value, V, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    nl.let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    nl.wait(PDL)
    best = id_of(largest_word(words, row, parts, BLOCK))
    tl.store(index + row, best)
    tl.store(value + row, tl.load(logits + row * V + best))


def logits_parts(
    h: Tensor,
    matrix: Matrix,
    out: Tensor,
    limit: int,
    *,
    cap: float | None = None,
    config: Config | None = None,
    pdl: bool = False,
) -> Parts:
    """Logits of rows and the largest of each tile, by one launch; see `logits_peaks`, and `step.finish_greedy`.

    Returns:
        What lies in place until the next call with as many rows and tiles on the device.
    """
    rows, width = out.shape
    if h.shape != (rows, matrix.in_features) or h.dtype is not matrix.dtype or not h.is_contiguous():
        raise InputError(
            f"head: h {tuple(h.shape)} {h.dtype} must be contiguous {(rows, matrix.in_features)} {matrix.dtype}"
        )
    if width != matrix.out_features or out.dtype is not torch.float32 or not out.is_contiguous():
        raise InputError(
            f"head: logits {tuple(out.shape)} {out.dtype} must be contiguous float32 {(rows, matrix.out_features)}"
        )
    _check_limit(limit, width)
    bn, bk, warps, stages = config or settings(matrix, rows)
    lanes = min(64, max(8, nl.next_power_of_2(rows)))
    tiles = nl.cdiv(width, bn)
    words = room(h.device, rows, tiles)
    none = out
    head_kernel[(nl.cdiv(rows, lanes), tiles)](
        h, matrix.weights, none if matrix.scales is None else matrix.scales,
        none if matrix.mins is None else matrix.mins, none if matrix.bias is None else matrix.bias,
        out, words, rows, width, limit, 0.0 if cap is None else cap,
        K=matrix.in_features, SEGMENT=walk.length(matrix.in_features), L=lanes, BN=bn, BK=bk, STAGES=stages,
        BIAS=matrix.bias is not None, BITS=matrix.bits, ZERO=matrix.zero, MINS=matrix.mins is not None,
        DT=nl.TYPES[matrix.dtype], CAP=cap is not None, PRECISION=nl.precision(matrix.dtype), num_warps=warps,
        **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip
    return Parts(words)


def settings(matrix: Matrix, rows: int) -> Config:
    """Enough bytes under way on every multiprocessor: three programs of three tiles of weights each; of packed weights,
    more and smaller programs, as they wait for arithmetic."""
    if matrix.bits != 16:
        return 64, 128, 2 if rows <= 8 else 4, 3
    if matrix.dtype.itemsize == 4:
        return 32, 32, 4, 2
    if 8 < rows <= 32 and matrix.in_features < 1024:
        return 64, 128, 2, 3
    return 64, 128, 4, 4 if rows <= 32 else 3  # as many as leave room for a second program


def logits_peaks(
    h: Tensor,
    matrix: Matrix,
    out: Tensor,
    limit: int,
    index: Tensor,
    value: Tensor,
    *,
    cap: float | None = None,
    config: Config | None = None,
    pdl: bool = False,
) -> None:
    """Logits of rows and the largest of each.

    Args:
        h: DT [R, K].
        out: float32 [R, V], soft-capped by `cap`; sums as they are, not rounded to DT.
        limit: ids from here on are not looked at for the largest.
        index: int64 [R], of equals the first, or the first NaN; value: float32 [R], the logit there.
    """
    _finish(out, logits_parts(h, matrix, out, limit, cap=cap, config=config, pdl=pdl), index, value, pdl)


def peaks(logits: Tensor, limit: int, index: Tensor, value: Tensor, *, pdl: bool = False) -> None:
    """Index int64 [R] and value float32 [R] of the largest of the first `limit` of each row of float32 [R, V]."""
    rows, width = logits.shape
    _check_limit(limit, width)
    parts = nl.cdiv(limit, BLOCK)
    words = room(logits.device, rows, parts)
    block_words_kernel[(rows, parts)](logits, words, width, limit, BLOCK=BLOCK, num_warps=8, **nl.launch(pdl))
    _finish(logits, Parts(words), index, value, pdl)


def reference(logits: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The same by torch."""
    row = logits[:, :limit]
    top = row.max(1, keepdim=True).values  # NaN where there is one
    index = ((row == top) | row.isnan()).int().argmax(1)
    return index, logits.gather(1, index[:, None])[:, 0]


def room(device: torch.device, rows: int, tiles: int) -> Tensor:
    """Words int64 [rows, tiles]; kept for good, as graphs hold their addresses."""
    key = (device, nl.next_power_of_2(rows), tiles)
    if key not in _rooms:
        _rooms[key] = torch.empty(key[1:], dtype=torch.int64, device=device)
    return _rooms[key][:rows]


def _finish(logits: Tensor, parts: Parts, index: Tensor, value: Tensor, pdl: bool) -> None:
    rows, count = parts.words.shape
    if index.shape != (rows,) or index.dtype is not torch.int64 or value.shape != (rows,):
        raise InputError(
            f"head: index {tuple(index.shape)} {index.dtype} and value must be [{rows}], int64 and float32"
        )
    block = nl.next_power_of_2(count)
    finish_kernel[(rows,)](
        logits, parts.words, index, value, logits.shape[1], count, BLOCK=block, num_warps=1 if block <= 128 else 8,
        **nl.launch(pdl),
    )  # fmt: skip


def _check_limit(limit: int, width: int) -> None:
    if not 0 < limit <= width:
        raise InputError(f"head: limit {limit} must lie in [1, {width}]")
