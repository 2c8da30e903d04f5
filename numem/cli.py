"""The library's commands: `numem generate | log | show | fork | verify | models | bench`. None of them loads Dagster.

What takes long to import is imported by the command that needs it, so that `numem --help` is quick.
"""

import getpass
import json
import os
import string
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from numem.errors import InputError
from numem.terminal import (
    Commands,
    JsonFlag,
    MaxPositionOption,
    MemoryOption,
    busy,
    console,
    emit,
    fail,
    guarded,
    memory_home,
    note,
    open_memory,
    out,
    table,
)

if TYPE_CHECKING:
    from numem.state.node import Node

__all__ = [
    "JsonFlag",
    "MaxPositionOption",
    "MemoryOption",
    "app",
    "console",
    "emit",
    "fail",
    "guarded",
    "memory_home",
    "note",
    "open_memory",
    "out",
    "table",
]

# Rows of a table that could be as long as a state has chunks.
ROWS = 12

app = typer.Typer(
    name="numem",
    cls=Commands,
    help="Durable, forkable numerical memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Models known by key, and importing others.", no_args_is_help=True)
app.add_typer(models, name="models")


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


@app.command()
@guarded
def generate(
    model: Annotated[str, typer.Argument(help="A key of `numem models list`, or a model directory.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt through the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of weights and cache.")] = "float32",
    max_position: MaxPositionOption = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Generate text. The longest prefix that the memory holds is restored, and what was computed is published to it."""
    from numem.job.complete import complete
    from numem.runtime.sampling import Sampler

    sampler = Sampler(temperature, top_k, top_p, seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    with busy("loading the model"):
        from numem.models.lm import load_lm

        lm = load_lm(model, dtype=dtype, max_position=max_position)
    tokens = lm.tokenizer.chat([{"role": "user", "content": text}]) if chat else lm.tokenizer.encode(text)

    def show(piece: str) -> None:
        if not as_json:
            typer.echo(piece, nl=False)

    with open_memory(memory, create=True) as store:
        done = complete(store, lm, tokens, max_new_tokens, sampler=sampler, on_text=show)
    for warning in done.warnings:
        note(f"warning: {warning}")
    emit({"model": model, "memory": memory_home(memory), **asdict(done)}, as_json, "")
    if not as_json:
        note(
            f"{done.prompt_tokens} prompt tokens: {done.restored_tokens} restored, {done.computed_tokens} computed; first "
            f"token after {done.ttft_ms:.0f} ms; state {done.boundary[:12]}"
        )


@app.command()
@guarded
def log(
    name: Annotated[str | None, typer.Argument(metavar="[BRANCH|ID]", help="Default: everything.")] = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Lineage: all branches and states, or the ancestry of one; a branch shows its moves too."""
    from numem.lineage.log import ancestry, resolve, tree

    with open_memory(memory) as store:
        branches = store.branches()
        moves = []
        if name is None:
            nodes = store.nodes()
        else:
            nodes = ancestry(store, resolve(store, name).id)
            moves = list(store.log(name)) if name in {b.name for b in branches} else []
        result = {
            "memory": memory_home(memory),
            "branches": [{"name": b.name, "head": b.head.hex(), "source": b.source or None} for b in branches],
            "moves": [
                {
                    "generation": m.generation,
                    "action": m.action,
                    "previous": m.previous.hex() or None,
                    "head": m.head.hex(),
                    "actor": m.actor,
                    "reason": m.reason,
                }
                for m in moves
            ],
            "nodes": [_node(node) for node in nodes],
        }
        views: list[RenderableType] = []
        if moves:
            rows = [(m.generation, m.action, m.head.hex()[:12], m.actor, m.reason) for m in moves]
            views.append(table(("move", "action", "head", "actor", "reason"), rows, f"branch {name}"))
        views.append(tree(store, nodes) or f"{memory_home(memory)}: nothing is stored yet")
    emit(result, as_json, *views)


def _node(node: "Node") -> dict[str, Any]:
    from numem.lineage.log import node_bytes

    return {
        "id": node.id.hex(),
        "parent": None if node.is_root else node.parent.hex(),
        "scope": node.scope.hex(),
        "kind": node.kind,
        "range": [node.start, node.end],
        "coordinate": dict(node.coordinate),
        "pieces": [piece.hex() for piece in node.pieces],
        "bytes": node_bytes(node),
    }


@app.command()
@guarded
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="A causal id, the beginning of one, or a branch.")],
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """One state: its manifest, identity, copies and provenance."""
    from numem.lineage.log import branch_heads, line, resolve

    with open_memory(memory) as store:
        node = resolve(store, name)
        manifest = store.manifest(node.id)
        copies = {
            content.hex(): [
                {"tier": p.tier, "node": p.node or None, "volume": p.volume, "offset": p.offset, "bytes": p.nbytes}
                for p in store.placements(content)
            ]
            for content in dict.fromkeys(manifest.content_ids)
        }
        heads = branch_heads(store).get(node.id, [])
        parent = None if node.is_root else store.get(node.parent)
        result = {
            **_node(node),
            "branches": heads,
            "manifest": manifest.model_dump(mode="json"),
            "identity": store.identity(node.scope),
            "placements": copies,
            "provenance": dict(node.provenance),
        }
        title = line(node, parent, heads)
    identity = result["identity"] or {}
    flat = [(key, json.dumps(value, ensure_ascii=False)) for key, value in _flat(identity)]
    fields = [
        (f.id, f.value.dtype, f.value.shape, f.chunk_shape, len(f.chunks), sum(c.logical_byte_length for c in f.chunks))
        for f in manifest.fields
    ]
    where = [
        (content[:12], p["tier"], p["node"] or "", p["volume"], p["offset"], p["bytes"])
        for content, found in copies.items()
        for p in found
    ]
    more = [f"{len(where) - ROWS} more copies; --json lists all"] if len(where) > ROWS else []
    lost = [content[:12] for content, found in copies.items() if not found]
    emit(
        result,
        as_json,
        f"{title}\nid     {node.id.hex()}\nparent {'the scope' if node.is_root else node.parent.hex()}",
        table(("field", "dtype", "shape", "chunk", "chunks", "bytes"), fields, "manifest"),
        table(("identity", "value"), [("scope", node.scope.hex()), *flat], "identity"),
        table(("piece", "tier", "node", "volume", "offset", "bytes"), where[:ROWS], "copies"),
        *more,
        *([f"no copy of {', '.join(lost)}; recompute or restore a replica"] if lost else []),
        table(("provenance", "value"), sorted(node.provenance.items()), "provenance"),
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@app.command()
@guarded
def fork(
    name: Annotated[str, typer.Argument(metavar="ID", help="A causal id, the beginning of one, or a branch.")],
    branch: Annotated[str, typer.Option("--branch", help="Name of the new branch.")],
    actor: Annotated[str | None, typer.Option("--actor", help="Who forks. Default: the user.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why.")] = "",
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Start a branch at a state. No byte is copied; a name that is taken is refused."""
    from numem.lineage.log import resolve

    _check_branch(branch)
    with open_memory(memory) as store:
        head = resolve(store, name)
        source = name if name in {b.name for b in store.branches()} else None
        made = store.create_branch(branch, head.id, actor=actor or _user(), reason=reason, source=source)
    result = {
        "branch": made.name,
        "head": made.head.hex(),
        "generation": made.generation,
        "source": made.source or None,
    }
    emit(result, as_json, f"branch {made.name} at {made.head.hex()}")


def _check_branch(name: str) -> None:
    """Refuse names that a later command would take for something else."""
    if name.startswith("-"):
        raise InputError(f"branch {name!r}: a name that begins with '-' reads like an option; choose another")
    if len(name) >= 4 and all(c in string.hexdigits for c in name):
        raise InputError(f"branch {name!r}: only hex digits read like the beginning of a causal id; choose another")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may know no name for its user
        return f"uid {os.getuid()}"


@app.command()
@guarded
def verify(
    name: Annotated[str | None, typer.Argument(metavar="[ID]", help="A state and its ancestry. Default: all.")] = None,
    deep: Annotated[bool, typer.Option("--deep/--quick", help="Digest every byte, or only look for the files.")] = True,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check every copy against its content id. Exits with 1 when something is damaged or missing."""
    from numem.lineage.log import ancestry, resolve

    with open_memory(memory) as store, busy("verifying"):
        ids = None if name is None else [node.id for node in ancestry(store, resolve(store, name).id)]
        report = store.verify(ids, deep=deep)
        home = memory_home(memory)
    bad = [(q.content.hex(), q.tier, q.volume, q.reason) for q in report.bad]
    missing = {node.hex(): [content.hex() for content in contents] for node, contents in report.missing.items()}
    result = {
        "memory": home,
        "ok": report.ok,
        "deep": deep,
        "nodes": report.nodes,
        "pieces": report.pieces,
        "placements": report.placements,
        "bytes": report.bytes,
        "bad": [dict(zip(("content", "tier", "volume", "reason"), row, strict=True)) for row in bad],
        "missing": missing,
        "conflicts": [node.hex() for node in report.conflicts],
        "damaged": dict(report.damaged),
        "ms": round(report.ms, 1),
    }
    verdict = "ok" if report.ok else "DAMAGED"
    read = f"{report.bytes:,} bytes digested" if deep else "no byte read (quick)"
    counts = f"{report.nodes:,} states, {report.pieces:,} pieces, {report.placements:,} copies, {read}"
    views: list[RenderableType] = [f"{verdict}: {counts}, {report.ms:.0f} ms"]
    if bad:
        views.append(table(("piece", "tier", "volume", "why it is out of use"), [(b[0][:12], *b[1:]) for b in bad]))
    views += [f"state {node[:12]} lacks {len(c)} of its pieces; recompute it" for node, c in missing.items()]
    views += [f"{file}: {why}" for file, why in report.damaged.items()]
    views += [
        f"state {node.hex()[:12]} was once computed with other bytes; the first stay" for node in report.conflicts
    ]
    emit(result, as_json, *views)
    if not report.ok:
        raise typer.Exit(1)


@models.command("list")
@guarded
def models_list(as_json: JsonFlag = False) -> None:
    """The models known by key."""
    from numem.models.registry import entries, is_present

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


@models.command("fetch")
@guarded
def models_fetch(
    key: Annotated[str, typer.Argument(metavar="KEY")],
    as_json: JsonFlag = False,
) -> None:
    """Fetch and import a model, unless it is here already."""
    from numem.models.registry import resolve

    with busy(f"fetching {key}"):
        directory = resolve(key)
    emit({"key": key, "directory": str(directory)}, as_json, str(directory))


@models.command("import")
@guarded
def models_import(
    gguf: Annotated[Path, typer.Argument(metavar="GGUF")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the model directory.")],
    as_json: JsonFlag = False,
) -> None:
    """Write a Hugging Face model directory from a GGUF file."""
    from numem.models.gguf_import import import_gguf

    with busy(f"importing {gguf.name}"):
        made = import_gguf(gguf, directory)
    emit({"gguf": str(gguf), "directory": str(made)}, as_json, str(made))


@app.command()
@guarded
def bench(
    name: Annotated[str, typer.Argument(help="core, paged, or all.")],
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write a Markdown report.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine. Figures of one name, or of all of them keyed by name."""
    from numem.bench import NAMES, run
    from numem.bench.report import render

    results = {}
    for one in NAMES if name == "all" else (name,):
        with busy(f"measuring {one}"):
            results[one] = run(one)
    report = render(results)
    if write is not None:
        _replace(write, report)
    emit(results if name == "all" else results[name], as_json, f"{write} written" if write else report)


def _replace(path: Path, text: str) -> None:
    """Write a text file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


if __name__ == "__main__":
    app()
