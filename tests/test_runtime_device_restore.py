"""Restore and capture through a device's transfers, over pages of its form on the CPU: bytes, failures, bounds."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from numem import Memory
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.runtime.continuation import Session
from numem.runtime.device.form import TokenMajor
from numem.runtime.engine import Engine
from numem.runtime.lanes.publisher import Publisher
from numem.runtime.paging.pages import PageStorage, kv_spec
from numem.runtime.paging.pool import Route
from numem.runtime.restore.arrivals import Arrivals
from numem.runtime.restore.kv import held_rows, restore_rows
from numem.store.config import TierSpec
from tests.arrival_fixtures import Shaky, shaky

__all__ = ["shaky"]  # a fixture

CPU = torch.device("cpu")
TOKENS = [t % 97 for t in range(256 * 4 + 41)]
IDENTITY = Identity({"program": "device-restore-test"}, NumericPolicy("exact", b"\x01" * 32), "any")


def session_of(windows: tuple[int, ...] = ()) -> Session:
    """A session whose pages have the device's form, two chunks in its ring; nothing is ever computed."""
    spec = kv_spec(3, 2, 16, "float32", windows)
    decoder = SimpleNamespace(
        spec=spec, kv_heads=2, head_dim=16, vocab=100, max_position=2048, device=torch.device("cpu"), max_rows=512
    )
    engine = Engine(cast(Any, decoder), pages=300)
    engine.storage = PageStorage(spec, 2, 16, 300, device=CPU, form=TokenMajor(CPU, ring_bytes=1))
    return Session(engine, IDENTITY)


def filled(session: Session, rows: int, seed: int = 0) -> Route:
    engine = session.engine
    route = engine.pool.allocate()
    reservation = engine.reserve(route, rows)
    payload = torch.randn((2, 3, rows, 32), generator=torch.Generator().manual_seed(seed))
    engine.storage.load(payload, reservation.pages, 0)
    engine.pool.commit([reservation])
    return route


def publish(session: Session, memory: Memory, route: Route) -> None:
    publisher = Publisher(session, memory)
    publisher.submit("a", TOKENS, route)
    while not (ended := publisher.collect()):
        publisher.wait(1.0)
    assert [p.error for p in ended] == [""]
    publisher.close()


def whole(session: Session) -> bool:
    """Whether every slot and page was given back."""
    transfers = session.engine.storage.transfers
    assert transfers is not None
    session.engine.pool.check()
    ring, down = transfers.ring, transfers._down_ring
    return ring.idle == ring.slots and down.idle == down.slots and session.engine.pool.stats().reserved == 0


@pytest.fixture
def in_ram(tmp_path: Path) -> Iterator[Memory]:
    tiers = {"object": str(tmp_path / "home" / "object"), "host": TierSpec("host", capacity=64 << 20, write="through")}
    with Memory(tmp_path / "home", tiers=cast(Any, tiers)) as opened:
        yield opened


@pytest.mark.parametrize("windows", [(), (0, 64, 0)])
def test_restored_rows_are_those_that_were_captured(memory: Memory, windows: tuple[int, ...]) -> None:
    session = session_of(windows)
    source = filled(session, len(TOKENS) - 1)
    publish(session, memory, source)
    for limit in (256 * 4 + 40, 600):
        route, report, _ = restore_rows(
            memory, session.engine, IDENTITY.scope, session.engine.pool.allocate(), TOKENS[: limit + 1]
        )
        assert route.length == report.tokens == (limit if limit > 1000 else 600) and not report.failures
        twin = session.engine.pool.fork(source, route.length)
        if not windows:
            assert (
                held_rows(session.engine, route, route.length).tobytes()
                == held_rows(session.engine, twin, route.length).tobytes()
            )
        session.engine.release(twin)
        session.engine.release(route)
    assert whole(session)


def arrive(arrivals: Arrivals, route: Route, tokens: list[int]) -> Any:
    """An arrival whose rows all come from the memory, but for the last one."""
    arrival = arrivals.begin(route, tokens)
    ends = time.monotonic() + 30
    while arrival.loading and not arrival.restored.failures and time.monotonic() < ends:
        arrival.land(0.05)
    return arrival


@pytest.mark.parametrize("held", [0, 100])
def test_an_arrival_through_a_ring_smaller_than_the_prompt(memory: Memory, held: int) -> None:
    """Rows [0, held) are there already, in the middle of a chunk: they stay as they are."""
    session = session_of()
    source = filled(session, len(TOKENS) - 1)
    publish(session, memory, source)
    with Arrivals(session, memory, policy="restore") as arrivals:
        begun = session.engine.pool.fork(source, held) if held else session.engine.pool.allocate()
        arrival = arrive(arrivals, begun, TOKENS)
        assert arrival.route.length == len(TOKENS) - 1 and arrival.restored.tokens == len(TOKENS) - 1 - held
        rows = held_rows(session.engine, arrival.route, len(TOKENS) - 1)
        assert rows.tobytes() == held_rows(session.engine, source, len(TOKENS) - 1).tobytes()
        arrival.abort()
    assert whole(session)


def test_failing_reads_and_copies_give_everything_back(shaky: Shaky, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    source = filled(session, len(TOKENS) - 1)
    publish(session, shaky, source)
    free = session.engine.pool.free
    shaky.spoil(2)
    route, report, _ = restore_rows(shaky, session.engine, IDENTITY.scope, session.engine.pool.allocate(), TOKENS)
    assert route.length == 512 and len(report.failures) >= 1
    session.engine.release(route)
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrive(arrivals, session.engine.pool.allocate(), TOKENS)
        assert arrival.restored.failures
        arrival.abort()
    shaky.bad.clear()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("copy failed")

    with monkeypatch.context() as patched:
        patched.setattr("numem.runtime.device.transfer.moves.scatter_rows", fails)
        with pytest.raises(RuntimeError, match="copy failed"):
            restore_rows(shaky, session.engine, IDENTITY.scope, session.engine.pool.allocate(), TOKENS)
        with Arrivals(session, shaky, policy="restore") as arrivals:
            arrival = arrivals.begin(session.engine.pool.allocate(), TOKENS)
            with pytest.raises(RuntimeError, match="copy failed"):
                for _ in range(200):
                    arrival.land(0.05)
            arrival.abort()
    assert whole(session) and session.engine.pool.free == free


def test_a_cancelled_arrival_gives_its_slots_back(shaky: Shaky) -> None:
    session = session_of()
    publish(session, shaky, filled(session, len(TOKENS) - 1))
    shaky.hold_up(4)
    with Arrivals(session, shaky, policy="restore") as arrivals:
        arrival = arrivals.begin(session.engine.pool.allocate(), TOKENS)
        assert shaky.began[4].wait(20)
        arrival.abort()
        shaky.let(4)
    assert whole(session)


def test_pieces_in_ram_are_not_copied(in_ram: Memory) -> None:
    """A tier in RAM lends its pieces; they stay until the copy from them is done, and damage is found."""
    session = session_of()
    source = filled(session, len(TOKENS) - 1)
    publish(session, in_ram, source)
    in_ram.flush()
    (piece, *_), *_ = [node.pieces for node in in_ram.nodes()]
    lent = in_ram.borrow(piece)
    assert lent is not None and lent[0] == "host" and in_ram.borrow(piece, page_locked=True) is None
    lent[1].release()
    lent[1].release()
    route, report, _ = restore_rows(in_ram, session.engine, IDENTITY.scope, session.engine.pool.allocate(), TOKENS)
    assert set(report.by_tier) == {"host"} and report.bytes == report.by_tier["host"]
    rows = held_rows(session.engine, route, route.length)
    assert rows.tobytes() == held_rows(session.engine, source, route.length).tobytes()
    host = in_ram._parts.hosts["host"]
    host._pieces[piece].buffer[7] ^= 1
    assert in_ram.borrow(piece) is None and host.stats().damaged == 1
    assert whole(session) and all(p.holders == 0 for p in host._pieces.values())
