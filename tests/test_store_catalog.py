"""The catalog: an ordinary LanceDB database outside, dictionaries inside."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from numem.state.node import Node
from numem.store.catalog import table as table_module
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import SCHEMAS, Clock, Placement, State
from numem.store.memory import Memory
from tests.store_fixtures import SCOPE, assert_readable, make_chain, make_node, payload, put

IDS = np.random.default_rng(5)


def _nodes(count: int) -> list[Node]:
    parent, nodes = SCOPE, []
    for number in range(count):
        node = Node(
            id=IDS.bytes(32),
            parent=parent,
            scope=SCOPE,
            kind="kv",
            start=256 * number,
            count=256,
            applied=IDS.bytes(2048),
            pieces=(IDS.bytes(32),),
            fields=({"id": "kv", "value": {"dtype": "bfloat16", "shape": [60, 256, 192]}, "chunks": []},),
            coordinate={"processed_count": 256 * (number + 1)},
            marks=tuple(IDS.bytes(32) for _ in range(16)),
            append_axis=1,
            provenance={"numem": "0.1.0"},
        )
        nodes.append(node)
        parent = node.id
    return nodes


def _place(clock: Clock, content: bytes) -> Placement:
    return Placement(clock.next(), content, "object", "", "local.w000.000001", "f.lance", 1, 0, 10, 0, 0, bytes(16))


def test_ten_thousand_nodes_open_and_look_up_fast(tmp_path: Path) -> None:
    """Opening loads ids, parents and placements; 32 steps down a chain of chunks take well under a millisecond."""
    nodes = _nodes(10_000)
    with Memory(tmp_path) as memory:
        catalog = memory._parts.catalog
        for at in range(0, len(nodes), 500):
            some = nodes[at : at + 500]
            places = [_place(catalog.clock, node.pieces[0]) for node in some]
            catalog.append(Facts(placements=places, nodes=some))
    started = time.perf_counter()
    memory = Memory(tmp_path)
    opened = time.perf_counter() - started
    with memory:
        assert memory.stats()["nodes"] == 10_000
        laps = []
        for _ in range(5):
            started = time.perf_counter()
            parent = SCOPE
            for expected in nodes[:32]:
                (node,) = memory.children(parent)
                assert node.id == expected.id
                parent = node.id
            laps.append(time.perf_counter() - started)
        assert memory.get(nodes[7_777].id) == nodes[7_777]
        assert memory.available(nodes[9_999].id)
        assert memory.chain(nodes[99].id) == tuple(nodes[:100])
    # Loose bounds: the machine is shared. The figures are in the benchmarks.
    assert opened < 2.0
    assert min(laps) < 0.003


def test_lancedb_opens_the_catalog(tmp_path: Path) -> None:
    """numem goes through Lance itself; the directory is a LanceDB database all the same."""
    import lancedb

    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    database = lancedb.connect(str(tmp_path / "catalog"))
    found = {name: database.open_table(name).count_rows() for name in SCHEMAS}
    assert found == {
        "identities": 0,
        "placements": 4,
        "records": 0,
        "events": 0,
        "branches": 0,
        "claims": 0,
        "retired": 0,
        "nodes": 3,
    }
    rows = database.open_table("nodes").search().where(f"id = X'{chain[1][0].id.hex()}'").to_list()
    assert [row["parent"] for row in rows] == [chain[0][0].id]


def test_keys_are_binary_or_string_and_nothing_is_nullable() -> None:
    """storage: never FixedSizeBinary (lance#8949: racing merges duplicate it, 60 of 60)."""
    for schema in SCHEMAS.values():
        for field in schema:
            assert field.type in (pa.int64(), pa.string(), pa.binary(), pa.bool_())
            assert not field.nullable


def test_a_btree_is_built_when_there_are_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "INDEX_ROWS", 40)
    chains = [make_chain(15, nbytes=100, seed=n, name=str(n)) for n in range(8)]
    with Memory(tmp_path) as memory:
        for chain in chains:
            put(memory, chain)
        for name, key in (("nodes", "id_idx"), ("placements", "content_idx")):
            lance = memory._parts.catalog.tables[name].dataset.lance
            assert [index.name for index in lance.describe_indices()] == [key]
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        for chain in chains:
            assert_readable(memory, chain)


def test_duplicate_rows_change_no_answer(tmp_path: Path) -> None:
    """lance#8949, lance PR#9238: readers treat rows as a set."""
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        catalog = memory._parts.catalog
        again = [place for node, _ in chain for place in memory.placements(node.pieces[0])]
        catalog.append(Facts(placements=again, nodes=[node for node, _ in chain]))
        assert memory.nodes() == tuple(node for node, _ in chain)
        assert memory.usage()["object"] == 210_000
    with Memory(tmp_path) as memory:
        assert memory.nodes() == tuple(node for node, _ in chain)
        assert memory.usage()["object"] == 210_000
        assert_readable(memory, chain)


def test_the_newest_state_of_a_copy_holds_whatever_the_order_of_rows(tmp_path: Path) -> None:
    data = [payload(70_000, 1)]
    node = make_node(data)
    with Memory(tmp_path) as memory:
        put(memory, [(node, data)])
        (place,) = memory.placements(node.pieces[0])
        clock = memory._parts.clock
        first, second = clock.next(), clock.next()
        catalog = memory._parts.catalog
        catalog.append(Facts(placements=[place.turned(second, State.QUARANTINED, "late")]))
        catalog.append(Facts(placements=[place.turned(first, State.READY, "early, arrives late")]))
        assert not memory.available(node.id)
    with Memory(tmp_path) as memory:
        assert not memory.available(node.id)


def test_the_clock_never_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock set back, or another process ahead: sequences go on rising."""
    clock = Clock()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000)
    assert [clock.next(), clock.next()] == [1_000, 1_001]
    clock.observe(5_000)
    monkeypatch.setattr(time, "time_ns", lambda: 10)
    assert clock.next() == 5_001
    monkeypatch.setattr(time, "time_ns", lambda: 9_000)
    assert clock.next() == 9_000
