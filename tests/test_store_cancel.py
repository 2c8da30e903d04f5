"""Cancelled at every step of a publication: whoever gives up breaks nobody else's commit, and nothing is half-visible."""

import asyncio
from pathlib import Path

import pytest

from numem.store import barrier
from numem.store.memory import Memory
from tests.store_fixtures import assert_readable, make_chain, put


def _steps(tmp_path: Path) -> list[str]:
    """Steps of one publication by an open memory, in order."""
    steps: list[str] = []
    with Memory(tmp_path) as memory:
        put(memory, make_chain(1, seed=9, name="first"))
        end = barrier.observe(lambda step, what: steps.append(step))
        memory.publish(*make_chain(1)[0]).published.result(timeout=30)
        end()
    return steps


def test_a_waiter_that_is_cancelled_at_any_step_breaks_no_commit(tmp_path: Path) -> None:
    """Two publications in one group; at the nth step the task that awaits the first is cancelled, and its ticket too."""
    count = len(_steps(tmp_path / "steps"))
    assert count > 20
    with Memory(tmp_path / "memory") as memory:
        put(memory, make_chain(1, seed=9, name="first"))

        async def publish(nth: int) -> tuple[list[bool], list[bool]]:
            chain = make_chain(2, seed=nth + 1, name=str(nth))
            loop = asyncio.get_running_loop()
            answers: list[bool] = []
            seen = [0]
            started = asyncio.Event()

            def at(step: str, what: str) -> None:
                seen[0] += 1
                if seen[0] == nth + 2:  # both are captured by then
                    answers.append(tickets[0].cancel())
                    loop.call_soon_threadsafe(task.cancel)

            async def wait() -> None:
                started.set()
                await asyncio.wrap_future(tickets[0].published)

            tickets = [memory.publish(*entry) for entry in chain]
            task = loop.create_task(wait())
            await started.wait()
            seen[0] = 2
            end = barrier.observe(at)
            try:
                memory._parts.committer.hurry()
                receipt = await asyncio.wait_for(asyncio.wrap_future(tickets[1].published), 30)
            finally:
                end()
            assert receipt.stored == 1
            with pytest.raises(asyncio.CancelledError):
                await task
            visible = [memory.get(node.id) is not None for node, _ in chain]
            # It is whole, or it was taken back whole.
            assert visible == [tickets[0].published.exception(30) is None, True]
            assert_readable(memory, [entry for entry, there in zip(chain, visible, strict=True) if there])
            return answers, visible

        for nth in range(1, count - 2):
            answers, visible = asyncio.run(publish(nth))
            assert answers == [False] and visible == [True, True]
        assert memory.verify().ok
    with Memory(tmp_path / "memory") as memory:
        assert memory.recovered == ()
        assert memory.verify().ok
