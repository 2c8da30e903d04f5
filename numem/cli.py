"""The library's commands, mounted; none of them loads Dagster. What they do: `numem.commands`.

`numem --help` imports no tensor or storage library: what takes long to import is imported by the command that needs it.
"""

from collections.abc import Callable
from typing import Annotated

import typer

from numem.commands import bench, care, doctor, embed, forget, generate, lineage, models, replay, residency, why
from numem.terminal import Commands

app = typer.Typer(
    name="numem",
    cls=Commands,
    help="Durable, forkable numerical memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
STATES: tuple[Callable[..., None], ...] = (generate.generate, embed.embed, lineage.log, lineage.show, lineage.fork)
DECISIONS: tuple[Callable[..., None], ...] = (why.why, replay.replay)
CARE: tuple[Callable[..., None], ...] = (
    care.verify,
    care.scrub,
    care.maintain,
    care.archive,
    forget.forget,
    doctor.doctor,
)
RESIDENCY: tuple[Callable[..., None], ...] = (
    residency.tiers,
    residency.pin,
    residency.unpin,
    residency.pins,
    residency.demand,
    residency.cancel,
    residency.demands,
    residency.reconcile,
    residency.evict,
)
for commands, panel in (
    (STATES, None),
    (CARE, "Keeping a memory whole and small"),
    (RESIDENCY, "Copies and where they are"),
    (DECISIONS, "Why it did what it did"),
):
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(models.app, name="models")
app.command()(bench.bench)


def _version(asked: bool) -> None:
    if asked:
        from numem import __version__

        typer.echo(f"numem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Durable, forkable numerical memory."""


if __name__ == "__main__":
    app()
