"""Pins and leases: what keeps a node, in this process and for others."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from numem.errors import CapacityError, InputError, LeaseError, NotFoundError
from numem.store.memory import Memory, TierSpec
from numem.store.placement import claims
from tests.store_fixtures import SCOPE, make_chain, put, read_back, run_children

SIZE = 70_000


def open_at(root: Path) -> Memory:
    tiers: Mapping[str, str | TierSpec] = {
        "object": str(root / "home" / "object"),
        "ssd": TierSpec(root / "ssd", 4 * SIZE),
    }
    return Memory(root / "home", tiers=tiers)


def test_protected_names_held_leased_and_pinned_nodes_with_their_ancestors(tmp_path: Path) -> None:
    chain, other = make_chain(3), make_chain(2, seed=5, name="other")
    nodes = [node for node, _ in chain]
    strangers = [node for node, _ in other]
    with open_at(tmp_path) as memory:
        put(memory, chain + other)
        parts = memory._parts
        assert claims.protected(parts).nodes == frozenset()
        with memory.hold([nodes[1].id]):
            kept = claims.protected(parts, "ssd")
            assert kept.nodes == {nodes[0].id, nodes[1].id}
            assert kept.pieces == {nodes[0].pieces[0], nodes[1].pieces[0]}
        assert claims.protected(parts, "ssd").nodes == frozenset()
        memory.residency.pin([nodes[2].id], tier="ssd", owner="a")
        memory.residency.pin([strangers[0].id], owner="b", ttl_s=3600)
        assert claims.protected(parts, "ssd").nodes == {*(n.id for n in nodes), strangers[0].id}
        assert claims.protected(parts, "object").nodes == {strangers[0].id}
        assert claims.protected(parts).nodes == {*(n.id for n in nodes), strangers[0].id}


def test_pins_by_owner_and_tier(tmp_path: Path) -> None:
    """lmcache#5095: one owner's pin says nothing about another's, and what is not pinned cannot be unpinned below."""
    chain = make_chain(2)
    ids = [node.id for node, _ in chain]
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.residency.pin(ids, owner="a")
        memory.residency.pin(ids[:1], tier="ssd", owner="b", ttl_s=60)
        memory.residency.pin(ids[:1], owner="a")  # again: still one
        found = [(pin.subject, pin.tier, pin.node, pin.owner, pin.expires > 0) for pin in memory.residency.pins()]
        assert found == sorted(
            [(ids[0], "", "", "a", False), (ids[1], "", "", "a", False), (ids[0], "ssd", "local", "b", True)]
        )
        assert memory.residency.unpin(ids, owner="b") == 0
        assert memory.residency.unpin(ids, owner="a") == 2
        assert memory.residency.unpin(ids, owner="a") == 0
        assert [pin.owner for pin in memory.residency.pins()] == ["b"]
    with open_at(tmp_path) as memory:
        assert [pin.owner for pin in memory.residency.pins()] == ["b"]


def test_a_soft_pin_lapses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1)
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id])
        memory.residency.pin([chain[0][0].id], owner="a", ttl_s=3600)
        with pytest.raises(CapacityError):
            memory.residency.evict("ssd", 1)
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 3601 * 10**9)
        assert memory.residency.pins() == ()
        assert memory.residency.evict("ssd", 1).nodes == (chain[0][0].id,)


@pytest.mark.parametrize(
    ("ttl_s", "owner", "error"),
    [(0, "a", InputError), (-1.0, "a", InputError), (float("nan"), "a", InputError), (None, "", InputError)],
)
def test_pins_that_make_no_sense(tmp_path: Path, ttl_s: float | None, owner: str, error: type[Exception]) -> None:
    chain = make_chain(1)
    with open_at(tmp_path) as memory:
        put(memory, chain)
        with pytest.raises(error):
            memory.residency.pin([chain[0][0].id], owner=owner, ttl_s=ttl_s)
        with pytest.raises(NotFoundError):
            memory.residency.pin([chain[0][0].id, SCOPE], owner="a")
        with pytest.raises(NotFoundError, match="no tier 'nvme'"):
            memory.residency.pin([chain[0][0].id], tier="nvme", owner="a")
        assert memory.residency.pins() == ()


def _evict_all(root: str, expect: int) -> None:
    with open_at(Path(root)) as memory:
        try:
            assert len(memory.residency.evict("ssd", 2 * SIZE).nodes) == expect
        except CapacityError:
            assert expect == 0


def test_a_shared_lease_is_respected_by_other_processes(tmp_path: Path) -> None:
    """lmcache#3381: a typed lease, released once; another process cannot evict what it names until then."""
    chain = make_chain(2)
    ids = [node.id for node, _ in chain]
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.promote(ids)
        lease = memory.hold(ids, shared=True)
        assert run_children(_evict_all, [(str(tmp_path), 0)]) == [0]
        assert read_back(memory, chain[1][0], [SIZE], "ssd") == chain[1][1]
        lease.release()
        with pytest.raises(LeaseError):
            lease.release()
        assert run_children(_evict_all, [(str(tmp_path), 2)]) == [0]
        assert read_back(memory, chain[1][0], [SIZE]) == chain[1][1]
        assert memory.verify().ok


def test_the_lease_of_a_process_that_died_lapses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1)
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id])
        memory.hold([chain[0][0].id], ttl_s=300, shared=True)  # never released
    with open_at(tmp_path) as memory:
        with pytest.raises(CapacityError):
            memory.residency.evict("ssd", 1)
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 301 * 10**9)
        assert len(memory.residency.evict("ssd", 1).nodes) == 1
