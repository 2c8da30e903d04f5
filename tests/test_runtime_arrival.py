"""Arrivals: rows computed from the front and loaded from the back give the bytes of computing alone, whatever fails."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from numem import LM, Memory, load_lm
from numem.errors import CapacityError, IntegrityError, NotFoundError, StoreError
from numem.lineage.decisions import DecisionLog
from numem.policy.costs import Configured, Costs, TierCost
from numem.runtime.continuation import Continuation, Session
from numem.runtime.engine import pages_for_lanes
from numem.runtime.restore.arrival import Arrival
from numem.runtime.restore.arrivals import Arrivals
from numem.runtime.restore.loader import Loader
from numem.runtime.restore.measured import costs_path
from numem.store.reports import ReadReport
from tests.model_fixtures import tiny_model
from tests.test_runtime_exact import prompt

CHUNKS = 5
LENGTH = 256 * CHUNKS + 1
WAIT_S = 60.0


class Shaky(Memory):
    """A memory whose reads can be held up, delayed or made to fail, by position of the chunk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.contents: dict[bytes, int] = {}
        self.bad: dict[int, Exception] = {}
        self.held: dict[int, threading.Event] = {}
        self.began: dict[int, threading.Event] = {}
        self.delay_s = 0.0

    def hold_up(self, *chunks: int) -> None:
        """Reads of these chunks wait until `let` is called."""
        self._learn()
        for chunk in chunks:
            self.held[chunk], self.began[chunk] = threading.Event(), threading.Event()

    def _learn(self) -> None:
        self.contents = {piece: node.start // 256 for node in self.nodes() for piece in node.pieces}

    def let(self, *chunks: int) -> None:
        for chunk in chunks:
            self.held[chunk].set()

    def spoil(self, *chunks: int) -> None:
        """Reads of these chunks fail in every tier."""
        self._learn()
        for chunk in chunks:
            self.bad[chunk] = IntegrityError(f"piece {chunk}: spoiled; recompute it")

    def read(  # type: ignore[no-untyped-def]
        self, requests: Sequence[tuple[bytes, object]], **options
    ) -> ReadReport:
        for content, _ in requests:
            chunk = self.contents.get(content, -1)
            if chunk in self.held:
                self.began[chunk].set()
                assert self.held[chunk].wait(WAIT_S)
            if chunk in self.bad:
                raise self.bad[chunk]
        time.sleep(self.delay_s * len(requests))
        return super().read(requests, **options)


@pytest.fixture
def shaky(tmp_path: Path) -> Iterator[Shaky]:
    with Shaky(tmp_path / "shaky") as opened:
        yield opened
        for event in opened.held.values():
            event.set()


def known(prefill: float = 1.0, tiers: dict[str, TierCost] | None = None) -> Costs:
    """Costs that say that everything was measured."""
    costs = Costs(Configured(tiers=tiers or {"object": TierCost(0.0, 1e9), "ssd": TierCost(0.0, 1e9)}))
    for start in (0, 256, 512, 1024, 2048):
        costs.observe_prefill(start, 256, 256 * prefill)
    return costs


def publish(session: Session, memory: Memory, ids: list[int]) -> tuple[bytes, bytes]:
    """Make a prompt's rows durable; its cache bytes with the last token's row, and the logits of that."""
    with session.start(ids) as alone:
        alone.publish(memory).wait()
        alone.step()
        assert alone.logits is not None
        return alone.kv().tobytes(), alone.logits.tobytes()


def step(session: Session, arrival: Arrival, budget: int = 256) -> np.ndarray | None:
    """One turn as a scheduler takes it: evaluate what helps, else wait for loads; logits where they came."""
    work = arrival.next(budget)
    check(session, arrival)
    if work is None:
        arrival.land(1.0)
        return None
    (logits,) = session.engine.evaluate([work.span])
    arrival.settle(work, True)
    return logits if len(logits) else None


def run(session: Session, arrival: Arrival, budget: int = 256) -> tuple[bytes, bytes]:
    """Bring an arrival to its end; its cache bytes and the last logits."""
    logits = None
    until = time.monotonic() + WAIT_S
    while not arrival.done:
        assert time.monotonic() < until
        logits = step(session, arrival, budget)
        check(session, arrival)
    assert logits is not None
    with Continuation(session, [*arrival.tokens, 0], arrival.route) as c:
        assert arrival.restored.tokens + arrival.computed <= len(arrival.tokens)
        return c.kv().tobytes(), logits.tobytes()


def check(session: Session, arrival: Arrival) -> None:
    pool = session.engine.pool
    stats = pool.stats()
    assert stats.free + stats.resident + stats.reserved == stats.physical
    pool.check()


def session_of(lm: LM, length: int = LENGTH, routes: int = 2) -> Session:
    return lm.session(pages=pages_for_lanes(routes, length + 64), debug=True)


def settled(session: Session) -> None:
    """Nothing is held any more."""
    stats = session.engine.pool.stats()
    assert (stats.free, stats.reserved, stats.leases) == (stats.physical, 0, 0)
    session.engine.pool.check()


@pytest.mark.parametrize("policy", ["recompute", "restore", "two-ended", "measured"])
@pytest.mark.parametrize("budget", [100, 2000])
def test_every_policy_gives_the_bytes_of_computing_alone(tiny_lm: LM, memory: Memory, policy: str, budget: int) -> None:
    session = session_of(tiny_lm)
    for length in (1, 17, 600, LENGTH):
        ids = prompt(length)
        expected = publish(session, memory, ids)
        with Arrivals(session, memory, policy=policy) as arrivals:
            arrival = arrivals.begin(session.engine.pool.allocate(), ids)
            assert run(session, arrival, budget) == expected
            assert arrival.computed + arrival.restored.tokens == length
            if policy == "restore" and length > 16:
                assert (arrival.restored.tokens, arrival.computed) == (length - 1, 1)
            if policy == "recompute":
                assert arrival.computed == length
        settled(session)
    assert memory.stats()["leases"] == 0


@pytest.mark.parametrize("met", [0, 1, 100, 256, 257, 512, 700, 1024, 1279, 1280])
def test_every_meeting_point(tiny_lm: LM, shaky: Shaky, met: int) -> None:
    """Rows [0, met) are computed while every load is held up; then all that is left is loaded, none overwritten."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(*range(CHUNKS))
    # Nothing is known of the tier: computing helps as long as nothing has come.
    with Arrivals(session, shaky, policy="two-ended", costs=Costs()) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        while arrival.front < met:
            before = arrival.front
            step(session, arrival, min(256, met - before))
            assert before < arrival.front <= met
        assert arrival.front == met
        shaky.let(*range(CHUNKS))
        until = time.monotonic() + WAIT_S
        while arrival.loading and time.monotonic() < until:
            arrival.land(1.0)
        assert not arrival.loading
        assert (arrival.computed, arrival.restored.tokens) == (met, LENGTH - 1 - met)
        assert run(session, arrival) == expected
    settled(session)


@pytest.mark.parametrize("policy", ["restore", "two-ended"])
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (3,), (4,), (0, 4), (1, 2, 3), (0, 1, 2, 3, 4)])
def test_chunks_that_fail_are_computed(tiny_lm: LM, shaky: Shaky, policy: str, bad: tuple[int, ...]) -> None:
    """vllm#49250: output byte-equal to a cold run, with the load failing at every chunk; later chunks stay valid."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.spoil(*bad)
    with Arrivals(session, shaky, policy=policy) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert run(session, arrival) == expected
    settled(session)
    failures = arrival.restored.failures
    if policy == "restore":
        assert arrival.computed == 1 + 256 * len(bad)
        assert [f"chunk [{256 * k}, {256 * k + 256})" in f for k, f in zip(reversed(bad), failures, strict=True)]
    assert all(f.endswith("; recomputed") and "spoiled" in f for f in failures)
    assert shaky.stats()["leases"] == 0


@pytest.mark.parametrize("late", range(CHUNKS))
def test_nothing_is_read_before_its_load_has_ended(tiny_lm: LM, shaky: Shaky, late: int) -> None:
    """sglang#22811, FlexKV#225: the load of each chunk in turn comes last; no row is evaluated before it is there."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(late)
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert shaky.began[late].wait(WAIT_S)
        for _ in range(3):
            assert arrival.next(256) is None
            arrival.land(0.01)
        assert arrival.front <= 256 * late and arrival.route.length == 0
        shaky.let(late)
        assert run(session, arrival) == expected
        assert arrival.computed == 1
    settled(session)


def test_a_stalled_tier_is_computed_around(tiny_lm: LM, shaky: Shaky) -> None:
    """A load that was predicted to be quick and does not come is not waited for, unless that is forced."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(*range(CHUNKS))
    with Arrivals(session, shaky, costs=known()) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        assert arrival.decision is not None and arrival.decision.choice == "restore:object"
        assert run(session, arrival) == expected
        assert arrival.restored.tokens == 0
        shaky.let(*range(CHUNKS))
    settled(session)
    assert shaky.stats()["leases"] == 0


def test_a_slow_tier_is_recomputed_with_its_terms(tiny_lm: LM, memory: Memory) -> None:
    """dynamo#6101, llm-d-router#2833: below the break-even bandwidth the decision is to recompute, and says why."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, memory, ids)
    costs = known(0.01, {"object": TierCost(5.0, 100.0)})
    log = DecisionLog(memory)
    with Arrivals(session, memory, costs=costs, decisions=log) as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids, request="r1")
        assert run(session, arrival) == expected
    decision = arrival.decision
    assert decision is not None and decision.choice == "recompute" and arrival.computed == LENGTH
    by_name = {a.name: a for a in decision.alternatives}
    assert list(by_name) == ["resident", "restore:object", "recompute", "two-ended:object"]
    nbytes = sum(len(node.pieces) * 2 * 3 * 256 * 64 * 4 for node in memory.nodes())
    restore = by_name["restore:object"]
    assert restore.terms["bytes"] == decision.inputs["bytes:object"] == nbytes
    assert restore.terms["tokens"] == decision.inputs["matched"] == LENGTH - 1
    assert restore.terms["load_ms"] == pytest.approx(5 * CHUNKS + nbytes / 100)
    assert by_name["recompute"].cost_ms == pytest.approx((LENGTH - 1) * 0.01 + 20)
    (recorded,) = log.all("arrive")
    assert (recorded.decision.choice, recorded.decision.request) == ("recompute", "r1")
    assert recorded.decision.subject == memory.nodes()[-1].id
    assert recorded.took is not None and recorded.took.cost_ms == pytest.approx(arrival.took_ms)
    assert recorded.took.terms["computed"] == LENGTH
    settled(session)


def test_the_fastest_tier_is_chosen(tiny_lm: LM, memory: Memory) -> None:
    """Of tiers that hold all chunks the measured cost decides, not the name."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, memory, ids)
    memory.promote([node.id for node in memory.nodes()], "ssd")
    for slow, fast in (("ssd", "object"), ("object", "ssd")):
        costs = known(1.0, {slow: TierCost(50.0, 1e4), fast: TierCost(0.0, 1e9)})
        with Arrivals(session, memory, costs=costs) as arrivals:
            arrival = arrivals.begin(session.engine.pool.allocate(), ids)
            assert arrival.decision is not None and arrival.decision.choice == f"restore:{fast}"
            assert run(session, arrival) == expected
        assert set(arrival.restored.by_tier) <= {fast}
    settled(session)


def test_a_tier_that_was_never_read_is_probed_once(tiny_lm: LM, memory: Memory) -> None:
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, memory, ids)
    costs = Costs()
    with Arrivals(session, memory, costs=costs) as arrivals:
        first = arrivals.begin(session.engine.pool.allocate(), ids)
        assert first.decision is not None and first.decision.choice == "two-ended:object"
        assert first.decision.chosen.terms["probe"] is True and first.decision.chosen.cost_ms is None
        assert run(session, first) == expected
        while not costs.measured("object"):  # computing may have won; the read under way still told
            again = arrivals.begin(session.engine.pool.allocate(), ids)
            assert run(session, again) == expected
        assert costs.prefill_measured
        second = arrivals.begin(session.engine.pool.allocate(), ids)
        assert second.decision is not None and "probe" not in second.decision.chosen.terms
        assert run(session, second) == expected
    settled(session)


@pytest.mark.parametrize("resident", [1, 15, 16, 250, 256, 300, 511, 512, 599])
def test_resident_rows_are_never_overwritten(tiny_lm: LM, memory: Memory, resident: int) -> None:
    """lmcache#2206: rows below the resident boundary keep their bytes, also where a stored chunk overlaps them."""
    session, ids = session_of(tiny_lm, 600, 3), prompt(600)
    publish(session, memory, ids)
    route = session.engine.pool.allocate()
    session.engine.append([(route, ids[:resident])], logits="none")
    # Other bytes than the stored ones, so that an overwritten row shows.
    session.engine.storage.v[:, route.pages] += 1.0
    with Continuation(session, ids[: resident + 1], session.engine.pool.fork(route)) as c:
        before = c.kv().tobytes()
    with Arrivals(session, memory, policy="restore") as arrivals:
        arrival = arrivals.begin(route, ids)
        run_on = arrival.route
        while arrival.loading:
            step(session, arrival)
        with Continuation(session, ids[: resident + 1], session.engine.pool.fork(run_on, resident)) as c:
            assert c.kv().tobytes() == before
        if 600 - 1 - resident >= 16:
            assert arrival.restored.tokens == 599 - resident
        arrival.abort()
    settled(session)


@pytest.mark.parametrize("policy", ["restore", "two-ended", "recompute"])
def test_abort_at_every_point(tiny_lm: LM, shaky: Shaky, policy: str) -> None:
    """Pages come back at once, leases when the read under way has ended, each exactly once."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    publish(session, shaky, ids)
    for turns in range(9):
        with Arrivals(session, shaky, policy=policy) as arrivals:
            arrival = arrivals.begin(session.engine.pool.allocate(), ids)
            for _ in range(turns):
                if not arrival.done:
                    step(session, arrival, 256)
            arrival.abort()
            arrival.abort()
            settled(session)
        assert shaky.stats()["leases"] == 0


@pytest.mark.parametrize("policy", ["restore", "two-ended"])
def test_abort_while_a_read_is_under_way(tiny_lm: LM, shaky: Shaky, policy: str) -> None:
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(CHUNKS - 1)
    arrivals = Arrivals(session, shaky, policy=policy)
    arrival = arrivals.begin(session.engine.pool.allocate(), ids)
    assert shaky.began[CHUNKS - 1].wait(WAIT_S)
    if policy == "two-ended":
        work = arrival.next(256)
        assert work is not None
    arrival.abort()
    settled(session)
    # The pages go to somebody else while the read still runs.
    with session.start(ids) as other:
        shaky.let(CHUNKS - 1)
        arrivals.close()
        other.step()
        assert other.kv().tobytes() == expected[0]
    assert shaky.stats()["leases"] == 0
    settled(session)


def test_evaluation_that_fails_is_given_back(tiny_lm: LM, shaky: Shaky) -> None:
    """A step that failed leaves its rows missing; they are loaded or computed all the same."""
    session, ids = session_of(tiny_lm), prompt(LENGTH)
    expected = publish(session, shaky, ids)
    shaky.hold_up(*range(CHUNKS))
    with Arrivals(session, shaky, policy="two-ended") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), ids)
        work = arrival.next(256)
        assert work is not None and arrival.land(0.0) is False
        arrival.settle(work, False)
        assert arrival.front == 0
        shaky.let(*range(CHUNKS))
        assert run(session, arrival) == expected
    settled(session)


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
