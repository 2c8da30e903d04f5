"""Demands, plans and reconciliation: exact plans, failures that are not repeated, replicas that are verified."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numem.errors import InputError, NotFoundError
from numem.store.barrier import observe
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Placement, State
from numem.store.memory import Memory, TierSpec
from numem.store.placement import promote
from numem.store.placement.demands import Plan
from tests.store_fixtures import (
    SCOPE,
    assert_readable,
    die_at,
    flip,
    make_chain,
    make_node,
    payload,
    put,
    run_children,
    sidecars,
)

SIZE = 70_000


def open_at(root: Path, capacity: int | None = None, node: str = "local") -> Memory:
    tiers: Mapping[str, str | TierSpec] = {
        "object": str(root / "home" / "object"),
        "ssd": TierSpec(root / "ssd", capacity, "lru"),
        "host2": str(root / "host2"),
    }
    return Memory(root / "home", tiers=tiers, node=node)


def facts_of(memory: Memory, content: bytes, tier: str) -> list[tuple[State, str]]:
    return [(p.state, p.reason) for p in memory._parts.catalog.placements.current(content) if p.tier == tier]


def test_demands_are_ordered_renewed_and_cancelled(tmp_path: Path) -> None:
    a, b, c = (bytes([n]) * 32 for n in (1, 2, 3))
    with open_at(tmp_path) as memory:
        residency = memory.residency
        residency.demand([c, a], "ssd", owner="x")
        residency.demand([b], "ssd", owner="x", priority=5, ttl_s=3600)
        residency.demand([a], "nvme", node="elsewhere", owner="x", priority=9)
        residency.demand([a], "ssd", owner="y", priority=-1)
        found = [(d.id, d.tier, d.node, d.priority, d.owner) for d in residency.demands()]
        assert found == [
            (a, "nvme", "elsewhere", 9, "x"),
            (b, "ssd", "local", 5, "x"),
            (a, "ssd", "local", 0, "x"),
            (c, "ssd", "local", 0, "x"),
            (a, "ssd", "local", -1, "y"),
        ]
        assert [d.id for d in residency.demands("elsewhere")] == [a]
        residency.demand([c], "ssd", owner="x", priority=7)
        assert [d.id for d in residency.demands("local")] == [c, b, a, a]
        assert residency.cancel([c, b], "ssd", owner="x") == 2
        assert residency.cancel([c], "ssd", owner="x") == 0
        assert residency.cancel([a], "nvme", node="elsewhere", owner="y") == 0
    with open_at(tmp_path) as memory:
        assert [(d.id, d.owner) for d in memory.residency.demands("local")] == [(a, "x"), (a, "y")]


def test_a_demand_lapses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_at(tmp_path) as memory:
        memory.residency.demand([bytes(32)], "ssd", owner="x", ttl_s=3600)
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 3601 * 10**9)
        assert memory.residency.demands() == ()
        assert memory.residency.plan() == Plan()


def test_demands_that_make_no_sense(tmp_path: Path) -> None:
    with open_at(tmp_path) as memory:
        with pytest.raises(NotFoundError, match="no tier 'nvme'"):
            memory.residency.demand([bytes(32)], "nvme", owner="x")
        with pytest.raises(InputError, match="32 bytes"):
            memory.residency.demand([b"short"], "ssd", owner="x")
        with pytest.raises(InputError):
            memory.residency.demand([bytes(32)], "ssd", owner="x", ttl_s=0)
        with pytest.raises(InputError):
            memory.residency.demand([bytes(32)], "ssd", owner="")
        with pytest.raises(ValueError, match="node"):
            memory.residency.demand([bytes(32)], "ssd", node="../up", owner="x")
        assert memory.residency.demands() == ()


def test_an_exact_plan(tmp_path: Path) -> None:
    """Satisfied, to be copied from the nearest source, impossible for a reason; each demand in one place only."""
    chain = make_chain(3)
    nodes = [node for node, _ in chain]
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.promote([nodes[0].id], "ssd")
        memory.promote([nodes[1].id], "host2")
        residency = memory.residency
        residency.demand([node.id for node in nodes], "ssd", owner="x")
        residency.demand([nodes[1].id], "ssd", owner="y", priority=3)
        residency.demand([SCOPE], "ssd", owner="x", priority=-5)
        residency.demand([nodes[2].id], "ssd", node="elsewhere", owner="x")
        plan = residency.plan()
        assert [d.id for d in plan.satisfied] == [nodes[0].id]
        assert plan.in_progress == ()
        by_id = {action.demand.id: action for action in plan.actions}
        assert plan.actions[0].demand.id == nodes[1].id
        assert set(by_id) == {nodes[1].id, nodes[2].id}
        near = by_id[nodes[1].id]
        assert near.demand.owner == "y"
        assert [(s.tier, s.node) for s in near.sources] == [("host2", "local"), ("object", "")]
        assert near.source == near.sources[0]
        assert [copy.content for copy in near.source.copies] == list(nodes[1].pieces)
        assert [(s.tier, s.node) for s in by_id[nodes[2].id].sources] == [("object", "")]
        assert [(u.demand.id, u.reason) for u in plan.unsatisfiable] == [
            (SCOPE, f"no node {SCOPE.hex()} in this memory; publish it first")
        ]
        assert residency.plan() == plan  # asking changes nothing

        report = residency.reconcile()
        assert report.ready == (nodes[1].id, nodes[2].id)
        assert (report.failed, report.suppressed, report.satisfied) == ({}, (), 1)
        assert_readable(memory, chain, "ssd")
        assert [d.id for d in residency.plan().satisfied] == [nodes[1].id, *sorted([nodes[0].id, nodes[2].id])]
        stats = memory.stats()
        assert (stats["reconciliations"], stats["ready"], stats["failed"], stats["suppressed"]) == (1, 2, 0, 0)

        # What nobody demands any more stays where it is.
        residency.cancel([node.id for node in nodes], "ssd", owner="x")
        residency.cancel([nodes[1].id], "ssd", owner="y")
        residency.reconcile()
        assert_readable(memory, chain, "ssd")


def test_a_node_of_several_pieces_is_ready_when_all_of_them_are(tmp_path: Path) -> None:
    """Sources that hold it together; nodes of several groups are copied whole."""
    data = [payload(SIZE, n) for n in range(3)]
    node = make_node(data, name="multi")
    single = make_node(data[:1], name="single")
    with open_at(tmp_path) as memory:
        put(memory, [(node, data), (single, data[:1])])
        memory.promote([single.id], "ssd")
        assert not memory.available(node.id, "ssd")
        memory.residency.demand([node.id], "ssd", owner="x")
        (action,) = memory.residency.plan().actions
        assert [copy.content for copy in action.source.copies] == list(node.pieces[1:])
        assert memory.residency.reconcile().ready == (node.id,)
        assert memory.available(node.id, "ssd")
        assert memory.usage()["ssd"] == 3 * SIZE


def test_a_failed_attempt_is_not_repeated_until_its_sources_change(tmp_path: Path) -> None:
    data = [[payload(SIZE, n)] for n in range(2)]
    first, second = (make_node(pieces, name=f"n{n}") for n, pieces in enumerate(data))
    with open_at(tmp_path, capacity=SIZE) as memory:
        put(memory, [(first, data[0]), (second, data[1])])
        residency = memory.residency
        residency.demand([first.id], "ssd", owner="x", priority=1)
        residency.demand([second.id], "ssd", owner="x")
        report = residency.reconcile()
        assert report.ready == (first.id,)
        assert list(report.failed) == [second.id]
        assert "must leave" in report.failed[second.id]
        # Demands do not push each other out, and the same is not tried again.
        report = residency.reconcile()
        assert (report.ready, report.failed, report.suppressed) == ((), {}, (second.id,))
        report = residency.reconcile(retry_failed=True)
        assert (list(report.failed), report.suppressed) == ([second.id], ())
        # Another source is another attempt.
        memory.promote([second.id], "host2")
        assert list(residency.reconcile().failed) == [second.id]
        assert residency.reconcile().suppressed == (second.id,)
        residency.cancel([first.id], "ssd", owner="x")
        assert residency.reconcile(retry_failed=True).ready == (second.id,)
        stats = memory.stats()
        assert (stats["failed"], stats["suppressed"], stats["ready"]) == (3, 2, 2)
        assert stats["failed_attempts"] == 0


def test_bytes_of_another_content_are_not_made_ready(tmp_path: Path) -> None:
    chain = make_chain(1)
    node = chain[0][0]
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.residency.demand([node.id], "ssd", owner="x")
        flip(sidecars(tmp_path / "home" / "object")[0], 1000)
        report = memory.residency.reconcile()
        assert "xxh3" in report.failed[node.id]
        ((state, reason),) = facts_of(memory, node.pieces[0], "ssd")
        assert state is State.FAILED
        assert "xxh3" in reason
        assert memory.usage()["ssd"] == 0
        assert memory.stats()["bytes_promoted"] == 0
        (impossible,) = memory.residency.plan().unsatisfiable
        assert "no readable replica" in impossible.reason
        # A good copy at home again: the sources are others.
        put(memory, chain)
        assert memory.residency.reconcile().ready == (node.id,)
        assert_readable(memory, chain, "ssd")


@pytest.mark.parametrize("fault", ["start", "scope"])
def test_a_node_that_does_not_continue_its_parent_is_not_made_ready(tmp_path: Path, fault: str) -> None:
    """Content ids alone do not make a replica: scope, parent, start and count are compared with the catalog."""
    (parent, data), (child, more) = make_chain(2)
    if fault == "start":
        child = replace(child, start=child.start + 1)
    else:
        child = replace(child, scope=bytes(32))
    with open_at(tmp_path) as memory:
        put(memory, [(parent, data), (child, more)])
        report = memory.promote([parent.id, child.id])
        assert (report.promoted, report.bytes) == (1, SIZE)
        assert ("another scope" if fault == "scope" else "starts at 17") in report.failed[child.pieces[0].hex()]
        assert facts_of(memory, child.pieces[0], "ssd")[0][0] is State.FAILED
        assert memory.usage()["ssd"] == SIZE


def test_a_node_that_leaves_meanwhile_is_not_made_ready(tmp_path: Path) -> None:
    chain = make_chain(1)
    node = chain[0][0]
    with open_at(tmp_path) as memory:
        put(memory, chain)

        def retire(step: str, what: str) -> None:
            if step == "payload durable" and what.startswith("ssd"):
                from numem.store.catalog.facts import Retired

                parts = memory._parts
                parts.catalog.append(Facts(retired=[Retired(parts.clock.next(), node.id, "forgotten")]))

        end = observe(retire)
        report = memory.promote([node.id])
        end()
        assert (report.promoted, report.bytes) == (0, 0)
        assert "not in the catalog any more" in report.failed[node.pieces[0].hex()]
        assert memory.usage()["ssd"] == 0


def copying(memory: Memory, content: bytes, reason: str, age_s: int = 0) -> None:
    """A COPYING fact as another writer would leave it."""
    parts = memory._parts
    sequence = parts.clock.next() - age_s * 10**9
    fact = Placement(sequence, content, "ssd", "local", "", "", 0, 0, 0, 0, 0, b"", State.COPYING, reason)
    parts.catalog.append(Facts(placements=[fact]))


def test_a_copy_that_another_process_makes_is_in_progress(tmp_path: Path) -> None:
    chain = make_chain(1)
    node = chain[0][0]
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.residency.demand([node.id], "ssd", owner="x")
        parts = memory._parts
        stem = parts.writer.rpartition(".w")[0]
        free = parts.writers.try_lock(7)
        assert free is not None
        copying(memory, node.pieces[0], f"{stem}.w007")
        plan = memory.residency.plan()
        assert ([d.id for d in plan.in_progress], plan.actions) == ([node.id], ())
        free.release()  # it died
        plan = memory.residency.plan()
        assert (plan.in_progress, len(plan.actions)) == ((), 1)
        copying(memory, node.pieces[0], "elsewhere.0123456789abcdef.w000")
        assert len(memory.residency.plan().in_progress) == 1
        copying(memory, node.pieces[0], "elsewhere.0123456789abcdef.w001", age_s=601)
        assert len(memory.residency.plan().in_progress) == 1  # an older fact about the same copy says nothing
        memory.residency.reconcile()
        assert memory.promote([node.id]).promoted == 1
        assert len(memory.residency.plan().satisfied) == 1


def test_the_announcement_of_another_node_lapses(tmp_path: Path) -> None:
    chain = make_chain(1)
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.residency.demand([chain[0][0].id], "ssd", owner="x")
        copying(memory, chain[0][0].pieces[0], "elsewhere.0123456789abcdef.w000", age_s=601)
        assert len(memory.residency.plan().actions) == 1


def _die_copying(root: str, id: bytes) -> None:
    promote.ANNOUNCE_BYTES = 1
    with open_at(Path(root)) as memory:
        die_at("announced")
        memory.promote([id])


@pytest.mark.crash
def test_an_announced_promotion_whose_process_dies_is_made_again(tmp_path: Path) -> None:
    chain = make_chain(1)
    node = chain[0][0]
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.residency.demand([node.id], "ssd", owner="x")
        assert run_children(_die_copying, [(str(tmp_path), node.id)]) == [-9]
        memory.refresh()
        assert facts_of(memory, node.pieces[0], "ssd")[0][0] is State.COPYING
        assert memory.residency.reconcile().ready == (node.id,)
        assert_readable(memory, chain, "ssd")


def test_an_announced_promotion_is_seen_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1)
    node = chain[0][0]
    monkeypatch.setattr(promote, "ANNOUNCE_BYTES", 1)
    seen: list[Any] = []
    with open_at(tmp_path) as memory:
        put(memory, chain)
        memory.residency.demand([node.id], "ssd", owner="x")

        def look(step: str, what: str) -> None:
            if step == "announced":
                seen.append(memory.residency.plan())

        end = observe(look)
        memory.promote([node.id])
        end()
        assert [d.id for d in seen[0].in_progress] == [node.id]
        assert [d.id for d in memory.residency.plan().satisfied] == [node.id]
        memory.residency.evict("ssd", 1)
        assert len(memory.residency.plan().actions) == 1


def test_signals_are_coalesced_and_served_in_the_background(tmp_path: Path) -> None:
    chain = make_chain(2)
    ids = [node.id for node, _ in chain]
    with open_at(tmp_path) as memory:
        put(memory, chain)
        residency = memory.residency
        residency.demand(ids, "ssd", owner="x")
        with memory._parts.promoter._lock:  # the worker waits here
            assert residency.signal()
            while memory._parts.background._pending:
                time.sleep(0.001)
            assert residency.signal()
            assert not residency.signal()
            assert not residency.signal()
        residency.settle()
        assert_readable(memory, chain, "ssd")
        stats = memory.stats()
        assert (stats["signals_accepted"], stats["signals_coalesced"], stats["reconciliations"]) == (2, 2, 2)
        assert stats["ready"] == 2
        residency.signal()
    assert not residency._parts.background.signal("reconcile")


def _promote_all(root: str) -> None:
    with open_at(Path(root)) as memory:
        memory.promote([node.id for node in memory.nodes()])


def test_processes_that_promote_the_same_copy_it_once(tmp_path: Path) -> None:
    chain = make_chain(6)
    with open_at(tmp_path) as memory:
        put(memory, chain)
        assert run_children(_promote_all, [(str(tmp_path),)] * 3) == [0, 0, 0]
        memory.refresh()
        assert memory.usage()["ssd"] == 6 * SIZE
        assert_readable(memory, chain, "ssd")
