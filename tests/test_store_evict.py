"""Eviction: what leaves a tier, in which order, what stays, and what is refused."""

import contextlib
import errno
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from numem import policy
from numem.errors import CapacityError, StorageFullError
from numem.identity.digest import content_id
from numem.state.node import Node
from numem.store.config import TierSpec
from numem.store.memory import Memory
from numem.store.payload.tier import Tier
from numem.store.placement import account
from tests.s3_fixtures import Place
from tests.store_fixtures import assert_readable, die_at, make_chain, make_node, payload, put, read_back, run_children

SIZE = 70_000


def open_small(root: Path, pieces: int | None = 4, policy: str = "slru") -> Memory:
    """A memory whose ssd holds so many pieces of SIZE bytes."""
    capacity = None if pieces is None else pieces * SIZE
    return Memory(
        root / "home",
        tiers={"object": str(root / "home" / "object"), "ssd": TierSpec(root / "ssd", capacity, policy)},
    )


def resident(memory: Memory, nodes: list[Node]) -> list[int]:
    """Positions of the nodes that are whole in ssd."""
    return [number for number, node in enumerate(nodes) if memory.available(node.id, "ssd")]


def read_ssd(memory: Memory, *nodes: Node) -> None:
    for node in nodes:
        read_back(memory, node, [SIZE], "ssd")


def singles(count: int) -> list[tuple[Node, list[bytes]]]:
    """Nodes of one piece each that do not continue one another."""
    return [(make_node([data], name=f"s{n}"), [data]) for n in range(count) for data in [payload(SIZE, 900 + n)]]


@pytest.mark.parametrize("name", policy.NAMES)
def test_leaves_leave_before_what_they_continue_under_every_policy(tmp_path: Path, name: str) -> None:
    """A chain is evicted from its end, whatever was read last (llm-d, SGLang: no stranded children)."""
    chain = make_chain(4)
    nodes = [node for node, _ in chain]
    with open_small(tmp_path, 4, name) as memory:
        put(memory, chain)
        memory.promote([node.id for node in nodes])
        read_ssd(memory, nodes[3], nodes[3], nodes[0])
        report = memory.residency.evict("ssd", 1)
        assert report.nodes == (nodes[3].id,)
        assert (report.pieces, report.bytes, report.policy) == (1, SIZE, name)
        assert memory.residency.evict("ssd", SIZE + 1).nodes == (nodes[2].id, nodes[1].id)
        assert resident(memory, nodes) == [0]
        assert memory.residency.used("ssd") == SIZE
        assert_readable(memory, chain)  # from home


ORDERS = {
    # Five nodes placed in the order 0..4; read: 0 0 1 0. Then they leave one at a time.
    "lru": [2, 3, 4, 1, 0],
    "lfu": [2, 3, 4, 1, 0],
    "slru": [2, 3, 4, 1, 0],
    "cost": [2, 3, 4, 1, 0],
    "arc": [2, 3, 4, 1, 0],
    "s3fifo": [2, 3, 4, 0, 1],
    "interval": [2, 3, 4, 1, 0],
}


@pytest.mark.parametrize("name", policy.NAMES)
def test_the_order_in_which_unrelated_nodes_leave(tmp_path: Path, name: str) -> None:
    put_in = singles(5)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 5, name) as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes])
        assert memory.residency.used("ssd") == 5 * SIZE
        read_ssd(memory, nodes[0], nodes[0], nodes[1], nodes[0])
        order = [memory.residency.evict("ssd", 1).nodes for _ in nodes]
        assert order == [(nodes[n].id,) for n in ORDERS[name]]
        assert memory.usage()["ssd"] == 0


def test_a_promotion_makes_its_own_room(tmp_path: Path) -> None:
    """mooncake#2286: what is only in another tier does not count, so that no more leaves than has to."""
    put_in = singles(6)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 4, "lru") as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes[:4]])
        read_ssd(memory, nodes[0])
        assert memory.promote([nodes[4].id, nodes[5].id]).promoted == 2
        assert resident(memory, nodes) == [0, 3, 4, 5]
        assert memory.usage()["ssd"] == 4 * SIZE
        (record,) = memory.records("eviction")
        assert record.subject == nodes[1].id
        assert record.body == {
            "tier": "ssd",
            "node": "local",
            "policy": "lru",
            "reason": f"{2 * SIZE} bytes are promoted",
            "bytes": 2 * SIZE,
            "pieces": 2,
            "nodes": [nodes[1].id.hex(), nodes[2].id.hex()],
        }
        assert memory.stats()["evictions"] == 1
        assert memory.stats()["bytes_evicted"] == 2 * SIZE
        assert_readable(memory, put_in)


def test_a_promotion_does_not_push_out_what_it_continues(tmp_path: Path) -> None:
    chain, other = make_chain(3), singles(1)
    nodes = [node for node, _ in chain + other]
    with open_small(tmp_path, 3, "lru") as memory:
        put(memory, chain + other)
        memory.promote([node.id for node in nodes[:2]])
        memory.promote([nodes[3].id])
        read_ssd(memory, nodes[3])
        memory.promote([nodes[2].id])
        assert resident(memory, nodes) == [0, 1, 2]
        memory.promote([nodes[3].id])
        assert resident(memory, nodes) == [0, 1, 3]


def test_at_open_nodes_count_in_the_order_in_which_they_were_placed(tmp_path: Path) -> None:
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 4) as memory:
        put(memory, put_in)
        for number in (2, 0, 3, 1):
            memory.promote([nodes[number].id])
    with open_small(tmp_path, 4) as memory:
        order = [memory.residency.evict("ssd", 1).nodes for _ in nodes]
        assert order == [(nodes[n].id,) for n in (2, 0, 3, 1)]


def test_what_was_placed_last_is_not_the_first_victim(tmp_path: Path) -> None:
    """mooncake#3101: a chunk that has just arrived is not evicted at once, though all others were read more often."""
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, None, "slru") as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes[:3]])
        read_ssd(memory, *nodes[:3], *nodes[:3])
        memory.residency.used("ssd")
        memory.promote([nodes[3].id])
        assert memory.residency.evict("ssd", 1).nodes == (nodes[0].id,)
        # Where the others do not suffice it goes too.
        assert memory.residency.evict("ssd", 3 * SIZE).nodes == (nodes[3].id, nodes[1].id, nodes[2].id)


def test_pins_keep_a_node_and_what_leads_to_it(tmp_path: Path) -> None:
    chain, other = make_chain(2), make_chain(2, seed=7, name="other")
    nodes = [node for node, _ in chain + other]
    with open_small(tmp_path, 4) as memory:
        put(memory, chain + other)
        memory.promote([node.id for node in nodes])
        memory.residency.pin([nodes[1].id], tier="ssd", owner="t")
        before = memory.records("eviction")
        with pytest.raises(CapacityError, match=rf"{3 * SIZE} bytes must leave.* of {4 * SIZE} only {2 * SIZE} may"):
            memory.residency.evict("ssd", 3 * SIZE)
        assert resident(memory, nodes) == [0, 1, 2, 3]
        assert memory.records("eviction") == before
        assert memory.residency.evict("ssd", 2 * SIZE).nodes == (nodes[3].id, nodes[2].id)
        assert memory.residency.unpin([nodes[1].id], tier="ssd", owner="t") == 1
        assert memory.residency.evict("ssd", 2 * SIZE).nodes == (nodes[1].id, nodes[0].id)


def test_a_promotion_that_cannot_fit_changes_nothing(tmp_path: Path) -> None:
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2) as memory:
        put(memory, put_in)
        with pytest.raises(CapacityError, match=rf"tier ssd: {SIZE} bytes must leave"):
            memory.promote([node.id for node in nodes[:3]])
        assert memory.usage()["ssd"] == 0
        memory.promote([node.id for node in nodes[:2]])
        with memory.hold([nodes[0].id, nodes[1].id]):
            with pytest.raises(CapacityError, match="only 0 may"):
                memory.promote([nodes[2].id])
            assert resident(memory, nodes) == [0, 1]
            assert memory.records("eviction") == ()
        memory.promote([nodes[2].id])
        assert resident(memory, nodes) == [1, 2]


def test_asking_whether_a_node_is_there_keeps_nothing(tmp_path: Path) -> None:
    """mooncake#2187: existence probes renew nothing, so a full tier still lets go."""
    put_in = singles(2)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2, "lru") as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes])
        for _ in range(200):
            assert memory.available(nodes[0].id, "ssd")
            memory.durable(nodes[0].id)
            memory.placements(nodes[0].pieces[0])
        assert memory.residency.evict("ssd", 1).nodes == (nodes[0].id,)


def test_a_held_node_stays_findable_while_the_tier_is_filled(tmp_path: Path) -> None:
    """pegaflow#434, vllm#39702: lookup, then eviction, then use: the lease keeps what was looked up."""
    put_in = singles(5)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2, "lru") as memory:
        put(memory, put_in)
        memory.promote([nodes[0].id])
        with memory.hold([nodes[0].id]):
            for node in nodes[1:]:
                memory.promote([node.id])
                assert read_back(memory, nodes[0], [SIZE], "ssd") == put_in[0][1]
            assert resident(memory, nodes) == [0, 4]


def test_looked_up_and_never_used_lapses_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmcache#1034: leases that nobody releases end by themselves, with a metric."""
    put_in = singles(2)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2) as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes])
        leases = [memory.hold([nodes[0].id], ttl_s=3600.0) for _ in range(1000)]
        with pytest.raises(CapacityError):
            memory.residency.evict("ssd", 2 * SIZE)
        for lease in leases:
            lease.deadline = 0.0
        assert len(memory.residency.evict("ssd", 2 * SIZE).nodes) == 2
        assert memory.stats()["leases_expired"] == 1000
        assert memory.stats()["leases"] == 0


def test_a_piece_that_another_resident_node_has_stays(tmp_path: Path) -> None:
    shared, own = payload(SIZE, 1), payload(SIZE, 2)
    first = (make_node([shared], name="a"), [shared])
    second = (make_node([shared, own], name="b"), [shared, own])
    with open_small(tmp_path, 4, "lru") as memory:
        put(memory, [first, second])
        memory.promote([first[0].id])
        memory.promote([second[0].id])
        assert memory.residency.used("ssd") == 2 * SIZE
        report = memory.residency.evict("ssd", 1)
        # Without the first node nothing would be freed, so both have to go or the second one alone.
        assert report.bytes in (SIZE, 2 * SIZE)
        assert memory.residency.used("ssd") == 2 * SIZE - report.bytes
        assert_readable(memory, [first, second])


def test_the_last_durable_copy_never_leaves(tmp_path: Path) -> None:
    chain = make_chain(2)
    with open_small(tmp_path, 4) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain])
        with pytest.raises(CapacityError, match="only 0 may"):
            memory.residency.evict("object", 1)
        assert all(memory.durable(node.id) for node, _ in chain)


def test_the_home_tier_lets_go_of_what_another_shared_tier_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2)
    monkeypatch.setattr(
        "numem.store.workspace.Workspace.node_of", lambda work, tier: "" if tier != "ssd" else work.node
    )
    tiers: Mapping[str, str | TierSpec] = {name: str(tmp_path / name) for name in ("object", "cold", "ssd")}
    with Memory(tmp_path / "home", tiers=tiers) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id, chain[1][0].id], "ssd")
        memory.promote([chain[1][0].id], "cold")
        assert memory.residency.evict("object", 1).nodes == (chain[1][0].id,)
        with pytest.raises(CapacityError):
            memory.residency.evict("object", 1)
        assert_readable(memory, chain, "ssd")
        assert memory.available(chain[1][0].id, "cold")
        assert not memory.durable(chain[1][0].id)


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
        assert memory.records("eviction")[0].body["reason"] == "the disk is full"


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
