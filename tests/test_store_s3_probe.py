"""The start-up probe: a store that ignores the conditions of writes is refused before anything is stored there."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from numem.errors import BackendError, StoreError
from numem.store.memory import Memory
from numem.store.payload import probe
from numem.store.payload.objects import Objects, Stored
from numem.store.urls import Location
from tests.fault_proxy import FaultProxy
from tests.s3_fixtures import Place
from tests.store_fixtures import assert_readable, make_chain, put, run_children

pytestmark = pytest.mark.s3


class Stub(Objects):
    """A store in memory.

    Args:
        gap: seconds between looking and writing, unlocked: right in turn, wrong at once.
        conditions: whether conditions count at all.
    """

    def __init__(self, gap: float = 0.0, conditions: bool = True, updates: bool = True) -> None:
        super().__init__(Location("s3://stub/x", None), None)
        self.held: dict[str, Stored] = {}
        self._gap = gap
        self._conditions = conditions
        self._updates = updates
        self._turn = threading.Lock()

    def create(self, name: str, data: bytes) -> bool:
        with self._turn if not self._gap else threading.Lock():
            if self._conditions and name in self.held:
                return False
            time.sleep(self._gap)
            self.held[name] = Stored(data, "w", {"e_tag": data.decode()})
            return True

    def fetch(self, name: str) -> Stored:
        return self.held[name]

    def replace(self, name: str, data: bytes, mark: Mapping[str, str]) -> Mapping[str, str] | None:
        if self._updates and self.held[name].mark != mark:
            return None
        self.held[name] = Stored(data, "w", {"e_tag": data.decode()})
        return self.held[name].mark

    def delete(self, names: object) -> None:
        self.held.clear()


def test_a_store_that_excludes_rivals_passes_and_nothing_is_left() -> None:
    stub = Stub()
    probe.probe(stub)
    assert stub.held == {}


@pytest.mark.parametrize(
    ("stub", "missing"),
    [
        (Stub(gap=0.05), "do not exclude each other"),
        (Stub(conditions=False), "If-None-Match"),
        (Stub(updates=False), "If-Match"),
    ],
)
def test_a_store_without_a_guarantee_is_refused(stub: Stub, missing: str) -> None:
    """seaweedfs#8800: right in turn and wrong at once is refused too; a sequential probe would accept it."""
    with pytest.raises(BackendError, match=missing):
        probe.probe(stub)
    assert stub.held == {}


def test_seaweedfs_is_accepted_and_remembered(
    faulty: Place, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lance#6595: the same probe accepts a store that keeps its word; it is asked once a day and not at every open."""
    with faulty.open():
        pass
    assert proxy.count("PUT", "/probe-") >= 36
    assert not [name for name in faulty.names() if "probe" in name]
    proxy.clear()
    with faulty.open():
        assert proxy.count("PUT", "/probe-") == 0
    (passed,) = (faulty.local / "n1" / "probes").iterdir()
    for moment in (time.time() + probe.REMEMBER_S + 60, time.time() - 3600):  # expired; a clock that went backwards
        proxy.clear()
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        probe.require_safe([(faulty.objects().location, faulty.options)], passed.parent)
        assert proxy.count("PUT", "/probe-") >= 36


def test_rclone_is_refused_with_the_reason_and_nothing_is_written(unsafe_s3: Place, tmp_path: Path) -> None:
    """lance#6595: refused at start, as a home and as a further tier, by what it does and not by its name."""
    with pytest.raises(BackendError, match="If-None-Match.*lose acknowledged rows.*use a store that"):
        unsafe_s3.open()
    tiers = {"object": str(tmp_path / "object"), "far": unsafe_s3.url}
    with pytest.raises(BackendError, match="If-None-Match"):
        Memory(tmp_path / "home", tiers=tiers, storage_options=unsafe_s3.options)
    assert unsafe_s3.names() == []
    assert not (tmp_path / "home" / "numem.json").exists()
    chain = make_chain(1)
    with Memory(tmp_path / "home", tiers={"object": tiers["object"]}) as memory:
        put(memory, chain)
        assert_readable(memory, chain)


def test_a_store_that_cannot_be_reached_or_refuses_the_credentials(s3: Place) -> None:
    """lmcache#79: an error that says so, in bounded time, and nothing remembered."""
    wrong = Place(s3.url, {**s3.options, "aws_secret_access_key": "wrong"}, s3.local)
    with pytest.raises(StoreError, match="403"):
        wrong.open()
    assert not list(s3.local.rglob("probes/*"))
    started = time.monotonic()
    with pytest.raises(StoreError, match="not known|cannot"):
        probe.probe(
            Objects(Location("s3://numem/x", None), {**s3.options, "aws_endpoint": "http://127.0.0.1:9"}, deadline_s=1)
        )
    assert time.monotonic() - started < 30


def _append(url: str, options: dict[str, str], start: float, worker: int, done: str) -> None:
    while time.time() < start:
        time.sleep(0.001)
    for number in range(20):
        try:
            row = pa.table({"row": pa.array([worker * 100 + number], pa.int64())})
            lance.write_dataset(row, url, mode="append", storage_options=options)
        except (OSError, ValueError, RuntimeError):
            continue
        with open(done, "a") as file:
            file.write("1\n")


@pytest.mark.slow
def test_eight_rivals_on_one_name(s3: Place) -> None:
    """seaweedfs#8800: the server itself, by more rivals than the probe uses, whom it makes wait for seconds."""
    objects = s3.objects()
    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            assert sum(pool.map(objects.create, [f"key{number}"] * 8, [b"%d" % n for n in range(8)])) == 1


@pytest.mark.slow
def test_what_the_probe_prevents(unsafe_s3: Place, s3: Place, tmp_path: Path) -> None:
    """lance#6595: without the probe, appends of four processes to such a store are acknowledged and lost."""
    kept = {}
    for place in (unsafe_s3, s3):
        url = f"{place.url}/t.lance"
        lance.write_dataset(pa.table({"row": pa.array([], pa.int64())}), url, storage_options=place.options)
        files = [str(tmp_path / f"{place is s3}-{worker}") for worker in range(4)]
        start = time.time() + 4
        assert run_children(_append, [(url, place.options, start, n, files[n]) for n in range(4)], 120) == [0] * 4
        told = sum(len(Path(file).read_text().split()) for file in files)
        kept[place is s3] = (told, lance.dataset(url, storage_options=place.options).count_rows())
    told, rows = kept[True]
    assert told == rows == 80
    told, rows = kept[False]
    assert rows < told
