"""`numem generate`: text from a model, through the memory."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from numem.environment import memory_home
from numem.errors import InputError
from numem.terminal import (
    JsonFlag,
    MaxPositionOption,
    MemoryOption,
    busy,
    emit,
    guarded,
    note,
    open_memory,
)


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
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16, of weights and cache. Default: float32 on the CPU, bfloat16 on a GPU."),
    ] = None,
    quantise: Annotated[
        str | None, typer.Option(help="q8, q4, q4a, q4k or native (as weights were quantised before). Default: none.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR[@SCALE]", help="LoRA directory of PEFT to merge; may be given several times."),
    ] = None,
    max_position: MaxPositionOption = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Generate text. The longest prefix that the memory holds is restored, and what was computed is published to it."""
    from numem.job.complete import complete, require_fits
    from numem.runtime.sampling import Sampler

    sampler = Sampler(temperature, top_k, top_p, seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    with busy("loading the model"):
        from numem.models.lm import load_lm

        lm = load_lm(
            model,
            device=device,
            dtype=dtype,
            quantise=None if quantise == "none" else quantise,
            adapters=[_adapter(given) for given in adapter or ()],
            max_position=max_position,
        )
    tokens = lm.tokenizer.chat([{"role": "user", "content": text}]) if chat else lm.tokenizer.encode(text)
    require_fits(lm, tokens, max_new_tokens)

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


def _adapter(given: str) -> tuple[str, float]:
    """A directory and its scale, from DIR or DIR@SCALE; a directory whose own name has an @ is taken as it is."""
    directory, at, scale = given.rpartition("@")
    if not at or Path(given).is_dir():
        return given, 1.0
    try:
        return directory, float(scale)
    except ValueError as error:
        raise InputError(f"--adapter {given}: {scale!r} is not a scale; give DIR or DIR@SCALE") from error
