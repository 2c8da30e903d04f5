"""Catalog tables without any good manifest: made anew from the ledger and the volumes, reported, never refused."""

import shutil
from pathlib import Path

import pytest

from numem.state.node import Node
from numem.store.catalog.catalog import Catalog
from numem.store.catalog.facts import ORDER, SCHEMAS
from numem.store.memory import Memory
from numem.store.payload.manifests import manifest_path, manifest_versions
from numem.store.upkeep.doctor import repair
from tests.store_fixtures import assert_readable, flip, make_chain, put

Chain = list[tuple[Node, list[bytes]]]


def _fill(home: Path) -> list[Chain]:
    """A memory with three commits of nodes, a record and a branch; its events and identities are empty."""
    chains = [make_chain(2, seed=n, name=str(n)) for n in range(3)]
    with Memory(home) as memory:
        for chain in chains:
            put(memory, chain)
        memory.record("note", chains[0][0][0].id, {"n": 1})
        memory.create_branch("main", chains[0][0][0].id, actor="test", reason="test")
    return chains


def _assert_whole(memory: Memory, chains: list[Chain]) -> None:
    for chain in chains:
        assert_readable(memory, chain)
        assert all(memory.durable(node.id) for node, _ in chain)
    assert len(memory.nodes()) == 6
    assert memory.verify().ok
    assert memory.usage()["object"] == 6 * 70_000


def _assert_goes_on(home: Path, chains: list[Chain]) -> None:
    """The next open finds nothing to do, and publication works across it."""
    more = make_chain(2, seed=9, name="more")
    with Memory(home) as memory:
        assert memory.recovered == ()
        _assert_whole(memory, chains)
        assert put(memory, more).stored == 2
    with Memory(home) as memory:
        assert memory.recovered == ()
        assert_readable(memory, more)


@pytest.mark.parametrize("table", SCHEMAS)
def test_every_manifest_of_a_table_flipped(tmp_path: Path, table: str) -> None:
    """One bit in each manifest (an empty table has but one): the table is made anew, nothing of it is lost."""
    chains = _fill(tmp_path)
    root = tmp_path / "catalog" / f"{table}.lance"
    for version in manifest_versions(root):
        path = manifest_path(root, version)
        flip(path, path.stat().st_size // 2)
    with Memory(tmp_path) as memory:
        assert memory.recovered[0].kind == "rebuilt"
        assert memory.recovered[0].dataset == f"catalog/{table}"
        assert "lost" not in {entry.kind for entry in memory.recovered}
        _assert_whole(memory, chains)
        assert [record.body for record in memory.records("note")] == [{"n": 1}]
        assert memory.branch("main").head == chains[0][0][0].id
    assert list((tmp_path / "quarantine").glob(f"catalog-{table}._versions.*"))
    _assert_goes_on(tmp_path, chains)


@pytest.mark.parametrize("table", ["events", "nodes", "placements"])
def test_a_deleted_table(tmp_path: Path, table: str) -> None:
    """Its data files are gone as well: nodes and placements come from the volumes."""
    chains = _fill(tmp_path)
    shutil.rmtree(tmp_path / "catalog" / f"{table}.lance")
    with Memory(tmp_path) as memory:
        kinds = {entry.kind for entry in memory.recovered}
        assert kinds == ({"rebuilt"} if table == "events" else {"rebuilt", "lost", "adopted"})
        _assert_whole(memory, chains)
    _assert_goes_on(tmp_path, chains)


def test_a_deleted_catalog(tmp_path: Path) -> None:
    """What only the catalog held (records, branches) is named as lost; what the volumes hold is back."""
    chains = _fill(tmp_path)
    shutil.rmtree(tmp_path / "catalog")
    with Memory(tmp_path) as memory:
        rebuilt = [entry.dataset for entry in memory.recovered if entry.kind == "rebuilt"]
        assert rebuilt == [f"catalog/{table}" for table in ORDER]
        assert {entry.dataset for entry in memory.recovered if entry.kind == "lost"} == {
            f"catalog/{table}" for table in ("placements", "records", "branches", "nodes")
        }
        _assert_whole(memory, chains)
        assert memory.records("note") == ()
    _assert_goes_on(tmp_path, chains)


def test_a_table_that_is_a_file(tmp_path: Path) -> None:
    """Whatever stands where the table was is set aside."""
    chains = _fill(tmp_path)
    root = tmp_path / "catalog" / "events.lance"
    shutil.rmtree(root)
    root.write_bytes(b"?")
    with Memory(tmp_path) as memory:
        assert [entry.kind for entry in memory.recovered] == ["rebuilt"]
        _assert_whole(memory, chains)
    assert [path.read_bytes() for path in (tmp_path / "quarantine").glob("catalog-events.*")] == [b"?"]
    _assert_goes_on(tmp_path, chains)


def test_volumes_of_another_node_and_of_a_running_process_are_read_too(tmp_path: Path) -> None:
    """Every volume of the home tier counts, not only those that the process at work may append to."""
    chains = [make_chain(2, seed=n, name=str(n)) for n in range(2)]
    with Memory(tmp_path, node="far", local=tmp_path / "far") as memory:
        put(memory, chains[0])
    with Memory(tmp_path) as running:
        put(running, chains[1])
        for table in ("nodes", "placements"):
            shutil.rmtree(tmp_path / "catalog" / f"{table}.lance")
        with Memory(tmp_path) as memory:
            for chain in chains:
                assert_readable(memory, chain)
                assert all(memory.durable(node.id) for node, _ in chain)
            assert memory.verify().ok
    with Memory(tmp_path, node="far", local=tmp_path / "far") as memory:
        assert memory.recovered == ()
        assert put(memory, chains[0]).stored == 0


def test_a_writer_that_catalogues_and_ends_while_another_opens_is_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volume looks uncatalogued from a catalog read before its commit; adoption reads again under the lock."""
    chain = make_chain(8)
    Memory(tmp_path).close()
    opened = Catalog.open

    def then_publish(catalog: Catalog) -> None:
        opened(catalog)
        monkeypatch.setattr(Catalog, "open", opened)
        with Memory(tmp_path) as other:
            assert put(other, chain).stored == 8

    monkeypatch.setattr(Catalog, "open", then_publish)
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)
        table = memory._parts.catalog.tables["nodes"].dataset.lance.to_table(columns=["id"])
        assert table.num_rows == 8


def test_two_damaged_volumes_of_one_writer_are_both_written_anew(tmp_path: Path) -> None:
    """What is copied out of the first does not go into the second, which has room and is as damaged."""
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        put(memory, chain[:2])
        memory.care.close_volumes()
        put(memory, chain[2:])
    for data in tmp_path.glob("object/*.lance/data/*.lance"):
        flip(data, 40, 2)
    mended = repair(tmp_path)
    assert mended.ok, mended
    assert sorted(path.stem for path in tmp_path.glob("object/*.lance")) == ["local.w000.000003"]
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)
