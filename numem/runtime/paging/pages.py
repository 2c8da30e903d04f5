"""The page tensors of a device, and the moves between pages and durable payloads.

    k [layers, pages, kv_heads, head_dim, 16]     keys minor, so that 16 scores come from one multiply-add chain
    v [layers, pages, kv_heads, 16, head_dim]

A durable payload is [2, layers, tokens, kv_heads * head_dim] (keys, then values), raw in the dtype of the pages. Where
layers have windows it is one such payload per retention group, of the group's layers.
"""

from collections.abc import Sequence

import torch

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS
from numem.kernels.pages import gather_rows, scatter_rows
from numem.runtime.paging.guard import PageGuard
from numem.state.groups import Group
from numem.state.spec import Slab, StateSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PageStorage:
    """Key and value pages of all layers.

    Args:
        spec: layout of one position (slabs "key" and "value").
        kv_heads, head_dim: split of a row.
        pages: number of physical pages.
        poison: free pages are NaN, and are looked at when they are taken (a debug aid: anything read before it is
            written, or written after it was freed, becomes visible).
        canary: full pages are sealed by a hash, which every read compares.

    Attributes:
        guard: what watches over the pages, for the pool; None without poison and canary.
    """

    def __init__(
        self,
        spec: StateSpec,
        kv_heads: int,
        head_dim: int,
        pages: int,
        *,
        poison: bool = False,
        canary: bool = False,
    ) -> None:
        if spec.width != kv_heads * head_dim:
            raise InputError(f"page storage: row width {spec.width} is not kv_heads {kv_heads} x head_dim {head_dim}")
        self.spec = spec
        self.layers = spec.slabs[0].members
        self.dtype = DTYPES[spec.dtype]
        make = torch.zeros if not poison else torch.empty
        self.k = make((self.layers, pages, kv_heads, head_dim, PAGE_TOKENS), dtype=self.dtype)
        self.v = make((self.layers, pages, kv_heads, PAGE_TOKENS, head_dim), dtype=self.dtype)
        self.guard = PageGuard((self.k, self.v), poison=poison, canary=canary) if poison or canary else None

    def copy(self, source: int, target: int) -> None:
        """Copy one page in all layers, every byte of it."""
        if self.guard is not None:
            self.guard.verify((source,))
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    def load(self, payload: torch.Tensor, pages: Sequence[int], start: int, group: Group | None = None) -> None:
        """Write payload rows [2, layers, n, width], of a group's layers or of all, at token positions
        [start, start + n) of a page table."""
        table = torch.tensor(pages, dtype=torch.int32)
        scatter_rows(payload, self.k, self.v, table, start, layers=self._layers_of(group))

    def save(self, pages: Sequence[int], start: int, count: int, group: Group | None = None) -> torch.Tensor:
        """Rows [start, start + count) of a page table as a fresh payload [2, layers, count, width], of a group's layers
        or of all.

        Raises:
            IntegrityError: a sealed page among them changed.
        """
        if self.guard is not None:
            self.guard.verify(pages[start // PAGE_TOKENS : -(-(start + count) // PAGE_TOKENS)])
        layers = self._layers_of(group)
        table = torch.tensor(pages, dtype=torch.int32)
        return gather_rows(self.k, self.v, table, start, count, layers=layers)

    def _layers_of(self, group: Group | None) -> list[int] | None:
        return None if group is None or not self.spec.groups else layers_of(group)


def kv_spec(layers: int, kv_heads: int, head_dim: int, dtype: str, windows: Sequence[int] = ()) -> StateSpec:
    """Layout of attention state: key rows of every layer, then value rows.

    Args:
        windows: rows that each layer sees, its own included, 0 for all of them; default: no layer has a window. Layers
            of one window form a retention group.
    """
    width = kv_heads * head_dim
    slabs = (Slab("key", layers, width), Slab("value", layers, width))
    if not any(windows):
        return StateSpec(slabs, dtype)
    if len(windows) != layers:
        raise InputError(f"kv spec: {len(windows)} windows for {layers} layers")
    groups = []
    for window in sorted(set(windows)):
        mine = [layer for layer in range(layers) if windows[layer] == window]
        members = tuple((slab.name, layer) for slab in slabs for layer in mine)
        groups.append(Group(f"window-{window}", members, window) if window else Group("global", members))
    return StateSpec(slabs, dtype, groups=tuple(groups))


def layers_of(group: Group) -> list[int]:
    """Layers of a group of attention state, in payload order; its members are their keys, then their values."""
    layers = [layer for slab, layer in group.members if slab == "key"]
    if group.members != tuple((slab, layer) for slab in ("key", "value") for layer in layers):
        raise InputError(f"group {group.id!r}: its members are not the keys and then the values of the same layers")
    return layers
