"""Catalog compaction: few fragments, few versions, the same facts; handles that stood on the old files; crashes."""

import shutil
from pathlib import Path

import pytest

from numem.store.memory import Memory
from numem.store.payload.manifests import manifest_path, manifest_versions
from tests.store_fixtures import Chain, assert_readable, die_at, flip, make_chain, put, run_children, sidecars


def _fill(home: Path, count: int = 12) -> Chain:
    chain = make_chain(count)
    with Memory(home) as memory:
        for node, data in chain:
            put(memory, [(node, data)])
        memory.create_branch("main", chain[0][0].id, actor="test", reason="test")
        for node, _ in chain[1:5]:
            branch = memory.branch("main")
            memory.move_branch("main", node.id, expected=branch.head, actor="test", reason="test")
        memory.record("note", chain[0][0].id, {"n": 1})
    return chain


def _assert_whole(memory: Memory, chain: Chain) -> None:
    assert memory.nodes() == tuple(node for node, _ in chain)
    assert_readable(memory, chain)
    assert [move.head for move in memory.log("main")] == [node.id for node, _ in chain[:5]]
    assert [record.body for record in memory.records("note")] == [{"n": 1}]


def test_a_table_becomes_one_fragment_and_old_versions_go(tmp_path: Path) -> None:
    """lance#7941, lance#5194: manifests and versions do not pile up."""
    chain = _fill(tmp_path)
    with Memory(tmp_path) as memory:
        report = memory.care.compact(least=2, keep_versions_s=0)
        assert report.fragments["nodes"] == report.fragments["placements"] == 12
        assert report.bytes_removed > 0
        _assert_whole(memory, chain)
        more = make_chain(2, seed=3, name="more")
        put(memory, more)
        assert memory.care.compact(least=50, keep_versions_s=0).fragments == {}
    assert len(manifest_versions(tmp_path / "catalog" / "nodes.lance")) == 1
    assert len(list((tmp_path / "catalog" / "nodes.lance" / "data").iterdir())) == 2
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        _assert_whole(memory, [*chain, *more])


def test_an_open_handle_goes_on_after_another_compacted(tmp_path: Path) -> None:
    """Nodes that it had not read yet lay in files that are gone; its own appends and moves are kept."""
    chain = _fill(tmp_path)
    with Memory(tmp_path) as reader, Memory(tmp_path) as other:
        assert len(reader.nodes("none")) == 0
        other.care.compact(least=2, keep_versions_s=0)
        assert_readable(reader, chain)
        more = make_chain(1, seed=8, name="more")
        other.care.compact(least=1, keep_versions_s=0)
        put(reader, more)
        head = reader.branch("main").head
        reader.move_branch("main", more[0][0].id, expected=head, actor="test", reason="test")
        assert [move.generation for move in other.log("main")] == [1, 2, 3, 4, 5, 6]
        assert_readable(other, [*chain, *more])


def test_superseded_facts_are_dropped(tmp_path: Path) -> None:
    """Ten quarantines and repairs of one piece leave what a reader needs."""
    chain = make_chain(1)
    with Memory(tmp_path) as memory:
        for _ in range(4):
            put(memory, chain)
            flip(sidecars(tmp_path / "object")[-1], 10)
            assert not memory.verify().ok
        put(memory, chain)
        table = memory._parts.catalog.tables["placements"]
        before = table.dataset.lance.count_rows()
        report = memory.care.compact(least=2)
        assert table.dataset.lance.count_rows() == before - report.rows_dropped
        assert report.rows_dropped >= 4
        assert_readable(memory, chain)
    with Memory(tmp_path) as memory:
        assert_readable(memory, chain)


@pytest.mark.parametrize("shape", ["missing", "empty", "zeros", "half", "flipped"])
@pytest.mark.parametrize("cleaned", [False, True])
def test_a_bad_manifest_after_a_compaction_loses_nothing(tmp_path: Path, shape: str, cleaned: bool) -> None:
    """pond#110 in spirit: the compacted version's manifest is bad; its facts come back from the ledger."""
    chain = _fill(tmp_path)
    more = make_chain(1, seed=9, name="more")
    with Memory(tmp_path) as memory:
        memory.care.compact(least=2, keep_versions_s=0 if cleaned else 3600)
        put(memory, more)
    for name in ("nodes", "placements", "branches"):
        root = tmp_path / "catalog" / f"{name}.lance"
        for version in manifest_versions(root)[: 2 if name != "branches" else 1]:
            _spoil(manifest_path(root, version), shape)
    with Memory(tmp_path) as memory:
        assert memory.recovered
        assert not [report for report in memory.recovered if report.kind == "lost"]
        _assert_whole(memory, [*chain, *more])
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        _assert_whole(memory, [*chain, *more])


def _spoil(path: Path, shape: str) -> None:
    data = path.read_bytes()
    if shape == "missing":
        path.unlink()
    elif shape == "empty":
        path.write_bytes(b"")
    elif shape == "zeros":
        path.write_bytes(bytes(len(data)))
    elif shape == "half":
        path.write_bytes(data[: len(data) // 2])
    else:
        flip(path, len(data) // 2)


def test_a_compacted_file_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    """What it replaced is still there and says the same."""
    chain = _fill(tmp_path)
    root = tmp_path / "catalog" / "nodes.lance"
    before = {path.name for path in (root / "data").iterdir()}
    with Memory(tmp_path) as memory:
        memory.care.compact(least=2, keep_versions_s=3600)
    (new,) = [path for path in (root / "data").iterdir() if path.name not in before]
    new.write_bytes(bytes(new.stat().st_size))
    manifest_path(root, manifest_versions(root)[0]).unlink()
    with Memory(tmp_path) as memory:
        _assert_whole(memory, chain)


def _compact_and_die(home: str, step: str, nth: int) -> None:
    with Memory(home) as memory:
        die_at(step, nth)
        memory.care.compact(least=2, keep_versions_s=0)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("step", "nth"),
    [("written", 1), ("written", 3), ("committed", 1), ("committed", 2), ("fsync ledger", 1), ("fsync directory", 5)],
)
def test_a_compaction_killed_anywhere_loses_nothing(tmp_path: Path, step: str, nth: int) -> None:
    """lance#7207: a maintainer dies; no fact is lost, the next compaction ends the work."""
    chain = _fill(tmp_path)
    assert run_children(_compact_and_die, [(str(tmp_path), step, nth)]) == [-9]
    with Memory(tmp_path) as memory:
        _assert_whole(memory, chain)
        memory.care.compact(least=2, keep_versions_s=0)
        _assert_whole(memory, chain)
        assert memory.verify().ok
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()


def test_everything_of_the_catalog_can_be_rebuilt_after_a_compaction(tmp_path: Path) -> None:
    """A table whose directory is gone comes back from the volumes, and one whose manifests are gone from the ledger."""
    chain = _fill(tmp_path)
    with Memory(tmp_path) as memory:
        memory.care.compact(least=2, keep_versions_s=0)
    shutil.rmtree(tmp_path / "catalog" / "nodes.lance")
    for path in (tmp_path / "catalog" / "branches.lance" / "_versions").iterdir():
        path.unlink()
    with Memory(tmp_path) as memory:
        assert {report.kind for report in memory.recovered} >= {"rebuilt"}
        _assert_whole(memory, chain)
