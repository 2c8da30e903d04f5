"""Moves between pages and payloads on a device, bit for bit: values travel as integers.

Pages k and v are both [layers, pages, kv_heads, 16, head_dim]; a payload is [2, layers, n, kv_heads * head_dim], keys
before values, its layers in the order in which they are named. Page indices lie on the device: nobody looks whether they
are inside the pools.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import language as nl

PAGE = 16
BLOCK = 2048  # words of a program that copies
FINISHERS = (  # two multipliers and three shifts: of splitmix64 and of MurmurHash3
    (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31),
    (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 33, 33, 33),
)


# Sizes of single calls are not compiled in: no call waits for a compiler because its start is a multiple of 16.
@triton.jit(do_not_specialize=["start", "skip", "n", "members"])
def move_kernel(
    payload, k, v, table, layers, start, skip, n, members, pool_pages,
    KV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SOME: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """A program moves what one page has of one layer's keys or values."""
    index = (start + skip) // 16 + tl.program_id(0)
    side = tl.program_id(1) // members  # 0: keys, 1: values
    member = tl.program_id(1) % members
    layer = member.to(tl.int64)
    if SOME:
        layer = tl.load(layers + member).to(tl.int64)
    page = tl.load(table + index).to(tl.int64)
    t = tl.arange(0, 16)
    i = tl.arange(0, WIDTH)
    row = index * 16 + t - start
    inside = ((row >= skip) & (row < n))[:, None] & (i < KV * D)[None, :]
    there = (layer * pool_pages + page) * (KV * 16 * D) + ((i // D) * (16 * D) + i % D)[None, :] + (t * D)[:, None]
    here = payload + (tl.program_id(1).to(tl.int64) * n + row[:, None]) * (KV * D) + i[None, :]
    pool = k if side == 0 else v
    if GATHER:
        tl.store(here, tl.load(pool + there, mask=inside), mask=inside)
    else:
        tl.store(pool + there, tl.load(here, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["source", "target"])
def copy_kernel(k, v, pairs, source, target, pool_pages, WORDS: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr):  # fmt: skip
    layer = (tl.program_id(1) // 2).to(tl.int64)
    pool = k if tl.program_id(1) % 2 == 0 else v
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LISTED:
        source = tl.load(pairs + 2 * tl.program_id(2))
        target = tl.load(pairs + 2 * tl.program_id(2) + 1)
    first = layer * pool_pages
    values = tl.load(pool + (first + source) * WORDS + i, mask=i < WORDS)
    tl.store(pool + (first + target) * WORDS + i, values, mask=i < WORDS)


@nl.jit
def mixed(x, FIRST: tl.constexpr, SECOND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Every bit of uint64 x in every bit of the result."""
    x = (x ^ (x >> A)) * tl.full([1], FIRST, tl.uint64)
    x = (x ^ (x >> B)) * tl.full([1], SECOND, tl.uint64)
    return x ^ (x >> C)


@nl.jit
def digest_kernel(k, v, pages, out, layers, pool_pages, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    part = tl.program_id(1)  # keys of all layers, then values
    pool = k if part < layers else v
    first = ((part % layers).to(tl.int64) * pool_pages + page) * WORDS
    one = tl.zeros([BLOCK], tl.uint64)
    two = tl.zeros([BLOCK], tl.uint64)
    for start in range(0, WORDS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        word = tl.load(pool + first + i, mask=i < WORDS, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        number = (part.to(tl.int64) * WORDS + i + 1).to(tl.uint64)
        x = word + number * tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
        a = mixed(x, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31)
        b = mixed(x, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 33, 33, 33)
        one += tl.where(i < WORDS, a, 0)
        two += tl.where(i < WORDS, b, 0)
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + part) * 2
    tl.store(out + at, tl.sum(one, 0).to(tl.int64, bitcast=True))
    tl.store(out + at + 1, tl.sum(two, 0).to(tl.int64, bitcast=True))


def scatter_rows(
    payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, *, layers: Tensor | None = None, skip: int = 0
) -> None:
    """Write payload rows [skip, n) at positions [start + skip, start + n) of a page table.

    Args:
        payload: of the pools' dtype, contiguous, on their device.
        pages: int32 [P], the physical pages in logical order, on the device.
        start: position of the first row; negative only where `skip` leaves those rows out.
        layers: int32, the pools' layers that the payload has, on the device; default: all.

    Other rows of the touched pages keep their bytes. Nothing is written when an argument is refused.
    """
    _check("scatter_rows", payload, k, v, pages, start, layers, skip)
    way = move if k.is_cuda else reference  # the interpreter would take seconds
    way(payload, k, v, pages, start, layers=layers, skip=skip, gather=False)


def gather_rows(
    k: Tensor, v: Tensor, pages: Tensor, start: int, n: int, out: Tensor, *, layers: Tensor | None = None
) -> None:
    """Positions [start, start + n) of a page table as the payload `out`; arguments as for `scatter_rows`."""
    _check("gather_rows", out, k, v, pages, start, layers)
    if out.shape[2] != n:
        raise InputError(f"gather_rows: output {tuple(out.shape)} must have {n} rows")
    way = move if k.is_cuda else reference
    way(out, k, v, pages, start, layers=layers, skip=0, gather=True)


def move(
    payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, *, layers: Tensor | None, skip: int, gather: bool
) -> None:
    """Both moves by one launch."""
    _, members, n, _ = payload.shape
    if n <= skip or not members:
        return
    _, pool_pages, kv_heads, _, head_dim = k.shape
    size = k.element_size()
    whole = head_dim * size % 4 == 0 and all(t.storage_offset() * size % 4 == 0 for t in (payload, k, v))
    kind = torch.int32 if whole else torch.int16
    d = head_dim * size // kind.itemsize
    touched = nl.cdiv(start + n, PAGE) - (start + skip) // PAGE
    with torch.cuda.device_of(k):
        move_kernel[(touched, 2 * members)](
            payload.view(kind), k.view(kind), v.view(kind), pages, pages if layers is None else layers, start, skip, n,
            members, pool_pages,
            KV=kv_heads, D=d, WIDTH=nl.next_power_of_2(kv_heads * d), SOME=layers is not None, GATHER=gather,
            num_warps=8,
        )  # fmt: skip


def copy_page(k: Tensor, v: Tensor, source: int, target: int) -> None:
    """Copy one page in all layers."""
    _check_pools("copy_page", k, v)
    for page in (source, target):
        if not 0 <= page < k.shape[1]:
            raise InputError(f"copy_page: page {page} is outside the pool of {k.shape[1]}")
    if k.is_cuda or nl.INTERPRETED:
        _copy(k, v, None, source, target)
        return
    for pool in (k, v):
        pool[:, target].copy_(pool[:, source])


def copy_pages(k: Tensor, v: Tensor, pairs: Tensor) -> None:
    """Copy pages in all layers by one launch.

    Args:
        pairs: int32 [P, 2] on the device, (source, target); no page is the target of two, or source and target.
    """
    _check_pools("copy_pages", k, v)
    if pairs.shape[1:] != (2,) or pairs.dtype is not torch.int32 or not pairs.is_contiguous():
        raise InputError(f"copy_pages: pairs {tuple(pairs.shape)} {pairs.dtype} must be contiguous int32 [n, 2]")
    if len(pairs):
        _copy(k, v, pairs, 0, 0)


def fill(k: Tensor, v: Tensor, pages: Tensor) -> None:
    """Every byte of these pages 0xFF."""
    for pool in (k, v):
        raw = pool.view(torch.int32 if pool.element_size() == 4 else torch.int16)
        raw[:, pages.long()] = -1


def digest(k: Tensor, v: Tensor, pages: Sequence[int] | Tensor) -> Tensor:
    """int64 [P, 2]: two sums, modulo 2^64, over the 32-bit words of a page in all layers, keys before values: each word
    is mixed with its number by the finishers of splitmix64 and of MurmurHash3.

    A canary for bytes that changed by accident: not an identity, and nothing against somebody who looks for collisions.
    """
    _check_pools("digest", k, v)
    index = torch.as_tensor(pages, dtype=torch.int32, device=k.device)
    return (hashes if k.is_cuda else digest_reference)(k, v, index)


def hashes(k: Tensor, v: Tensor, pages: Tensor) -> Tensor:
    """`digest` by one launch, and a sum over layers."""
    layers, pool_pages = k.shape[:2]
    words = k[0, 0].numel() * k.element_size() // 4
    out = torch.empty((len(pages), 2 * layers, 2), dtype=torch.int64, device=k.device)
    if len(pages):
        with torch.cuda.device_of(k):
            digest_kernel[(len(pages), 2 * layers)](
                _words(k), _words(v), pages, out, layers, pool_pages, WORDS=words,
                BLOCK=min(1024, nl.next_power_of_2(words)), num_warps=8,
            )  # fmt: skip
    return out.sum(1)


def digest_reference(k: Tensor, v: Tensor, pages: Tensor) -> Tensor:
    """`digest` by numpy."""
    out = torch.empty((len(pages), 2), dtype=torch.int64)
    for row, page in zip(out, pages.tolist(), strict=True):
        words = np.concatenate([p[:, page].contiguous().cpu().view(-1).view(torch.int32).numpy() for p in (k, v)])
        number = np.arange(1, len(words) + 1, dtype=np.uint64)
        start = words.view(np.uint32).astype(np.uint64) + number * np.uint64(0x9E3779B97F4A7C15)
        for i, (first, second, *shifts) in enumerate(FINISHERS):
            a, b, c = map(np.uint64, shifts)
            x = (start ^ (start >> a)) * np.uint64(first)
            x = (x ^ (x >> b)) * np.uint64(second)
            row[i] = int((x ^ (x >> c)).sum(dtype=np.uint64).astype(np.int64))
    return out


def reference(
    payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, *, layers: Tensor | None, skip: int, gather: bool
) -> None:
    """Both moves by torch."""
    positions = torch.arange(start + skip, start + payload.shape[2], device=k.device)
    which = torch.arange(k.shape[0], device=k.device) if layers is None else layers.long()
    at = which[:, None], pages[positions // PAGE].long()[None], slice(None), (positions % PAGE)[None]
    for pool, rows in zip((k, v), payload, strict=True):
        if gather:
            rows[:, skip:] = pool[at].reshape(rows[:, skip:].shape)
        else:
            pool[at] = rows[:, skip:].reshape(rows.shape[0], -1, k.shape[2], k.shape[4])


def _copy(k: Tensor, v: Tensor, pairs: Tensor | None, source: int, target: int) -> None:
    words = k[0, 0].numel() * k.element_size() // 4
    raw = _words(k)
    with torch.cuda.device_of(k):
        copy_kernel[(nl.cdiv(words, BLOCK), 2 * k.shape[0], 1 if pairs is None else len(pairs))](
            raw, _words(v), raw if pairs is None else pairs, source, target, k.shape[1], WORDS=words, BLOCK=BLOCK,
            LISTED=pairs is not None, num_warps=4,
        )  # fmt: skip


def _words(pool: Tensor) -> Tensor:
    """All of a pool as int32; a page of 16 tokens is whole words."""
    return pool.view(-1).view(torch.int32)


def _check_pools(what: str, k: Tensor, v: Tensor) -> None:
    if k.ndim != 5 or k.shape[3] != PAGE or v.shape != k.shape or v.dtype is not k.dtype:
        raise InputError(f"{what}: pools {tuple(k.shape)} and {tuple(v.shape)} do not belong together")
    if k.element_size() not in (2, 4) or not k.is_contiguous() or not v.is_contiguous() or v.device != k.device:
        raise InputError(f"{what}: pools must be contiguous tensors of 2- or 4-byte elements on one device")


def _check(
    what: str, payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, layers: Tensor | None, skip: int = 0
) -> None:
    _check_pools(what, k, v)
    pool_layers, _, kv_heads, _, head_dim = k.shape
    members, width = pool_layers if layers is None else len(layers), kv_heads * head_dim
    if layers is not None and (layers.ndim != 1 or layers.dtype is not torch.int32 or layers.device != k.device):
        raise InputError(f"{what}: layers {tuple(layers.shape)} {layers.dtype} must be an int32 vector on {k.device}")
    if (
        payload.ndim != 4
        or payload.shape[:2] != (2, members)
        or payload.shape[3] != width
        or payload.dtype is not k.dtype
        or not payload.is_contiguous()
        or payload.device != k.device
    ):
        raise InputError(
            f"{what}: payload {tuple(payload.shape)} {payload.dtype} must be contiguous "
            f"[2, {members}, n, {width}] {k.dtype} on {k.device}"
        )
    if pages.ndim != 1 or pages.dtype is not torch.int32 or not pages.is_contiguous() or pages.device != k.device:
        raise InputError(f"{what}: pages {tuple(pages.shape)} {pages.dtype} must be a contiguous int32 vector")
    n = payload.shape[2]
    if skip < 0 or (skip < n and not 0 <= start + skip <= start + n <= len(pages) * PAGE):
        raise InputError(f"{what}: positions [{start + skip}, {start + n}) lie outside the route's {len(pages)} pages")
