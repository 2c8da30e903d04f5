"""The heat example: durable steps, a fork that shares tiles, an exact restart in a new process, printed lineage."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from numem import Memory
from numem.lineage.log import ancestry, shared

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "heat.py"


def run(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    home = tmp_path_factory.mktemp("heat") / "memory"
    yield home, run("--memory", str(home)).splitlines()


@pytest.fixture(scope="module")
def heat() -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location("heat", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 100


def test_it_prints_lineage_sharing_and_an_exact_restart(printed: tuple[Path, list[str]]) -> None:
    _, lines = printed
    assert len(lines) == 10
    assert all(re.fullmatch(r"[│├└─ ]*[0-9a-f]{12} field step \d+  64 chunks, \d+ new.*", text) for text in lines[:7])
    assert [text for text in lines if text.endswith("[main]")] and [t for t in lines if t.endswith("[slow-corner]")]
    assert lines[7] == "the fork at step 40 shares 10 of 64 tiles with the state it was forked from"
    assert lines[8] == "the fork at step 40 shares 55 of 64 tiles with main at the same step"
    assert lines[9] == "resumed from step 32 in a new process: bit-exact True"


def test_stored_states_equal_an_uninterrupted_run(printed: tuple[Path, list[str]], heat: ModuleType) -> None:
    home, _ = printed
    with Memory(home) as memory:
        chain = ancestry(memory, memory.branch("main").head)
        for node in chain:
            expected = heat.steps(heat.START, node.coordinate["step"], heat.PLAIN)
            assert heat.restore(memory, node.id).tobytes() == expected.tobytes()
        fork = ancestry(memory, memory.branch("slow-corner").head)
        assert [n.id for n in fork[:3]] == [n.id for n in chain[:3]]
        apart = heat.steps(heat.steps(heat.START, 24, heat.PLAIN), 16, heat.SLOW)
        assert heat.restore(memory, fork[-1].id).tobytes() == apart.tobytes()


def test_only_tiles_the_change_can_have_reached_differ(printed: tuple[Path, list[str]], heat: ModuleType) -> None:
    """The stencil carries a change one cell per step: what is farther off is the same bytes, stored once."""
    home, _ = printed
    with Memory(home) as memory:
        main, fork = (ancestry(memory, memory.branch(name).head) for name in ("main", "slow-corner"))
        for steps, one, other in ((8, main[3], fork[3]), (16, main[4], fork[4])):
            top, bottom, left, right = heat.SLOW[:4]
            reached = np.zeros((heat.CELLS, heat.CELLS), dtype=bool)
            reached[top - steps + 1 : bottom + steps - 1, left - steps + 1 : right + steps - 1] = True
            tiles = reached.reshape(8, 16, 8, 16).any(axis=(1, 3)).reshape(-1)
            same = [a == b for a, b in zip(one.pieces, other.pieces, strict=True)]
            assert all(equal or hit for equal, hit in zip(same, tiles, strict=True))
            assert shared(memory, one.id, other.id).chunks >= int((~tiles).sum()) == 55
        wrote = {p for n in fork[3:] for p in n.pieces} - {p for n in main for p in n.pieces}
        assert len(wrote) <= 2 * 9
        assert memory.verify().ok


def test_running_it_again_stores_nothing_new(printed: tuple[Path, list[str]]) -> None:
    home, lines = printed
    with Memory(home) as memory:
        before = (len(memory.nodes()), memory.usage())
    assert run("--memory", str(home)).splitlines() == lines
    with Memory(home) as memory:
        assert (len(memory.nodes()), memory.usage()) == before


def test_another_coefficient_is_another_identity_or_another_cause(heat: ModuleType) -> None:
    changed = heat.Identity({**heat.IDENTITY.semantic, "alpha": 2.0}, heat.IDENTITY.policy, "cpu")
    assert heat.IDENTITY.compare(changed).fields == ("semantic.alpha",)
    assert changed.scope != heat.IDENTITY.scope
