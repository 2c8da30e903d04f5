"""A process killed with SIGKILL after the acknowledgement, reopened; damaged chunks are recomputed, and said so."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from numem import LM, Memory
from numem.runtime.engine import pages_for_lanes
from tests.test_runtime_exact import prompt, trace

CHILD = """
import sys, time
from numem import Memory, load_lm
from tests.test_runtime_exact import prompt

if __name__ == "__main__":
    lm = load_lm(sys.argv[1])
    memory = Memory(sys.argv[2])
    continuation = lm.session().start(prompt(600))
    continuation.advance(20)
    continuation.publish(memory).wait()
    print("acknowledged", flush=True)
    time.sleep(60)
"""


@pytest.mark.crash
def test_sigkill_after_the_acknowledgement(tiny_lm: LM, tmp_path: Path) -> None:
    """kill -9, reopen: same hits, same bytes, no new bytes written (lmcache#1175, lmcache#2734)."""
    home = tmp_path / "memory"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tiny_lm.directory), str(home)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == b"acknowledged"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()

    session = tiny_lm.session(pages=pages_for_lanes(2, 700))
    with session.start(prompt(600)) as never:
        never.advance(20)
        tokens = list(never.tokens)
        expected = trace(never)
    with Memory(home) as memory:
        with session.restore(memory, tokens) as restored:
            assert restored.restored.tokens == 619
            assert trace(restored) == expected
        before = memory.usage()
        with session.start(tokens) as again:
            assert again.publish(memory).tickets == ()
        assert memory.usage() == before


def sidecars(home: Path) -> list[Path]:
    return sorted(home.rglob("*.blob"))


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 0x10]))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(4096)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.crash
@pytest.mark.parametrize("damage", [flip, cut, empty, gone])
def test_a_damaged_chunk_is_recomputed_and_said_so(tiny_lm: LM, tmp_path: Path, damage: object) -> None:
    """lmcache#1981, lmcache#2420, mooncake#3465, vllm#49176, vllm#49250: the output equals a cold run's."""
    assert callable(damage)
    ids = prompt(700)
    session = tiny_lm.session(pages=pages_for_lanes(2, 720))
    with Memory(tmp_path / "m") as memory, session.start(ids) as never:
        never.publish(memory).wait()
        expected = trace(never)
    damage(sidecars(tmp_path / "m")[0])
    with Memory(tmp_path / "m") as memory:
        with session.restore(memory, ids) as restored:
            used = restored.restored
            assert used.tokens < 699
            assert trace(restored) == expected
        assert used.failures and all("recomputed" in failure for failure in used.failures)
        with session.restore(memory, ids) as again:
            # The verdict of the failed read stays: bounded attempts (pegaflow 33af1d5).
            assert again.restored.tokens == used.tokens
        # Each round finds the next bad chunk, recomputes and writes it again: damaged content is never skipped because
        # its name exists.
        for _ in range(3):
            with session.restore(memory, ids) as mending:
                mending.publish(memory).wait()
        with session.restore(memory, ids) as mended:
            assert mended.restored.tokens == 699
            assert trace(mended) == expected


@pytest.mark.crash
def test_a_damaged_ssd_replica_is_read_from_home(tiny_lm: LM, tmp_path: Path) -> None:
    """A bad replica costs a second read, never a recomputation, while another tier has the bytes."""
    ids = prompt(700)
    session = tiny_lm.session(pages=pages_for_lanes(2, 720))
    with Memory(tmp_path / "m") as memory, session.start(ids) as never:
        never.publish(memory).wait()
        memory.promote([node.id for node in memory.nodes()], "ssd")
        expected = trace(never)
    for path in sidecars(tmp_path / "m" / "nodes"):
        flip(path)
    with Memory(tmp_path / "m") as memory, session.restore(memory, ids, tier="ssd") as restored:
        assert restored.restored.tokens == 699
        assert "read from another tier" in restored.restored.failures[0]
        assert restored.restored.by_tier["object"] > 0
        assert trace(restored) == expected
