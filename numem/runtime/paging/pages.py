"""The page tensors of a device, and the moves between pages and durable payloads.

    k [layers, pages, kv_heads, head_dim, 16]     keys minor, so that 16 scores come from one multiply-add chain
    v [layers, pages, kv_heads, 16, head_dim]

A durable payload is [2, layers, tokens, kv_heads * head_dim] (keys, then values), raw in the dtype of the pages. Where
layers have windows it is one such payload per retention group, of the group's layers.

On a GPU both are token-major, [layers, pages, kv_heads, 16, head_dim], and rows travel on side streams
(`numem.runtime.device`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS
from numem.kernels.pages import gather_rows, scatter_rows
from numem.runtime.paging.guard import HostBytes, PageGuard
from numem.state.groups import Group
from numem.state.spec import Slab, StateSpec

if TYPE_CHECKING:
    from numem.runtime.device.form import TokenMajor
    from numem.runtime.device.streams import Event
    from numem.runtime.device.transfer import Transfers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU = torch.device("cpu")


class PageStorage:
    """Key and value pages of all layers.

    Args:
        spec: layout of one position (slabs "key" and "value").
        kv_heads, head_dim: split of a row.
        pages: number of physical pages.
        poison: free pages are NaN, and are looked at when they are taken (a debug aid: anything read before it is
            written, or written after it was freed, becomes visible).
        canary: full pages are sealed by a hash, which every read compares.
        device: where the pages lie.
        form: how; default: as the device's kernels read them.

    Attributes:
        transfers: what moves rows between the device and the host; None where the pages are host memory.
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
        device: torch.device = CPU,
        form: "TokenMajor | None" = None,
    ) -> None:
        if spec.width != kv_heads * head_dim:
            raise InputError(f"page storage: row width {spec.width} is not kv_heads {kv_heads} x head_dim {head_dim}")
        self.spec = spec
        self.layers = spec.slabs[0].members
        self.dtype = DTYPES[spec.dtype]
        self.device = device
        self.transfers: Transfers | None = None
        if form is None and device.type != "cpu":
            from numem.runtime.device.form import TokenMajor  # compiles kernels: of no use on a CPU

            form = TokenMajor(device)
        self._form = form
        if form is None:
            make = torch.zeros if not poison else torch.empty
            self.k = make((self.layers, pages, kv_heads, head_dim, PAGE_TOKENS), dtype=self.dtype)
            self.v = make((self.layers, pages, kv_heads, PAGE_TOKENS, head_dim), dtype=self.dtype)
        else:
            self.k, self.v = form.pools(self.layers, pages, kv_heads, head_dim, self.dtype)
            self.transfers = form.transfers(spec, self.k, self.v)
        self.guard: PageGuard | None = None
        if poison or canary:
            contents = HostBytes((self.k, self.v)) if form is None else form.contents(self.k, self.v)
            self.guard = PageGuard(contents, pages, poison=poison, canary=canary)

    def copy(self, source: int, target: int) -> None:
        """Copy one page in all layers, every byte of it."""
        if self.guard is not None:
            self.guard.verify((source,))
        if self._form is not None:
            self._form.copy(self.k, self.v, source, target)
            return
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    def load(self, payload: torch.Tensor, pages: Sequence[int], start: int, group: Group | None = None) -> None:
        """Write payload rows [2, layers, n, width], of a group's layers or of all, at token positions
        [start, start + n) of a page table, in the order of computing."""
        layers = self.layers_of(group)
        if self.transfers is not None:
            done = self.transfers.upload([payload], None, pages, start, [layers], after=self.transfers.fence())
            self.transfers.join(done)
            return
        table = torch.tensor(pages, dtype=torch.int32)
        scatter_rows(payload, self.k, self.v, table, start, layers=layers)

    def save(
        self,
        pages: Sequence[int],
        start: int,
        count: int,
        group: Group | None = None,
        after: "Event | None" = None,
    ) -> torch.Tensor:
        """Rows [start, start + count) of a page table as a fresh payload [2, layers, count, width], of a group's layers
        or of all, in host memory.

        Args:
            after: on a device, behind which the rows are written; default: behind all that this thread has computed.

        Raises:
            IntegrityError: a sealed page among them changed.
        """
        if self.guard is not None:
            self.join(after)
            self.guard.verify(pages[start // PAGE_TOKENS : -(-(start + count) // PAGE_TOKENS)])
        layers = self.layers_of(group)
        if self.transfers is not None:
            return self.transfers.save(pages, start, count, layers, after=after)
        table = torch.tensor(pages, dtype=torch.int32)
        return gather_rows(self.k, self.v, table, start, count, layers=layers)

    def fence(self) -> "Event | None":
        """The point behind everything that this thread has computed so far; None where everything is done at once."""
        return None if self.transfers is None else self.transfers.fence()

    def join(self, event: "Event | None") -> None:
        """What this thread computes from now on begins after the event; the host does not wait."""
        if event is not None and self.transfers is not None:
            self.transfers.join(event)

    def layers_of(self, group: Group | None) -> tuple[int, ...] | None:
        """Layers of a group's payload; None for all."""
        return None if group is None or not self.spec.groups else tuple(layers_of(group))


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
