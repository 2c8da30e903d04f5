"""Random operations on the resident plane: every sequence is, byte for byte, what it is alone.

    pytest -m stress --stress-operations 10000 --stress-seed 7

A run follows from its seed; one that fails prints it with all operations so far.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from numem import LM, Memory, TierSpec, load_lm
from tests.model_fixtures import tiny_model
from tests.stress_fixtures import Alone, Disturbed, Prompts
from tests.stress_worlds import Continuations, Scheduled

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    # Five layers of a small window to one that sees everything, heads unlike in width to the hidden size.
    "windowed": (
        "qwen3",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 0,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "hidden_size": 48,
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def stressed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LM:
    family, config = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp("stress") / request.param
    return load_lm(tiny_model(directory, family, max_position_embeddings=1024, **config))


@contextmanager
def replayable(seed: int, operations: list[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(f"seed {seed}, {len(operations)} operations:", *operations, sep="\n  ")
        raise


@contextmanager
def opened(tmp_path: Path, seed: int) -> Iterator[Disturbed]:
    tiers: dict[str, str | TierSpec] = {
        "object": str(tmp_path / "m" / "object"),
        "ssd": TierSpec(tmp_path / "ssd", 4_000_000),
    }
    with Memory(tmp_path / "m", tiers=tiers) as memory:
        yield Disturbed(memory, tmp_path, random.Random(seed))


def run(world: Continuations | Scheduled, seed: int, operations: int) -> None:
    with replayable(seed, world.operations):
        for _ in range(operations):
            world.operate()
        world.end()


def continuations(lm: LM, root: Path, seed: int, operations: int, longest: int = 600) -> None:
    with opened(root, seed) as disturbed:
        run(Continuations(Alone(lm), disturbed, Prompts(seed, longest), seed), seed, operations)


def scheduled(lm: LM, root: Path, seed: int, operations: int, longest: int = 600) -> None:
    """The settings change every fifty operations; the memory and what is asked go on."""
    alone, prompts = Alone(lm), Prompts(seed, longest)
    with opened(root, seed) as disturbed:
        for part, done in enumerate(range(0, operations, 50)):
            run(Scheduled(alone, disturbed, prompts, 1000 * seed + part), seed, min(50, operations - done))


def options(config: pytest.Config) -> tuple[int, int]:
    return config.getoption("--stress-seed"), config.getoption("--stress-operations")


def test_continuations_in_short(stressed: LM, tmp_path: Path) -> None:
    continuations(stressed, tmp_path, 0, 60)


def test_scheduler_in_short(stressed: LM, tmp_path: Path) -> None:
    scheduled(stressed, tmp_path, 0, 100)


@pytest.mark.slow
@pytest.mark.stress
def test_continuations(stressed: LM, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    continuations(stressed, tmp_path, *options(pytestconfig))


@pytest.mark.slow
@pytest.mark.stress
def test_scheduler(stressed: LM, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    scheduled(stressed, tmp_path, *options(pytestconfig))


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.anchors
def test_the_real_model(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A fifth of the operations on SmolLM2, whose steps take as much longer."""
    seed, operations = options(pytestconfig)
    lm = load_lm("smollm2-135m-instruct")
    continuations(lm, tmp_path / "by hand", seed, operations // 5, 280)
    scheduled(lm, tmp_path / "scheduled", seed, operations // 5, 280)
