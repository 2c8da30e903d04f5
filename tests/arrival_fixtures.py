"""A memory whose reads fail or wait on demand, and arrivals driven step by step, for the tests of `Arrivals`."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from numem import LM, Memory
from numem.errors import IntegrityError
from numem.policy.costs import Configured, Costs, TierCost
from numem.runtime.continuation import Continuation, Session
from numem.runtime.engine import pages_for_lanes
from numem.runtime.restore.arrival import Arrival
from numem.store.reports import ReadReport

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

    def read(  # type: ignore[no-untyped-def]  # passes on whatever options there are
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
