"""Pages as kernels of a device read them: token-major, and moved by its own copies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from numem.identity.chain import CHUNK_TOKENS, PAGE_TOKENS
from numem.kernels.cuda import pages as moves
from numem.runtime.device.streams import Streams, streams_of
from numem.runtime.device.transfer import Transfers, places
from numem.state.spec import StateSpec

RING_BYTES = 512 << 20
"""Page-locked memory for chunks on their way up, of one engine."""
MOST_SLOTS = 32


class TokenMajor:
    """The form of pages on a device.

    Args:
        device: where they lie.
        streams: default: those of the device.
        ring_bytes: see RING_BYTES; at least two chunks.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None, ring_bytes: int = RING_BYTES) -> None:
        self.device = device
        self.streams = streams or streams_of(device)
        self._ring_bytes = ring_bytes

    def pools(self, layers: int, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeroed key and value pages, [layers, pages, kv_heads, 16, head_dim] both."""
        shape = (layers, pages, kv_heads, PAGE_TOKENS, head_dim)
        return tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in "kv")  # type: ignore[return-value]

    def transfers(self, spec: StateSpec, k: Tensor, v: Tensor) -> Transfers:
        """What moves rows of these pages; a slot is a whole chunk of all groups."""
        _, slot = places([spec.group_bytes(group, CHUNK_TOKENS) for group in spec.retained])
        slots = max(2, min(self._ring_bytes // slot, MOST_SLOTS))
        return Transfers(self.streams, k, v, slot, slots)

    def copy(self, k: Tensor, v: Tensor, source: int, target: int) -> None:
        """Copy one page in all layers, in the order of computing."""
        moves.copy_page(k, v, source, target)

    def contents(self, k: Tensor, v: Tensor) -> "DeviceBytes":
        """The bytes of these pages, for a guard."""
        return DeviceBytes(k, v)


class DeviceBytes:
    """Bytes of pages as a guard looks at them, by kernels in the order of computing; every look waits for the device."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._poison: bytes | None = None

    def fill(self, pages: Sequence[int]) -> None:
        """Every byte 0xFF."""
        if len(pages):
            moves.fill(self._k, self._v, self._index(pages))

    def touched(self, page: int) -> bool:
        """Whether a filled page has other bytes now, by its digest."""
        if self._poison is None:
            twin = torch.empty((self._k.shape[0], 1, *self._k.shape[2:]), dtype=self._k.dtype, device=self._k.device)
            zero = torch.zeros(1, dtype=torch.int32, device=self._k.device)
            moves.fill(twin, twin, zero)
            self._poison = _bytes(moves.digest(twin, twin, zero))
        return self.digest(page) != self._poison

    def digest(self, page: int) -> bytes:
        """16 bytes that tell whether a page changed."""
        return _bytes(moves.digest(self._k, self._v, self._index((page,))))

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(list(pages), dtype=torch.int32).to(self._k.device)


def _bytes(digest: Tensor) -> bytes:
    return digest.cpu().numpy().tobytes()
