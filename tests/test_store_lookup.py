"""`Memory.lookup`: one query for many nodes, on a handle that has not loaded the catalog and on one that has."""

import random
import time
from pathlib import Path

import pytest

from numem.errors import IntegrityError
from numem.state.node import Node
from numem.store.catalog import index as index_module
from numem.store.catalog import table as table_module
from numem.store.catalog.catalog import Catalog, Facts
from numem.store.catalog.facts import Clock
from numem.store.catalog.nodes import node_of, node_of_row, node_row, sealed_row
from numem.store.memory import Memory
from numem.store.upkeep.collect import retire
from tests.store_fixtures import SCOPE, assert_readable, flip, make_chain, make_node, payload, put


def _nodes(count: int) -> list[Node]:
    return [make_node([payload(100, number)], name=str(number)) for number in range(count)]


def _append(memory: Memory, nodes: list[Node], each: int) -> None:
    for at in range(0, len(nodes), each):
        memory._parts.catalog.append(Facts(nodes=nodes[at : at + each]))


def _catalog(memory: Memory) -> Catalog:
    return memory._parts.catalog


def test_the_first_lookup_answers_in_order_without_loading(tmp_path: Path) -> None:
    """seed-systems §1.6: one query, requested order, None where missing, duplicates as asked for."""
    nodes = _nodes(40)
    with Memory(tmp_path) as memory:
        _append(memory, nodes, 7)
    asked = [nodes[31].id, bytes(32), nodes[2].id, nodes[31].id, nodes[0].id]
    expected = (nodes[31], None, nodes[2], nodes[31], nodes[0])
    with Memory(tmp_path) as memory:
        assert memory.lookup(asked) == expected
        assert not _catalog(memory)._loaded
        assert memory.lookup(asked) == expected
        assert _catalog(memory)._loaded
        assert memory.lookup([]) == ()
    with Memory(tmp_path, read_only=True) as memory:
        assert memory.lookup(asked) == expected


def test_a_lookup_knows_what_was_retired_and_published_again(tmp_path: Path) -> None:
    """Also behind a compaction, and what another handle appended since this one was opened."""
    chain = make_chain(4, nbytes=100)
    first, second = chain[2][0], chain[3][0]
    with Memory(tmp_path) as memory, Memory(tmp_path) as late:
        put(memory, chain)
        assert retire(memory._parts, [second.id], "collected") == 1
        assert late.lookup([first.id, second.id]) == (first, None)
    with Memory(tmp_path) as memory:
        assert memory.lookup([second.id, first.id]) == (None, first)
        put(memory, chain[3:])
        memory.care.compact(least=1, keep_versions_s=0)
    with Memory(tmp_path) as memory:
        assert memory.lookup([second.id, first.id]) == (second, first)
        assert not _catalog(memory)._loaded
        assert_readable(memory, chain)


def test_rows_without_a_seal_are_looked_up_through_the_digests_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier release wrote."""
    nodes = _nodes(3)
    monkeypatch.setattr(
        "numem.store.catalog.catalog.sealed_row", lambda sequence, node: {"sequence": sequence, **node_row(node)}
    )
    with Memory(tmp_path) as memory:
        _append(memory, nodes, 3)
    with Memory(tmp_path) as memory:
        assert memory.lookup([node.id for node in nodes]) == tuple(nodes)
        assert _catalog(memory)._loaded
        assert memory.recovered == ()


def test_a_seal_covers_every_column() -> None:
    node = make_node([payload(100, 1)], name="sealed")
    row = sealed_row(7, node)
    assert node_of_row(row, sealed=True) == node_of(row) == node
    other = make_node([payload(100, 2)], name="other", start=16)
    changed = sealed_row(8, other)
    for name in row:
        if row[name] != changed[name]:
            with pytest.raises(IntegrityError):
                node_of_row({**row, name: changed[name]}, sealed=True)
    assert {name for name in row if row[name] == changed[name]} == {"parent", "scope", "kind", "count"}
    for name, value in (("parent", bytes(32)), ("scope", bytes(32)), ("kind", "kv"), ("count", 3)):
        with pytest.raises(IntegrityError):
            node_of_row({**row, name: value}, sealed=True)
    with pytest.raises(IntegrityError, match="no digest"):
        node_of_row({"sequence": 7, **node_row(node)}, sealed=True)


def test_a_flipped_bit_anywhere_never_changes_what_a_lookup_answers(tmp_path: Path) -> None:
    """Bits across the data files, of pages, indexes of pages and footers: a first lookup answers the node or nothing,
    and what loads the catalog finds the damage and takes the facts from the volumes again."""
    chain = make_chain(12, nbytes=200)
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path) as memory:
        put(memory, chain)
    (path,) = (tmp_path / "catalog" / "nodes.lance" / "data").iterdir()
    places = random.Random(3).sample(range(path.stat().st_size * 8), 60)
    whole = path.read_bytes()
    hidden = 0
    for bit in places:
        flip(path, bit // 8, bit % 8)
        with Memory(tmp_path, read_only=True) as memory:
            found = memory.lookup(ids)
            hidden += sum(node is None for node in found)
            assert all(node is None or node == chain[at][0] for at, node in enumerate(found))
        path.write_bytes(whole)
    assert hidden <= 12 * len(places)
    flip(path, len(whole) // 3)
    with Memory(tmp_path) as memory:
        memory.lookup(ids)
        assert [entry.kind for entry in memory.recovered] == ["lost", "adopted"]
        assert memory.lookup(ids) == tuple(node for node, _ in chain)
        assert_readable(memory, chain)


def test_many_nodes_are_read_by_row_and_neighbours_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "BLOCK", 8)
    nodes = _nodes(50)
    reads: list[int] = []
    take = table_module.FactTable.take

    def counted(self: table_module.FactTable, fragment: object, numbers: list[int]) -> object:
        reads.append(len(numbers))
        return take(self, fragment, numbers)

    monkeypatch.setattr(table_module.FactTable, "take", counted)
    with Memory(tmp_path) as memory:
        _append(memory, nodes, 25)
        assert [memory.get(node.id) for node in nodes[:10]] == nodes[:10]
        assert reads == [8, 8]
        assert memory.lookup([nodes[40].id, nodes[20].id, nodes[3].id]) == (nodes[40], nodes[20], nodes[3])
        assert reads == [8, 8, 1, 1]
        assert memory.nodes() == tuple(nodes)
        assert memory.children(SCOPE) == tuple(nodes)
        assert memory.nodes("rows") == tuple(nodes) and memory.nodes("kv") == ()


def test_sequences_rise_across_handles_that_load_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock set back between two openings, neither of which reads the catalog: both records are kept."""
    now = time.time_ns()
    with Memory(tmp_path) as memory:
        first = memory.record("r", b"s", {"n": 1})
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**12)
    with Memory(tmp_path) as memory:
        second = memory.record("r", b"s", {"n": 2})
        assert second > first
        assert [record.body for record in memory.records()] == [{"n": 1}, {"n": 2}]
    assert Clock().next() < first


def test_two_hundred_of_many_are_found_fast(tmp_path: Path) -> None:
    """Loose bounds; the figures are in the benchmarks."""
    nodes = _nodes(2_000)
    with Memory(tmp_path) as memory:
        _append(memory, nodes, 500)
    wanted = [node.id for node in nodes[900:1100]]
    with Memory(tmp_path) as memory:
        started = time.perf_counter()
        assert memory.lookup(wanted) == tuple(nodes[900:1100])
        fresh = time.perf_counter() - started
        memory.lookup(wanted)
        laps = []
        for _ in range(5):
            started = time.perf_counter()
            memory.lookup(wanted)
            laps.append(time.perf_counter() - started)
    assert fresh < 2.0
    assert min(laps) < 0.03
