"""Times of heads, sampling, page moves and mixtures: python benchmarks/probe_head_pages.py [heads sampling pages mixture]."""

import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from numem.kernels.cuda import head, mixture, pages, sampling, step
from numem.kernels.cuda.matrix import WORDS, Matrix, Stack, tiled

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def timed(launches: Callable[[], object], count: int, repeats: int = 9) -> float:
    """Microseconds of one of `count` launches in a graph: the median."""
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    graph.replay()
    found = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / count)
    return sorted(found)[repeats // 2]


def copy_rate() -> float:
    """GB/s, read and written bytes, of a device copy of 1 GiB."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a), 1) / 1e3


def quantised(vocab: int, k: int, bits: int) -> Matrix:
    """Random packed weights."""
    blocks = -(-k // 128)
    words = torch.randint(-(2**31), 2**31, (vocab, blocks * 4 * bits), dtype=torch.int32, device=DEVICE)
    scales = torch.rand((vocab, blocks * 4), device=DEVICE) * 1e-3
    return Matrix(
        vocab, k, tiled(words, WORDS), bits, BF16, scales=tiled(scales.half(), 4), zero=128 if bits == 8 else 8
    )


def heads(rate: float) -> None:
    """The product with its block maxima, and the whole greedy end of a step."""
    for vocab, k in ((262144, 640), (151936, 1024), (128256, 4096)):
        weight = torch.empty((vocab, k), dtype=BF16, device=DEVICE).normal_(std=0.02)
        matrices = [("bf16", Matrix.dense(weight))]
        if k == 640:
            matrices += [("q8", quantised(vocab, k, 8)), ("q4", quantised(vocab, k, 4))]
        for name, matrix in matrices:
            for rows in (1, 16, 32) if name == "bf16" else (1,):
                h = torch.randn((rows, k), device=DEVICE).to(BF16)
                out = torch.empty((rows, vocab), device=DEVICE)
                configs = (
                    [None, (32, 128, 4, 4), (64, 128, 4, 5), (128, 128, 4, 3)] if (k, rows) == (640, 1) else [None]
                )
                for config in configs if name == "bf16" else [None]:
                    us = timed(
                        lambda m=matrix, h=h, out=out, n=vocab, c=config: [
                            head.logits_parts(h, m, out, n, config=c, pdl=True) for _ in range(4)
                        ],
                        4,
                    )
                    share = (matrix.nbytes + out.nbytes) / us / 1e3
                    print(
                        f"head {vocab}x{k} {name} R{rows} {config or ''}: {us:.1f} us {share:.0f} GB/s {share / rate:.0%}"
                    )
                state = [torch.zeros(rows, dtype=torch.int64, device=DEVICE) for _ in range(2)]
                history = torch.zeros((256, rows), dtype=torch.int64, device=DEVICE)
                counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
                parts = head.logits_parts(h, matrix, out, vocab)
                us = timed(
                    lambda p=parts, s=state, h=history, c=counter: [
                        step.finish_greedy(p, *s, h, c, pdl=True) for _ in range(8)
                    ],
                    8,
                )
                right = torch.equal(state[0], out.argmax(1))
                print(f"  finish_greedy {us:.2f} us, right {right}", flush=True)
                if name == "bf16":
                    ref = timed(lambda m=weight, h=h: [torch.mm(h, m.T) for _ in range(4)], 4)
                    print(f"  the library's product (bf16 logits): {ref:.1f} us", flush=True)
        del weight, matrices, matrix


def samples(_: float) -> None:
    """Choosing from logits of a normal distribution."""
    vocab = 262144
    for rows in (1, 32):
        logits = torch.randn((rows, vocab), device=DEVICE) * 3
        positions = torch.arange(rows, device=DEVICE)
        out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0), ("temperature", 0.8, 0, 1.0), ("top_k 50", 0.8, 50, 1.0),
            ("top_p 0.9", 0.8, 0, 0.9), ("top_k 50, top_p 0.9", 0.8, 50, 0.9),
        ):  # fmt: skip
            settings = sampling.Settings(
                torch.full((rows,), temperature, device=DEVICE),
                torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
                torch.full((rows,), top_p, device=DEVICE),
                torch.arange(rows, device=DEVICE),
            )
            us = [
                timed(
                    lambda s=settings, pdl=pdl, a=(logits, vocab), b=(positions, out): [
                        sampling.sample(*a, s, *b, pdl=pdl) for _ in range(2)
                    ],
                    2,
                )
                for pdl in (False, True)
            ]
            print(f"sample {name} R{rows}: {us[0]:.1f} us, with dependent launch {us[1]:.1f}", flush=True)


def moves(rate: float) -> None:
    """Chunks of 256 tokens, too many of them for the cache; bytes read and written."""
    for name, layers, kv, dim in (("Llama-3.1-8B", 32, 8, 128), ("SmolLM2-135M", 30, 3, 64)):
        chunks = 8
        shape = (layers, 16 * chunks + 1, kv, 16, dim)
        k, v = (torch.randn(shape, device=DEVICE).to(BF16) for _ in range(2))
        tables = torch.randperm(16 * chunks, device=DEVICE).to(torch.int32).view(chunks, 16)
        payloads = [torch.randn((2, layers, 256, kv * dim), device=DEVICE).to(BF16) for _ in range(chunks)]
        for what, way in (("scatter", _scatter), ("gather", _gather)):
            us = timed(
                lambda way=way, k=k, v=v, payloads=payloads, tables=tables: [
                    way(p, k, v, t) for p, t in zip(payloads, tables, strict=True)
                ],
                chunks,
            )
            got = 2 * payloads[0].nbytes / us / 1e3
            print(f"{what} {name}: {us:.1f} us {got:.0f} GB/s {got / rate:.0%}", flush=True)
        us = timed(lambda k=k, v=v, to=16 * chunks: [pages.copy_page(k, v, i, to) for i in range(8)], 8)
        pairs = torch.tensor([[i, 64 + i] for i in range(32)], dtype=torch.int32, device=DEVICE)
        many = timed(lambda k=k, v=v, pairs=pairs: pages.copy_pages(k, v, pairs), 1)
        print(f"copy_page {name}: {us:.2f} us; 32 pages at once {many:.1f} us", flush=True)
        for count in (1, 64):
            index = torch.arange(count, dtype=torch.int32, device=DEVICE)
            us = timed(lambda k=k, v=v, index=index: [pages.hashes(k, v, index) for _ in range(4)], 4)
            print(f"digest {name} of {count}: {us:.1f} us", flush=True)


def _scatter(payload: Tensor, k: Tensor, v: Tensor, table: Tensor) -> None:
    pages.scatter_rows(payload, k, v, table, 0)


def _gather(payload: Tensor, k: Tensor, v: Tensor, table: Tensor) -> None:
    pages.gather_rows(k, v, table, 0, 256, payload)


def mixtures(rate: float) -> None:
    """A layer of Qwen3-30B-A3B's shape; share of the copy rate by the weights of the chosen experts."""
    experts, top_k, hidden, inner = 128, 8, 2048, 768
    up = Matrix.dense(torch.empty((experts * 2 * inner, hidden), dtype=BF16, device=DEVICE).normal_(std=0.02))
    down = Matrix.dense(torch.empty((experts * hidden, inner), dtype=BF16, device=DEVICE).normal_(std=0.02))
    stacks = Stack(up, experts), Stack(down, experts)
    router = torch.randn((experts, hidden), device=DEVICE) * 0.02
    for rows, pdl in product((1, 8, 1024), (True,)):
        h = torch.randn((rows, hidden), device=DEVICE).to(BF16)
        y = torch.empty_like(h)
        scratch = mixture.Scratch.of(rows, experts, top_k, inner, hidden, BF16, DEVICE)

        def once(h: Tensor = h, y: Tensor = y, scratch: mixture.Scratch = scratch, pdl: bool = pdl) -> None:
            mixture.mixture(
                h, router, *stacks, y, top_k=top_k, norm_topk=True, act="silu", scratch=scratch,
                pdl=pdl and len(h) <= mixture.FEW,
            )  # fmt: skip

        us = timed(once, 1)
        used = len(scratch.ids.unique()) * 3 * inner * hidden * 2 / us / 1e3
        flop = rows * top_k * 6 * inner * hidden / us / 1e6
        print(
            f"mixture of {rows} rows: {us:.1f} us, {used / rate:.0%} of the copy rate, {flop:.0f} TFLOP/s", flush=True
        )


def main() -> None:
    rate = copy_rate()
    print(f"copy {rate:.0f} GB/s")
    sections = {"heads": heads, "sampling": samples, "pages": moves, "mixture": mixtures}
    for name in sys.argv[1:] or sections:
        start = time.perf_counter()
        sections[name](rate)
        print(f"[{name} {time.perf_counter() - start:.0f} s]", flush=True)


main()
