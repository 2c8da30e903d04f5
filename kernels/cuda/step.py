"""The end of a decode step: chosen tokens become the state of the next one, on the device."""

import torch
import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.head import Parts, id_of, is_finite, largest_word
from numem.kernels.cuda.language import jit

_arrived: dict[torch.device, Tensor] = {}


@jit
def advance_kernel(
    index, value, tokens, positions, history, counter, lanes, steps, LANES: tl.constexpr, PDL: tl.constexpr
):
    nl.let_next_start(PDL)
    lane = tl.arange(0, LANES)
    inside = lane < lanes
    nl.wait(PDL)
    position = tl.load(positions + lane, mask=inside, other=-1)
    active = inside & (position >= 0)
    chosen = tl.load(index + lane, mask=active, other=-1)
    best = tl.load(value + lane, mask=active, other=0.0)
    finite = tl.abs(best) < float("inf")
    at = tl.load(counter)
    tl.store(history + at % steps * lanes + lane, tl.where(finite, chosen, -1), mask=inside)
    tl.store(tokens + lane, tl.where(finite & (chosen >= 0), chosen, 0), mask=active)
    tl.store(positions + lane, position + 1, mask=active)
    tl.debug_barrier()
    tl.store(counter, at + 1)


@jit
def finish_greedy_kernel(
    words, tokens, positions, history, counter, arrived, parts, lanes, steps,
    ALONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    nl.let_next_start(PDL)
    lane = tl.program_id(0)
    nl.wait(PDL)
    position = tl.load(positions + lane)
    at = tl.load(counter)
    chosen = position * 0 - 1
    if position >= 0:
        word = largest_word(words, lane.to(tl.int64), parts, BLOCK)
        if is_finite(word):
            chosen = id_of(word)
        tl.store(tokens + lane, tl.maximum(chosen, 0))
        tl.store(positions + lane, position + 1)
    tl.store(history + at % steps * lanes + lane, chosen)
    # every thread has read the counter before the last program to arrive counts on
    tl.debug_barrier()
    if ALONE:
        tl.store(counter, at + 1)
    elif tl.atomic_add(arrived, 1, sem="acq_rel") == lanes - 1:
        tl.store(arrived, 0)
        tl.store(counter, at + 1)


def advance(
    index: Tensor,
    value: Tensor,
    tokens: Tensor,
    positions: Tensor,
    history: Tensor,
    counter: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """tokens = index and positions += 1 of every lane whose position is not negative.

    Args:
        index: int64 [L], the tokens chosen; value: float32 [L], the largest logits.
        tokens, positions: int64 [L].
        history: int64 [steps, L]; row counter % steps takes the tokens, -1 where the largest logit is not finite.
        counter: int64 [1], counted on.
    """
    lanes = len(tokens)
    advance_kernel[(1,)](
        index, value, tokens, positions, history, counter, lanes, len(history),
        LANES=nl.next_power_of_2(lanes), num_warps=1, **nl.launch(pdl),
    )  # fmt: skip


def finish_greedy(
    parts: Parts, tokens: Tensor, positions: Tensor, history: Tensor, counter: Tensor, *, pdl: bool = False
) -> None:
    """The largest logit of every lane, and `advance` by it, in one launch.

    Args:
        parts: of `head.logits_parts`, a row a lane; the other arguments are those of `advance`.
    """
    lanes, count = parts.words.shape
    if tokens.device not in _arrived:
        _arrived[tokens.device] = torch.zeros(1, dtype=torch.int32, device=tokens.device)
    block = nl.next_power_of_2(count)
    finish_greedy_kernel[(lanes,)](
        parts.words, tokens, positions, history, counter, _arrived[tokens.device], count, lanes, len(history),
        ALONE=lanes == 1, BLOCK=block, num_warps=1 if block <= 128 else 8, **nl.launch(pdl),
    )  # fmt: skip
