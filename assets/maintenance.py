"""Maintenance of the store as assets: rounds of the maintenance lane, and the copies that demands ask for.

Belongs here: what a person reads about a round. What is done: `numem.store.upkeep.maintain` and `numem.store.placement.reconcile`. One
process maintains a memory at a time; where another one does, the asset is skipped, since nothing is wrong.

Dagster concept: https://docs.dagster.io/guides/build/assets
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dagster_project.assets.figures import stacked_bars
from dagster_project.assets.metadata import lines, ms, table
from dagster_project.assets.provenance import code_version
from dagster_project.resources.memory import MemoryResource
from numem.errors import LeaseHeldError

if TYPE_CHECKING:
    from numem.store.memory import Memory
    from numem.store.placement.reconcile import ReconcileReport
    from numem.store.upkeep.maintain import MaintainReport

Context = dg.AssetExecutionContext
Result = dg.MaterializeResult[Any]

GROUP = "maintenance"
OWNERS = ["team:numem"]
DAY_S = 86_400.0
# What one check after a round reads; the scrub job reads everything.
SCRUB_BYTES = 1 << 30


class MaintainConfig(dg.Config):
    """What one round may take."""

    retain_days: float | None = Field(
        default=None, ge=0, description="Drop states that nothing reaches once they are older; empty: keep all."
    )
    grace_s: float = Field(default=3600.0, ge=0, description="Take nothing that is younger, in seconds.")
    dead_fraction: float = Field(
        default=0.5, ge=0, le=1, description="Rewrite volumes of which more than this is dead."
    )
    keep_versions_s: float = Field(
        default=600.0, ge=0, description="Keep catalog versions that are younger, in seconds."
    )
    least: int = Field(default=64, ge=0, description="Compact catalog tables of more fragments than this.")


class ScrubConfig(dg.Config):
    """How much a check of the store reads."""

    budget_bytes: int = Field(default=SCRUB_BYTES, ge=0, description="Bytes of copies to read; 0: all of them.")
    repair: bool = Field(default=True, description="Make bad copies anew from good ones.")


@dg.asset(
    group_name=GROUP,
    owners=OWNERS,
    kinds={"lance"},
    code_version=code_version("store", "policy"),
    output_required=False,
)
def compacted_store(context: Context, config: MaintainConfig, memory: MemoryResource) -> Iterator[Result]:
    """The store after a round of maintenance: without what nothing reaches, its catalog in few fragments and versions.

    The data version is the epoch of the maintenance lease.
    """
    options = config.model_dump(exclude={"retain_days"})
    retain_s = None if config.retain_days is None else config.retain_days * DAY_S
    try:
        report = memory.get().care.maintain(retain_s=retain_s, **options)
    except LeaseHeldError as error:
        context.log.warning(f"skipped: {error}")
        return
    version = dg.DataVersion(f"epoch-{report.epoch}")
    yield dg.MaterializeResult(data_version=version, metadata={**of_round(memory.get(), report), "run": context.run_id})


@dg.asset(group_name=GROUP, owners=OWNERS, kinds={"lance"}, code_version=code_version("store", "policy"))
def reconciled_replicas(context: Context, memory: MemoryResource) -> Result:
    """Copies that demands want in tiers of this node, made where they can be; highest priority first."""
    report = memory.get().residency.reconcile()
    return dg.MaterializeResult(metadata={**of_reconciliation(report), "run": context.run_id})


@dg.asset_check(asset=compacted_store)
def no_orphans(memory: MemoryResource) -> dg.AssetCheckResult:
    """Every file of a volume belongs to one that the store knows, and every piece of every state lies in the home tier."""
    tiers = memory.get().residency.tiers()
    faults = [f"{tier.name}/{name}: belongs to no volume" for tier in tiers for name in tier.orphans]
    home = next(tier for tier in tiers if tier.home)
    if home.actual < home.desired:
        faults.append(f"{home.name}: lacks {home.desired - home.actual} of {home.desired} pieces")
    figures = {"volumes": sum(tier.volumes for tier in tiers), "pieces": home.desired}
    return _result(faults, "every file and every piece has its place", figures)


@dg.asset_check(asset=compacted_store)
def store_intact(config: ScrubConfig, memory: MemoryResource) -> dg.AssetCheckResult:
    """Copies read and compared with their content ids, those first that were looked at longest ago; bad ones made anew."""
    report = memory.get().care.scrub(budget_bytes=config.budget_bytes or None, repair=config.repair)
    faults = [f"piece {content.hex()[:16]}: {why}" for content, why in report.unrepairable.items()]
    faults += [f"volume {volume}: {why}" for volume, why in report.damaged.items()]
    if len(report.bad) > report.repaired + len(report.unrepairable):
        faults.append(f"{len(report.bad)} bad copies, {report.repaired} made anew")
    figures = {
        "copies_checked": report.checked,
        "checked_bytes": report.bytes,
        "every_copy": report.whole,
        "bad": len(report.bad),
        "repaired": report.repaired,
        "unrepairable": len(report.unrepairable),
        "time_ms": ms(report.ms),
    }
    return _result(faults, f"{report.checked} copies checked, {report.repaired} made anew", figures)


def of_round(memory: "Memory", report: "MaintainReport") -> dict[str, Any]:
    """What a round gave back, and what the tiers hold now. Numbers and names alone, nothing of what states hold."""
    collected, compacted = report.collected, report.compacted
    before = {"catalog": report.catalog_before, "payload": report.payload_before}
    after = {"catalog": report.catalog_after, "payload": report.payload_after}
    bars = {
        "kept": [min(after[name], before[name]) for name in before],
        "given back": [max(0, before[name] - after[name]) for name in before],
    }
    columns = {
        "tier": "string",
        **dict.fromkeys(("used_bytes", "file_bytes", "pieces", "volumes", "quarantined"), "int"),
    }
    rows = [(t.name, t.used_bytes, t.file_bytes, t.pieces, t.volumes, t.quarantined) for t in memory.residency.tiers()]
    return {
        **{f"{name}_bytes_before": value for name, value in before.items()},
        **{f"{name}_bytes_after": value for name, value in after.items()},
        "states_retired": collected.retired,
        "copies_evicted": collected.evicted,
        "volumes_removed": collected.removed,
        "volumes_rewritten": collected.rewritten,
        "orphan_bytes": collected.orphans,
        "fragments_joined": sum(compacted.fragments.values()),
        "facts_dropped": compacted.rows_dropped,
        "version_bytes": compacted.bytes_removed,
        "epoch": report.epoch,
        "time_ms": ms(report.ms),
        **table("tiers", columns, rows),
        "figure": stacked_bars("Bytes of catalog and payload", bars, unit="bytes", each="catalog, payload"),
    }


def of_reconciliation(report: "ReconcileReport") -> dict[str, Any]:
    """What was copied, and why the rest was not."""
    stuck = [f"{id.hex()[:16]}: {why}" for id, why in report.failed.items()]
    stuck += [f"{one.demand.id.hex()[:16]}: {one.reason}" for one in report.unsatisfiable]
    stuck += [f"{id.hex()[:16]}: failed before, and its sources are the same" for id in report.suppressed]
    return {
        "copied": len(report.ready),
        "there_already": report.satisfied,
        "under_way": report.in_progress,
        "not_copied": len(stuck),
        "failures": dg.MetadataValue.md(lines(stuck)),
    }


def _result(faults: list[str], good: str, figures: dict[str, Any]) -> dg.AssetCheckResult:
    verdict = good if not faults else f"{len(faults)} at fault, first: {faults[0]}"
    return dg.AssetCheckResult(passed=not faults, description=verdict, metadata={**figures, "faults": lines(faults)})


MAINTENANCE = [compacted_store, reconciled_replicas]
MAINTENANCE_CHECKS = [no_orphans, store_intact]
