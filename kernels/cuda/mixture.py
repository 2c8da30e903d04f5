"""Mixture of experts: the operation of `numem.kernels.mixture` on a device.

    route      p = softmax of a float32 router; the top_k largest, equals by lowest id; their weights
    up, down   rows of the chosen experts: a slot is a row with one of its experts
    combine    the sum of a row's slots in order of expert ids, float32, rounded to DT

Few rows, and a step of decoding: a program takes the columns of one slot. Many rows: slots are sorted by expert, and a
program takes a tile of slots of one expert; how many tiles there may be follows from the shapes alone. Products are those
of `walk`, so that a row's bits depend neither on the form nor on the other rows.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import language as nl
from numem.kernels.cuda import segments, walk
from numem.kernels.cuda.chain import prefetch
from numem.kernels.cuda.language import jit
from numem.kernels.cuda.matrix import Matrix, Stack

FEW = segments.FEW  # rows whose slots go by themselves
EACH = 8  # experts whose logits a program of the router computes
BLOCK = 512  # columns of the router at a time


@dataclass(frozen=True, slots=True)
class Scratch:
    """Working memory for up to `rows` rows.

    Attributes:
        logits: float32 [rows, experts]; ended: int32 [rows], programs of a row that have ended, zero between calls.
        ids: int32 [rows, top_k], experts of a row in order of their ids; weights: float32, theirs.
        inner: DT [rows * top_k, F]; outer: DT [rows * top_k, K].
    """

    logits: Tensor
    ended: Tensor
    ids: Tensor
    weights: Tensor
    inner: Tensor
    outer: Tensor

    @classmethod
    def of(
        cls,
        rows: int,
        experts: int,
        top_k: int,
        inner: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Scratch":
        slots = rows * top_k
        return cls(
            torch.empty((rows, experts), device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.empty((rows, top_k), dtype=torch.int32, device=device),
            torch.empty((rows, top_k), device=device),
            torch.empty((slots, inner), dtype=dtype, device=device),
            torch.empty((slots, hidden), dtype=dtype, device=device),
        )


@jit
def route_kernel(
    h, router, logits, ended, ids, weights, E,
    K: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, NORM: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs of a row take EACH experts; the one that ends last chooses."""
    nl.let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    some = tl.program_id(1) * EACH + tl.arange(0, EACH)
    real = some < E
    if PDL and K >= 512:
        prefetch(router, tl.minimum(some, E - 1), K, 512, 16)  # while the kernel before ends
    nl.wait(PDL)
    acc = tl.zeros([EACH, BLOCK], tl.float32)
    for at in range(0, K, BLOCK):
        k = at + tl.arange(0, BLOCK)
        x = tl.load(h + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(router + some[:, None] * K + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        acc += w * x[None, :]
    tl.store(logits + row * E + some, tl.sum(acc, 1), mask=real)
    tl.debug_barrier()
    if tl.atomic_add(ended + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.debug_barrier()
        e = tl.arange(0, EP)
        logit = tl.load(logits + row * E + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
        choose(logit, e, E, ids + row * TOP, weights + row * TOP, TOP, NORM, EP)
        tl.store(ended + row, 0)


@jit
def choose(logit, e, E, ids, weights, TOP: tl.constexpr, NORM: tl.constexpr, EP: tl.constexpr):
    """The TOP largest shares of a row's softmax, equals by lowest id, written in order of ids."""
    top = tl.max(logit, 0)
    p = tl.exp(logit - tl.where(top > float("-inf"), top, 0.0))  # of a row of NaN there is no largest
    p = p / tl.sum(p, 0)
    left = tl.where(e < E, p, -1.0)
    chosen = e < 0
    total = 0.0
    for _ in tl.static_range(TOP):
        largest = tl.max(left, 0)
        # a row that is no number still names an expert
        best = tl.minimum(tl.min(tl.where(left == largest, e, EP), 0), E - 1)
        here = e == best
        total += tl.sum(tl.where(here, p, 0.0), 0)
        chosen = chosen | here
        left = tl.where(here, -1.0, left)
    share = p
    if NORM:
        share = p / total
    for j in tl.static_range(TOP):
        next_ = tl.minimum(tl.min(tl.where(chosen, e, EP), 0), E - 1)
        tl.store(ids + j, next_)
        tl.store(weights + j, tl.sum(tl.where(e == next_, share, 0.0), 0))
        chosen = chosen & (e != next_)


@jit
def expert_kernel(
    h, w, scales, mins, ids, order, starts, out, N, E,
    K: tl.constexpr, SEGMENT: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EP: tl.constexpr, PER: tl.constexpr, SORTED: tl.constexpr, ACT: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [slots, N] of rows slot // PER of h; with ACT an expert is [gate | up], and out the gated half."""
    nl.let_next_start(PDL)
    tile = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, L)
    nl.wait(PDL)
    if SORTED:
        e = tl.arange(0, EP)
        first = tl.load(starts + e, mask=e < E, other=0)
        last = tl.load(starts + e + 1, mask=e < E, other=0)
        tiles = tl.cdiv(last - first, L)
        expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (e < E)).to(tl.int32), 0)
        before = tl.sum(tl.where(e < expert, tiles, 0), 0)
        at = tl.sum(tl.where(e == expert, first, 0), 0) + (tile - before) * L + lane
        inside = at < tl.sum(tl.where(e == expert, last, 0), 0)
        slot = tl.load(order + at, mask=inside, other=0)
        some = expert < E
    else:
        expert = tl.load(ids + tile)
        slot = tile + lane * 0
        inside = lane == 0
        some = tile >= 0
    if some:
        WIDE: tl.constexpr = 2 if ACT != 0 else 1
        n = expert * (WIDE * N) + tl.minimum(column, N - 1)
        m = slot // PER
        result = walk.walk(
            h, m, inside, w, scales, mins, n, K, SEGMENT, L, BN, BK, STAGES, BITS, ZERO, MINS, DT, PRECISION
        )
        up = 0.0
        if ACT != 0:
            up = walk.walk(
                h, m, inside, w, scales, mins, n + N, K, SEGMENT, L, BN, BK, STAGES, BITS, ZERO, MINS, DT, PRECISION
            )
        result = nl.ended(result, up, out, n, N, False, ACT, DT)
        to = out + slot[None, :].to(tl.int64) * N + column[:, None]
        tl.store(to, result.to(DT), mask=inside[None, :] & (column[:, None] < N))


@jit
def combine_kernel(outer, weights, y, K, TOP: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr, PDL: tl.constexpr):
    nl.let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nl.wait(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        slot = row * TOP + j
        part = tl.load(outer + slot * K + i, mask=i < K, other=0.0).to(tl.float32)
        total += tl.load(weights + slot) * part
    tl.store(y + row * K + i, total.to(DT), mask=i < K)


def mixture(
    h: Tensor,
    router: Tensor,
    gate_up: Stack,
    down: Stack,
    y: Tensor,
    *,
    top_k: int,
    norm_topk: bool,
    act: str,
    scratch: Scratch,
    sort: bool | None = None,
    pdl: bool = False,
) -> None:
    """y DT [M, K] = the weighted sum of the chosen experts of each row of h DT [M, K].

    Args:
        router: float32 [experts, K].
        gate_up: matrices [2 F, K] of the experts, gate before up; down: [K, F].
        act: of `nl.ACTIVATIONS`.
        scratch: for at least M rows of this top_k.
        sort: slots by expert, with memory that torch allocates, which no graph should hold; default: more than FEW rows.
            Changes no bit.
    """
    rows, hidden = h.shape
    experts, inner = gate_up.count, down.matrix.in_features
    if router.shape != (experts, hidden) or router.dtype is not torch.float32 or not 0 < top_k <= experts:
        raise InputError(
            f"mixture: router {tuple(router.shape)} {router.dtype} must be float32 {(experts, hidden)} and top_k "
            f"{top_k} in [1, {experts}]"
        )
    for name, stack, shape in (("gate_up", gate_up, (2 * inner, hidden)), ("down", down, (hidden, inner))):
        found = (stack.matrix.out_features // stack.count, stack.matrix.in_features)
        if found != shape or stack.count != experts or stack.matrix.bias is not None:
            raise InputError(f"mixture: {name} {stack.count} x {found} must be {experts} x {shape}, without a bias")
    shapes = scratch.ids.shape[1:], scratch.logits.shape[1:]
    if shapes != ((top_k,), (experts,)) or len(scratch.ids) < rows or y.shape != h.shape:
        raise InputError(f"mixture: scratch of {tuple(scratch.ids.shape)} or y {tuple(y.shape)} for {rows} rows")
    ids, weights = scratch.ids[:rows], scratch.weights[:rows]
    route_kernel[(rows, nl.cdiv(experts, EACH))](
        h, router, scratch.logits, scratch.ended, ids, weights, experts,
        K=hidden, EP=nl.next_power_of_2(experts), TOP=top_k, NORM=norm_topk, EACH=EACH, BLOCK=BLOCK, num_warps=4,
        **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip
    sort = rows > FEW if sort is None else sort
    plan = sorted_slots(ids, experts) if sort else None
    _experts(gate_up.matrix, h, ids, plan, scratch.inner, inner, experts, top_k, act, pdl)
    _experts(down.matrix, scratch.inner, ids, plan, scratch.outer, hidden, experts, 1, None, pdl)
    block = min(1024, nl.next_power_of_2(hidden))
    combine_kernel[(rows, nl.cdiv(hidden, block))](
        scratch.outer, weights, y, hidden, TOP=top_k, BLOCK=block, DT=nl.TYPES[y.dtype], num_warps=4,
        **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip


def sorted_slots(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Slots in order of their experts, int64, and where each expert begins, int64 [experts + 1]."""
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    bounds = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
    return order, torch.searchsorted(sorted_ids, bounds)


def reference(
    h: Tensor, router: Tensor, gate_up: Stack, down: Stack, *, top_k: int, norm_topk: bool, act: str
) -> Tensor:
    """y DT [M, K] by torch, products in float64."""
    activate = torch.nn.functional.silu if act == "silu" else torch.nn.functional.gelu
    p = torch.softmax(h.double() @ router.double().T, 1).float()
    top, ids = torch.sort(p, dim=1, descending=True, stable=True)
    top, ids = top[:, :top_k], ids[:, :top_k]
    if norm_topk:
        top = top / top.sum(1, keepdim=True)
    y = torch.zeros(h.shape, device=h.device)
    wide = gate_up.matrix.reference().view(gate_up.count, -1, h.shape[1])
    tall = down.matrix.reference().view(down.count, h.shape[1], -1)
    for expert in range(gate_up.count):
        rows, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (h[rows].double() @ wide[expert].double().T).to(h.dtype).float().chunk(2, 1)
        inner = (activate(gate) * up).to(h.dtype)
        y[rows] += (inner.double() @ tall[expert].double().T).to(h.dtype).float() * top[rows, place][:, None]
    return y.to(h.dtype)


def _experts(
    matrix: Matrix,
    h: Tensor,
    ids: Tensor,
    plan: tuple[Tensor, Tensor] | None,
    out: Tensor,
    width: int,
    experts: int,
    per: int,
    act: str | None,
    pdl: bool,
) -> None:
    slots = ids.numel()
    bn, bk, stages = (32, 32, 2) if matrix.dtype.itemsize == 4 and matrix.bits == 16 else (32, 128, 4)
    lanes, tiles = 8, slots
    if plan is not None:
        lanes = 16 if slots <= 16 * experts else 64
        tiles = min(slots, experts + slots // lanes)
        if bk == 128:
            bn, stages = 64, 4 if lanes < 64 else 3
    order, starts = plan if plan is not None else (ids, ids)
    none = out
    expert_kernel[(tiles, nl.cdiv(width, bn))](
        h, matrix.weights, none if matrix.scales is None else matrix.scales,
        none if matrix.mins is None else matrix.mins, ids, order, starts, out, width, experts,
        K=matrix.in_features, SEGMENT=walk.length(matrix.in_features), L=lanes, BN=bn, BK=bk, STAGES=stages,
        EP=nl.next_power_of_2(experts), PER=per, SORTED=plan is not None, ACT=0 if act is None else nl.ACTIVATIONS[act],
        BITS=matrix.bits, ZERO=matrix.zero, MINS=matrix.mins is not None, DT=nl.TYPES[matrix.dtype],
        PRECISION=nl.precision(matrix.dtype), num_warps=4, **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip
