"""Where weights go: each matrix in the form of its kernel, each vector where kernels read it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from numem.kernels.formats import Planes
from numem.kernels.linear import PackedLinear
from numem.kernels.operations import Linear
from numem.kernels.quantised import QuantisedLinear


class Maker(Protocol):
    """Makes what the programs of one device refer to. What it is given lies on the CPU."""

    def dense(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Linear:
        """The matrix of parts [n_i, K] stacked by rows, each float32, float16 or bfloat16, perhaps mapped from a file."""

    def quantised(self, format: str, n: int, k: int, planes: Planes, bias: Tensor | None) -> Linear:
        """The matrix [n, k] of what `numem.kernels.formats.quantise` gave."""

    def stack(self, matrices: Sequence[Linear]) -> Sequence[Linear]:
        """Matrices of one shape that a kernel chooses from by number."""

    def vector(self, values: Tensor) -> Tensor:
        """A float32 vector or table."""


class CpuMaker:
    """For the kernels of the CPU."""

    def dense(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Linear:
        return PackedLinear.of_parts(parts, dtype, bias)

    def quantised(self, format: str, n: int, k: int, planes: Planes, bias: Tensor | None) -> Linear:
        return QuantisedLinear.of_planes(format, n, k, planes, bias)

    def stack(self, matrices: Sequence[Linear]) -> Sequence[Linear]:
        return tuple(matrices)

    def vector(self, values: Tensor) -> Tensor:
        return values
