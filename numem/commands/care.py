"""`numem verify | scrub | maintain | archive | doctor`: keeping a memory whole and small."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from numem.environment import memory_home, parse_bytes
from numem.terminal import JsonFlag, MemoryOption, busy, emit, guarded, open_memory, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numem.store.reports import Quarantined

DAY_S = 86_400.0
HOUR_S = 3_600.0


@guarded
def verify(
    name: Annotated[str | None, typer.Argument(metavar="[ID]", help="A state and its ancestry. Default: all.")] = None,
    deep: Annotated[bool, typer.Option("--deep/--quick", help="Digest every byte, or only look for the files.")] = True,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check every copy against its content id. Exits with 1 when something is damaged or missing."""
    from numem.lineage.log import ancestry, resolve

    with open_memory(memory, looks=True) as store, busy("verifying"):
        ids = None if name is None else [node.id for node in ancestry(store, resolve(store, name).id)]
        report = store.verify(ids, deep=deep)
        home = memory_home(memory)
    missing = {node.hex(): [content.hex() for content in contents] for node, contents in report.missing.items()}
    result = {
        "memory": home,
        "ok": report.ok,
        "deep": deep,
        "nodes": report.nodes,
        "pieces": report.pieces,
        "placements": report.placements,
        "bytes": report.bytes,
        "bad": bad_copies(report.bad),
        "missing": missing,
        "conflicts": [node.hex() for node in report.conflicts],
        "damaged": dict(report.damaged),
        "ms": round(report.ms, 1),
    }
    verdict = "ok" if report.ok else "DAMAGED"
    read = f"{report.bytes:,} bytes digested" if deep else "no byte read (quick)"
    counts = f"{report.nodes:,} states, {report.pieces:,} pieces, {report.placements:,} copies, {read}"
    views: list[RenderableType] = [f"{verdict}: {counts}, {report.ms:.0f} ms", *_bad_view(report.bad)]
    views += [f"state {node[:12]} lacks {len(c)} of its pieces; recompute it" for node, c in missing.items()]
    views += [f"{file}: {why}" for file, why in report.damaged.items()]
    views += [
        f"state {node.hex()[:12]} was once computed with other bytes; the first stay" for node in report.conflicts
    ]
    emit(result, as_json, *views)
    if not report.ok:
        raise typer.Exit(1)


@guarded
def scrub(
    tier: Annotated[
        str | None, typer.Option("--tier", help="This tier alone. Default: all on disk, and archives.")
    ] = None,
    budget_bytes: Annotated[
        str | None,
        typer.Option("--budget-bytes", metavar="BYTES", help="Stop after so much, like 10GB; go on next time."),
    ] = None,
    budget_s: Annotated[float | None, typer.Option("--budget-s", min=0, help="Stop after so many seconds.")] = None,
    repair: Annotated[bool, typer.Option("--repair/--no-repair", help="Make bad copies anew from good ones.")] = True,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Read copies, those first that were looked at longest ago, and repair what is bad. Exits with 1 where that cannot be."""
    budget = None if budget_bytes is None else parse_bytes(budget_bytes)
    with open_memory(memory) as store, busy("scrubbing"):
        report = store.care.scrub(tier=tier, budget_bytes=budget, budget_s=budget_s, repair=repair)
    lost = {content.hex(): why for content, why in report.unrepairable.items()}
    result = {
        "memory": memory_home(memory),
        "ok": report.ok,
        "checked": report.checked,
        "bytes": report.bytes,
        "whole": report.whole,
        "bad": bad_copies(report.bad),
        "repaired": report.repaired,
        "unrepairable": lost,
        "damaged": dict(report.damaged),
        "ms": round(report.ms, 1),
    }
    verdict = "ok" if report.ok else "DAMAGED"
    extent = "every copy" if report.whole else "the budget is spent; the next scrub goes on there"
    line = f"{verdict}: {report.checked:,} copies, {report.bytes:,} bytes read, {report.ms:.0f} ms ({extent})"
    views: list[RenderableType] = [line, *_bad_view(report.bad)]
    if report.bad or report.repaired:
        views.append(f"{report.repaired:,} copies made anew")
    views += [f"piece {content[:12]}: {why}" for content, why in lost.items()]
    views += [f"{volume}: {why}" for volume, why in report.damaged.items()]
    emit(result, as_json, *views)
    if not report.ok:
        raise typer.Exit(1)


@guarded
def maintain(
    retain: Annotated[
        float | None,
        typer.Option(
            "--retain", min=0, metavar="DAYS", help="Drop states that nothing reaches once older. Default: keep."
        ),
    ] = None,
    grace: Annotated[float, typer.Option("--grace", min=0, metavar="SECONDS", help="Take nothing younger.")] = HOUR_S,
    dead: Annotated[
        float, typer.Option("--dead", min=0, max=1, help="Rewrite volumes of which a larger share is dead.")
    ] = 0.5,
    versions: Annotated[
        float, typer.Option("--versions", min=0, metavar="SECONDS", help="Keep catalog versions that are younger.")
    ] = 600.0,
    least: Annotated[int, typer.Option("--least", min=0, help="Compact tables of more fragments than this.")] = 64,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """One round of maintenance: collect, reclaim, compact, clean up. One process at a time."""
    with open_memory(memory) as store, busy("maintaining"):
        report = store.care.maintain(
            retain_s=None if retain is None else retain * DAY_S,
            grace_s=grace,
            dead_fraction=dead,
            keep_versions_s=versions,
            least=least,
        )
    collected, compacted = report.collected, report.compacted
    result = {
        "memory": memory_home(memory),
        "catalog_bytes": {"before": report.catalog_before, "after": report.catalog_after},
        "payload_bytes": {"before": report.payload_before, "after": report.payload_after},
        "retired": collected.retired,
        "evicted": collected.evicted,
        "evicted_bytes": collected.evicted_bytes,
        "volumes_removed": collected.removed,
        "volumes_rewritten": collected.rewritten,
        "orphan_bytes": collected.orphans,
        "fragments": dict(compacted.fragments),
        "rows_dropped": compacted.rows_dropped,
        "version_bytes": compacted.bytes_removed,
        "ledger_bytes": report.ledger_saved,
        "spool_files": report.spool_swept,
        "epoch": report.epoch,
        "ms": round(report.ms, 1),
    }
    rows = [
        ("catalog", report.catalog_before, report.catalog_after, report.catalog_before - report.catalog_after),
        ("payload", report.payload_before, report.payload_after, report.payload_before - report.payload_after),
    ]
    emit(
        result,
        as_json,
        table(("bytes", "before", "after", "given back"), rows),
        f"{collected.retired:,} states retired, {collected.evicted:,} copies let go of, "
        f"{collected.removed:,} volumes removed ({collected.rewritten:,} of them rewritten first)",
        f"{sum(compacted.fragments.values()):,} catalog fragments joined, {compacted.rows_dropped:,} facts dropped, "
        f"epoch {report.epoch}, {report.ms:.0f} ms",
    )


@guarded
def archive(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A tier with write=archive, see NUMEM_TIERS.")],
    close: Annotated[bool, typer.Option("--close", help="Close the volumes that are written to first.")] = False,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy closed volumes of the home tier to an archive. Exits with 1 when one could not be copied."""
    with open_memory(memory) as store, busy(f"archiving to {name}"):
        report = store.care.archive(name, close=close)
    result = {
        "memory": memory_home(memory),
        "archive": name,
        "volumes": list(report.volumes),
        "held": report.held,
        "bytes": report.bytes,
        "failed": dict(report.failed),
        "ms": round(report.ms, 1),
    }
    copied = f"{len(report.volumes):,} volumes copied ({report.bytes:,} bytes), {report.held:,} there already"
    emit(result, as_json, copied, *(f"{volume}: not archived: {why}" for volume, why in report.failed.items()))
    if report.failed:
        raise typer.Exit(1)


def bad_copies(bad: "Iterable[Quarantined]") -> list[dict[str, Any]]:
    """Quarantined copies as JSON."""
    return [{"content": q.content.hex(), "tier": q.tier, "volume": q.volume, "reason": q.reason} for q in bad]


def _bad_view(bad: "Iterable[Quarantined]") -> list[RenderableType]:
    rows = [(q.content.hex()[:12], q.tier, q.volume, q.reason) for q in bad]
    return [table(("piece", "tier", "volume", "why it is out of use"), rows)] if rows else []
