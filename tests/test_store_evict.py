"""Eviction: what leaves a tier, in which order, what stays, and what is refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from numem import policy
from numem.errors import CapacityError
from numem.lineage.decisions import DecisionLog
from numem.store.config import TierSpec
from numem.store.memory import Memory
from tests.evict_fixtures import SIZE, open_small, read_ssd, resident, singles
from tests.store_fixtures import assert_readable, make_chain, make_node, payload, put, read_back


@pytest.mark.parametrize("name", policy.NAMES)
def test_leaves_leave_before_what_they_continue_under_every_policy(tmp_path: Path, name: str) -> None:
    """A chain is evicted from its end, whatever was read last (llm-d, SGLang: no stranded children)."""
    chain = make_chain(4)
    nodes = [node for node, _ in chain]
    with open_small(tmp_path, 4, name) as memory:
        put(memory, chain)
        memory.promote([node.id for node in nodes])
        read_ssd(memory, nodes[3], nodes[3], nodes[0])
        report = memory.residency.evict("ssd", 1)
        assert report.nodes == (nodes[3].id,)
        assert (report.pieces, report.bytes, report.policy) == (1, SIZE, name)
        assert memory.residency.evict("ssd", SIZE + 1).nodes == (nodes[2].id, nodes[1].id)
        assert resident(memory, nodes) == [0]
        assert memory.residency.used("ssd") == SIZE
        assert_readable(memory, chain)  # from home


ORDERS = {
    # Five nodes placed in the order 0..4; read: 0 0 1 0. Then they leave one at a time.
    "lru": [2, 3, 4, 1, 0],
    "lfu": [2, 3, 4, 1, 0],
    "slru": [2, 3, 4, 1, 0],
    "cost": [2, 3, 4, 1, 0],
    "arc": [2, 3, 4, 1, 0],
    "s3fifo": [2, 3, 4, 0, 1],
    "interval": [2, 3, 4, 1, 0],
}


@pytest.mark.parametrize("name", policy.NAMES)
def test_the_order_in_which_unrelated_nodes_leave(tmp_path: Path, name: str) -> None:
    put_in = singles(5)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 5, name) as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes])
        assert memory.residency.used("ssd") == 5 * SIZE
        read_ssd(memory, nodes[0], nodes[0], nodes[1], nodes[0])
        order = [memory.residency.evict("ssd", 1).nodes for _ in nodes]
        assert order == [(nodes[n].id,) for n in ORDERS[name]]
        assert memory.usage()["ssd"] == 0


def test_a_promotion_makes_its_own_room(tmp_path: Path) -> None:
    """mooncake#2286: what is only in another tier does not count, so that no more leaves than has to."""
    put_in = singles(6)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 4, "lru") as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes[:4]])
        read_ssd(memory, nodes[0])
        assert memory.promote([nodes[4].id, nodes[5].id]).promoted == 2
        assert resident(memory, nodes) == [0, 3, 4, 5]
        assert memory.usage()["ssd"] == 4 * SIZE
        (decided,) = DecisionLog(memory).all("evict")
        decision = decided.decision
        assert (decision.subject, decision.others, decision.policy) == (nodes[1].id, (nodes[2].id,), "lru")
        assert decision.inputs == {
            "tier": "ssd",
            "node": "local",
            "reason": f"{2 * SIZE} bytes are promoted",
            "need": 2 * SIZE,
            "bytes": 2 * SIZE,
            "pieces": 2,
            "nodes": 2,
            "stray_bytes": 0,
            "resident": 4,
            "used": 4 * SIZE,
            "capacity": 4 * SIZE,
        }
        # What left, in order, then what could have: nodes were placed 0 1 2 3, then 0 was read.
        assert [(a.name, a.terms["uses"], a.terms["idle"]) for a in decision.alternatives] == [
            (f"evict:{nodes[n].id.hex()}", uses, idle) for n, uses, idle in ((1, 1, 3), (2, 1, 2), (3, 1, 1), (0, 2, 0))
        ]
        assert memory.stats()["evictions"] == 1
        assert memory.stats()["bytes_evicted"] == 2 * SIZE
        assert_readable(memory, put_in)


def test_a_promotion_does_not_push_out_what_it_continues(tmp_path: Path) -> None:
    chain, other = make_chain(3), singles(1)
    nodes = [node for node, _ in chain + other]
    with open_small(tmp_path, 3, "lru") as memory:
        put(memory, chain + other)
        memory.promote([node.id for node in nodes[:2]])
        memory.promote([nodes[3].id])
        read_ssd(memory, nodes[3])
        memory.promote([nodes[2].id])
        assert resident(memory, nodes) == [0, 1, 2]
        memory.promote([nodes[3].id])
        assert resident(memory, nodes) == [0, 1, 3]


def test_at_open_nodes_count_in_the_order_in_which_they_were_placed(tmp_path: Path) -> None:
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 4) as memory:
        put(memory, put_in)
        for number in (2, 0, 3, 1):
            memory.promote([nodes[number].id])
    with open_small(tmp_path, 4) as memory:
        order = [memory.residency.evict("ssd", 1).nodes for _ in nodes]
        assert order == [(nodes[n].id,) for n in (2, 0, 3, 1)]


def test_what_was_placed_last_is_not_the_first_victim(tmp_path: Path) -> None:
    """mooncake#3101: a chunk that has just arrived is not evicted at once, though all others were read more often."""
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, None, "slru") as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes[:3]])
        read_ssd(memory, *nodes[:3], *nodes[:3])
        memory.residency.used("ssd")
        memory.promote([nodes[3].id])
        assert memory.residency.evict("ssd", 1).nodes == (nodes[0].id,)
        # Where the others do not suffice it goes too.
        assert memory.residency.evict("ssd", 3 * SIZE).nodes == (nodes[3].id, nodes[1].id, nodes[2].id)


def test_pins_keep_a_node_and_what_leads_to_it(tmp_path: Path) -> None:
    chain, other = make_chain(2), make_chain(2, seed=7, name="other")
    nodes = [node for node, _ in chain + other]
    with open_small(tmp_path, 4) as memory:
        put(memory, chain + other)
        memory.promote([node.id for node in nodes])
        memory.residency.pin([nodes[1].id], tier="ssd", owner="t")
        before = memory.records("decision/evict")
        with pytest.raises(CapacityError, match=rf"{3 * SIZE} bytes must leave.* of {4 * SIZE} only {2 * SIZE} may"):
            memory.residency.evict("ssd", 3 * SIZE)
        assert resident(memory, nodes) == [0, 1, 2, 3]
        assert memory.records("decision/evict") == before
        assert memory.residency.evict("ssd", 2 * SIZE).nodes == (nodes[3].id, nodes[2].id)
        assert memory.residency.unpin([nodes[1].id], tier="ssd", owner="t") == 1
        assert memory.residency.evict("ssd", 2 * SIZE).nodes == (nodes[1].id, nodes[0].id)


def test_a_promotion_that_cannot_fit_changes_nothing(tmp_path: Path) -> None:
    put_in = singles(4)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2) as memory:
        put(memory, put_in)
        with pytest.raises(CapacityError, match=rf"tier ssd: {SIZE} bytes must leave"):
            memory.promote([node.id for node in nodes[:3]])
        assert memory.usage()["ssd"] == 0
        memory.promote([node.id for node in nodes[:2]])
        with memory.hold([nodes[0].id, nodes[1].id]):
            with pytest.raises(CapacityError, match="only 0 may"):
                memory.promote([nodes[2].id])
            assert resident(memory, nodes) == [0, 1]
            assert memory.records("decision/evict") == ()
        memory.promote([nodes[2].id])
        assert resident(memory, nodes) == [1, 2]


def test_asking_whether_a_node_is_there_keeps_nothing(tmp_path: Path) -> None:
    """mooncake#2187: existence probes renew nothing, so a full tier still lets go."""
    put_in = singles(2)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2, "lru") as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes])
        for _ in range(200):
            assert memory.available(nodes[0].id, "ssd")
            memory.durable(nodes[0].id)
            memory.placements(nodes[0].pieces[0])
        assert memory.residency.evict("ssd", 1).nodes == (nodes[0].id,)


def test_a_held_node_stays_findable_while_the_tier_is_filled(tmp_path: Path) -> None:
    """pegaflow#434, vllm#39702: lookup, then eviction, then use: the lease keeps what was looked up."""
    put_in = singles(5)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2, "lru") as memory:
        put(memory, put_in)
        memory.promote([nodes[0].id])
        with memory.hold([nodes[0].id]):
            for node in nodes[1:]:
                memory.promote([node.id])
                assert read_back(memory, nodes[0], [SIZE], "ssd") == put_in[0][1]
            assert resident(memory, nodes) == [0, 4]


def test_looked_up_and_never_used_lapses_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmcache#1034: leases that nobody releases end by themselves, with a metric."""
    put_in = singles(2)
    nodes = [node for node, _ in put_in]
    with open_small(tmp_path, 2) as memory:
        put(memory, put_in)
        memory.promote([node.id for node in nodes])
        leases = [memory.hold([nodes[0].id], ttl_s=3600.0) for _ in range(1000)]
        with pytest.raises(CapacityError):
            memory.residency.evict("ssd", 2 * SIZE)
        for lease in leases:
            lease.deadline = 0.0
        assert len(memory.residency.evict("ssd", 2 * SIZE).nodes) == 2
        assert memory.stats()["leases_expired"] == 1000
        assert memory.stats()["leases"] == 0


def test_a_piece_that_another_resident_node_has_stays(tmp_path: Path) -> None:
    shared, own = payload(SIZE, 1), payload(SIZE, 2)
    first = (make_node([shared], name="a"), [shared])
    second = (make_node([shared, own], name="b"), [shared, own])
    with open_small(tmp_path, 4, "lru") as memory:
        put(memory, [first, second])
        memory.promote([first[0].id])
        memory.promote([second[0].id])
        assert memory.residency.used("ssd") == 2 * SIZE
        report = memory.residency.evict("ssd", 1)
        # Without the first node nothing would be freed, so both have to go or the second one alone.
        assert report.bytes in (SIZE, 2 * SIZE)
        assert memory.residency.used("ssd") == 2 * SIZE - report.bytes
        assert_readable(memory, [first, second])


def test_the_last_durable_copy_never_leaves(tmp_path: Path) -> None:
    chain = make_chain(2)
    with open_small(tmp_path, 4) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain])
        with pytest.raises(CapacityError, match="only 0 may"):
            memory.residency.evict("object", 1)
        assert all(memory.durable(node.id) for node, _ in chain)


def test_the_home_tier_lets_go_of_what_another_shared_tier_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2)
    monkeypatch.setattr(
        "numem.store.workspace.Workspace.node_of", lambda work, tier: "" if tier != "ssd" else work.node
    )
    tiers: Mapping[str, str | TierSpec] = {name: str(tmp_path / name) for name in ("object", "cold", "ssd")}
    with Memory(tmp_path / "home", tiers=tiers) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id, chain[1][0].id], "ssd")
        memory.promote([chain[1][0].id], "cold")
        assert memory.residency.evict("object", 1).nodes == (chain[1][0].id,)
        with pytest.raises(CapacityError):
            memory.residency.evict("object", 1)
        assert_readable(memory, chain, "ssd")
        assert memory.available(chain[1][0].id, "cold")
        assert not memory.durable(chain[1][0].id)
