"""Random rows, their bits, and packed weights, for the tests of products."""

import torch
from torch import Tensor

from numem.kernels import formats
from numem.kernels.cuda.matrix import Matrix


def rows_of(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def packed(weight: Tensor, name: str, dtype: torch.dtype, device: torch.device) -> Matrix:
    """A weight in one of the CPU's formats, packed for the device."""
    f = formats.FORMATS[name]
    planes = formats.quantise(weight, name)
    grid = formats.unpack(planes["records"], f)
    scales, mins = grid.effective()
    n, k = weight.shape
    cut = (slice(n), slice(k // 32))
    return Matrix.packed(
        grid.codes[:n, :k], scales[cut].half(), planes["units"][:n], zero=f.zero, bits=f.code, dtype=dtype,
        device=device, mins=None if mins is None else mins[cut].half(),
    )  # fmt: skip
