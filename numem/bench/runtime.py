"""`numem bench runtime`: the figures of the resident plane, each held against its bar, in one run on the CPU."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numem.bench.machine import machine, threads
from numem.bench.runtime_lanes import lanes, publishing
from numem.bench.runtime_pool import pool_operations
from numem.bench.runtime_prefix import sharing
from numem.bench.runtime_restore import restoring

if TYPE_CHECKING:
    from numem.models.lm import LM

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is measured; the defaults are for the record, less says little.

    Attributes:
        pairs: interleaved repetitions of lanes and restores.
        long_pairs: of what takes many seconds each (shared prefix, publication).
        prompt: tokens of a prompt of a lane.
        steps: decode steps of a sample.
        stream: requests of a publication sample; new: tokens each generates, on average.
        prefix, questions, answer: tokens of the shared prefix, prompts over it, and tokens that each generates.
        alone: of these prompts, how many the side without reuse runs; its time is scaled up.
        restore: tokens of the shortest prompt that is restored.
        pool: tokens of a route in the pool's measurements, and how often each operation is repeated.
    """

    pairs: int = 7
    long_pairs: int = 3
    prompt: int = 512
    steps: int = 32
    stream: int = 16
    new: int = 64
    prefix: int = 2048
    questions: int = 64
    answer: int = 16
    alone: int = 16
    restore: int = 1024
    pool: tuple[int, int] = (2048, 2000)


def runtime(model: str = MODEL, shape: Shape | None = None) -> dict[str, Any]:
    """All figures of a model, float32, with everything warm but what a figure says is cold."""
    import torch

    from numem.kernels import native
    from numem.models.lm import load_lm

    torch.set_num_threads(threads())
    native.set_threads(threads())
    return {"machine": machine(), "model": model, **measure(load_lm(model), shape or Shape())}


def measure(lm: "LM", shape: Shape) -> dict[str, Any]:
    """The medians by name, and `details` with quartiles, bars and absolute values."""
    details = {
        **lanes(lm, shape.prompt, shape.steps, shape.pairs),
        **sharing(lm, shape.prefix, shape.questions, shape.answer, shape.alone, shape.long_pairs),
        **publishing(lm, shape.prompt, shape.new, shape.stream, shape.long_pairs),
        **restoring(lm, shape.restore, shape.pairs),
        **pool_operations(*shape.pool),
    }
    return {**{name: found["median"] for name, found in details.items()}, "details": details}
