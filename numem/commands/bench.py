"""`numem bench`: measurements of this machine, and replays of request traces."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from numem.errors import InputError
from numem.terminal import JsonFlag, busy, emit, guarded, table


@guarded
def bench(
    name: Annotated[
        str, typer.Argument(help="core, paged, store, runtime, models, or all; trace for the request trace FILE.")
    ],
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="JSON lines with hash_ids, .gz too.")] = None,
    policies: Annotated[list[str] | None, typer.Option("--policy", help="trace: replay only this; repeatable.")] = None,
    capacities: Annotated[list[int] | None, typer.Option("--capacity", help="trace: in blocks; repeatable.")] = None,
    second_touch: Annotated[bool, typer.Option("--second-touch", help="trace: admit from the second use on.")] = False,
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write a Markdown report.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine, or replay a request trace. Figures of one name, or of all of them keyed by name."""
    from numem.bench import NAMES, run
    from numem.bench.report import render

    if name == "trace":
        if write is not None:
            raise InputError("bench trace: --write belongs to the benchmarks of this machine; use --json > FILE")
        _bench_trace(file, policies or [], capacities or [], second_touch, as_json)
        return
    if file is not None or policies or capacities or second_touch:
        raise InputError(f"bench {name}: a file, --policy, --capacity and --second-touch belong to `numem bench trace`")
    results = {}
    for one in NAMES if name == "all" else (name,):
        with busy(f"measuring {one}"):
            results[one] = run(one)
    report = render(results)
    if write is not None:
        _replace(write, report)
    emit(results if name == "all" else results[name], as_json, f"{write} written" if write else report)


def _bench_trace(
    file: Path | None, policies: list[str], capacities: list[int], second_touch: bool, as_json: bool
) -> None:
    from numem.bench.trace import ratios, trace

    if file is None:
        raise InputError("bench trace: name the trace, for example `numem bench trace conversation.jsonl.gz`")
    with busy(f"replaying {file.name}"):
        results = trace(file, policies, capacities, second_touch)
    columns = ("policy", *(f"{capacity:,}" for capacity in next(iter(results.values()))))
    hits = [(name, *(f"{one.hit_ratio:.4f}" for one in row.values())) for name, row in results.items()]
    written = [(name, *(one.written for one in row.values())) for name, row in results.items()]
    emit(
        ratios(results),
        as_json,
        table(columns, hits, "hit ratio by capacity in blocks"),
        table(columns, written, "blocks written"),
    )


def _replace(path: Path, text: str) -> None:
    """Write a text file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
