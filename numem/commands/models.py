"""`numem models list | fetch | import`: models known by key, and importing others."""

from pathlib import Path
from typing import Annotated

import typer

from numem.terminal import JsonFlag, busy, emit, guarded, table

app = typer.Typer(help="Models known by key, and importing others.", no_args_is_help=True)


@app.command("list")
@guarded
def models_list(as_json: JsonFlag = False) -> None:
    """The models known by key."""
    from numem.models.hub.registry import entries, is_present

    known = [
        {
            "key": e.key,
            "family": e.family,
            "present": is_present(e),
            "source": e.source.describe(),
            "notes": e.notes,
        }
        for e in entries()
    ]
    rows = [(m["key"], m["family"], "yes" if m["present"] else "no", m["notes"]) for m in known]
    emit({"models": known}, as_json, table(("key", "family", "here", "what it is"), rows))


@app.command("fetch")
@guarded
def models_fetch(
    key: Annotated[str, typer.Argument(metavar="KEY")],
    as_json: JsonFlag = False,
) -> None:
    """Fetch and import a model, unless it is here already."""
    from numem.models.hub.registry import resolve

    with busy(f"fetching {key}"):
        directory = resolve(key)
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
