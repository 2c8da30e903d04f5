"""Eviction gives space back: to the disk, beside other writers, on a full disk, and when it is killed."""

import contextlib
import errno
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from numem.errors import CapacityError, StorageFullError
from numem.identity.digest import content_id
from numem.store.config import TierSpec
from numem.store.memory import Memory
from numem.store.payload.tier import Tier
from numem.store.placement import account
from tests.evict_fixtures import SIZE, open_small, resident, singles
from tests.s3_fixtures import Place
from tests.store_fixtures import assert_readable, die_at, make_chain, make_node, payload, put, read_back, run_children


def test_evicted_space_returns_to_the_disk(tmp_path: Path) -> None:
    mega = 1 << 20
    chain = make_chain(8, mega)
    tiers: Mapping[str, str | TierSpec] = {
        "object": str(tmp_path / "object"),
        "ssd": TierSpec(tmp_path / "ssd", 8 * mega),
    }
    with Memory(tmp_path / "home", tiers=tiers) as memory:
        put(memory, chain)
        for node, _ in chain:
            memory.promote([node.id])
        before = sum(path.stat().st_size for path in (tmp_path / "ssd").rglob("*.blob"))
        assert before == 8 * mega
        memory.residency.evict("ssd", 7 * mega)
        after = sum(path.stat().st_size for path in (tmp_path / "ssd").rglob("*.blob"))
        assert after <= 2 * mega
        assert resident(memory, [node for node, _ in chain]) == [0]
        assert_readable(memory, chain[:1], "ssd")
        assert memory.verify().ok


def test_the_disk_is_asked_for_room_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mooncake#2419: each instance obeys its own limit, and together they fill the disk: the file system is asked."""
    put_in = singles(3)
    nodes = [node for node, _ in put_in]
    free: list[int] = []
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(path: Path) -> Any:
        return usage._replace(free=free.pop(0)) if free else usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with open_small(tmp_path, 100, "lru") as memory:
        put(memory, put_in)
        memory.promote([nodes[0].id])
        memory.promote([nodes[1].id])
        free.append((1 << 20) + 1)  # one byte beyond the slack
        assert memory.promote([nodes[2].id]).promoted == 1
        assert resident(memory, nodes) == [1, 2]
        assert memory.records("decision/evict")[0].body["inputs"]["reason"] == "the disk is full"


def test_a_full_disk_degrades_a_promotion_and_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmcache#1454, lmcache#4725, DingoCache#83: on ENOSPC evict and try once more, else say so; reads go on."""
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    append, full = Tier.append, [0]

    def failing(tier: Tier, *arguments: Any) -> Any:
        if tier.name == "ssd" and full[0]:
            full[0] -= 1
            raise StorageFullError(errno.ENOSPC, "no space left")
        return append(tier, *arguments)

    monkeypatch.setattr(Tier, "append", failing)
    with open_small(tmp_path, 100, "lru") as memory:
        put(memory, put_in)
        memory.promote([nodes[0].id, nodes[1].id])
        full[0] = 1
        assert memory.promote([nodes[2].id]).promoted == 1
        assert resident(memory, nodes) == [1, 2]
        full[0] = 1000
        report = memory.promote([nodes[3].id])
        assert (report.promoted, report.bytes, list(report.failed)) == (0, 0, [nodes[3].pieces[0].hex()])
        full[0] = 0
        assert memory.stats()["promotions_full"] == 1
        assert_readable(memory, put_in)
        assert memory.promote([nodes[3].id]).promoted == 1


def _fill(home: str, ssd: str, seed: int) -> None:
    tiers: Mapping[str, str | TierSpec] = {"object": f"{home}/object", "ssd": TierSpec(ssd, 4 * SIZE)}
    with Memory(home, tiers=tiers, local=f"{home}/local") as memory:
        mine = [node for node in memory.nodes() if node.applied.startswith(b"%d-" % seed)]
        for node in mine:
            memory.promote([node.id])
            buffer = bytearray(SIZE)
            memory.read([(node.pieces[0], buffer)])


def test_two_processes_keep_one_limit_together(tmp_path: Path) -> None:
    """mooncake#2419 with two writers: what counts is what the node holds, not what a process placed."""
    home, ssd = tmp_path / "home", tmp_path / "ssd"
    put_in = [
        (make_node([data], name=f"{seed}-{n}"), [data])
        for seed in (1, 2)
        for n in range(6)
        for data in [payload(SIZE, seed * 100 + n)]
    ]
    tiers: Mapping[str, str | TierSpec] = {"object": f"{home}/object", "ssd": TierSpec(ssd, 4 * SIZE)}
    with Memory(home, tiers=tiers, local=home / "local") as memory:
        put(memory, put_in)
    assert run_children(_fill, [(str(home), str(ssd), 1), (str(home), str(ssd), 2)]) == [0, 0]
    with Memory(home, tiers=tiers, local=home / "local") as memory:
        assert memory.residency.used("ssd") == 4 * SIZE
        assert_readable(memory, put_in)
        assert memory.verify().ok


def test_a_stray_copy_leaves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a node that is not whole in the tier serve no restore there."""
    whole = singles(2)
    data = [payload(SIZE, 50), payload(SIZE, 51)]
    double = (make_node(data, name="double"), data)
    half = (make_node(data[:1], name="half"), data[:1])
    monkeypatch.setattr(account, "_STRAY_GRACE_NS", 0)
    with open_small(tmp_path, 10, "lru") as memory:
        put(memory, [*whole, double])
        put(memory, [half])
        memory.promote([node.id for node, _ in whole])
        memory.promote([half[0].id])
        memory.promote([double[0].id])
        assert memory.residency.used("ssd") == 4 * SIZE
        from numem.store.upkeep.collect import retire

        retire(memory._parts, [half[0].id, double[0].id], "collected")
        report = memory.residency.evict("ssd", 1)
        assert (report.nodes, report.pieces, report.bytes) == ((), 2, 2 * SIZE)
        assert resident(memory, [node for node, _ in whole]) == [0, 1]


def _fill_the_disk(root: str, seed: int) -> None:
    with open_small(Path(root), 1000) as memory:
        for node in memory.nodes():
            if node.applied.startswith(b"%d-" % seed):
                memory.promote([node.id])
                assert read_back(memory, node, [SIZE]) == [payload(SIZE, int(node.applied.split(b"-")[1]))]


def test_two_writers_on_a_disk_smaller_than_their_limits(tmp_path: Path) -> None:
    """mooncake#2419, lmcache#4664: a small file system that fills before any limit is reached; reads still work."""
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(ssd)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs; the tests with an injected ENOSPC cover it")
    try:
        put_in = [
            (make_node([data], name=f"{seed}-{seed * 100 + n}"), [data])
            for seed in (1, 2)
            for n in range(30)
            for data in [payload(SIZE, seed * 100 + n)]
        ]
        with open_small(tmp_path, 1000) as memory:
            put(memory, put_in)
        assert run_children(_fill_the_disk, [(str(tmp_path), 1), (str(tmp_path), 2)]) == [0, 0]
        with open_small(tmp_path, 1000) as memory:
            assert_readable(memory, put_in)
            assert memory.promote([put_in[0][0].id]).failed == {}
            assert 0 < memory.residency.used("ssd") < 3 << 20
            assert memory.verify().ok
    finally:
        subprocess.run(["umount", "-l", str(ssd)], check=True)


def test_threads_that_publish_promote_evict_and_look_up_never_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    """mooncake#2486, llm-d-kv-cache#393: locks are taken in one order (promoter, tier, catalog), so nothing is lost."""
    chains = [make_chain(4, seed=n, name=f"t{n}") for n in range(4)]
    with open_small(tmp_path, 6, "slru") as memory:

        def publish(number: int) -> None:
            put(memory, chains[number])

        def promote(number: int) -> None:
            for _ in range(3):
                for node in memory.nodes():
                    with contextlib.suppress(CapacityError):
                        memory.promote([node.id])

        def evict(number: int) -> None:
            for _ in range(6):
                with contextlib.suppress(CapacityError):
                    memory.residency.evict("ssd", SIZE)

        def look_up(number: int) -> None:
            for _ in range(20):
                for node in memory.nodes():
                    with memory.hold([node.id]):
                        buffer = bytearray(SIZE)
                        memory.read([(node.pieces[0], buffer)])
                        assert content_id(buffer) == node.pieces[0]

        with ThreadPoolExecutor(8) as pool:
            tasks = [*[publish] * 4, promote, evict, look_up, look_up]
            for future in [pool.submit(task, number) for number, task in enumerate(tasks)]:
                future.result(timeout=120)
        for chain in chains:
            assert_readable(memory, chain)
        assert memory.residency.used("ssd") <= 6 * SIZE
        assert memory.verify().ok


def _die_evicting(root: str) -> None:
    with open_small(Path(root), 4, "lru") as memory:
        die_at("evicted")
        memory.residency.evict("ssd", 2 * SIZE)


@pytest.mark.crash
def test_an_eviction_that_was_killed_has_happened(tmp_path: Path) -> None:
    """The catalog lets go first: bytes that are still there are dead, and the next eviction gives their space back."""
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 4, "lru") as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes])
    assert run_children(_die_evicting, [(str(tmp_path),)]) == [-9]
    with open_small(tmp_path, 4, "lru") as memory:
        assert resident(memory, nodes) == [2, 3]
        assert memory.residency.used("ssd") == 2 * SIZE
        assert memory.promote([nodes[0].id, nodes[1].id]).promoted == 2
        assert_readable(memory, put_in, "ssd")
        assert memory.verify().ok


@pytest.mark.s3
def test_an_ssd_in_front_of_an_object_store_keeps_its_capacity(s3: Place, tmp_path: Path) -> None:
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    tiers: Mapping[str, str | TierSpec] = {
        "object": f"{s3.url}/object",
        "ssd": TierSpec(tmp_path / "ssd", 2 * SIZE, "lru", "through"),
    }
    with Memory(s3.url, tiers=tiers, local=s3.local, storage_options=s3.options) as memory:
        put(memory, put_in[:2])
        memory.residency.settle()
        assert resident(memory, nodes[:2]) == [0, 1]
        put(memory, put_in[2:])
        memory.residency.settle()
        assert resident(memory, nodes) == [2, 3]
        memory.residency.demand([nodes[0].id], "ssd", owner="x")
        assert memory.residency.reconcile().ready == (nodes[0].id,)
        assert resident(memory, nodes) == [0, 3]
        with pytest.raises(CapacityError):
            memory.residency.evict("object", 1)
        assert_readable(memory, put_in)
