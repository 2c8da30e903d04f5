"""The state of decoding lanes on a device: one block of bytes, so that loading it is one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from numem.runtime.sampling import Sampler

_FIELDS = (
    ("tokens", np.int64),
    ("positions", np.int64),
    ("seed", np.int64),
    ("counter", np.int64),  # one, but a lane's worth keeps what follows aligned
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int32),
)
_MOST = np.iinfo(np.int32).max  # keeps every id, as does whatever is larger


@dataclass(frozen=True, slots=True)
class Step:
    """What a lane decodes from.

    Attributes:
        token: pending, evaluated at `position`.
        pages: physical pages in logical order, with room for all rows to come.
    """

    token: int
    position: int
    pages: Sequence[int] | np.ndarray
    sampler: Sampler


class LaneState:
    """Tokens, positions, sampling settings and block tables of `lanes` lanes, on the host and on the device.

    Attributes:
        tokens, positions, seed: int64 [lanes]; a position of -1 is an idle lane.
        counter: int64 [1], steps since the load.
        temperature, top_p: float32 [lanes]; top_k: int32 [lanes].
        tables: int32 [lanes, width].
    """

    tokens: Tensor
    positions: Tensor
    seed: Tensor
    counter: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    tables: Tensor

    def __init__(self, lanes: int, width: int, device: torch.device) -> None:
        self.lanes, self.width = lanes, width
        sizes = [lanes * np.dtype(kind).itemsize for _, kind in _FIELDS]
        total = sum(sizes) + 4 * lanes * width
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._views: dict[str, np.ndarray] = {}
        at = 0
        for (name, kind), size in zip(_FIELDS, sizes, strict=True):
            self._views[name] = self._host[at : at + size].numpy().view(kind)
            part = self._device[at : at + size].view(torch.from_numpy(np.empty(0, kind)).dtype)
            setattr(self, name, part[:1] if name == "counter" else part)
            at += size
        self._tables = self._host[at:].numpy().view(np.int32).reshape(lanes, width)
        self.tables = self._device[at:].view(torch.int32).view(lanes, width)
        # torch has no types here
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """All lanes idle."""
        self.load(())

    def load(self, items: Sequence[Step]) -> None:
        """Lanes 0, 1, ... take these; the others are idle."""
        if self._copied is not None:
            self._copied.synchronize()  # the host block is read by the copy before
        views = self._views
        views["positions"][:] = -1
        views["counter"][:] = 0
        for lane, step in enumerate(items):
            views["tokens"][lane] = step.token
            views["positions"][lane] = step.position
            views["temperature"][lane] = step.sampler.temperature
            views["top_k"][lane] = min(step.sampler.top_k, _MOST)
            views["top_p"][lane] = step.sampler.top_p
            views["seed"][lane] = np.uint64(step.sampler.seed % 2**64).astype(np.int64)
            self._tables[lane, : len(step.pages)] = step.pages
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))


def settings_of(samplers: Sequence[Sampler], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperature float32, top_k int32, top_p float32 and seed int64 of samplers, on a device."""
    return (
        torch.tensor([s.temperature for s in samplers], dtype=torch.float32).to(device),
        torch.tensor([min(s.top_k, _MOST) for s in samplers], dtype=torch.int32).to(device),
        torch.tensor([s.top_p for s in samplers], dtype=torch.float32).to(device),
        torch.from_numpy(np.array([s.seed % 2**64 for s in samplers], dtype=np.uint64).astype(np.int64)).to(device),
    )
