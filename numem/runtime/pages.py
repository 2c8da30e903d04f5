"""The page tensors of a device, and the moves between pages and durable payloads.

    k [layers, pages, kv_heads, head_dim, 16]     keys minor, so that 16 scores come from one multiply-add chain
    v [layers, pages, kv_heads, 16, head_dim]

A durable payload is [2, layers, tokens, kv_heads * head_dim] (keys, then values), raw in the dtype of the pages.
"""

from collections.abc import Sequence

import torch

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS
from numem.kernels.pages import gather_rows, scatter_rows
from numem.state.spec import Slab, StateSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PageStorage:
    """Key and value pages of all layers.

    Args:
        spec: layout of one position (slabs "key" and "value").
        kv_heads, head_dim: split of a row.
        pages: number of physical pages.
        poison: fill fresh and freed pages with NaN (a debug aid: anything read before it is written becomes visible).
    """

    def __init__(self, spec: StateSpec, kv_heads: int, head_dim: int, pages: int, *, poison: bool = False) -> None:
        if spec.width != kv_heads * head_dim:
            raise InputError(f"page storage: row width {spec.width} is not kv_heads {kv_heads} x head_dim {head_dim}")
        self.spec = spec
        self.layers = spec.slabs[0].members
        self.dtype = DTYPES[spec.dtype]
        self.poisoned = poison
        make = torch.zeros if not poison else torch.empty
        self.k = make((self.layers, pages, kv_heads, head_dim, PAGE_TOKENS), dtype=self.dtype)
        self.v = make((self.layers, pages, kv_heads, PAGE_TOKENS, head_dim), dtype=self.dtype)
        if poison:
            self.poison(range(pages))

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with 0xFF bytes, which are NaN in every float dtype."""
        index = torch.as_tensor(list(pages), dtype=torch.int64)
        for pool in (self.k, self.v):
            raw = pool.view(torch.int32 if self.dtype is torch.float32 else torch.int16)
            raw[:, index] = -1

    def copy(self, source: int, target: int) -> None:
        """Copy one page in all layers, every byte of it."""
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    def load(self, payload: torch.Tensor, pages: Sequence[int], start: int) -> None:
        """Write payload rows [2, layers, n, width] at token positions [start, start + n) of a page table."""
        scatter_rows(payload, self.k, self.v, torch.tensor(pages, dtype=torch.int32), start)

    def save(self, pages: Sequence[int], start: int, count: int) -> torch.Tensor:
        """Rows [start, start + count) of a page table as a fresh payload [2, layers, count, width]."""
        out = torch.empty((2, self.layers, count, self.spec.width), dtype=self.dtype)
        gather_rows(self.k, self.v, torch.tensor(pages, dtype=torch.int32), start, count, out)
        return out


def kv_spec(layers: int, kv_heads: int, head_dim: int, dtype: str) -> StateSpec:
    """Layout of attention state: key rows of every layer, then value rows."""
    width = kv_heads * head_dim
    return StateSpec((Slab("key", layers, width), Slab("value", layers, width)), dtype)
