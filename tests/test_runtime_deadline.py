"""A restore whose reads come too late recomputes, says so, and blames nothing."""

from pathlib import Path

from numem import LM, Memory
from numem.runtime.engine import pages_for_lanes
from tests.test_runtime_exact import prompt, trace


def test_a_read_past_its_deadline_is_recomputed(tiny_lm: LM, tmp_path: Path) -> None:
    """lmcache#79, vllm#49250, llama.cpp#17118: output equal to a cold run, pages as before, a later restore works."""
    ids = prompt(700)
    session = tiny_lm.session(pages=pages_for_lanes(2, 720))
    with Memory(tmp_path / "m") as memory, session.start(ids) as never:
        never.publish(memory).wait()
        expected = trace(never)
    with Memory(tmp_path / "m", read_deadline_s=-1.0) as memory, session.restore(memory, ids) as late:
        assert late.restored.tokens == 0
        (failure,) = late.restored.failures
        assert "before the deadline" in failure and "recomputed" in failure
        assert trace(late) == expected
        assert memory.stats().get("quarantined", 0) == 0
        assert all(memory.available(node.id) for node in memory.nodes())
    with Memory(tmp_path / "m") as memory, session.restore(memory, ids) as again:
        assert again.restored.tokens == 699
        assert trace(again) == expected
