"""What was read of a chunk, and the memory in which it waits to be written into pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from numem.runtime.paging.pages import DTYPES
from numem.runtime.restore.prefix import Hit
from numem.state.spec import StateSpec

if TYPE_CHECKING:
    from numem.runtime.device.ring import Source
    from numem.runtime.device.transfer import Transfers
    from numem.store.memory import Memory
    from numem.store.reading.host import Borrowed


@dataclass(slots=True)
class Payload:
    """The rows of a hit's needed groups.

    Attributes:
        parts: [members, rows, width] each.
        source: owner of their memory where it is lent: a slot of page-locked memory, or pieces in RAM.
        there: bytes by tier of pieces that need not be read, as they were borrowed; empty where all are to be read.
    """

    parts: list[torch.Tensor]
    source: "Source | None" = None
    there: dict[str, int] = field(default_factory=dict)

    def drop(self) -> None:
        """Nobody wants the rows; dropping twice is harmless."""
        if self.source is not None:
            self.source.release()


@dataclass(slots=True)
class _Pieces:
    """Pieces of one chunk where they lie."""

    held: "list[Borrowed]" = field(default_factory=list)

    def release(self) -> None:
        for piece in self.held:
            piece.release()


def room_for(spec: StateSpec, hit: Hit, staging: "Transfers | None", *, wait: bool) -> Payload:
    """Memory to read a hit's parts into: a slot of the device's ring, or memory of its own.

    Args:
        wait: for a slot, where all are in use.
    """
    shapes = [spec.group_shape(spec.retained[index], hit.node.count) for index in hit.parts]
    dtype = DTYPES[spec.dtype]
    sizes = [spec.group_bytes(spec.retained[index], hit.node.count) for index in hit.parts]
    slot = None if staging is None else staging.slot(sizes, wait=wait)
    if slot is None:
        return Payload([torch.empty(shape, dtype=dtype) for shape in shapes])
    return Payload([part.view(dtype).view(shape) for part, shape in zip(slot[1], shapes, strict=True)], slot[0])


def borrow(memory: "Memory", spec: StateSpec, hit: Hit, tier: str | None, staging: "Transfers") -> Payload | None:
    """A hit's parts where tiers in RAM hold all of them in memory that the device copies from; None else."""
    pieces = _Pieces()
    made = Payload([], pieces)
    for index in hit.parts:
        try:
            found = memory.borrow(hit.node.pieces[index], tier=tier, page_locked=staging.streams.page_locked)
        except BaseException:
            made.drop()
            raise
        if found is None:
            made.drop()
            return None
        name, piece = found
        pieces.held.append(piece)
        shape = spec.group_shape(spec.retained[index], hit.node.count)
        made.parts.append(torch.from_numpy(piece.data).view(DTYPES[spec.dtype]).view(shape))
        made.there[name] = made.there.get(name, 0) + piece.data.nbytes
    return made


def drop(payloads: Sequence[Payload]) -> None:
    """Give back the memory of payloads that nobody wants."""
    for payload in payloads:
        payload.drop()
