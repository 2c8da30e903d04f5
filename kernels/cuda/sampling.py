"""Choosing tokens on a device, with randomness that is a function of (seed, position, column) alone.

    kept     the top_k largest logits (0: all), equals by lowest id; of these the smallest set of the most likely whose
             mass at the temperature reaches top_p of theirs, equals by lowest id
    u        a Philox-4x32-10 word of key seed and counter (column, position, 0, 0): ((word >> 9) + 1/2) / 2^23,
             never 1, whose logarithm of the logarithm is infinite
    chosen   the largest of logit / temperature - log(-log(u)) over the kept ones, of equals the lowest id;
             at temperature 0 the largest logit

Thresholds are found by bisection over the float32 values in their integer order, so that no row is sorted.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit

BLOCK = 4096
_LOWEST = tl.constexpr(-2147483648)
_HIGHEST = tl.constexpr(2147483647)
_rooms: dict[tuple[torch.device, int, int], tuple[Tensor, ...]] = {}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of rows: temperature and top_p float32 [R], top_k int32 [R], seed int64 [R]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor


@jit
def ordered(x):
    """Integers in the order of float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def value_of(key):
    """The inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def weight_at_least(row, limit, least, top, temperature, COUNT: tl.constexpr, floor, ties, BLOCK: tl.constexpr):
    """How many logits are at least `least`, or their mass; of mass only those above `floor` and `ties` equal to it."""
    total = 0.0
    for start in range(0, limit, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(row + i, mask=i < limit, other=float("-inf"))
        key = ordered(v)
        inside = (i < limit) & (key >= least)
        if COUNT:
            total += tl.sum(tl.where(inside, 1.0, 0.0), 0)
        else:
            w = tl.exp((v - top) / temperature)
            total += tl.sum(tl.where(inside & (key > floor), w, 0.0), 0)
    if not COUNT:
        mass = tl.exp((value_of(floor) - top) / temperature)
        total += tl.where((least <= floor) & (ties > 0.0), mass * ties, 0.0)
    return total


@jit
def threshold_kernel(logits, values, temperatures, top_ks, top_ps, keys, cuts, V, limit, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + r)
    k, p = tl.load(top_ks + r), tl.load(top_ps + r)
    row = logits + r * V
    i = tl.arange(0, PARTS)
    top = tl.max(tl.load(values + r * parts + i, mask=i < parts, other=float("-inf")), 0)
    none = ordered(top) * 0
    key, cut, ties = none + _LOWEST, none + limit, none.to(tl.float32)
    if (temperature > 0) & (tl.abs(top) < float("inf")):
        if (k > 0) & (k < limit):
            low, high = key.to(tl.int64), ordered(top).to(tl.int64)
            for _ in range(33):  # the largest key that k logits reach
                middle = (low + high + 1) >> 1
                if weight_at_least(row, limit, middle.to(tl.int32), top, temperature, True, 0, 0.0, BLOCK) >= k:
                    low = middle
                else:
                    high = tl.minimum(high, middle - 1)
            key = low.to(tl.int32)
            above = weight_at_least(row, limit, (low + 1).to(tl.int32), top, temperature, True, 0, 0.0, BLOCK)
            ties = k - above
        if p < 1.0:
            all_mass = weight_at_least(row, limit, none + _LOWEST, top, temperature, False, key, ties, BLOCK)
            low, high = key.to(tl.int64), ordered(top).to(tl.int64)
            for _ in range(33):  # the largest key at which the mass is enough
                middle = (low + high + 1) >> 1
                if (
                    weight_at_least(row, limit, middle.to(tl.int32), top, temperature, False, key, ties, BLOCK)
                    >= p * all_mass
                ):
                    low = middle
                else:
                    high = tl.minimum(high, middle - 1)
            above = weight_at_least(row, limit, (low + 1).to(tl.int32), top, temperature, False, key, ties, BLOCK)
            one = tl.exp((value_of(low.to(tl.int32)) - top) / temperature)
            needed = tl.maximum(tl.ceil((p * all_mass - above) / one), 1.0)
            if low.to(tl.int32) > key:
                ties = needed
            else:
                ties = tl.minimum(ties, needed)
            key = low.to(tl.int32)
        seen = none.to(tl.float32)
        for start in range(0, limit, BLOCK):  # where the last of the equals that are kept lies
            at = start + tl.arange(0, BLOCK)
            v = tl.load(row + at, mask=at < limit, other=float("-inf"))
            equal = (at < limit) & (ordered(v) == key)
            rank = seen + tl.cumsum(tl.where(equal, 1.0, 0.0), 0)
            last = tl.max(tl.where(equal & (rank <= ties), at, -1), 0)
            if last >= 0:
                cut = last
            seen += tl.sum(tl.where(equal, 1.0, 0.0), 0)
    tl.store(keys + r, key)
    tl.store(cuts + r, cut)


@jit
def block_max_kernel(logits, values, V, limit, parts, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(logits + r * V + i, mask=i < limit, other=float("-inf"))
    tl.store(values + r * parts + tl.program_id(1), tl.max(tl.where(v <= float("inf"), v, float("inf")), 0))


@jit
def score_kernel(logits, temperatures, seeds, positions, keys, cuts, scores, indices, V, limit, parts, BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + r)
    v = tl.load(logits + r * V + i, mask=i < limit, other=float("-inf"))
    score = v
    if temperature > 0:
        key, cut = tl.load(keys + r), tl.load(cuts + r)
        own = ordered(v)
        kept = (own > key) | ((own == key) & (i <= cut))
        zero = i * 0
        word, _, _, _ = tl.philox(tl.load(seeds + r), i, zero + tl.load(positions + r).to(tl.int32), zero, zero)
        u = ((word.to(tl.uint32, bitcast=True) >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
        score = tl.where(kept, v / temperature - tl.log(-tl.log(u)), float("-inf"))
    score = tl.where(i < limit, score, float("-inf"))
    top = tl.max(score, 0)
    at = r * parts + tl.program_id(1)
    tl.store(scores + at, top)
    tl.store(indices + at, tl.min(tl.where((score == top) & (i < limit), i, _HIGHEST), 0))


@jit
def choose_kernel(values, scores, indices, out, parts, PARTS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    inside = i < parts
    largest = tl.max(tl.load(values + r * parts + i, mask=inside, other=float("-inf")), 0)
    score = tl.load(scores + r * parts + i, mask=inside, other=float("-inf"))
    at = tl.load(indices + r * parts + i, mask=inside, other=_HIGHEST)
    best = tl.min(tl.where(score == tl.max(score, 0), at, _HIGHEST), 0)
    tl.store(out + r, tl.where(tl.abs(largest) < float("inf"), best, -1).to(tl.int64))


def sample(logits: Tensor, limit: int, settings: Settings, positions: Tensor, out: Tensor) -> None:
    """Choose a token of each row.

    Args:
        logits: float32 [R, V]; ids from `limit` on are never chosen.
        positions: int64 [R].
        out: int64 [R]; -1 of a row whose largest logit is NaN or infinite.
    """
    rows, vocab = logits.shape
    parts = nl.cdiv(limit, BLOCK)
    padded = nl.next_power_of_2(parts)
    values, scores, indices, keys, cuts = _room(logits.device, nl.next_power_of_2(rows), parts)
    block_max_kernel[(rows, parts)](logits, values, vocab, limit, parts, BLOCK=BLOCK, num_warps=8)
    threshold_kernel[(rows,)](
        logits, values, settings.temperature, settings.top_k, settings.top_p, keys, cuts, vocab, limit, parts,
        BLOCK=BLOCK, PARTS=padded, num_warps=8, **nl.EXACT,
    )  # fmt: skip
    score_kernel[(rows, parts)](
        logits, settings.temperature, settings.seed, positions, keys, cuts, scores, indices, vocab, limit, parts,
        BLOCK=BLOCK, num_warps=8, **nl.EXACT,
    )  # fmt: skip
    choose_kernel[(rows,)](values, scores, indices, out, parts, PARTS=padded, num_warps=1)


def _room(device: torch.device, rows: int, parts: int) -> tuple[Tensor, ...]:
    """Working memory; kept for good, as graphs hold its addresses."""
    key = (device, rows, parts)
    if key not in _rooms:
        _rooms[key] = (
            torch.empty((rows, parts), device=device),
            torch.empty((rows, parts), device=device),
            torch.empty((rows, parts), dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )
    return _rooms[key]
