"""What the tests of kernels share: the instruction sets of this machine, put back after each test, and inputs."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from numem.kernels import native

ISAS = native.isas()
PATHS = [*ISAS, "torch"]

needs_native = pytest.mark.skipif(not ISAS, reason="the extension is not built")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The instruction set and the number of threads after a test are those before it."""
    isa, threads = native.isa(), native.threads()
    yield
    native.use(isa)
    native.set_threads(threads)


def bits(x: Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
