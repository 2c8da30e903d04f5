"""Resident KV pages, and raw moves of token rows between them and the durable payload.

A page holds 16 tokens of all heads of one layer. Keys lie key-minor, [kv_heads, head_dim, 16], so that the scores of a
page are 16 lanes of one vector; values lie [kv_heads, 16, head_dim]. The pools are
k [layers, pages, kv_heads, head_dim, 16] and v [layers, pages, kv_heads, 16, head_dim].

The payload of n tokens is [2, layers, n, kv_heads * head_dim], keys before values: the canonical chunk of the store. A
payload of some layers only has them in the order in which they are named.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native

PAGE = native.PAGE

_move = native.function("nm_move")


def new_pools(layers: int, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeroed key and value pools."""
    return (
        torch.zeros((layers, pages, kv_heads, head_dim, PAGE), dtype=dtype),
        torch.zeros((layers, pages, kv_heads, PAGE, head_dim), dtype=dtype),
    )


def scatter_rows(
    payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, *, layers: Sequence[int] | None = None
) -> None:
    """Write the payload's token rows to positions start .. start + n of a route.

    Args:
        payload: [2, layers, n, kv_heads * head_dim], contiguous, of the pools' dtype.
        k, v: the pools.
        pages: int32 vector, the route's physical pages in logical order (from position 0).
        start: first position, >= 0.
        layers: the pools' layers that the payload has, in its order; default: all.

    Other rows of the touched pages keep their bytes. Nothing is written when an argument is refused.
    """
    _run("scatter_rows", payload, k, v, pages, start, layers, gather=False)


def gather_rows(
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    start: int,
    n: int,
    out: Tensor | None = None,
    *,
    layers: Sequence[int] | None = None,
) -> Tensor:
    """The inverse of `scatter_rows`: positions start .. start + n of a route as a payload, bit for bit."""
    pool_layers, _, kv_heads, head_dim, _ = k.shape
    shape = (2, pool_layers if layers is None else len(layers), n, kv_heads * head_dim)
    if out is None:
        out = torch.empty(shape, dtype=k.dtype)
    elif out.shape != shape:
        raise InputError(f"gather_rows: output {tuple(out.shape)} must be {shape}")
    _run("gather_rows", out, k, v, pages, start, layers, gather=True)
    return out


def _run(
    what: str,
    payload: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    start: int,
    some: Sequence[int] | None,
    *,
    gather: bool,
) -> None:
    pool_layers, pool_pages, kv_heads, head_dim, _ = k.shape
    layers = pool_layers if some is None else len(some)
    width = kv_heads * head_dim
    if k.shape[4] != PAGE or v.shape != (pool_layers, pool_pages, kv_heads, PAGE, head_dim) or v.dtype is not k.dtype:
        raise InputError(f"{what}: pools {tuple(k.shape)} and {tuple(v.shape)} do not belong together")
    if k.element_size() not in (2, 4) or not k.is_contiguous() or not v.is_contiguous() or not (k.is_cpu and v.is_cpu):
        raise InputError(f"{what}: pools must be contiguous tensors of 2- or 4-byte elements on the CPU")
    if some is not None and (len(set(some)) != layers or not layers or min(some) < 0 or max(some) >= pool_layers):
        raise InputError(f"{what}: layers {list(some)} must be distinct and lie in [0, {pool_layers})")
    if (
        payload.ndim != 4
        or payload.shape[:2] != (2, layers)
        or payload.shape[3] != width
        or payload.dtype is not k.dtype
        or not payload.is_contiguous()
        or not payload.is_cpu
    ):
        raise InputError(
            f"{what}: payload {tuple(payload.shape)} {payload.dtype} must be contiguous "
            f"[2, {layers}, n, {width}] {k.dtype}"
        )
    if pages.ndim != 1 or pages.dtype is not torch.int32 or not pages.is_contiguous() or not pages.is_cpu:
        raise InputError(f"{what}: pages {tuple(pages.shape)} {pages.dtype} must be a contiguous int32 vector")
    n = payload.shape[2]
    if start < 0 or start + n > len(pages) * PAGE:
        raise InputError(f"{what}: positions [{start}, {start + n}) lie outside the route's {len(pages)} pages")
    if not native.active:
        used = pages[start // PAGE : -(-(start + n) // PAGE)] if n else pages[:0]
        bad = ((used < 0) | (used >= pool_pages)).nonzero()
        if len(bad):
            raise _bad_page(what, pages, start // PAGE + int(bad[0]), pool_pages)
        reference(payload, k, v, pages, start, some, gather=gather)
        return
    which = None if some is None else torch.tensor(some, dtype=torch.int64)
    code = _move(
        payload.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pages.data_ptr(),
        len(pages),
        None if which is None else which.data_ptr(),
        layers,
        pool_pages,
        kv_heads,
        head_dim,
        start,
        n,
        k.element_size(),
        gather,
    )
    if code:
        raise _bad_page(what, pages, code - 1, pool_pages)


def _bad_page(what: str, pages: Tensor, at: int, pool_pages: int) -> InputError:
    return InputError(f"{what}: page {int(pages[at])} at index {at} of the route is outside the pool of {pool_pages}")


def reference(
    payload: Tensor, k: Tensor, v: Tensor, pages: Tensor, start: int, some: Sequence[int] | None, *, gather: bool
) -> None:
    """The torch form of both moves."""
    pool_layers, _, kv_heads, head_dim, _ = k.shape
    n = payload.shape[2]
    positions = torch.arange(start, start + n)
    page, token = pages[positions // PAGE].long(), positions % PAGE
    heads = payload.view(2, payload.shape[1], n, kv_heads, head_dim)
    for i, layer in enumerate(range(pool_layers) if some is None else some):
        if gather:
            heads[0, i] = k[layer, page, :, :, token]
            heads[1, i] = v[layer, page, :, token]
        else:
            k[layer, page, :, :, token] = heads[0, i]
            v[layer, page, :, token] = heads[1, i]
