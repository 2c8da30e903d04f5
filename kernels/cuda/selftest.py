"""What the self-test of a device is made of: inputs from a BLAKE3 stream, and the comparison of rows.

A pool of stream bytes goes to the device once; tensors are consecutive elements of it, again from its start past its
end. The pool's length is a prime, so that no two rows of a matrix are alike.
"""

import torch
from blake3 import blake3
from torch import Tensor

from numem.errors import ModelError
from numem.kernels.cuda.matrix import STEP, Matrix
from numem.kernels.formats import FORMATS

POLICY = "cuda-mma-v1"
"""The arithmetic of the kernels in this directory."""

_POOL = 1_048_573  # int16
_SLAB = 1 << 24


class Inputs:
    """Deterministic tensors on a device.

    Args:
        device: where.
        dtype: DT, of weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        raw = bytearray(blake3(b"numem/self-test/device/v1").digest(length=2 * _POOL))
        self._pool = torch.frombuffer(raw, dtype=torch.int16).to(device)
        self._at = 0

    def take(self, *shape: int) -> Tensor:
        """int16 elements of the stream."""
        count = torch.Size(shape).numel()
        out = torch.empty(count, dtype=torch.int16, device=self.device)
        for start in range(0, count, _SLAB):
            some = torch.arange(start, min(start + _SLAB, count), device=self.device)
            out[start : start + _SLAB] = self._pool[(some + self._at) % _POOL]
        self._at = (self._at + count) % _POOL
        return out.view(shape)

    def values(self, *shape: int) -> Tensor:
        """Float32 in [-1, 1)."""
        return self.take(*shape).float().mul_(2.0**-15)

    def matrix(self, n: int, k: int, kind: str = "dense", *, bias: bool = False) -> Matrix:
        """A matrix whose products of rows of size 1 are of size 1: dense, or in a packed format of `FORMATS`."""
        added = self.values(n).mul_(0.25) if bias else None
        size = 2.0 ** -(k.bit_length() // 2)
        if kind == "dense":
            return Matrix.dense(self.take(n, k).to(self.dtype).mul_(2.0**-15 * size), added)
        f = FORMATS[kind]
        held = torch.float32 if f.nested else torch.float16
        codes = self.take(n, k).bitwise_and_((1 << f.code) - 1).to(torch.uint8)
        scales = (1.0 + 0.5 * self.values(n, k // STEP)).to(held)
        mins = (-float(1 << f.code - 1) * scales.float() + self.values(n, k // STEP)).to(held) if f.mins else None
        # not so small that float16 would lose bits of the scales, which are kept in it where it does not
        units = torch.full((n,), max(size * 2.0 ** -(f.code - 1), 2.0**-13), device=self.device)
        return Matrix.packed(
            codes, scales, units, zero=f.zero, bits=f.code, dtype=self.dtype, device=self.device, mins=mins, bias=added
        )


def require_equal(a: Tensor, b: Tensor, what: str) -> None:
    """Raise ModelError unless two tensors have the same bytes."""
    if a.shape != b.shape or a.dtype is not b.dtype or not torch.equal(_bits(a), _bits(b)):
        raise ModelError(
            f"self-test: {what}: a row's bytes depend on how it was computed; these kernels are not exact on this GPU, use "
            "device='cpu' or report it with the versions of torch and triton"
        )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
