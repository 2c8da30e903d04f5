"""`numem models list | fetch | import | verify | card`: models known by key, and importing others."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from numem.terminal import JsonFlag, busy, emit, guarded, table

app = typer.Typer(help="Models known by key, and importing others.", no_args_is_help=True)

OfflineFlag = Annotated[bool, typer.Option("--offline", help="Never reach for the network.")]


@app.command("list")
@guarded
def models_list(as_json: JsonFlag = False) -> None:
    """The models known by key."""
    from numem.models.hub.card import entry_card
    from numem.models.hub.registry import entries, is_present, location

    known: list[dict[str, Any]] = []
    for entry in entries():
        here = is_present(entry)
        files = [path for path in location(entry).rglob("*") if path.is_file()] if here else []
        known.append(
            {**entry_card(entry), "present": here, "bytes": sum(f.stat().st_size for f in files) if here else None}
        )
    views = []
    for kind, title in (("lm", "language models"), ("embedding", "embedding models")):
        rows = [
            (m["key"], m["level"], f"{m['bytes'] / 1e6:,.0f} MB" if m["present"] else "no", m["licence"])
            for m in known
            if m["kind"] == kind
        ]
        views.append(table(("key", "level", "here", "licence"), rows, title))
    emit({"models": known}, as_json, *views)


@app.command("fetch")
@guarded
def models_fetch(
    key: Annotated[str, typer.Argument(metavar="KEY")],
    offline: OfflineFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch and import a model, unless it is here already."""
    from numem.models.hub.registry import resolve

    with busy(f"fetching {key}"):
        directory = resolve(key, offline=offline)
    emit({"key": key, "directory": str(directory)}, as_json, str(directory))


@app.command("import")
@guarded
def models_import(
    gguf: Annotated[Path, typer.Argument(metavar="GGUF")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the model directory.")],
    as_json: JsonFlag = False,
) -> None:
    """Write a Hugging Face model directory from a GGUF file."""
    from numem.models.gguf.importer import import_gguf

    with busy(f"importing {gguf.name}"):
        made = import_gguf(gguf, directory)
    emit({"gguf": str(gguf), "directory": str(made)}, as_json, str(made))


@app.command("verify")
@guarded
def models_verify(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY|DIR]...", help="Default: every known model that is here.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Hash models again and compare them with what was recorded; exit code 1 where one differs."""
    from numem.models.hub.registry import entries, is_present, resolve
    from numem.models.hub.verification import verify_directory

    found: list[dict[str, Any]] = []
    for model in models or [entry.key for entry in entries() if is_present(entry)]:
        directory = resolve(model, offline=True)
        with busy(f"verifying {model}"):
            done = verify_directory(directory)
        found.append(
            {
                "model": model,
                "directory": str(directory),
                "files": done.files,
                "ok": not done.problems,
                "problems": list(done.problems),
            }
        )
    views = [f"{m['model']}: {m['files']} files are as they were recorded" for m in found if m["ok"]]
    views += [problem for m in found for problem in m["problems"]]
    emit({"models": found}, as_json, *(views or ["no known model is here"]))
    if not all(m["ok"] for m in found):
        raise typer.Exit(1)


@app.command("card")
@guarded
def models_card(
    model: Annotated[str, typer.Argument(metavar="KEY|DIR")],
    as_json: JsonFlag = False,
) -> None:
    """What is known of a model: origin, licence, architecture, tokenizer, sizes. Nothing is fetched."""
    from numem.models.hub.card import card

    known = card(model)
    emit(known, as_json, table(("what", "value"), _lines(known)))


def _lines(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """A tree of values as lines of (dotted name, value), without what is not known."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _lines(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for number, item in enumerate(value):
                yield from _lines(item, f"{prefix}{name}.{number}.")
        elif value not in (None, [], {}):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{prefix}{name}", shown if type(value) is int else str(shown)
