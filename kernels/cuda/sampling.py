"""Choosing tokens on a device. A row's choice depends on its logits, seed and position alone.

    kept     the top_k largest logits (0: all), equals by lowest id; of these the smallest set of the most likely whose
             mass reaches top_p of theirs, equals by lowest id
    mass     of a token: floor(exp((logit - largest) / temperature) * 2^40), an integer, so that sums have no order;
             top_p of a mass is ceil(float64(top_p) * float64(mass))
    chosen   the largest of (logit - largest) / temperature + gumbel(seed, position, id) over the kept ones, see
             `numem.kernels.cuda.gumbel`; of equals the lowest id. At temperature 0 the largest logit. Temperatures
             below 10^-6 count as that

Thresholds are found in the integer order of float32 values, without sorting: a round looks at 32 values that divide what
is left, all blocks of a row at once, and the next round begins by adding up what the blocks found. Seven rounds are enough
for 2^32 values. A row that needs no threshold costs an empty launch.

    words | 7 rounds for top_k | 7 rounds for top_p | equals at the threshold | scores | choice
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import gumbel, head
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.head import id_of, is_finite, largest_word, ordered, words_of_values
from numem.kernels.cuda.language import jit

BLOCK = 2048
STEP = 128  # logits that a program compares at a time
ROUNDS = 7
WAYS = tl.constexpr(32)
FIELDS = tl.constexpr(6)  # of a search: low, high, above, need, floor, ties
LEAST = tl.constexpr(-2147483648)
UNIT = tl.constexpr(2.0**40)
COLDEST = tl.constexpr(1e-6)

_rooms: dict[tuple[torch.device, int, int], "Room"] = {}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of rows: temperature and top_p float32 [R], top_k int32 [R], seed int64 [R]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor


@dataclass(frozen=True, slots=True)
class Room:
    """Working memory of R rows of `parts` blocks.

    Attributes:
        words, scores: int64 [R, parts], largest logits and scores.
        states: int64 [2, R, FIELDS], by turns; the answer of a search lies in [low, high], `above` counts what is larger
            than high, and `need` is what the answer reaches. floor and ties: of the top_k.
        sums: int64 [2, R, parts, WAYS], counts or masses from each of the values of a round on.
        keys, ties: int64 [R], what is kept at last: above the key, and the first `ties` equal to it.
        equals: int32 [R, parts].
    """

    words: Tensor
    scores: Tensor
    states: Tensor
    sums: Tensor
    keys: Tensor
    ties: Tensor
    equals: Tensor

    @classmethod
    def of(cls, device: torch.device, rows: int, parts: int) -> "Room":
        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            new(rows, parts), new(rows, parts), new(2, rows, FIELDS.value), new(2, rows, parts, WAYS.value),
            new(rows), new(rows), new(rows, parts, dtype=torch.int32),
        )  # fmt: skip


@jit
def value_of(key):
    """The float32 of a key of `ordered`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def mass_of(value, top, temperature):
    """Mass of logits, int64."""
    return (tl.exp((value - top) / temperature) * UNIT).to(tl.int64)


@jit
def candidate(low, high, j):
    """Value j of those that a round looks at."""
    step = (high - low + WAYS - 1) // WAYS
    return tl.minimum(low + 1 + j * step, high + 1)


@jit
def settled(states, sums, r, parts, p, rest, SHARE: tl.constexpr, PARTS: tl.constexpr):
    """A search after a round: low, high, above, need.

    SHARE: the round was the first for top_p, and need is that share of what it found in all, `rest` more.
    """
    at = states + r * FIELDS
    low, high, above, need = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    b, j = tl.arange(0, PARTS), tl.arange(0, WAYS)
    found = tl.load(sums + (r * parts + b[:, None]) * WAYS + j[None, :], mask=(b < parts)[:, None], other=0)
    found = tl.sum(found, 0)
    if SHARE:
        every = tl.sum(tl.where(j == 0, found, 0), 0) + rest
        need = tl.ceil(p.to(tl.float64) * every.to(tl.float64)).to(tl.int64)
        need = tl.minimum(tl.maximum(need, 1), every)
    n = tl.sum((found >= need).to(tl.int64), 0)  # they fall with the value
    over = tl.sum(tl.where(j == n, found, 0), 0)
    last, next_ = candidate(low, high, n - 1), candidate(low, high, n)
    return (
        tl.where(n > 0, last, low),
        tl.where(n < WAYS, next_ - 1, high),
        tl.where(n < WAYS, over, above),
        need,
    )


@jit
def of_row(words, temperatures, top_ks, top_ps, r, limit, parts, PARTS: tl.constexpr):
    """Settings of a row, its largest logit, and whether top_k and top_p have something to leave out."""
    word = largest_word(words, r, parts, PARTS)
    top = value_of(word >> 32)
    temperature = tl.load(temperatures + r)
    k, p = tl.load(top_ks + r).to(tl.int64), tl.load(top_ps + r)
    warm = (temperature > 0) & is_finite(word)
    return tl.maximum(temperature, COLDEST), k, p, top, warm & (k > 0) & (k < limit), warm & (p < 1.0), warm


@jit
def round_kernel(
    logits, words, temperatures, top_ks, top_ps, old_states, old_sums, states, sums, V, limit, parts,
    MASS: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A round of a search; ROUND is 0, 1 or 2 for all later ones."""
    nl.let_next_start(PDL)
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    nl.wait(PDL)
    temperature, k, p, top, some, share, _ = of_row(words, temperatures, top_ks, top_ps, r, limit, parts, PARTS)
    active = some
    if MASS:
        active = share
    if active:
        none = k * 0
        high = ordered(top).to(tl.int64)
        floor, ties, rest = none + LEAST, none, none
        if ROUND > 0:
            if MASS:
                floor, ties = tl.load(old_states + r * FIELDS + 4), tl.load(old_states + r * FIELDS + 5)
                if ROUND == 1:  # noqa: SIM102 (the outer condition is the compiler's)
                    if ties > 0:
                        rest = ties * mass_of(value_of(floor), top, temperature)
            SHARE: tl.constexpr = MASS and ROUND == 1
            low, high, above, need = settled(old_states, old_sums, r, parts, p, rest, SHARE, PARTS)
        else:
            above, need = none, k
            if MASS:  # noqa: SIM102
                if some:  # begin at the threshold of the top_k
                    floor, _end, more, _wanted = settled(old_states, old_sums, r, parts, p, rest, False, PARTS)
                    ties = k - more
            low = floor
        if part == 0:
            at = states + r * FIELDS
            tl.store(at, low)
            tl.store(at + 1, high)
            tl.store(at + 2, above)
            tl.store(at + 3, need)
            tl.store(at + 4, floor)
            tl.store(at + 5, ties)
        j = tl.arange(0, WAYS)
        value = candidate(low, high, j).to(tl.int32)
        sum_ = tl.zeros([WAYS, STEP], tl.int64 if MASS else tl.int32)
        for start in range(0, BLOCK, STEP):
            i = part * BLOCK + start + tl.arange(0, STEP)
            v = tl.load(logits + r * V + i, mask=i < limit, other=float("-inf"))
            own = tl.where(i < limit, ordered(v), LEAST)
            if MASS:
                sum_ += tl.where(own[None, :] >= value[:, None], mass_of(v, top, temperature)[None, :], 0)
            else:
                sum_ += (own[None, :] >= value[:, None]).to(tl.int32)
        tl.store(sums + (r * parts + part) * WAYS + j, tl.sum(sum_, 1).to(tl.int64))


@jit
def equals_kernel(
    logits, words, temperatures, top_ks, top_ps, k_states, k_sums, p_states, p_sums, keys, all_ties, equals,
    V, limit, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What is kept, and how many logits of a block equal the least of it."""
    nl.let_next_start(PDL)
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    nl.wait(PDL)
    temperature, k, p, top, some, share, _ = of_row(words, temperatures, top_ks, top_ps, r, limit, parts, PARTS)
    none = k * 0
    key, ties = none + LEAST, none
    if share:
        key, _high, above, need = settled(p_states, p_sums, r, parts, p, none, False, PARTS)
        one = mass_of(value_of(key), top, temperature)
        ties = (need - above + one - 1) // tl.maximum(one, 1)
    elif some:
        key, _high, above, _need = settled(k_states, k_sums, r, parts, p, none, False, PARTS)
        ties = k - above
    count = none
    if share | some:
        i = part * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(logits + r * V + i, mask=i < limit, other=float("-inf"))
        count = tl.sum(((i < limit) & (ordered(v) == key.to(tl.int32))).to(tl.int64), 0)
    tl.store(equals + r * parts + part, count.to(tl.int32))
    if part == 0:
        tl.store(keys + r, key)
        tl.store(all_ties + r, ties)


@jit
def score_kernel(
    logits, words, temperatures, top_ks, top_ps, seeds, positions, keys, all_ties, equals, scores, V, limit, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    nl.wait(PDL)
    temperature, _, _, top, _, _, warm = of_row(words, temperatures, top_ks, top_ps, r, limit, parts, PARTS)
    if warm:
        v = tl.load(logits + r * V + i, mask=i < limit, other=float("-inf"))
        key = tl.load(keys + r).to(tl.int32)
        b = tl.arange(0, PARTS)
        before = tl.sum(tl.load(equals + r * parts + b, mask=b < part, other=0), 0)
        own = ordered(v)
        equal = (own == key) & (i < limit)
        rank = before + tl.cumsum(equal.to(tl.int32), 0)
        kept = (own > key) | (equal & (rank <= tl.load(all_ties + r)))
        noise = gumbel.gumbel_of(gumbel.word_of(tl.load(seeds + r), tl.load(positions + r), i))
        score = tl.where(kept, (v - top) / temperature + noise, float("-inf"))
        tl.store(scores + r * parts + part, tl.max(words_of_values(score, i, limit), 0))


@jit
def choose_kernel(words, temperatures, scores, out, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    nl.let_next_start(PDL)
    r = tl.program_id(0).to(tl.int64)
    nl.wait(PDL)
    word = largest_word(words, r, parts, PARTS)
    chosen = id_of(word)
    if tl.load(temperatures + r) > 0:
        chosen = id_of(largest_word(scores, r, parts, PARTS))
    tl.store(out + r, tl.where(is_finite(word), chosen, -1))


def sample(
    logits: Tensor,
    limit: int,
    settings: Settings,
    positions: Tensor,
    out: Tensor,
    *,
    block: int = BLOCK,
    pdl: bool = False,
) -> None:
    """Choose a token of each row.

    Args:
        logits: float32 [R, V]; ids from `limit` on are never chosen.
        positions: int64 [R].
        out: int64 [R]; -1 of a row whose largest logit is NaN or infinite.
        block: logits of a program, a power of two; changes no choice.
    """
    rows, vocab = logits.shape
    if not 0 < limit <= vocab or logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise InputError(f"sample: logits {tuple(logits.shape)} {logits.dtype} must be contiguous float32 [., {limit}]")
    if positions.shape != (rows,) or out.shape != (rows,) or out.dtype is not torch.int64:
        raise InputError(
            f"sample: positions {tuple(positions.shape)} and out {tuple(out.shape)} must be int64 [{rows}]"
        )
    block = max(STEP, min(block, nl.next_power_of_2(limit)))
    parts = nl.cdiv(limit, block)
    room = _room(logits.device, rows, parts)
    s, grid = settings, (rows, parts)
    shape = {"BLOCK": block, "PARTS": nl.next_power_of_2(parts)}
    common = {"num_warps": 4, **nl.EXACT, **nl.launch(pdl)}
    head.block_words_kernel[grid](logits, room.words, vocab, limit, BLOCK=block, **common)
    of_rows = (logits, room.words, s.temperature, s.top_k, s.top_p)
    for number in range(2 * ROUNDS):
        old, new = (number + 1) % 2, number % 2
        round_kernel[grid](
            *of_rows, room.states[old], room.sums[old], room.states[new], room.sums[new], vocab, limit, parts,
            MASS=number >= ROUNDS, ROUND=min(number % ROUNDS, 2), STEP=STEP, **shape, **common,
        )  # fmt: skip
    equals_kernel[grid](
        *of_rows, *_last(room, ROUNDS), *_last(room, 2 * ROUNDS), room.keys, room.ties, room.equals,
        vocab, limit, parts, **shape, **common,
    )  # fmt: skip
    score_kernel[grid](
        *of_rows, s.seed, positions, room.keys, room.ties, room.equals, room.scores, vocab, limit, parts,
        **shape, **common,
    )  # fmt: skip
    choose_kernel[(rows,)](
        room.words, s.temperature, room.scores, out, parts, PARTS=shape["PARTS"], num_warps=4, **nl.launch(pdl)
    )


def reference(row: np.ndarray, sampler: tuple[float, int, float, int], position: int) -> int:
    """The choice from one row of logits below the limit, by numpy; `sampler` is temperature, top_k, top_p, seed."""
    temperature, top_k, top_p, seed = sampler
    best = int(row.argmax())
    if not np.isfinite(row[best]) or temperature == 0:
        return best if np.isfinite(row[best]) else -1
    scaled = (row - row[best]) / np.float32(max(temperature, COLDEST.value))
    order = kept_ids(row, scaled, top_k, top_p)
    score = scaled[order] + gumbel.gumbel(gumbel.words(seed, position, order))
    return int(order[score == score.max()].min())


def kept_ids(row: np.ndarray, scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Ids of the kept tokens of a row, the most likely first; `scaled` is (row - largest) / temperature."""
    order = np.argsort(-row, kind="stable")[: top_k or None]
    if top_p >= 1.0:
        return order
    mass = np.cumsum((np.exp(scaled[order]) * np.float32(UNIT.value)).astype(np.int64))
    need = max(1, int(np.ceil(np.float64(np.float32(top_p)) * np.float64(mass[-1]))))
    return order[: int(np.searchsorted(mass, min(need, mass[-1]))) + 1]


def _last(room: Room, rounds: int) -> tuple[Tensor, Tensor]:
    """State and sums after so many rounds."""
    at = (rounds - 1) % 2
    return room.states[at], room.sums[at]


def _room(device: torch.device, rows: int, parts: int) -> Room:
    """Kept for good, as graphs hold its addresses."""
    key = (device, nl.next_power_of_2(rows), parts)
    if key not in _rooms:
        _rooms[key] = Room.of(*key)
    return _rooms[key]
