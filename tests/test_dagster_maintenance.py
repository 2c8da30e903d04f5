"""Maintenance in Dagster: what a round reports, what its checks find, when it is skipped, when it ticks."""

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_project.definitions import build_defs
from dagster_project.jobs import maintain_daily
from dagster_project.resources.memory import MemoryResource
from numem import Memory
from numem.store.upkeep.maintain import catalog_bytes, lane, payload_bytes
from tests.store_fixtures import Chain, assert_readable, flip, make_chain, put

NBYTES = 70_000
NOW = {"retain_days": 0.0, "grace_s": 0.0, "keep_versions_s": 0.0, "least": 0}
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def kept(home: Path) -> Chain:
    """Three nodes that a branch reaches, beside four that nothing reaches."""
    chain = make_chain(3, NBYTES)
    with Memory(home) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain], "ssd")
        memory.create_branch("main", chain[-1][0].id, actor="test", reason="test")
        put(memory, make_chain(4, NBYTES, seed=7, name="garbage"))
    return chain


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def execute(
    job: str, home: Path, instance: dg.DagsterInstance, ops: dict[str, Any] | None = None
) -> dg.ExecuteInProcessResult:
    definitions = build_defs(resource_overrides={"memory": MemoryResource(home=str(home))})
    configs = {name: {"config": config} for name, config in (ops or {}).items()}
    run_config = {**QUIET, "ops": configs} if configs else QUIET
    return definitions.resolve_job_def(job).execute_in_process(instance=instance, run_config=run_config)


def checks(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    return {check.check_name: check for check in result.get_asset_check_evaluations()}


def values(entries: Any) -> dict[str, Any]:
    return {key: entry.value for key, entry in entries.items()}


def test_a_round_gives_back_what_nothing_reaches(home: Path, kept: Chain, instance: dg.DagsterInstance) -> None:
    with Memory(home) as memory:
        before = payload_bytes(memory.care._parts)
    result = execute("maintain_store", home, instance, {"compacted_store": NOW})
    (event,) = result.asset_materializations_for_node("compacted_store")
    found = values(event.metadata)
    with Memory(home) as memory:
        parts = memory.care._parts
        assert (found["payload_bytes_before"], found["payload_bytes_after"]) == (before, payload_bytes(parts))
        assert found["catalog_bytes_after"] <= catalog_bytes(parts)  # the scrub of the check left a record since
        assert_readable(memory, kept)
        assert len(memory.nodes()) == 3
        tiers = {tier.name: tier for tier in memory.residency.tiers()}
    assert found["catalog_bytes_before"] > found["catalog_bytes_after"]
    assert {
        key: found[key] for key in ("states_retired", "copies_evicted", "volumes_removed", "volumes_rewritten")
    } == {"states_retired": 4, "copies_evicted": 4, "volumes_removed": 1, "volumes_rewritten": 1}
    assert (found["orphan_bytes"], found["epoch"], found["run"]) == (0, 1, result.run_id)
    assert found["time_ms"] > 0 and found["fragments_joined"] > 0
    assert [record.data for record in found["tiers"].records] == [
        {
            "tier": name,
            "used_bytes": 3 * NBYTES,
            "file_bytes": tiers[name].file_bytes,
            "pieces": 3,
            "volumes": 1,
            "quarantined": 0,
        }
        for name in ("object", "ssd")
    ]
    assert found["tiers_shown"] == "2 of 2"
    assert (event.tags or {})["dagster/data_version"] == "epoch-1"


def test_the_checks_of_a_round(home: Path, kept: Chain, instance: dg.DagsterInstance) -> None:
    result = execute("maintain_store", home, instance, {"compacted_store": NOW})
    found = checks(result)
    assert {name: check.passed for name, check in found.items()} == {"no_orphans": True, "store_intact": True}
    assert values(found["no_orphans"].metadata) == {"volumes": 2, "pieces": 3, "faults": "none"}
    scrubbed = values(found["store_intact"].metadata)
    del scrubbed["time_ms"]
    assert scrubbed == {
        "copies_checked": 6,
        "checked_bytes": 6 * NBYTES,
        "every_copy": True,
        "bad": 0,
        "repaired": 0,
        "unrepairable": 0,
        "faults": "none",
    }


def test_a_scrub_repairs_and_fails_where_it_cannot(home: Path, kept: Chain, instance: dg.DagsterInstance) -> None:
    node = kept[1][0]
    _damage(home, node.pieces[0], "ssd")
    mended = checks(execute("scrub_store", home, instance))["store_intact"]
    assert mended.passed and values(mended.metadata)["repaired"] == 1
    _damage(home, node.pieces[0], "ssd")
    _damage(home, node.pieces[0], "object")
    lost = checks(execute("scrub_store", home, instance))["store_intact"]
    assert not lost.passed and node.pieces[0].hex()[:16] in (lost.description or "")
    assert (values(lost.metadata)["bad"], values(lost.metadata)["unrepairable"]) == (2, 1)
    incomplete = checks(execute("maintain_store", home, instance))["no_orphans"]
    assert not incomplete.passed and "object: lacks 1 of 7 pieces" in (incomplete.description or "")


def test_a_scrub_stops_at_its_budget(home: Path, kept: Chain, instance: dg.DagsterInstance) -> None:
    config = {"compacted_store_store_intact": {"budget_bytes": NBYTES, "repair": False}}
    found = values(checks(execute("scrub_store", home, instance, config))["store_intact"].metadata)
    assert (found["copies_checked"], found["checked_bytes"], found["every_copy"]) == (1, NBYTES, False)


def test_an_orphan_volume_is_found(home: Path, kept: Chain, instance: dg.DagsterInstance) -> None:
    orphan = home / "object" / "gone.w000.000007.lance"
    (orphan / "data").mkdir(parents=True)
    (orphan / "data" / "x").write_bytes(b"x" * 100)
    for path in (orphan / "data" / "x", orphan / "data", orphan):
        os.utime(path, (1e9, 1e9))
    found = checks(execute("maintain_store", home, instance, {"compacted_store": {"grace_s": 1e12}}))["no_orphans"]
    assert not found.passed
    assert found.description == "1 at fault, first: object/gone.w000.000007: belongs to no volume"
    result = execute("maintain_store", home, instance)
    (event,) = result.asset_materializations_for_node("compacted_store")
    assert values(event.metadata)["orphan_bytes"] == 100 and not orphan.exists()
    assert checks(result)["no_orphans"].passed


def test_a_round_beside_another_maintainer_is_skipped(home: Path, kept: Chain, instance: dg.DagsterInstance) -> None:
    with Memory(home) as memory, lane(memory.care._parts):
        result = execute("maintain_store", home, instance)
    assert result.success
    assert not result.asset_materializations_for_node("compacted_store")
    assert checks(result) == {}


def test_reconciliation_copies_what_is_demanded(home: Path, kept: Chain, instance: dg.DagsterInstance) -> None:
    ids = [node.id for node, _ in kept]
    with Memory(home) as memory:
        memory.residency.evict("ssd", 3 * NBYTES)
        memory.residency.demand([*ids, b"\xab" * 32], "ssd", owner="test")
    result = execute("reconcile_replicas", home, instance)
    (event,) = result.asset_materializations_for_node("reconciled_replicas")
    found = values(event.metadata)
    counts = {key: found[key] for key in ("copied", "there_already", "under_way", "not_copied")}
    assert counts == {"copied": 3, "there_already": 0, "under_way": 0, "not_copied": 1}
    assert found["failures"].startswith("- abababab") and "publish it first" in found["failures"]
    with Memory(home) as memory:
        assert_readable(memory, kept, "ssd")


def test_the_schedule_ticks_at_three_and_runs_maintenance(instance: dg.DagsterInstance) -> None:
    assert maintain_daily.default_status is dg.DefaultScheduleStatus.RUNNING
    at = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)
    with dg.build_schedule_context(instance, scheduled_execution_time=at) as context:
        data = build_defs().get_repository_def().get_schedule_def("maintain_daily").evaluate_tick(context)
    (request,) = data.run_requests or []
    assert (maintain_daily.cron_schedule, maintain_daily.job_name) == ("0 3 * * *", "maintain_store")
    assert request.run_config == {} and not request.asset_selection


def _damage(home: Path, content: bytes, tier: str) -> None:
    """Flip a bit of a piece in a tier."""
    with Memory(home) as memory:
        (place,) = [p for p in memory.placements(content) if p.tier == tier]
        path = memory.care._parts.tiers[tier].volume(place.volume).sidecar(place.file, place.blob)
    assert path is not None
    flip(path, place.offset + 100)
