"""`numem embed`: vectors of texts."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from numem.errors import InputError
from numem.terminal import JsonFlag, busy, emit, guarded, note, table

if TYPE_CHECKING:
    import numpy as np

# What people are shown: the first texts, and the first components of each.
_ROWS, _SHOWN = 20, 4


@guarded
def embed(
    model: Annotated[str, typer.Argument(help="A key of `numem models list`, or a model directory.")],
    texts: Annotated[list[str] | None, typer.Argument(help="The texts.", metavar="[TEXTS]...")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Read the texts from FILE: one a line of a .txt, or the field 'text' of each row of a .jsonl."
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="document, query, or another prompt that the model has. Default: document.")
    ] = None,
    instruct: Annotated[
        str | None, typer.Option(help="What queries look for, where the model takes an instruction.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Keep the leading components, normalised again.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the vectors to FILE.npy, float32 [texts, dim].")] = None,
    device: Annotated[str, typer.Option(help="cpu, or auto, which is the CPU too.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of the weights.")] = "float32",
    quantise: Annotated[str | None, typer.Option(help="q8, q4, q4a or q4k: quantise the weights.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Embed texts. A vector's bytes depend on its text and the model alone."""
    if (file is None) == (not texts):
        raise InputError("embed: give texts, or a file of them with --file, and not both")
    if out is not None and out.suffix != ".npy":
        raise InputError(f"{out}: the vectors are written as .npy; name such a file")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"{out}: {out.parent} is no directory; make it first")
    given = texts if file is None else read_texts(file)
    with busy("loading the model"):
        from numem.models.embedding.embedder import load_embedder

        embedder = load_embedder(model, device=device, dtype=dtype, quantise=quantise)
    began = time.perf_counter()
    with busy(f"embedding {len(given or ()):,} texts"):
        vectors = embedder.embed_texts(given or (), kind=kind, instruct=instruct, dim=dim)
    seconds = time.perf_counter() - began
    count, width = vectors.shape
    result: dict[str, Any] = {"model": model, "texts": count, "dim": width, "scope": embedder.identity.scope.hex()}
    if out is None:
        result["vectors"] = vectors.tolist()
    else:
        write_npy(out, vectors)
        result["out"] = str(out)
    first = list(zip(given or (), vectors, strict=True))[:_ROWS]
    shown = [(i, text[:60], *(f"{x:.5f}" for x in row[:_SHOWN])) for i, (text, row) in enumerate(first)]
    heads = [f"[{i}]" for i in range(min(_SHOWN, width))]
    emit(result, as_json, str(out) if out else table(["#", "text", *heads], shown, f"{count:,} texts x {width}"))
    note(f"{count:,} texts in {seconds:.2f} s")


def read_texts(path: Path) -> list[str]:
    """The texts of a file, in order: every line of a .txt, empty ones too, or the rows of a .jsonl.

    Raises:
        InputError: no such file, another suffix, or a row without a text; names file and line.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a .txt with a text a line, or a .jsonl")
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(f"{path}: suffix {path.suffix!r} is not .txt or .jsonl")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    if lines[-1] == "":
        lines.pop()
    if path.suffix == ".txt":
        return [line.removesuffix("\r") for line in lines]
    return [_row(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _row(where: str, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{where}: the row needs a field 'text' with a string")
    return text


def write_npy(path: Path, vectors: "np.ndarray") -> None:
    """Write an array so that the file is there whole or not at all."""
    import numpy as np

    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            np.save(file, vectors)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
