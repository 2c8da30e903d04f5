"""The `numem` command: the library's commands of `numem.cli`, and those that orchestrate: demo, run, ui.

Belongs here: options, and what is printed. The run itself: `dagster_project.runs`. Dagster is imported by the commands
that need it, so that the others stay quick.
"""

import json
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from numem.cli import app
from numem.errors import InputError
from numem.terminal import (
    JsonFlag,
    MaxPositionOption,
    MemoryOption,
    busy,
    console,
    emit,
    fail,
    guarded,
    say_error,
    table,
)

if TYPE_CHECKING:
    from dagster_project.deployment import Deployment
    from dagster_project.runs import Finished, Settings

__all__ = ["app", "main"]

ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="KEY", help="A key of `numem models list`, or a model directory.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:N, auto, or several GPUs: cuda:all, cuda:0,cuda:1.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32 or bfloat16, of weights and cache. Default: float32 on the CPU, bfloat16 on a GPU."
    ),
]
QuantiseOption = Annotated[
    str | None, typer.Option("--quantise", help="none, q8, q4, q4a, q4k or native (as weights were quantised before).")
]
LanesOption = Annotated[int, typer.Option("--lanes", min=1, max=256, help="Prompts decoded at once.")]

DEMO_TOKENS = 64
DEMO_LANES = 4


@app.command()
@guarded
def demo(
    memory: MemoryOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantise: QuantiseOption = None,
    max_position: MaxPositionOption = None,
    model_free: Annotated[
        bool, typer.Option("--model-free", help="Without a model: the exactness contract on synthetic state.")
    ] = False,
    two_workers: Annotated[
        bool, typer.Option("--two-workers", help="Without a model: two processes share a memory on an S3 server.")
    ] = False,
    s3_endpoint: Annotated[
        str | None,
        typer.Option(
            "--s3-endpoint",
            metavar="URL",
            help="With --two-workers: this server, with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Default: a local one.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the main job on the example prompts: prefill, publish, promote, restore, decode, and prove it exact."""
    if s3_endpoint is not None and not two_workers:
        raise InputError("--s3-endpoint belongs to --two-workers")
    if model_free:
        _model_free(memory, as_json)
        return
    if two_workers:
        _two_workers(memory, s3_endpoint, as_json)
        return
    from dagster_project.runs import Settings

    # Again, and from the durable plane: a demonstration goes every step of the way on each of its runs.
    settings = Settings(
        max_new_tokens=DEMO_TOKENS, lanes=DEMO_LANES, ignore_eos=True, arrivals="restore", again=True, previews=True
    )
    where = _deployment(memory, model, device, dtype, quantise, max_position)
    _job(example_prompts(), settings, where, None, as_json)


@app.command()
@guarded
def run(
    prompts: Annotated[Path, typer.Argument(metavar="PROMPTS", help="JSONL or Parquet, one prompt a row.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where completions.jsonl is written.")],
    memory: MemoryOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantise: QuantiseOption = None,
    max_position: MaxPositionOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=0)] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this probability.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling; prompt i of the table uses seed + i.")] = 0,
    lanes: LanesOption = 4,
    cache_mib: Annotated[
        int,
        typer.Option("--cache-mib", min=0, help="Memory for the state of ended prompts that is kept for later ones."),
    ] = 256,
    again: Annotated[
        bool,
        typer.Option("--again", help="Decode every prompt, also those an earlier run finished under these settings."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run the main job on your own prompts. Rows have `prompt`, or `messages` for the chat template, and maybe `id`.

    A run that was interrupted or killed goes on where it was: start it again with the same table, model and settings.
    """
    from dagster_project.runs import Settings
    from numem.runtime.sampling import Sampler

    Sampler(temperature, top_k, top_p, seed)  # refuses what no run could use, before anything is opened
    settings = Settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, lanes=lanes,
        cache_mib=cache_mib, again=again,
    )  # fmt: skip
    _job(prompts, settings, _deployment(memory, model, device, dtype, quantise, max_position), out, as_json)


@app.command()
@guarded
def ui(
    memory: MemoryOption = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 3000,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantise: QuantiseOption = None,
) -> None:
    """Open Dagster's UI on the memory's runs, at http://127.0.0.1:3000. Ends with ctrl-C."""
    from dagster_project import ui as server
    from dagster_project.deployment import Deployment

    deployment = Deployment.here(memory=memory, model=model, device=device, dtype=dtype, quantise=quantise)
    server.require_free(port)
    environment = server.environment(deployment, chosen=bool(model or device or dtype or quantise))
    console.print(f"http://{server.HOST}:{port}  (memory {environment['NUMEM_MEMORY']})", highlight=False, markup=False)
    sys.stdout.flush()
    sys.stderr.flush()
    # Dagster ends on SIGTERM as it ends on SIGINT, which a shell script's background job ignores.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execve(sys.executable, server.command(port), environment)


def example_prompts() -> Path:
    """The example table: of a checkout, or as installed under the environment's share directory.

    Raises:
        InputError: it is in neither place.
    """
    places = [Path(__file__).resolve().parents[1] / "examples", Path(sys.prefix) / "share" / "numem" / "examples"]
    for place in places:
        if (place / "prompts.jsonl").is_file():
            return place / "prompts.jsonl"
    raise InputError(
        f"examples/prompts.jsonl: not found in {' or '.join(map(str, places))}; use `numem run PROMPTS --out DIR`"
    )


def _deployment(
    memory: str | None,
    model: str | None,
    device: str | None,
    dtype: str | None,
    quantise: str | None,
    max_position: int | None,
) -> "Deployment":
    # Dagster announces what it will rename one day; that is for developers, who see it in the tests.
    warnings.simplefilter("ignore")
    from dagster_project.deployment import Deployment

    return Deployment.here(
        memory=memory, model=model, device=device, dtype=dtype, quantise=quantise, max_position=max_position
    )


def _job(prompts: Path, settings: "Settings", deployment: "Deployment", out: Path | None, as_json: bool) -> None:
    from dagster_project.runs import continue_prompts
    from dagster_project.show import Watched

    watched = Watched()
    try:
        with watched.shown(console) as watcher:
            done = continue_prompts(deployment, prompts, settings, out=out, progress=watcher)
    except KeyboardInterrupt:
        cancelled = f"cancelled; {watched.kept()}"
        console.print(cancelled, highlight=False, soft_wrap=True)
        if as_json:
            say_error(cancelled, "KeyboardInterrupt")
        raise typer.Exit(130) from None
    _report(done, as_json)


def _report(done: "Finished", as_json: bool) -> None:
    from dagster_project.show import summary_table

    summary = done.summary
    result = {**summary.to_json(), "run_id": done.run_id, "instance": str(done.instance)}
    emit(result, as_json, summary_table(summary), f"outputs: {summary.outputs}", f"runs, lineage, checks: {_ui(done)}")
    for warning in summary.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    if summary.exact is False:
        fail(f"batch {summary.batch}: restored state is not exact; {'; '.join(summary.proof['differences'])}")


def _ui(done: "Finished") -> str:
    """The command that opens the UI on this run's instance."""
    from dagster_project.deployment import Deployment

    default = Deployment.here().memory_resource().resolved_home == done.summary.memory
    if not default:
        return f"numem ui --memory {done.summary.memory}"
    return "make ui" if Path("workspace.yaml").is_file() else "numem ui"


def _model_free(memory: str | None, as_json: bool) -> None:
    if memory and "://" in memory:
        raise InputError(f"--memory {memory}: the demo without a model needs a local directory")
    from numem.job.model_free import run_model_free

    result = run_model_free(Path(memory) if memory else None)
    emit(result, as_json, table(("without a model", ""), _rows(result)))


def _two_workers(memory: str | None, endpoint: str | None, as_json: bool) -> None:
    if memory:
        raise InputError(f"--memory {memory}: the demo of two workers makes a memory of its own; leave it out")
    from numem.bench.s3server import serve
    from numem.job.two_workers import on_server, run_two_workers

    with tempfile.TemporaryDirectory(prefix="numem-two-workers-") as directory, busy("two workers"):
        root = Path(directory)
        if endpoint is not None:
            result = on_server(endpoint, root)
        else:
            (root / "s3").mkdir()
            with serve(root / "s3") as server:
                result = run_two_workers(server.url("two-workers"), server.options, root)
    emit(result, as_json, table(("two workers", ""), _rows(result)))


def _rows(result: dict[str, Any]) -> list[tuple[str, object]]:
    return [(name, json.dumps(value) if isinstance(value, dict) else value) for name, value in result.items()]


def main() -> None:
    """Entry point of the `numem` command."""
    app()


if __name__ == "__main__":
    main()
