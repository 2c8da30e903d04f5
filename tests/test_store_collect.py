"""Collection: what is reached stays, what is not goes, and its space comes back."""

import time
from pathlib import Path
from typing import Any

import pytest

from numem.errors import NotFoundError
from numem.store.memory import Memory
from numem.store.upkeep.collect import retire
from tests.store_fixtures import Chain, assert_readable, die_at, make_chain, payload, put, run_children, tree


def _payload_bytes(root: Path) -> int:
    return sum(size for name, (size, _) in tree(root).items() if name.endswith(".blob"))


def _two(memory: Memory) -> tuple[Chain, Chain]:
    kept, loose = make_chain(4, name="kept"), make_chain(4, seed=1, name="loose")
    put(memory, kept)
    put(memory, loose)
    memory.create_branch("main", kept[-1][0].id, actor="test", reason="test")
    return kept, loose


def test_nothing_is_retired_unless_asked(tmp_path: Path) -> None:
    """By default a collection only takes what no published node needs."""
    with Memory(tmp_path) as memory:
        kept, loose = _two(memory)
        report = memory.care.collect(grace_s=0)
        assert (report.retired, report.evicted, report.removed) == (0, 0, 0)
        assert_readable(memory, [*kept, *loose])


def test_what_no_branch_reaches_goes_and_its_space_comes_back(tmp_path: Path) -> None:
    """Mark from the heads, sweep, rewrite what is mostly dead; the living are byte-equal, then and after a reopen."""
    with Memory(tmp_path) as memory:
        kept, loose = _two(memory)
        before = _payload_bytes(tmp_path / "object")
        memory._parts.home.close_volume()
        report = memory.care.collect(retain_s=0, grace_s=0, dead_fraction=0.3)
        assert (report.retired, report.evicted, report.rewritten) == (4, 4, 1)
        assert report.evicted_bytes == 4 * 70_000
        assert _payload_bytes(tmp_path / "object") <= before / 2 + 4096
        for node, _ in loose:
            assert memory.get(node.id) is None
            assert not memory.available(node.id)
            with pytest.raises(NotFoundError):
                memory.read([(node.pieces[0], bytearray(70_000))])
        assert_readable(memory, kept)
        assert memory.verify().ok
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert len(memory.nodes()) == 4
        assert_readable(memory, kept)
        assert put(memory, loose).stored == 4
        assert_readable(memory, loose)


def test_a_reopened_memory_gives_back_the_space_of_all_its_volumes(tmp_path: Path) -> None:
    """What lives in the first volume is not put into the last one, which has room and is as dead."""
    chain = make_chain(8)
    with Memory(tmp_path) as memory:
        put(memory, chain[:4])
        memory.care.close_volumes()
        put(memory, chain[4:])
        retire(memory._parts, [node.id for node, _ in (*chain[1:4], *chain[5:])], "collected")
    with Memory(tmp_path) as memory:
        report = memory.care.collect(grace_s=0)
        assert (report.removed, report.rewritten) == (2, 2)
        assert [path.stem for path in tmp_path.glob("object/*.lance")] == ["local.w000.000003"]
        assert_readable(memory, [chain[0], chain[4]])


def test_a_retired_node_can_be_published_again(tmp_path: Path) -> None:
    """Before its bytes are gone they are used again; afterwards they are written anew."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory, Memory(tmp_path) as other:
        put(memory, chain)
        assert memory.care.collect(retain_s=0).retired == 2
        assert other.nodes() == ()
        assert put(memory, chain).reused == 2
        assert_readable(other, chain)
        memory.care.compact(least=1, keep_versions_s=0)
        assert_readable(other, chain)
    with Memory(tmp_path) as memory:
        assert_readable(memory, chain)


def test_pins_leases_and_demands_keep_a_node_and_what_leads_to_it(tmp_path: Path) -> None:
    """seed 1.9: what is claimed is not collected; a hold of this process neither."""
    chains = [make_chain(3, seed=n, name=str(n)) for n in range(4)]
    with Memory(tmp_path) as memory:
        for chain in chains:
            put(memory, chain)
        memory.residency.pin([chains[0][1][0].id], owner="test")
        memory.residency.demand([chains[1][1][0].id], "ssd", owner="test")
        with memory.hold([chains[2][1][0].id]):
            assert memory.care.collect(retain_s=0, grace_s=0).retired == 3 + 3
        for chain in chains[:3]:
            assert_readable(memory, chain[:2])
            assert memory.get(chain[2][0].id) is None
        assert memory.care.collect(retain_s=0, grace_s=0).retired == 2


def test_a_staged_node_keeps_its_ancestors(tmp_path: Path) -> None:
    """The spool is a reference too: what is staged there is published next."""
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain[:2])
        memory.stage(*chain[2])
        assert memory.care.collect(retain_s=0, grace_s=0).retired == 0
        memory.publish_staged()
        assert_readable(memory, chain)


def test_second_copies_in_one_tier_go(tmp_path: Path) -> None:
    """Two writers that stored one piece, or a crash in the middle of a rewrite, leave one copy in the end."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        parts = memory._parts
        parts.home.close_volume()
        copies = [memory.placements(node.pieces[0])[0] for node, _ in chain]
        from numem.store.upkeep.collect import rewrite

        rewrite(parts, parts.home, copies, {})
        for node, _ in chain:
            (copy,) = memory.placements(node.pieces[0])
            assert copy.volume.endswith("000002")
        report = memory.care.collect(grace_s=0)
        assert report.removed == 1
        assert_readable(memory, chain)


def test_the_open_volume_of_a_running_writer_is_let_be(tmp_path: Path) -> None:
    """Only closed volumes change; another process may append to this one."""
    with Memory(tmp_path) as writer, Memory(tmp_path) as other:
        _, loose = _two(writer)
        before = tree(tmp_path / "object")
        report = other.care.collect(retain_s=0, grace_s=0)
        assert report.retired == 4
        assert (report.removed, report.rewritten) == (0, 0)
        assert tree(tmp_path / "object") == before
    with Memory(tmp_path) as memory:
        assert memory.care.collect(grace_s=0, dead_fraction=0.3).rewritten == 1
        assert memory.get(loose[0][0].id) is None


def test_a_young_piece_is_not_taken(tmp_path: Path) -> None:
    """mooncake#3101: right after it lost its last node a piece stays for the grace."""
    with Memory(tmp_path) as memory:
        _two(memory)
        report = memory.care.collect(retain_s=0)
        assert (report.retired, report.evicted) == (4, 0)
        assert memory.care.collect(retain_s=0, grace_s=1000).evicted == 0
        time.sleep(0.01)
        assert memory.care.collect(retain_s=0, grace_s=0.001).evicted == 4


def _collect_and_die(home: str, step: str, nth: int) -> None:
    with Memory(home) as memory:
        die_at(step, nth)
        memory.care.collect(retain_s=0, grace_s=0, dead_fraction=0.3)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("step", "nth"),
    [("written", 1), ("committed", 1), ("committed", 2), ("committed", 3), ("committed", 4), ("volume unmarked", 1)],
)
def test_a_collection_killed_anywhere_loses_nothing(tmp_path: Path, step: str, nth: int) -> None:
    """lance#8942, lance#7207: whatever is left over is removed by the next one; the living stay byte-equal."""
    with Memory(tmp_path) as memory:
        kept, loose = _two(memory)
    assert run_children(_collect_and_die, [(str(tmp_path), step, nth)]) == [-9]
    with Memory(tmp_path) as memory:
        assert_readable(memory, kept)
        memory._parts.home.close_volume()
        for _ in range(2):
            memory.care.collect(retain_s=0, grace_s=0, dead_fraction=0.3)
            assert_readable(memory, kept)
        assert memory.verify().ok
        assert [memory.get(node.id) for node, _ in loose] == [None] * 4
        assert _payload_bytes(tmp_path / "object") == 4 * -(-len(payload(70_000, 0)) // 4096) * 4096
    with Memory(tmp_path) as memory:
        assert_readable(memory, kept)


def test_a_piece_collected_while_its_node_is_published_again_is_written_again(tmp_path: Path) -> None:
    """The publisher found it durable, then the collection took it; the node must not point at nothing."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory, Memory(tmp_path) as other:
        put(other, chain)
        other._parts.home.close_volume()
        for node, data in chain:
            memory.stage(node, data)  # published already: nothing to stage
        assert other.care.collect(retain_s=0).retired == 2
        for node, data in chain:
            assert memory.stage(node, data)
        transaction = memory._parts.catalog.transaction
        calls = [0]

        def collect_first() -> Any:
            calls[0] += 1
            if calls[0] == 1:
                assert other.care.collect(grace_s=0).evicted == 2
            return transaction()

        memory._parts.catalog.transaction = collect_first  # type: ignore[method-assign]
        report = memory.publish_staged()
        assert (report.nodes, report.stored) == (2, 2)
        assert_readable(memory, chain)
        assert_readable(other, chain)
        assert memory.verify().ok
