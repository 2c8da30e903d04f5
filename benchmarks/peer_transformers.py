"""The peer: transformers with random weights of the same shape, static cache and compilation, SDPA."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Bench
from benchmarks.shapes import config_of

MODES = ("reduce-overhead", "graph", "max-autotune-no-cudagraphs")


class Peer:
    """A causal model of transformers.

    Args:
        shape: of `benchmarks.shapes`.
    """

    def __init__(self, bench: Bench, shape: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = dict(config_of(shape, dry=bench.dry))
        self.config = AutoConfig.for_model(config.pop("model_type"), **config)
        self.dtype = torch.float32 if bench.dry else torch.bfloat16
        self.device, self.dry = bench.device, bench.dry
        with torch.device(bench.device):
            self.model = AutoModelForCausalLM.from_config(
                self.config, dtype=self.dtype, attn_implementation="sdpa"
            ).eval()  # fmt: skip

    def cache(self, length: int) -> Any:
        from transformers import StaticCache

        return StaticCache(config=self.config, max_cache_len=length)

    def prefill(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """Logits of the last of tokens [lanes, n], in one call, a dynamic cache being filled where none is given."""
        out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits
        return logits

    def stepper(self, mode: str, lanes: int, context: int, room: int) -> Callable[[int], torch.Tensor]:
        """A loop of greedy steps after a prefilled context of random tokens.

        Args:
            mode: of `torch.compile`: "reduce-overhead"; or "graph", its default mode, and "max-autotune-no-cudagraphs",
                with the whole step in a CUDA graph of our own.
            room: tokens that the cache holds beyond the context.
        """
        cache = self.cache(context + room)
        self.prefill(torch.randint(0, self.config.vocab_size, (lanes, context), device=self.device), cache)
        token = torch.full((lanes, 1), 7, device=self.device)
        at = torch.full((lanes, 1), context, device=self.device)

        def step(token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            out = self.model(
                input_ids=token, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1
            )  # fmt: skip
            chosen: torch.Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
            return chosen

        def advance(call: Callable[..., torch.Tensor]) -> None:
            token.copy_(call(token, at))
            at.add_(1)

        if self.dry:
            run = lambda: advance(step)
        elif mode == "reduce-overhead":
            compiled = torch.compile(step, mode=mode)

            def run() -> None:
                torch.compiler.cudagraph_mark_step_begin()
                advance(compiled)
        else:
            compiled = torch.compile(step, mode=None if mode == "graph" else mode)
            for _ in range(3):
                advance(compiled)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                advance(compiled)
            run = graph.replay
        for _ in range(4):
            run()

        def steps(count: int) -> torch.Tensor:
            for _ in range(count):
                run()
            return token.cpu()

        return steps
