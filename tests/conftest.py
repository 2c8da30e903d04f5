"""Fixtures that several test files share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from numem import LM, Memory, load_lm
from tests.model_fixtures import tiny_model, tiny_tokenizer


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
