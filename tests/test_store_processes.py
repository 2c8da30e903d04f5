"""Several processes on one memory: racing creation, racing publication, facts of others, forks."""

import os
import signal
import time
from pathlib import Path

import pytest

from numem.errors import ClosedError
from numem.store.memory import Memory
from tests.store_fixtures import SCOPE, assert_readable, make_chain, make_node, payload, put, run_children, tree


def _wait_for(start: float) -> None:
    while time.time() < start:
        time.sleep(0.001)


def _publish_all(home: str, start: float, count: int) -> None:
    _wait_for(start)
    with Memory(home) as memory:
        for node, data in make_chain(count):
            memory.stage(node, data)
        report = memory.publish_staged()
        assert not report.missing and not report.conflicts
        assert put(memory, make_chain(count)).nodes == count


def test_processes_that_create_and_publish_the_same_nodes_all_succeed(tmp_path: Path) -> None:
    """lance#2403, lance#4451 (racing creation), lmcache#2517, lance#8949, lance PR#9238: four processes start on an
    empty directory and publish the same 32 nodes: one visible row per causal id, everybody is told of success."""
    codes = run_children(_publish_all, [(str(tmp_path), time.time() + 2.5, 32)] * 4)
    assert codes == [0] * 4
    chain = make_chain(32)
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)
        assert memory.nodes() == tuple(node for node, _ in chain)
        table = memory._parts.catalog.tables["nodes"].dataset.lance.to_table(columns=["id"])
        assert sorted(table.column("id").to_pylist()) == sorted(node.id for node, _ in chain)
        assert memory.verify().ok
        # Whoever wrote a piece as well as the first one did not enter it into the catalog.
        assert [len(memory.placements(node.pieces[0])) for node, _ in chain] == [1] * 32
        assert memory.staged() == ()
    names = {path.stem.split(".")[1] for path in (tmp_path / "object").glob("*.volume")}
    assert 1 <= len(names) <= 4  # writers of their own where they ran at once, however many slots the race needed


def _publish_rival(home: str, start: float, seed: int) -> None:
    with Memory(home) as memory:
        data = [payload(70_000, seed)]
        node = make_node(data)
        _wait_for(start)
        receipt = memory.publish(node, data).published.result(timeout=30)
        print(receipt)


def test_two_processes_with_other_floats_for_one_causal_id(tmp_path: Path) -> None:
    """seed case 41: the first wins, the other is recorded, both are told; whoever reads sees the same one."""
    assert run_children(_publish_rival, [(str(tmp_path), time.time() + 2.5, seed) for seed in (1, 2)]) == [0, 0]
    rivals = [make_node([payload(70_000, seed)]) for seed in (1, 2)]
    seen = set()
    for _ in range(2):
        with Memory(tmp_path) as memory:
            (node,) = memory.nodes()
            assert node in rivals
            (event,) = memory.events
            assert event.body["held"] == [node.pieces[0].hex()]
            seen.add(node.pieces)
    assert len(seen) == 1


def _append_for(home: str, start: float, number: int) -> None:
    with Memory(home) as memory:
        _wait_for(start)
        for node, data in make_chain(5, seed=number, name=f"p{number}"):
            memory.stage(node, data)
            memory.publish_staged([node.id])
            memory.record("note", node.id, {"by": number})


def test_appends_of_several_processes_are_all_kept_and_seen_by_an_open_handle(tmp_path: Path) -> None:
    """Catalog appends from several processes: all kept, and a handle opened before sees them at its next lookup."""
    with Memory(tmp_path) as memory:
        assert memory.children(SCOPE) == ()
        codes = run_children(_append_for, [(str(tmp_path), time.time() + 2.0, number) for number in range(3)])
        assert codes == [0] * 3
        chains = [make_chain(5, seed=number, name=f"p{number}") for number in range(3)]
        assert {node.id for node in memory.children(SCOPE)} == {chain[0][0].id for chain in chains}
        for chain in chains:
            assert_readable(memory, chain)
        assert len(memory.records("note")) == 15
        before = tree(tmp_path / "object")
        for chain in chains:
            assert put(memory, chain).stored == 0
        assert tree(tmp_path / "object") == before


def test_two_handles_of_one_process_see_each_other(tmp_path: Path) -> None:
    """s3fs#851 in spirit: a miss is not cached; what another handle published is found by the next lookup."""
    chain = make_chain(20)
    with Memory(tmp_path) as reader, Memory(tmp_path) as writer:
        for node, data in chain:
            assert reader.get(node.id) is None
            assert not reader.available(node.id)
            put(writer, [(node, data)])
            assert reader.get(node.id) == node
            assert reader.available(node.id)
        assert_readable(reader, chain)


def test_staged_by_one_process_published_by_another(tmp_path: Path) -> None:
    """The hand-off between assets: prefill stages and ends, another process publishes and empties the spool."""
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        for node, data in chain:
            memory.stage(node, data)
    with Memory(tmp_path) as memory:
        assert memory.staged() == tuple(node for node, _ in chain)
        assert memory.staged([chain[1][0].id]) == (chain[1][0],)
        assert memory.publish_staged().stored == 3
        assert_readable(memory, chain)
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_handle_inherited_by_fork_refuses_at_once(tmp_path: Path) -> None:
    """lance#3640, s3fs#914: a forked child gets an error, never a hang; the parent goes on."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        pid = os.fork()
        if not pid:
            signal.alarm(10)
            code = 1
            try:
                memory.get(chain[0][0].id)
            except ClosedError as error:
                code = 0 if "fork" in str(error) else 2
            memory.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert_readable(memory, chain)
        assert put(memory, make_chain(1, seed=5, name="after")).stored == 1
