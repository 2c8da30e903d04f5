"""Arrivals at their limits: eviction, deadlines, too few pages, bounded staging, windows, stores that cannot be asked."""

import time
from pathlib import Path

import pytest

from numem import LM, Memory, load_lm
from numem.errors import CapacityError, NotFoundError, StoreError
from numem.policy.costs import Costs
from numem.runtime.continuation import Continuation, Session
from numem.runtime.engine import pages_for_lanes
from numem.runtime.restore.arrival import Arrival
from numem.runtime.restore.arrivals import Arrivals
from numem.runtime.restore.loader import Loader
from numem.runtime.restore.measured import costs_path
from tests.arrival_fixtures import (
    CHUNKS,
    LENGTH,
    WAIT_S,
    Shaky,
    publish,
    run,
    session_of,
    settled,
    shaky,
    step,
)
from tests.model_fixtures import tiny_model
from tests.test_runtime_exact import prompt

__all__ = ["shaky"]


def test_what_was_found_is_not_evicted(tiny_lm: LM, shaky: Shaky) -> None:
    """vllm#39702, vllm#54914: between lookup and read the lease keeps the chunks; deletion does not reach them."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.promote([node.id for node in shaky.nodes()], "ssd")
    shaky.hold_up(*range(CHUNKS))
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert shaky.stats()["leases"] > 0
        with pytest.raises(CapacityError):
            shaky.residency.evict("ssd", 1)
        shaky.let(*range(CHUNKS))
        assert run(session, arrival) == expected
        assert arrival.restored.tokens == LENGTH - 1
    settled(session)


def test_a_tier_that_lost_a_chunk_is_replaced_by_another(tiny_lm: LM, tmp_path: Path) -> None:
    """A bad copy costs a second read, never a recomputation, while another tier has the bytes."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    with Memory(tmp_path / "m") as memory:
        expected = publish(session, memory, ids)
        memory.promote([node.id for node in memory.nodes()], "ssd")
    for path in (tmp_path / "m" / "nodes").rglob("*.blob"):
        data = bytearray(path.read_bytes())
        data[:: max(1, len(data) // 64)] = bytes(len(data[:: max(1, len(data) // 64)]))
        path.write_bytes(data)
    with Memory(tmp_path / "m") as memory, Arrivals(session, memory, tier="ssd", policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, arrival) == expected
        assert arrival.restored.tokens == LENGTH - 1
    settled(session)


def test_a_read_past_its_deadline_is_computed(tiny_lm: LM, tmp_path: Path) -> None:
    """lmcache#79: one wait, not one for each chunk; nothing is blamed."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    with Memory(tmp_path / "m") as memory:
        expected = publish(session, memory, ids)
    with (
        Memory(tmp_path / "m", read_deadline_s=-1.0) as memory,
        Arrivals(session, memory, policy="restore") as arrivals,
    ):
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, arrival) == expected
        (failure,) = arrival.restored.failures
        assert "before the deadline" in failure and failure.endswith("; recomputed")
        assert memory.stats().get("quarantined", 0) == 0
    settled(session)


def test_too_few_pages_leave_everything_as_before(tiny_lm: LM, memory: Memory) -> None:
    """llama.cpp#17118: loads that do not fit are declined with the reason; computing takes what there is, then ends."""
    ids = prompt(301)
    publish(tiny_lm.session(pages=40), memory, ids)
    small = tiny_lm.session(pages=8)
    with Arrivals(small, memory, policy="restore") as arrivals:
        arrival = arrivals.begin(small.engine.pool.allocate(), ids)
        assert arrival.decision is not None and arrival.decision.choice == "recompute"
        declined = {a.name: a.declined for a in arrival.decision.alternatives}
        assert declined["restore:object"] == declined["two-ended:object"] == "insufficient pages"
        with pytest.raises(CapacityError):
            arrival.next(256)
        arrival.abort()
    settled(small)
    assert memory.stats()["leases"] == 0


def test_capacity_is_drawn_first(tiny_lm: LM, memory: Memory) -> None:
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, memory, ids)
    pool = session.engine.pool
    with Arrivals(session, memory, policy="restore") as arrivals, pool.capacity(pool.pages_for(LENGTH)) as capacity:
        free = pool.free
        arrival = arrivals.begin(pool.allocate(), ids, capacity=capacity)
        assert pool.free == free
        assert run(session, arrival) == expected
    settled(session)


def test_staging_is_bounded_and_everybody_gets_on(tiny_lm: LM, memory: Memory) -> None:
    """Three arrivals over a budget of less than one chunk: one chunk is staged at a time, and all end."""
    session, ids = session_of(tiny_lm, routes=4), prompt(LENGTH)
    expected = publish(session, memory, ids)
    with Arrivals(session, memory, policy="restore") as arrivals:
        assert arrivals._loader is not None
        arrivals._loader.close()
        loader = arrivals._loader = Loader(memory, session.engine.decoder.spec, staging_bytes=1)
        three = [arrivals.begin(session.engine.pool.allocate(), ids) for _ in range(3)]
        most = 0
        until = time.monotonic() + WAIT_S
        while any(a.loading for a in three):
            assert time.monotonic() < until
            most = max(most, loader.staged)
            for arrival in three:
                arrival.land(0.02)
        assert most <= 2 * 3 * 256 * 64 * 4
        assert loader.staged == 0
        assert [run(session, arrival) for arrival in three] == [expected] * 3
    settled(session)


def test_a_load_without_room_waits_in_line_once(tiny_lm: LM, shaky: Shaky) -> None:
    """However often its owner asks for it meanwhile."""
    session, ids = session_of(tiny_lm, routes=3), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(4)
    with Arrivals(session, shaky, policy="restore") as arrivals:
        assert arrivals._loader is not None
        arrivals._loader.close()
        loader = arrivals._loader = Loader(shaky, session.engine.decoder.spec, staging_bytes=1)
        first = arrivals.begin(session.engine.pool.allocate(), ids)
        assert shaky.began[4].wait(WAIT_S)
        second = arrivals.begin(session.engine.pool.allocate(), ids)
        for _ in range(30):
            second.land(0.01)
            assert len(loader._parked) <= 1
        shaky.let(4)
        until = time.monotonic() + WAIT_S
        while first.loading or second.loading:
            assert time.monotonic() < until
            first.land(0.02)
            second.land(0.02)
        assert run(session, first) == run(session, second) == expected
    settled(session)


def test_two_ends_of_a_slow_tier_meet(tiny_lm: LM, shaky: Shaky) -> None:
    """On the real clock, throttled: sooner than loading everything, and something of either end (orders of magnitude)."""
    session, ids = session_of(tiny_lm, 2049), prompt(2049)
    expected = publish(session, shaky, ids)
    shaky.delay_s = 0.5
    with Arrivals(session, shaky, costs=Costs()) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, arrival) == expected
        assert arrival.computed > 1 and arrival.took_ms < 8 * 500
    settled(session)


def test_measurements_outlive_the_process(tiny_lm: LM, tmp_path: Path) -> None:
    """The next process starts with them; a damaged file is begun anew and said once."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    with Memory(tmp_path / "m") as memory:
        publish(session, memory, ids)
        path = costs_path(memory, tiny_lm.identity)
        assert not path.exists()
        with Arrivals(session, memory, policy="restore") as arrivals:
            run(session, arrivals.begin(session.engine.pool.allocate(), ids))
            found = arrivals.costs.to_json()
        with Arrivals(session, memory) as arrivals:
            assert arrivals.costs.to_json() == found and arrivals.costs.measured("object")
        for damaged in (b"{", b"[]", b'{"version": 1}', b"\xff\xfe", b"[" * 100_000):
            path.write_bytes(damaged)
            before = len(memory.records("warning"))
            with Arrivals(session, memory) as arrivals:
                assert not arrivals.costs.measured("object")
            assert len(memory.records("warning")) == before + 1
            with Arrivals(session, memory):
                pass
            assert len(memory.records("warning")) == before + 1


def test_without_a_memory_everything_is_computed(tiny_lm: LM) -> None:
    session, ids = session_of(tiny_lm, 300), prompt(300)
    with Arrivals(session, None) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        run(session, arrival)
        assert (arrival.computed, arrival.decision) == (300, None)
    settled(session)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """Two layers that see 300 rows and one that sees all: a boundary needs windowed rows of its last two chunks."""
    directory = tmp_path_factory.mktemp("models") / "windowed"
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    tiny_model(
        directory, "qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=300, max_window_layers=0,
        max_position_embeddings=2048,
    )  # fmt: skip
    return load_lm(directory)


def continued(session: Session, arrival: Arrival, ids: list[int]) -> list[bytes]:
    """Logits of the prompt's end and of three more steps."""
    logits = None
    until = time.monotonic() + WAIT_S
    while not arrival.done:
        assert time.monotonic() < until
        logits = step(session, arrival)
    assert logits is not None
    with Continuation(session, [*ids, 7], arrival.route) as c:
        out = [logits.tobytes()]
        for _ in range(3):
            c.step()
            assert c.logits is not None
            out.append(c.logits.tobytes())
        return out


@pytest.mark.parametrize("policy", ["restore", "two-ended", "measured"])
@pytest.mark.parametrize("bad", [None, 0, 1, 2, 3, 4])
def test_windows_need_what_their_boundary_needs(windowed: LM, shaky: Shaky, policy: str, bad: int | None) -> None:
    """vllm#49250 with sliding windows: what lies before a chunk that failed is computed, as its windowed rows are
    nowhere; what lies after it stays."""
    session = windowed.session(pages=pages_for_lanes(2, LENGTH + 64), debug=True, canary=True)
    ids = prompt(LENGTH)
    with session.start(ids) as alone:
        alone.publish(shaky).wait()
        alone.step()
        assert alone.logits is not None
        expected = [alone.logits.tobytes()]
        alone.tokens[-1] = 7
        for _ in range(3):
            alone.step()
            expected.append(alone.logits.tobytes())
    if bad is not None:
        shaky.spoil(bad)
    with Arrivals(session, shaky, policy=policy) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        found = continued(session, arrival, ids)
    assert found == expected
    if policy == "restore":
        assert arrival.computed == 1 + (0 if bad is None else 256 * (bad + 1))
    settled(session)
    assert shaky.stats()["leases"] == 0


@pytest.mark.parametrize(("bad", "start"), [(0, 768), (1, 768), (2, None), (4, None)])
def test_rows_computed_past_a_floor_count_as_held(windowed: LM, shaky: Shaky, bad: int, start: int | None) -> None:
    """What the front computed has the rows of every group: where it comes to the floor nothing is left out."""
    session = windowed.session(pages=pages_for_lanes(2, LENGTH + 64), debug=True, canary=True)
    ids = prompt(LENGTH)
    publish(session, shaky, ids)
    shaky.spoil(bad)
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert [floor.start for floor in arrival.route.floors] == [768]
        until = time.monotonic() + WAIT_S
        while not arrival.done:
            assert time.monotonic() < until
            step(session, arrival)
    with Continuation(session, [*ids, 0], arrival.route) as c, session.start([*ids, 0]) as alone:
        assert [floor.start for floor in c.route.floors] == ([] if start is None else [start])
        if start is None:
            alone.step()
            assert c.kv().tobytes() == alone.kv(0, LENGTH).tobytes()
            c.fork(300).close()
    settled(session)


@pytest.mark.parametrize("asked", ["children", "available", "placements", "hold"])
@pytest.mark.parametrize("error", [StoreError("the tier is gone"), PermissionError("not yours")])
def test_a_store_that_cannot_be_asked_is_computed_around(
    tiny_lm: LM, memory: Memory, monkeypatch: pytest.MonkeyPatch, asked: str, error: Exception
) -> None:
    session = tiny_lm.session(pages=pages_for_lanes(2, LENGTH), debug=True)
    ids = prompt(LENGTH)
    expected = publish(session, memory, ids)

    def fail(*args: object, **options: object) -> None:
        raise error

    with Arrivals(session, memory, policy="restore") as arrivals:
        with monkeypatch.context() as patch:
            patch.setattr(memory, asked, fail)
            arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, arrival) == expected
    assert arrival.computed == LENGTH
    assert arrival.restored.failures == [f"rows [0, {LENGTH}): {error}; recomputed"]
    settled(session)
    assert memory.stats()["leases"] == 0


def test_an_error_of_the_system_is_computed_around(tiny_lm: LM, shaky: Shaky) -> None:
    session = tiny_lm.session(pages=pages_for_lanes(2, LENGTH), debug=True)
    ids = prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.spoil(2)
    shaky.bad[2] = OSError("stale file handle")
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, arrival) == expected
    assert arrival.restored.tokens == 256 * (CHUNKS - 1)
    assert any("stale file handle" in failure for failure in arrival.restored.failures)
    settled(session)


def test_a_memory_that_was_closed_first_is_computed_around(tiny_lm: LM, shaky: Shaky) -> None:
    """Loads under way fail, later ones are not begun; nothing is lost but time."""
    session = tiny_lm.session(pages=pages_for_lanes(2, LENGTH), debug=True)
    ids = prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(4)
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert shaky.began[4].wait(WAIT_S)
        shaky.close()
        shaky.let(4)
        assert run(session, arrival) == expected
        again = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, again) == expected
    assert arrival.computed == again.computed == LENGTH
    settled(session)


def test_a_tier_that_does_not_exist_is_refused(tiny_lm: LM, memory: Memory) -> None:
    """It would be found nowhere, and every row silently computed."""
    session = tiny_lm.session()
    with pytest.raises(NotFoundError, match="nonsense"):
        Arrivals(session, memory, tier="nonsense")
    with session.start(range(3, 40)) as first:
        first.publish(memory).wait()
    with pytest.raises(NotFoundError, match="nonsense"):
        session.restore(memory, list(range(3, 40)), tier="nonsense")
    session.engine.pool.check()
    assert session.engine.pool.free == session.engine.pool.physical
