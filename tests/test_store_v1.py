"""A memory of format 1, written once by tests/data/make_store_v1.py, stays readable for ever."""

import shutil
from pathlib import Path

import pytest

from numem.store.memory import Memory
from tests.store_fixtures import assert_readable, make_chain, make_node, payload, put, read_back, tree

KEPT = Path(__file__).parent / "data" / "store-v1"
SMALL = [payload(100 + 16 * n, n) for n in range(3)]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy, since opening a memory may write beside it."""
    return Path(shutil.copytree(KEPT, tmp_path / "store-v1"))


def test_every_node_reads_as_it_was_written(kept: Path) -> None:
    chain = make_chain(2, nbytes=66_048, seed=11, name="v1")
    leaf = make_node(SMALL, parent=chain[-1][0].id, start=32, name="leaf")
    with Memory(kept) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)
        assert_readable(memory, chain[:1], tier="ssd")
        assert_readable(memory, chain, tier="object")
        assert memory.chain(leaf.id) == (chain[0][0], chain[1][0], leaf)
        assert read_back(memory, leaf, [len(data) for data in SMALL]) == SMALL
        assert memory.manifest(chain[1][0].id).logical_coordinate == {"row": 32}
        assert memory.verify().ok


def test_its_facts_read_as_they_were_written(kept: Path) -> None:
    chain = make_chain(2, nbytes=66_048, seed=11, name="v1")
    leaf = make_node(SMALL, parent=chain[-1][0].id, start=32, name="leaf")
    with Memory(kept) as memory:
        (description,) = memory.identities().values()
        assert description["semantic"] == {"made_by": "make_store_v1", "version": 1}
        assert [(b.name, b.head, b.generation, b.source) for b in memory.branches()] == [
            ("fork", leaf.id, 2, "main"),
            ("main", chain[1][0].id, 1, ""),
        ]
        (record,) = memory.records("decision")
        assert (record.subject, record.body) == (leaf.id, {"choice": "restore", "cost_ms": 1.5})
        (event,) = memory.events
        assert event.subject == chain[0][0].id


def test_it_is_gone_on_with(kept: Path) -> None:
    """Format 1 is not only read: new nodes join it, its own are recognised."""
    chain = make_chain(2, nbytes=66_048, seed=11, name="v1")
    before = tree(kept / "object")
    with Memory(kept) as memory:
        assert put(memory, chain).stored == 0
        assert tree(kept / "object") == before
        assert put(memory, make_chain(3, seed=12, name="new")).stored == 3
    with Memory(kept) as memory:
        assert_readable(memory, [*chain, *make_chain(3, seed=12, name="new")])
