"""Where the tests of the GPU kernels run: on the GPU where there is one, else in Triton's interpreter on the CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton


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
