"""`numem doctor`: what is wrong with a memory, whether or not it can be opened, and the repair of what can be mended."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from numem.environment import memory_home, places
from numem.terminal import JsonFlag, busy, emit, guarded, table

if TYPE_CHECKING:
    from numem.store.upkeep.findings import DoctorReport

# Rows of a table that could be as long as a memory has pieces.
ROWS = 40


@guarded
def doctor(
    path: Annotated[str | None, typer.Argument(metavar="[PATH]", help="A memory: a directory or s3:// URL.")] = None,
    mend: Annotated[bool, typer.Option("--repair", help="Mend what can be mended, and say what was lost.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Say what is wrong with a memory without changing it. Exits with 1 when more than notes were found."""
    home = memory_home(path)
    if mend:
        _repair(home, as_json)
        return
    from numem.store.upkeep.doctor import diagnose

    with busy("looking"):
        report = diagnose(home, **places())
    emit({"memory": home, **_document(report)}, as_json, *_views(report))
    if not report.ok:
        raise typer.Exit(1)


def _repair(home: str, as_json: bool) -> None:
    from numem.store.upkeep.doctor import repair

    with busy("repairing"):
        report = repair(home, **places())
    done = [{"kind": one.kind, "place": one.dataset, "detail": one.detail} for one in report.done]
    result = {
        "memory": home,
        "ok": report.ok,
        "before": _document(report.before),
        "done": done,
        "lost": list(report.lost),
        "after": _document(report.after),
    }
    rows = [(one.kind, one.dataset, one.detail) for one in report.done]
    views: list[RenderableType] = (
        [table(("done", "place", "what"), rows[:ROWS], "repair")] if rows else ["nothing to do"]
    )
    views += _more(len(rows))
    views += [f"LOST: {one}" for one in report.lost]
    emit(result, as_json, *views, *_views(report.after))
    if not report.ok:
        raise typer.Exit(1)


def _document(report: "DoctorReport") -> dict[str, Any]:
    return {
        "ok": report.ok,
        "findings": [
            {"severity": str(f.severity), "place": f.place, "what": f.what, "remedy": f.remedy} for f in report.findings
        ],
        "tables": report.tables,
        "volumes": report.volumes,
        "nodes": report.nodes,
        "copies": report.copies,
        "staged": report.staged,
        "ms": round(report.ms, 1),
    }


def _views(report: "DoctorReport") -> list[RenderableType]:
    verdict = "ok" if report.ok else "NOT WELL"
    looked = f"{report.volumes:,} volumes, {report.nodes:,} states, {report.copies:,} copies, {report.staged:,} staged"
    rows = [(f.severity, f.place, f.what, f.remedy) for f in report.findings]
    shown = [table(("how bad", "place", "what", "remedy"), rows[:ROWS], "findings")] if rows else []
    return [f"{verdict}: {looked}, {report.ms:.0f} ms", *shown, *_more(len(rows))]


def _more(count: int) -> list[str]:
    return [f"{count - ROWS} more rows; --json lists all"] if count > ROWS else []
