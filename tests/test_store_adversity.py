"""Clocks that go backwards, disks that fill up in maintenance, publishers that die beside a live one, stale committers."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from numem.errors import StorageFullError, StoreError
from numem.store import barrier
from numem.store.catalog.facts import State
from numem.store.memory import Memory
from numem.store.payload.dataset import Dataset
from numem.store.payload.tier import Tier
from numem.store.session import Session
from numem.store.upkeep import collect, recovery
from numem.store.upkeep.collect import retire
from numem.store.upkeep.doctor import diagnose, repair
from numem.store.urls import Location, locate
from tests.s3_fixtures import Place
from tests.store_fixtures import SCOPE, assert_readable, die_at, make_chain, put, run_children, sidecars

CHAIN = make_chain(3)


def _an_hour_ago(home: str) -> None:
    """What a process does whose clock is an hour behind; everything in it must count as later all the same."""
    real = time.time_ns
    time.time_ns = lambda: real() - 3600 * 10**9
    with Memory(home) as memory:
        assert memory.residency.unpin([CHAIN[0][0].id], owner="parent") == 1
        memory.residency.pin([CHAIN[1][0].id], owner="child")
        head = memory.branch("main").head
        memory.move_branch("main", CHAIN[1][0].id, expected=head, actor="child", reason="test")
        for place in memory.placements(CHAIN[2][0].pieces[0]):
            if place.tier == "ssd":
                memory._parts.quarantine(place.turned(memory._parts.clock.next(), State.QUARANTINED, "child"))
        put(memory, make_chain(1, seed=3, name="retired"))
        retire(memory._parts, [make_chain(1, seed=4, name="kept")[0][0].id], "collected")


def test_a_clock_that_goes_backwards_between_processes(tmp_path: Path) -> None:
    """Sequences go on above all that were seen: what a process with a late clock says later is later."""
    retired, kept = make_chain(1, seed=3, name="retired"), make_chain(1, seed=4, name="kept")
    with Memory(tmp_path) as memory:
        put(memory, [*CHAIN, *retired, *kept])
        memory.promote([node.id for node, _ in CHAIN])
        memory.residency.pin([CHAIN[0][0].id], owner="parent")
        memory.create_branch("main", CHAIN[0][0].id, actor="parent", reason="test")
        retire(memory._parts, [retired[0][0].id], "collected")
        assert memory.get(retired[0][0].id) is None
        assert run_children(_an_hour_ago, [(str(tmp_path),)]) == [0]
        assert_readable(memory, [*CHAIN, *retired])
        assert memory.get(kept[0][0].id) is None
        assert [claim.owner for claim in memory.residency.pins()] == ["child"]
        assert memory.branch("main").head == CHAIN[1][0].id
        copies = memory._parts.catalog.placements.current(CHAIN[2][0].pieces[0])
        states = {place.state for place in copies if place.tier == "ssd"}
        assert states == {State.QUARANTINED}
    assert diagnose(tmp_path).ok


def _mount(path: Path, *options: str) -> bool:
    tool = shutil.which("mount")
    if tool is None or os.geteuid() != 0:
        return False
    return subprocess.run([tool, *options, str(path)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if not _mount(tmp_path, "-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        pytest.skip("mounting a tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("spare", [0, 8, 40, 120, 400])
def test_a_disk_that_is_full_in_maintenance(small_disk: Path, spare: int) -> None:
    """Whatever step finds no space says so, in one line, and loses nothing; with space the next round ends it."""
    chains = [make_chain(2, seed=n, name=str(n)) for n in range(6)]
    with Memory(small_disk) as memory:
        for chain in chains:
            put(memory, chain)
        retire(memory._parts, [node.id for chain in chains[:4] for node, _ in chain], "collected")
        used = 64 * 1024 - shutil.disk_usage(small_disk).free // 1024
        assert _mount(small_disk, "-o", f"remount,size={used + spare}k")
        try:
            memory.care.maintain(grace_s=0, keep_versions_s=0, least=2)
        except StorageFullError as error:
            assert "no space left" in str(error) and "\n" not in str(error)
        for chain in chains[4:]:
            assert_readable(memory, chain)
        assert _mount(small_disk, "-o", "remount,size=64m")
        memory.care.maintain(grace_s=0, keep_versions_s=0, least=2)
        for chain in chains[4:]:
            assert_readable(memory, chain)
        assert len(memory.nodes()) == 4
    assert diagnose(small_disk).ok, diagnose(small_disk).findings
    with Memory(small_disk) as memory:
        assert [entry for entry in memory.recovered if entry.kind == "lost"] == []
        assert memory.verify().ok


def _publish_until_full(home: str, number: int) -> None:
    with Memory(home) as memory:
        for n in range(200):
            try:
                put(memory, make_chain(2, 500_000, seed=number * 1000 + n, name=f"{number}/{n}"))
            except StorageFullError:
                break
            with open(f"{home}.told", "a") as told:
                told.write(f"{number} {n}\n")
        else:
            raise AssertionError("never full")


def test_two_writers_fill_a_disk_that_is_read_throughout(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """mooncake#2419, lmcache#1454, lmcache#4725: each is told of the full disk; what was acknowledged reads from a handle
    that was open, from one that is opened on the full disk, and from one that only looks; with space all is well."""
    told = tmp_path_factory.mktemp("told") / "home"
    told.symlink_to(small_disk / "home")
    (small_disk / "home").mkdir()
    assert _mount(small_disk, "-o", "remount,size=24m")
    with Memory(told) as memory:
        put(memory, CHAIN)
        assert run_children(_publish_until_full, [(str(told), 1), (str(told), 2)]) == [0, 0]
        lines = Path(f"{told}.told").read_text().split()
        pairs = list(zip(map(int, lines[::2]), map(int, lines[1::2]), strict=True))
        done = [e for w, n in pairs for e in make_chain(2, 500_000, seed=w * 1000 + n, name=f"{w}/{n}")]
        assert len(done) > 10
        assert_readable(memory, [*CHAIN, *done])
    for read_only in (True, False):
        with Memory(told, read_only=read_only) as memory:
            assert_readable(memory, [*CHAIN, *done])
    assert not diagnose(told).of("loss")
    assert _mount(small_disk, "-o", "remount,size=64m")
    assert repair(told).ok
    with Memory(told) as memory:
        assert_readable(memory, [*CHAIN, *done])
        assert put(memory, make_chain(1, seed=77, name="after")).nodes == 1
    assert diagnose(told).ok


def _die_while_writing(home: str, number: int) -> None:
    memory = Memory(home)
    die_at("written object")
    put(memory, make_chain(2, seed=100 + number, name=f"dead{number}"))


@pytest.mark.crash
@pytest.mark.parametrize("deaths", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_writers_that_die_beside_a_live_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int) -> None:
    """lance#8942, lance PR#8945, lance#7207: files that no commit names are kept before the grace and gone after it, and
    a publication that is between its files and its commit meanwhile is not touched."""
    live = make_chain(2, seed=1, name="live")
    with Memory(tmp_path) as memory:
        put(memory, CHAIN)
        for start in range(0, deaths, 4):
            batch = range(start, min(start + 4, deaths))
            codes = run_children(_die_while_writing, [(str(tmp_path), number) for number in batch])
            assert codes == [-9] * len(batch)
        orphans = len(sidecars(tmp_path / "object")) - 1
        assert orphans == deaths
        Memory(tmp_path).close()
        assert repair(tmp_path).ok
        assert len(sidecars(tmp_path / "object")) == deaths + 1  # too young

        def sweep_meanwhile(step: str, what: str) -> None:
            if step == "written" and what.startswith("object"):
                with monkeypatch.context() as patch:
                    patch.setattr(recovery, "ORPHAN_GRACE_S", 0.0)
                    assert repair(tmp_path).ok

        end = barrier.observe(sweep_meanwhile)
        put(memory, live)
        end()
        assert len(sidecars(tmp_path / "object")) == 2
        assert_readable(memory, [*CHAIN, *live])
        assert memory.verify().ok
    assert diagnose(tmp_path).ok
    with Memory(tmp_path) as memory:
        assert_readable(memory, [*CHAIN, *live])
        assert put(memory, make_chain(2, seed=100, name="dead0")).nodes == 2


def test_a_volume_that_is_filled_and_closed_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was dead when maintenance began may not be when its turn comes; maintenance goes on, and keeps it."""
    real, dead, more = collect.closed, make_chain(1, seed=40, name="dead"), make_chain(1, seed=41, name="more")
    with Memory(tmp_path) as memory, Memory(tmp_path) as other:
        put(other, dead)
        retire(memory._parts, [dead[0][0].id], "collected")

        @contextmanager
        def closed(parts: Session, tier: Tier, name: str) -> Iterator[bool]:
            if tier is parts.home and not other.nodes():
                put(other, CHAIN)
                other._parts.home.close_volume()
                put(other, more)
                parts.catalog.refresh("placements", force=True)
            with real(parts, tier, name) as free:
                yield free

        monkeypatch.setattr(collect, "closed", closed)
        memory.care.maintain(grace_s=0)
        assert_readable(memory, [*CHAIN, *more])
    assert diagnose(tmp_path).ok


def test_maintenance_leaves_foreign_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lance#5294: strays under the root of a dataset are reported, not deleted, by cleaning up, sweeping or repair."""
    monkeypatch.setattr(recovery, "ORPHAN_GRACE_S", 0.0)
    with Memory(tmp_path) as memory:
        put(memory, CHAIN)
        (volume,) = (tmp_path / "object").glob("*.lance")
        strays = [
            place / below / name
            for place in (volume, *(tmp_path / "catalog").glob("*.lance"))
            for below, name in (("data", "holiday.jpg"), ("data/pack", "x.bin"))
        ]
        for path in strays:
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(b"mine")
        for n in range(4):
            put(memory, make_chain(1, seed=n + 5, name=f"more{n}"))
            memory.care.maintain(grace_s=0, keep_versions_s=0, least=2)
        assert all(path.read_bytes() == b"mine" for path in strays)
    report = diagnose(tmp_path)
    assert report.ok and len(report.findings) == 9
    assert all("not numem's" in finding.what for finding in report.findings)
    repair(tmp_path)
    assert all(path.read_bytes() == b"mine" for path in strays)


SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])


def _row(n: int) -> list[pa.RecordBatch]:
    return [pa.record_batch([pa.array([n])], schema=SCHEMA)]


def _stale(location: Location, options: dict[str, str] | None, others: int) -> None:
    def handle() -> Dataset:
        return Dataset("d", location, SCHEMA, None, options)

    stalled, lively = handle(), handle()
    stalled.create_new()
    stalled.append(_row(0))
    lively.open()
    busy: list[bool] = []

    def meanwhile(step: str, what: str) -> None:
        if step == "written" and not busy:
            busy.append(True)
            for n in range(others):
                lively.append(_row(10 + n))
            lively.clean_up(0)

    end = barrier.observe(meanwhile)
    try:
        acknowledged = bool(stalled.append(_row(1)))
    except StoreError:
        acknowledged = False
    finally:
        end()
    fresh = handle()
    fresh.open()
    rows = fresh.lance.to_table().column("n").to_pylist()
    assert {0, *range(10, 10 + others)} <= set(rows) and len(rows) == len(set(rows))
    assert not acknowledged or 1 in rows


@pytest.mark.parametrize("others", [2, 5])
def test_a_stale_committer_behind_a_clean_up(tmp_path: Path, others: int) -> None:
    """lance#3718: a writer stalls between its files and its commit, others commit and clean up everything older; its
    commit then fails, or is visible in the newest version."""
    _stale(locate("test", tmp_path / "d.lance"), None, others)


@pytest.mark.s3
def test_a_stale_committer_behind_a_clean_up_on_s3(s3: Place) -> None:
    """lance#3718, without a lock that orders the writers."""
    _stale(locate("test", f"{s3.url}/d.lance"), s3.options, 3)


def test_forgetting_takes_what_a_compaction_left_that_was_cut_short(tmp_path: Path) -> None:
    """The files of a catalog commit that never happened hold rows of nodes too."""
    with Memory(tmp_path) as memory:
        put(memory, CHAIN)
        data = tmp_path / "catalog" / "nodes.lance" / "data"
        (file,) = data.iterdir()
        shutil.copyfile(file, data / f"{'0' * 40}.lance")
        assert memory.care.forget(ids=[CHAIN[0][0].id], actor="test", reason="test").unreached == ()
        assert list(data.iterdir()) == []
    assert diagnose(tmp_path).findings == ()


def test_a_claim_for_the_scope_itself_and_unknown_nodes(tmp_path: Path) -> None:
    """Demands may name what is not published yet; that is no finding."""
    with Memory(tmp_path) as memory:
        put(memory, CHAIN)
        memory.residency.demand([SCOPE, bytes(32)], "ssd", owner="early")
    assert diagnose(tmp_path).findings == ()
