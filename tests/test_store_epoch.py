"""Leases with fencing: one holder at a time, strictly rising epochs, a paused holder is stopped at its next step."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numem.errors import LeaseLostError, SchemeError, StoreError
from numem.store.payload.objects import Objects
from numem.store.upkeep.epoch import EpochLease, Leases, LocalLeases, RemoteLeases, kept, leases_at
from numem.store.urls import Location, locate
from tests.fault_proxy import Fault, FaultProxy
from tests.s3_fixtures import Place
from tests.store_fixtures import run_children

pytestmark = pytest.mark.s3
TTL_S, GRACE_S = 0.6, 0.2


def leases(url: str, options: dict[str, str]) -> Leases:
    place = locate("place", url)
    return LocalLeases(place.path) if place.path is not None else RemoteLeases(Objects(place, options), GRACE_S)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    if request.param == "local":
        return str(tmp_path), {}
    s3: Place = request.getfixturevalue("s3")
    return s3.url, s3.options


def until(ask: Callable[[], EpochLease | None], limit_s: float = 30) -> EpochLease:
    end = time.monotonic() + limit_s
    while (lease := ask()) is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    return lease


def test_one_holder_and_rising_epochs(place: tuple[str, dict[str, str]]) -> None:
    mine, others = leases(*place), leases(*place)
    epochs = []
    for _ in range(4):
        lease = mine.acquire("lane", "a", ttl_s=30)
        assert lease is not None
        epochs.append(lease.epoch)
        assert others.acquire("lane", "b", ttl_s=30) is None
        other = others.acquire("another", "b", ttl_s=30)
        assert other is not None and other.epoch == lease.epoch
        lease.check()
        lease.renew()
        lease.check()
        other.release()
        lease.release()
        lease.release()
        with pytest.raises(LeaseLostError, match="lane"):
            lease.check()
        with pytest.raises(LeaseLostError):
            lease.renew()
        mine, others = others, mine
    assert epochs == [1, 2, 3, 4]
    with pytest.raises(SchemeError):
        mine.acquire("../x", "a")


def _race(url: str, options: dict[str, str], meet: Any, results: Any, number: int) -> None:
    asked = leases(url, options)
    meet.wait(60)
    lease = asked.acquire("lane", str(number), ttl_s=60)
    results.put(0 if lease is None else lease.epoch)
    meet.wait(60)  # a local lease ends with its process


def test_processes_that_race_for_a_lease(place: tuple[str, dict[str, str]]) -> None:
    """lance#2403: of two processes that ask at the same moment one has it."""
    context = multiprocessing.get_context("spawn")
    results, meet = context.Queue(), context.Barrier(2)
    assert run_children(_race, [(*place, meet, results, number) for number in range(2)]) == [0, 0]
    assert sorted(results.get(timeout=10) for _ in range(2)) == [0, 1]


def _maintain(url: str, options: dict[str, str], told: Any, go: Any) -> None:
    lease = until(lambda: leases(url, options).acquire("lane", "a", ttl_s=3.0))
    with kept(lease):
        told.put(("holds", lease.epoch))
        go.wait(60)
        try:
            lease.check()
            told.put(("destroyed", lease.epoch))
        except LeaseLostError:
            told.put(("refused", lease.epoch))


def test_a_maintainer_paused_past_its_lease_is_fenced(s3: Place) -> None:
    """Two maintainers on S3: the paused one's next destructive step raises, the other one proceeds (lance#3718)."""
    context = multiprocessing.get_context("spawn")
    told, go = context.Queue(), context.Event()
    child = context.Process(target=_maintain, args=(s3.url, s3.options, told, go))
    child.start()
    assert child.pid is not None
    try:
        assert told.get(timeout=60) == ("holds", 1)
        mine = leases(s3.url, s3.options)
        state = s3.objects()
        end = time.monotonic() + 60
        while json.loads(state.read("leases/lane.000000000001"))["renewals"] < 2:  # in the background
            assert mine.acquire("lane", "b", TTL_S) is None and time.monotonic() < end
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGSTOP)
        lease = until(lambda: mine.acquire("lane", "b", ttl_s=60))
        assert lease.epoch == 2
        os.kill(child.pid, signal.SIGCONT)
        go.set()  # waits for its waiter to wake
        assert told.get(timeout=60) == ("refused", 1)
        lease.check()
        child.join(30)
        lease.check()  # its release touched nothing of ours
    finally:
        child.kill()
        child.join()


def _hold_and_die(url: str, options: dict[str, str]) -> None:
    assert leases(url, options).acquire("lane", "a", TTL_S) is not None
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_holder_is_succeeded(place: tuple[str, dict[str, str]]) -> None:
    assert run_children(_hold_and_die, [place]) == [-signal.SIGKILL]
    asked = leases(*place)
    assert until(lambda: asked.acquire("lane", "b", TTL_S)).epoch == 2


def test_a_lease_that_was_not_renewed_is_over_for_its_holder_once_anybody_else_has_it(s3: Place) -> None:
    holder, other = leases(s3.url, s3.options), leases(s3.url, s3.options)
    lease = until(lambda: holder.acquire("lane", "a", TTL_S))
    assert until(lambda: other.acquire("lane", "b", ttl_s=60)).epoch == 2
    for step in (lease.check, lease.renew):
        with pytest.raises(LeaseLostError):
            step()
    lease.release()
    assert leases(s3.url, s3.options).acquire("lane", "c") is None


def test_wall_clocks_that_go_backwards_or_disagree_change_nothing(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, other = leases(s3.url, s3.options), leases(s3.url, s3.options)
    lease = holder.acquire("lane", "a", ttl_s=60)
    assert lease is not None
    for shift in (-86400, 86400):
        monkeypatch.setattr(time, "time", lambda shift=shift: time.monotonic() + shift)
        assert other.acquire("lane", "b", ttl_s=60) is None
        lease.renew()
        lease.check()


def test_a_process_that_stalled_since_its_listing_does_not_hold_an_old_epoch(s3: Place) -> None:
    """lance#3718: the number it listed as free was taken, released, succeeded and removed; creating it succeeds."""

    class Stalled(Objects):
        def create(self, name: str, data: bytes) -> bool:
            for _ in range(3):
                between = leases(s3.url, s3.options).acquire("lane", "b", ttl_s=60)
                assert between is not None
                between.release()
            return super().create(name, data)

    first = leases(s3.url, s3.options).acquire("lane", "a", ttl_s=60)
    assert first is not None
    first.release()
    stalled = RemoteLeases(Stalled(s3.objects().location, s3.options), GRACE_S)
    assert stalled.acquire("lane", "c", ttl_s=60) is None
    last = leases(s3.url, s3.options).acquire("lane", "d", ttl_s=60)
    assert last is not None and last.epoch == 5


def test_lost_replies_do_not_lose_a_lease(s3: Place, faulty: Place, proxy: FaultProxy) -> None:
    """icechunk#2099: the holder's own write is not a rival; a store that does not answer is not a lost lease."""
    mine = RemoteLeases(faulty.objects(deadline_s=3.0), GRACE_S)
    proxy.add(Fault("lost", "PUT", "/leases/", times=1))
    lease = mine.acquire("lane", "a", ttl_s=60)
    assert lease is not None and lease.epoch == 1
    proxy.add(Fault("lost", "PUT", "/leases/", times=1))
    lease.renew()
    lost = proxy.add(Fault("lost", "", "/leases/", times=-1))
    with pytest.raises(StoreError) as caught:
        lease.renew()
    assert lost.hits and not isinstance(caught.value, LeaseLostError)
    proxy.clear()
    lease.check()
    lease.renew()
    assert leases(s3.url, s3.options).acquire("lane", "b") is None


def test_where_leases_of_a_memory_lie(tmp_path: Path) -> None:
    assert isinstance(leases_at(locate("home", tmp_path), None), LocalLeases)
    assert isinstance(leases_at(Location("s3://bucket/x", None), {}), RemoteLeases)
