"""Fixtures that several test files share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

from numem import LM, Memory, load_lm
from tests.model_fixtures import tiny_model, tiny_tokenizer
from tests.s3_fixtures import faulty, proxy, s3, s3_server, unsafe_s3

__all__ = ["faulty", "memory", "proxy", "s3", "s3_server", "tiny_dir", "tiny_lm", "unsafe_s3"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the random tests go on."""
    parser.addoption("--crash-count", type=int, default=20, help="processes that the random crash test kills")
    parser.addoption("--stress-operations", type=int, default=500, help="operations of a stress test of the runtime")
    parser.addoption("--stress-seed", type=int, default=0, help="seed of a stress test of the runtime")


def pytest_configure() -> None:
    """A shell starts what it puts in the background with interrupts ignored, and processes hand that on; tests send some."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(directory, "llama", max_position_embeddings=4096)
    tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_lm(tiny_dir: Path) -> LM:
    return load_lm(tiny_dir)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with Memory(tmp_path / "memory") as opened:
        yield opened
