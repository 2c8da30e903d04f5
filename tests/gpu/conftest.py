"""Where the tests of the GPU kernels run: on the GPU where there is one, else in Triton's interpreter on the CPU."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

# torch takes every core in each of the workers otherwise, and its threads wait for each other by turning round and round
torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(scope="session", autouse=True)
def no_rounded_products_in_the_interpreter() -> Iterator[None]:
    """The interpreter multiplies the bits of bfloat16 as whole numbers: a test that gets there fails (triton#9171)."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def checked(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if "bf16" in (str(a.dtype.scalar), str(b.dtype.scalar)):
            raise TypeError("a product of bfloat16 in Triton's interpreter, which computes nonsense: use float32 there")
        return plain(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", checked)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def big() -> bool:
    """Whether shapes may be those of real models."""
    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def dtypes() -> list[torch.dtype]:
    """Of weights and pages; the interpreter multiplies bfloat16 wrongly."""
    return [torch.bfloat16] if torch.cuda.is_available() else [torch.float32]
