"""Logits of rows, float32, and the largest of each row."""

import torch
import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import chain, segments
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix

BLOCK = 4096
_parts: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor]] = {}


@jit
def block_peaks_kernel(logits, values, indices, V, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nl.wait(PDL)
    nl.ready(PDL)
    v = tl.load(logits + row * V + i, mask=i < limit, other=float("-inf"))
    # what is no number counts as the largest, so that it is found
    v = tl.where(v <= float("inf"), v, float("inf"))
    top = tl.max(v, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + at, top)
    tl.store(indices + at, tl.min(tl.where((v == top) & (i < limit), i, 2147483647), 0))


@jit
def row_peaks_kernel(logits, values, indices, index, value, V, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    nl.wait(PDL)
    nl.ready(PDL)
    v = tl.load(values + row * parts + i, mask=i < parts, other=float("-inf"))
    at = tl.load(indices + row * parts + i, mask=i < parts, other=2147483647)
    top = tl.max(v, 0)
    best = tl.min(tl.where(v == top, at, 2147483647), 0)
    tl.store(index + row, best.to(tl.int64))
    tl.store(value + row, tl.load(logits + row * V + best))


def logits_peaks(
    h: Tensor,
    matrix: Matrix,
    out: Tensor,
    limit: int,
    index: Tensor,
    value: Tensor,
    *,
    cap: float | None = None,
    pdl: bool = False,
) -> None:
    """Logits of rows and the largest of each.

    Args:
        h: DT [R, K].
        out: float32 [R, V], soft-capped by `cap`; sums as they are, not rounded to DT.
        limit: ids from here on are not looked at for the largest.
        index: int64 [R], of equals the first; value: float32 [R], NaN or infinite where a logit below `limit` is.
    """
    if segments.serves(matrix):
        segments.few_rows(matrix, out, h=h, cap=cap, pdl=pdl)
    else:
        chain.few_rows(matrix, h, out, cap=cap, pdl=pdl)
    peaks(out, limit, index, value, pdl=pdl)


def peaks(logits: Tensor, limit: int, index: Tensor, value: Tensor, *, pdl: bool = False) -> None:
    """Index int64 [R] and value float32 [R] of the largest of the first `limit` of each row of float32 [R, V]."""
    rows, vocab = logits.shape
    parts = nl.cdiv(limit, BLOCK)
    values, indices = _room(logits.device, nl.next_power_of_2(rows), parts)
    block_peaks_kernel[(rows, parts)](logits, values, indices, vocab, limit, BLOCK=BLOCK, num_warps=8, **nl.launch(pdl))
    row_peaks_kernel[(rows,)](
        logits, values, indices, index, value, vocab, parts, BLOCK=nl.next_power_of_2(parts), num_warps=1,
        **nl.launch(pdl),
    )  # fmt: skip


def reference(logits: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The same by torch, of finite logits."""
    top = logits[:, :limit].max(1).values
    index = (logits[:, :limit] == top[:, None]).int().argmax(1)
    return index, top


def _room(device: torch.device, rows: int, parts: int) -> tuple[Tensor, Tensor]:
    """Results of blocks; kept for good, as graphs hold their addresses."""
    key = (device, rows, parts)
    if key not in _parts:
        _parts[key] = (
            torch.empty((rows, parts), device=device),
            torch.empty((rows, parts), dtype=torch.int32, device=device),
        )
    return _parts[key]
