"""Moves between pages and payloads on a device, bit for bit: values travel as integers.

Pages k and v are both [layers, pages, kv_heads, 16, head_dim]; a payload is [2, layers, n, kv_heads * head_dim].
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit

PAGE = 16


@jit
def move_kernel(
    payload, k, v, table, layers, start, skip, n, members, pool_layers, pool_pages,
    KV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SOME: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + skip
    side = tl.program_id(1) // members  # 0: keys, 1: values
    member = tl.program_id(1) % members
    layer = member.to(tl.int64)
    if SOME:
        layer = tl.load(layers + member).to(tl.int64)
    position = start + row
    page = tl.load(table + position // 16).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = i < KV * D
    there = ((layer * pool_pages + page) * KV + i // D) * (16 * D) + position % 16 * D + i % D
    here = payload + (tl.program_id(1).to(tl.int64) * n + row) * (KV * D) + i
    pool = k if side == 0 else v
    if GATHER:
        tl.store(here, tl.load(pool + there, mask=inside), mask=inside)
    else:
        tl.store(pool + there, tl.load(here, mask=inside), mask=inside)


def scatter_rows(
    payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, *, layers: Tensor | None = None, skip: int = 0
) -> None:
    """Write payload rows [skip, n) at positions [start + skip, start + n) of a page table.

    Args:
        pages: int32 [P], the physical pages in logical order, on the device.
        layers: int32, the pools' layers that the payload has, on the device; default: all.
    """
    way = move if k.is_cuda else reference  # the interpreter would take seconds
    way(payload, k, v, pages, start, layers=layers, skip=skip, gather=False)


def gather_rows(
    k: Tensor, v: Tensor, pages: Tensor, start: int, n: int, out: Tensor, *, layers: Tensor | None = None
) -> None:
    """Positions [start, start + n) of a page table as the payload `out`; arguments as for `scatter_rows`."""
    assert out.shape[2] == n
    way = move if k.is_cuda else reference
    way(out, k, v, pages, start, layers=layers, skip=0, gather=True)


def move(
    payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, *, layers: Tensor | None, skip: int, gather: bool
) -> None:
    """Both moves by one launch."""
    _, members, n, width = payload.shape
    if n <= skip:
        return
    pool_layers, pool_pages, kv_heads, _, head_dim = k.shape
    kind = torch.int32 if k.element_size() == 4 else torch.int16
    move_kernel[(n - skip, 2 * members)](
        payload.view(kind), k.view(kind), v.view(kind), pages, pages if layers is None else layers, start, skip, n,
        members, pool_layers, pool_pages,
        KV=kv_heads, D=head_dim, WIDTH=nl.next_power_of_2(width), SOME=layers is not None, GATHER=gather, num_warps=4,
    )  # fmt: skip


def copy_page(k: Tensor, v: Tensor, source: int, target: int) -> None:
    """Copy one page in all layers."""
    for pool in (k, v):
        pool[:, target].copy_(pool[:, source])


def fill(k: Tensor, v: Tensor, pages: Tensor) -> None:
    """Every byte of these pages 0xFF."""
    for pool in (k, v):
        raw = pool.view(torch.int32 if pool.element_size() == 4 else torch.int16)
        raw[:, pages.long()] = -1


def digest(k: Tensor, v: Tensor, pages: Sequence[int] | Tensor) -> Tensor:
    """int64 [P, 2]: two sums of a page's words, each by odd weights of its own (in integers, modulo 2^64).

    A canary for bytes that changed by accident, not an identity.
    """
    index = torch.as_tensor(pages, dtype=torch.int64, device=k.device)
    parts = [pool.view(torch.int16)[:, index].transpose(0, 1).reshape(len(index), -1) for pool in (k, v)]
    words = torch.cat(parts, 1).to(torch.int64)
    weights = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=k.device)
    return torch.stack([(words * (weights * m | 1)).sum(1) for m in (-7046029254386353131, 2685821657736338717)], 1)


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
