"""Branches move by compare-and-set; leases are released once."""

import itertools
import time
from pathlib import Path

import pytest

from numem.errors import InputError, LeaseError, NotFoundError
from numem.lineage.branches import BranchMovedError
from numem.store.memory import Memory
from tests.store_fixtures import SCOPE, make_chain, make_node, payload, put, run_children


def test_a_branch_has_a_head_and_a_log(tmp_path: Path) -> None:
    chain = [node for node, _ in make_chain(4)]
    with Memory(tmp_path) as memory:
        put(memory, make_chain(4))
        main = memory.create_branch("main", chain[0].id, actor="ann", reason="start")
        assert (main.head, main.generation, main.source) == (chain[0].id, 1, "")
        moved = memory.move_branch("main", chain[1].id, expected=chain[0].id, actor="ann", reason="step")
        assert (moved.head, moved.generation) == (chain[1].id, 2)
        fork = memory.create_branch("what-if", chain[1].id, actor="bob", reason="try", source="main")
        assert fork.source == "main"
    with Memory(tmp_path) as memory:
        memory.move_branch("what-if", chain[3].id, expected=chain[1].id, actor="bob", reason="on", action="accept")
        assert memory.branches() == (memory.branch("main"), memory.branch("what-if"))
        assert memory.branch("main").head == chain[1].id
        assert [(m.action, m.actor, m.previous, m.head) for m in memory.log("what-if")] == [
            ("fork", "bob", b"", chain[1].id),
            ("accept", "bob", chain[1].id, chain[3].id),
        ]


def test_a_head_moves_only_from_where_it_was_expected(tmp_path: Path) -> None:
    chain = [node for node, _ in make_chain(3)]
    with Memory(tmp_path) as memory:
        put(memory, make_chain(3))
        memory.create_branch("main", chain[0].id, actor="a", reason="r")
        with pytest.raises(BranchMovedError) as caught:
            memory.move_branch("main", chain[2].id, expected=chain[1].id, actor="a", reason="r")
        assert caught.value.head == chain[0].id
        with pytest.raises(BranchMovedError, match="exists"):
            memory.create_branch("main", chain[1].id, actor="a", reason="r")
        with pytest.raises(NotFoundError, match="no branch 'dev'"):
            memory.branch("dev")
        with pytest.raises(NotFoundError):
            memory.log("dev")
        with pytest.raises(NotFoundError):
            memory.create_branch("dev", chain[0].id, actor="a", reason="r", source="gone")
        with pytest.raises(NotFoundError, match="no node"):
            memory.create_branch("dev", SCOPE, actor="a", reason="r")
        with pytest.raises(InputError):
            memory.create_branch("dev", b"short", actor="a", reason="r")
        with pytest.raises(InputError):
            memory.create_branch("de\0v", chain[0].id, actor="a", reason="r")
        assert len(memory.log("main")) == 1


def _race(home: str, start: float, number: int) -> None:
    chain = [node for node, _ in make_chain(3)]
    with Memory(home) as memory:
        while time.time() < start:
            time.sleep(0.001)
        won = 0
        for _ in range(5):
            head = memory.branch("main").head
            try:
                memory.move_branch("main", chain[number].id, expected=head, actor=str(number), reason="race")
                won += 1
            except BranchMovedError:
                continue
        memory.record("won", SCOPE, {"by": number, "moves": won})


def test_racing_moves_have_one_winner_each(tmp_path: Path) -> None:
    """Each acknowledged move is in the log exactly once and every move starts where the one before ended."""
    with Memory(tmp_path) as memory:
        put(memory, make_chain(3))
        memory.create_branch("main", make_chain(1)[0][0].id, actor="a", reason="r")
    assert run_children(_race, [(str(tmp_path), time.time() + 2.0, number) for number in range(3)]) == [0] * 3
    with Memory(tmp_path) as memory:
        log = memory.log("main")
        won = {record.body["by"]: record.body["moves"] for record in memory.records("won")}
        assert len(log) == 1 + sum(won.values())
        assert {by: sum(move.actor == str(by) for move in log) for by in won} == won
        assert all(after.previous == before.head for before, after in itertools.pairwise(log))


def test_a_lease_is_released_once(tmp_path: Path) -> None:
    """lmcache#3381, lmcache#5095: a second release is an error and corrupts no count."""
    node = make_node([payload(10, 1)])
    with Memory(tmp_path) as memory:
        first, second = memory.hold([node.id]), memory.hold([node.id, SCOPE])
        assert memory.stats()["leases"] == 3
        first.release()
        with pytest.raises(LeaseError, match="released already"):
            first.release()
        assert memory.stats()["leases"] == 2
        with second as held:
            assert held.ids == (node.id, SCOPE)
        with pytest.raises(LeaseError):
            second.release()
        with memory.hold([node.id]) as early:
            early.release()
        assert memory.stats()["leases"] == 0


def test_a_lease_that_is_never_released_expires(tmp_path: Path) -> None:
    """lmcache#1034: looked up and never used, a thousand times: released by the deadline, and counted."""
    with Memory(tmp_path) as memory:
        leases = [memory.hold([SCOPE], ttl_s=0.01) for _ in range(1000)]
        time.sleep(0.02)
        assert not leases[-1].active
        assert memory.stats()["leases"] == 0
        assert memory.stats()["leases_expired"] == 1000
