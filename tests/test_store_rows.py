"""Rows of the case pages that belong to no single part of the store."""

import mmap
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numem.errors import IntegrityError
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.store.memory import Memory
from tests.store_fixtures import SCOPE, Chain, assert_readable, make_chain, make_node, payload, put, tree


def _payload_bytes(root: Path) -> int:
    return sum(size for name, (size, _) in tree(root).items() if name.endswith(".blob"))


def _round(memory: Memory) -> Any:
    memory._parts.home.close_volume()
    return memory.care.maintain(retain_s=0, grace_s=0, keep_versions_s=0, dead_fraction=0.2, least=2)


def test_a_fork_does_not_depend_on_what_it_was_forked_from(tmp_path: Path) -> None:
    """lance#7514: the parent branch is deleted, collected and cleaned up behind a fork, which reads every byte."""
    trunk = make_chain(4, name="trunk")
    data = [payload(70_000, 77)]
    leaf = make_node(data, parent=trunk[1][0].id, start=trunk[1][0].end, name="leaf")
    with Memory(tmp_path) as memory:
        put(memory, [*trunk, (leaf, data)])
        memory.create_branch("trunk", trunk[-1][0].id, actor="test", reason="test")
        memory.create_branch("fork", leaf.id, source="trunk", actor="test", reason="test")
        assert memory.care.forget(branch="trunk", actor="test", reason="test").nodes == 2
        _round(memory)
        fork = [*trunk[:2], (leaf, data)]
        assert memory.chain(leaf.id) == tuple(node for node, _ in fork)
        assert_readable(memory, fork)
    with Memory(tmp_path) as memory:
        assert_readable(memory, fork)
        assert [branch.name for branch in memory.branches()] == ["fork"]
    used = [path for path in Path("numem").rglob("*.py") if "shallow_clone" in path.read_text()]
    assert used == []


def test_an_old_pin_does_not_keep_newer_garbage(tmp_path: Path) -> None:
    """lance#8516, lance#8705: bytes fall to what is alive and pinned, and to what is alive once the pin is gone."""
    pinned, live = make_chain(1, name="pinned"), make_chain(1, seed=1, name="live")
    one = -(-70_000 // 4096) * 4096
    with Memory(tmp_path) as memory:
        put(memory, pinned)
        memory.residency.pin([pinned[0][0].id], owner="test")
        put(memory, live)
        memory.create_branch("live", live[0][0].id, actor="test", reason="test")
        for number in range(6):
            put(memory, make_chain(3, seed=10 + number, name=str(number)))
            _round(memory)
            assert _payload_bytes(tmp_path / "object") == 2 * one
        assert_readable(memory, [*pinned, *live])
        assert memory.residency.unpin([pinned[0][0].id], owner="test") == 1
        _round(memory)
        assert _payload_bytes(tmp_path / "object") == one
        assert_readable(memory, live)


def test_a_restore_maps_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors#729, safetensors#562: rows come by positioned reads, so a copy behind them meets no page fault."""
    chain = make_chain(4, nbytes=300_000)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain], "ssd")
        assert_readable(memory, chain)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a payload file was mapped")

        monkeypatch.setattr(mmap, "mmap", refuse)
        assert_readable(memory, chain, "ssd")
        assert_readable(memory, chain, "object")


def test_collection_goes_by_the_catalog_in_a_memory_of_an_earlier_release(tmp_path: Path) -> None:
    """llm-d-kv-cache commit 01684fc (#611): what an older layout wrote is found and collected like anything else."""
    shutil.copytree(Path(__file__).parent / "data" / "store-v1", tmp_path / "memory")
    with Memory(tmp_path / "memory") as memory:
        before = _payload_bytes(tmp_path / "memory" / "object")
        nodes = memory.nodes()
        assert nodes and before
        heads = {branch.head for branch in memory.branches()}
        kept = {node.id for head in heads for node in memory.chain(head)}
        report = memory.care.collect(retain_s=0, grace_s=0, dead_fraction=0)
        assert report.retired == len(nodes) - len(kept)
        assert {node.id for node in memory.nodes()} == kept
        assert memory.verify().ok
        memory.care.forget(scope=nodes[0].scope, actor="test", reason="test")
        assert memory.nodes() == ()
        assert _payload_bytes(tmp_path / "memory" / "object") == 0


def test_a_new_instance_takes_nothing_from_a_running_one(tmp_path: Path) -> None:
    """UCM commit 0b295a3 (#566): volumes, spool and locks of a live process are its own."""
    chain = make_chain(3)
    with Memory(tmp_path) as first:
        put(first, chain[:1])
        first.stage(*chain[1])
        with Memory(tmp_path) as second:
            assert second.recovered == ()
            _round(second)
            put(second, make_chain(1, seed=4, name="second"))
        assert first.publish_staged().nodes == 1
        put(first, chain[2:])
        assert_readable(first, chain)
        names = {path.name.split(".")[1] for path in (tmp_path / "object").glob("*.volume")}
        assert names == {"w000", "w001"}
    assert SCOPE == chain[0][0].parent


def test_ranks_of_one_model_do_not_share_state(tmp_path: Path) -> None:
    """lmcache#2310, lmcache#1739, lmcache#1467, lmcache#1379, lmcache#2405, UCM#716: the rank stands in the identity;
    the usable prefix is the shortest over the ranks; a shard of another rank is refused."""
    policy = NumericPolicy("test", bytes(32))
    ranks = [Identity({"weights": "w", "shard": {"rank": rank, "of": 2}}, policy, "cpu") for rank in range(2)]
    assert ranks[0].compare(ranks[1]).fields == ("semantic.shard.rank",)
    chains: list[Chain] = []
    for identity in ranks:
        chain: Chain = []
        for number in range(3):
            data = [payload(70_000, 100 * len(chains) + number)]
            parent = chain[-1][0].id if chain else identity.scope
            node = make_node(data, parent=parent, start=16 * number, name="shard")
            chain.append((replace(node, scope=identity.scope), data))
        chains.append(chain)

    def length(memory: Memory, scope: bytes) -> int:
        boundary, count = scope, 0
        while found := [node for node in memory.children(boundary) if memory.available(node.id)]:
            boundary, count = found[0].id, count + 1
        return count

    with Memory(tmp_path) as memory:
        for identity, chain in zip(ranks, chains, strict=True):
            memory.register(identity)
            put(memory, chain)
        assert [length(memory, identity.scope) for identity in ranks] == [3, 3]
        memory.care.forget(ids=[chains[1][2][0].id], actor="test", reason="evicted")
        assert min(length(memory, identity.scope) for identity in ranks) == 2
        with pytest.raises(IntegrityError):
            memory.stage(chains[1][2][0], chains[0][2][1])


def test_reads_do_not_grow_with_the_number_of_fragments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lance#3751, lance#8914, lance#3080: a restore of k chunks costs at most 2 k system calls that read payload, whatever
    lies beside them, before and after a compaction."""
    chain = make_chain(4, nbytes=300_000)
    calls: list[int] = []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        calls.append(args[0])
        return preadv(*args)

    with Memory(tmp_path) as memory:
        put(memory, chain)
        for number in range(12):
            put(memory, make_chain(1, seed=number + 1, name=str(number)))
            assert_readable(memory, chain)
        monkeypatch.setattr(os, "preadv", counted)
        buffers = [(node.pieces[0], bytearray(300_000)) for node, _ in chain]
        for _ in range(2):
            calls.clear()
            memory.read(buffers)
            assert [bytes(buffer) for _, buffer in buffers] == [data for _, (data,) in chain]
            assert 1 <= len(calls) <= 2 * len(chain)
            memory.care.compact(least=1, keep_versions_s=0)
