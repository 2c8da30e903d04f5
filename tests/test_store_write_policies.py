"""When a tier is written: at publication, at the second read, before the home tier; and how much a scope may keep."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numem.errors import CapacityError, ClosedError, InputError, QuotaError, StorageFullError, StoreError
from numem.store.memory import Memory, TierSpec
from numem.store.payload.tier import Tier
from tests.store_fixtures import (
    SCOPE,
    assert_readable,
    die_at,
    make_chain,
    make_node,
    payload,
    put,
    read_back,
    run_children,
)

SIZE = 70_000


def open_at(root: Path, write: str, capacity: int | None = None, node: str = "local") -> Memory:
    tiers: Mapping[str, str | TierSpec] = {
        "object": str(root / "home" / "object"),
        "ssd": TierSpec(root / node / "ssd", capacity, "lru", write),
    }
    return Memory(root / "home", tiers=tiers, node=node, local=root / node / "local")


def test_through_a_publication_reaches_the_tier_as_well(tmp_path: Path) -> None:
    chain = make_chain(3)
    with open_at(tmp_path, "through") as memory:
        put(memory, chain[:2])
        memory.publish(*chain[2]).published.result()
        memory.residency.settle()
        assert_readable(memory, chain, "ssd")
        assert all(memory.durable(node.id) for node, _ in chain)
        assert memory.stats()["through_failed"] == 0


def test_through_what_does_not_fit_fails_no_publication(tmp_path: Path) -> None:
    chain = make_chain(3)
    with open_at(tmp_path, "through", capacity=2 * SIZE) as memory:
        put(memory, chain[:2])
        memory.residency.settle()
        with memory.hold([node.id for node, _ in chain[:2]]):
            assert put(memory, chain[2:]).nodes == 1
            memory.residency.settle()
        assert memory.stats()["through_failed"] == 1
        assert not memory.available(chain[2][0].id, "ssd")
        assert_readable(memory, chain)


def test_through_is_done_before_close_returns(tmp_path: Path) -> None:
    chain = make_chain(2)
    with open_at(tmp_path, "through") as memory:
        for node, data in chain:
            memory.publish(node, data)
    with open_at(tmp_path, "demand") as memory:
        assert_readable(memory, chain, "ssd")


def test_selective_a_second_read_promotes(tmp_path: Path) -> None:
    """vllm#35259, mooncake#2286: what is read once is not written nearer; what is read again is."""
    chain = make_chain(3)
    nodes = [node for node, _ in chain]
    with open_at(tmp_path, "selective") as memory:
        put(memory, chain)
        for node in nodes:
            read_back(memory, node, [SIZE])
        memory.residency.settle()
        assert memory.usage()["ssd"] == 0
        read_back(memory, nodes[1], [SIZE])
        memory.residency.settle()
        assert [memory.available(node.id, "ssd") for node in nodes] == [False, True, False]
        assert memory.stats()["selective_promoted"] == 1
        assert memory.stats()["selective_refused"] == 3  # the first read of each piece
        read_back(memory, nodes[1], [SIZE])
        read_back(memory, nodes[1], [SIZE])
        memory.residency.settle()
        assert memory.stats()["selective_promoted"] == 1  # it is read from ssd now


def test_selective_waits_are_bounded_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(3)
    monkeypatch.setattr("numem.store.publication.writes._WAITING", 1)
    with open_at(tmp_path, "selective") as memory:
        put(memory, chain)
        buffers = [(node.pieces[0], bytearray(SIZE)) for node, _ in chain]
        memory.read(buffers)
        memory.read(buffers)
        memory.residency.settle()
        assert memory.stats()["selective_promoted"] == 1
        assert memory.stats()["selective_dropped"] == 2


def hold_home(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While the list holds True, the home tier has no space."""
    append, full = Tier.append, [True]

    def failing(tier: Tier, *arguments: Any) -> Any:
        if tier.name == "object" and full[0]:
            raise StorageFullError("object: no space left")
        return append(tier, *arguments)

    monkeypatch.setattr(Tier, "append", failing)
    return full


def test_back_publication_ends_in_the_near_tier_and_home_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(3)
    ids = [node.id for node, _ in chain]
    full = hold_home(monkeypatch)
    with open_at(tmp_path, "back") as memory:
        ticket = memory.publish(*chain[0])
        receipt = ticket.published.result()
        assert (receipt.stored, receipt.missing) == (1, "")
        assert ticket.replicated is not None
        assert not ticket.replicated.done()
        put(memory, chain[1:])
        memory.residency.settle()
        assert [memory.durable(id) for id in ids] == [False] * 3
        assert [memory.available(id, "ssd") for id in ids] == [True] * 3
        assert_readable(memory, chain)
        # It is there already: neither staged nor written again.
        assert not memory.stage(*chain[0])
        assert not memory.publish(*chain[0]).accepted
        # The only copies do not leave.
        with pytest.raises(CapacityError, match="only 0 may"):
            memory.residency.evict("ssd", 1)
        with pytest.raises(StoreError, match="3 published nodes are not there yet"):
            memory.flush()
        full[0] = False
        memory.flush()
        assert ticket.replicated.result(timeout=0) is None
        assert [memory.durable(id) for id in ids] == [True] * 3
        assert memory.residency.evict("ssd", 3 * SIZE).nodes == tuple(reversed(ids))
        assert_readable(memory, chain, "object")
        assert memory.verify().ok


def test_back_home_follows_by_itself(tmp_path: Path) -> None:
    chain = make_chain(3)
    with open_at(tmp_path, "back", capacity=2 * SIZE) as memory:
        put(memory, chain)
        memory.residency.settle()
        assert all(memory.durable(node.id) for node, _ in chain)
        assert memory.residency.used("ssd") == 2 * SIZE  # brought back to its capacity
    with open_at(tmp_path, "demand", node="other") as memory:
        assert_readable(memory, chain)


def test_back_what_a_failure_left_follows_at_the_next_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2)
    full = hold_home(monkeypatch)
    with open_at(tmp_path, "back") as memory:
        put(memory, chain)
        memory.residency.settle()
        assert memory.stats()["writeback_failed"] > 0
        full[0] = False
        memory.residency.reconcile()
        memory.residency.settle()
        assert all(memory.durable(node.id) for node, _ in chain)


def test_back_what_is_not_at_home_when_the_memory_closes_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(1)
    full = hold_home(monkeypatch)
    with open_at(tmp_path, "back") as memory:
        replicated = memory.publish(*chain[0]).replicated
    assert replicated is not None
    with pytest.raises(ClosedError, match="follows at the next open"):
        replicated.result(timeout=0)
    full[0] = False
    with open_at(tmp_path, "back") as memory:
        memory.residency.settle()
        assert memory.durable(chain[0][0].id)
        assert memory.publish(*chain[0]).replicated is None  # there already


def _die_before_home(root: str) -> None:
    chain = make_chain(2)
    memory = open_at(Path(root), "back")
    with memory._parts.promoter._lock:  # the home copies cannot begin
        put(memory, chain)
        die_at("now")
        from numem.store import barrier

        barrier.reached("now")


@pytest.mark.crash
def test_back_home_follows_at_the_next_open_after_a_crash(tmp_path: Path) -> None:
    chain = make_chain(2)
    assert run_children(_die_before_home, [(str(tmp_path),)]) == [-9]
    with open_at(tmp_path, "back") as memory:
        assert_readable(memory, chain)
        memory.residency.settle()
        assert all(memory.durable(node.id) for node, _ in chain)
    with open_at(tmp_path, "demand", node="other") as memory:
        assert_readable(memory, chain)


def test_back_a_catalog_is_rebuilt_from_the_home_volumes(tmp_path: Path) -> None:
    """What is copied home says which nodes it belongs to, as a publication does."""
    chain = make_chain(2)
    with open_at(tmp_path, "back") as memory:
        put(memory, chain)
        memory.flush()
    import shutil

    shutil.rmtree(tmp_path / "local" / "ssd")
    for table in ("nodes", "placements"):
        for path in (tmp_path / "home" / "catalog" / f"{table}.lance" / "data").iterdir():
            path.write_bytes(b"")
    with open_at(tmp_path, "demand") as memory:
        assert_readable(memory, chain, "object")


def test_back_is_for_one_tier_of_this_node(tmp_path: Path) -> None:
    tiers: Mapping[str, str | TierSpec] = {
        "object": str(tmp_path / "object"),
        "ssd": TierSpec(tmp_path / "ssd", write="back"),
        "nvme": TierSpec(tmp_path / "nvme", write="back"),
    }
    with pytest.raises(InputError, match='write="back" is for one tier'):
        Memory(tmp_path / "home", tiers=tiers)


def test_a_scope_does_not_go_over_its_quota(tmp_path: Path) -> None:
    chain = make_chain(4)
    other = replace(make_node([payload(SIZE, 99)]), scope=bytes(32), parent=bytes(32), id=b"\1" * 32)
    with open_at(tmp_path, "demand") as memory:
        residency = memory.residency
        residency.set_quota(SCOPE, 2 * SIZE + 10)
        assert residency.quotas() == {SCOPE: 2 * SIZE + 10}
        put(memory, chain[:1])
        assert residency.scope_bytes(SCOPE) == SIZE
        assert memory.stage(*chain[1])
        with pytest.raises(QuotaError) as refused:
            memory.stage(*chain[2])  # what is staged counts
        error = refused.value
        assert (error.scope, error.used, error.quota) == (SCOPE, 2 * SIZE, 2 * SIZE + 10)
        assert str(error) == (
            f"scope {SCOPE.hex()}: {SIZE} more bytes do not fit its quota, {2 * SIZE} of {2 * SIZE + 10} are used; "
            "forget or collect nodes of it, or raise the quota"
        )
        assert memory.staged() == (chain[1][0],)
        memory.publish_staged()
        with pytest.raises(QuotaError):
            memory.publish(*chain[2])
        ticket = memory.publish(*chain[2], queue="cache")
        assert not ticket.accepted
        assert ticket.rejection.startswith("quota: scope ")
        assert not memory.stage(*chain[1])  # what is there already costs nothing
        assert put(memory, [(other, [payload(SIZE, 99)])]).nodes == 1  # another scope
    with open_at(tmp_path, "demand") as memory:
        with pytest.raises(QuotaError):
            memory.stage(*chain[2])
        memory.residency.set_quota(SCOPE, 3 * SIZE)
        assert put(memory, chain[2:3]).nodes == 1
        memory.residency.set_quota(SCOPE, None)
        assert memory.residency.quotas() == {}
        assert put(memory, chain[3:]).nodes == 1
        assert memory.residency.scope_bytes(SCOPE) == 4 * SIZE


def test_publications_under_way_count_against_a_quota(tmp_path: Path) -> None:
    chain = make_chain(5)
    with open_at(tmp_path, "demand") as memory:
        memory.residency.set_quota(SCOPE, 2 * SIZE)
        tickets = [memory.publish(node, data, queue="cache") for node, data in chain]
        assert [ticket.accepted for ticket in tickets] == [True, True, False, False, False]
        memory.flush()
        assert_readable(memory, chain[:2])


@pytest.mark.parametrize(("scope", "nbytes"), [(b"short", 1), (SCOPE, -1), (SCOPE, 2**63)])
def test_quotas_that_make_no_sense(tmp_path: Path, scope: bytes, nbytes: int) -> None:
    with open_at(tmp_path, "demand") as memory, pytest.raises(InputError, match="quota"):
        memory.residency.set_quota(scope, nbytes)
