"""Products on one GPU: chains of a model's matrix kernels, rates, bits, and prefill. PYTHONPATH=. python benchmarks/probe_linear.py

Sections (all without an argument): chain, rates, bits, prefill. Without a GPU everything runs once at tiny shapes, in
Triton's interpreter (TRITON_INTERPRET=1), to try the script.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from numem.kernels.cuda import chain, linear, norm, segments
from numem.kernels.cuda.matrix import BLOCK, STEP, WORDS, Matrix, tiled
from numem.kernels.cuda.unpack import unpack

REAL = torch.cuda.is_available()
DEV = torch.device("cuda" if REAL else "cpu")
DT = torch.bfloat16 if REAL else torch.float32
FORMS = ("bf16", "q8", "q4")

# hidden, width of attention, of queries with keys and values, of the feed-forward block, layers, vocabulary, act, post
MODELS = {
    "270M": (640, 1024, 1536, 2048, 18, 262144, "gelu_tanh", True),
    "0.6B": (1024, 2048, 4096, 3072, 28, 151936, "silu", False),
    "8B": (4096, 4096, 6144, 14336, 32, 128256, "silu", False),
}
if not REAL:
    MODELS = {"tiny": (160, 128, 256, 192, 2, 320, "silu", True)}


def matrix(n: int, k: int, form: str) -> Matrix:
    """Random, of variance 1 / k."""
    if form == "bf16":
        return Matrix.dense(torch.empty((n, k), dtype=DT, device=DEV).normal_(std=k**-0.5))
    bits, blocks = int(form[1:]), -(-k // BLOCK)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (n, blocks * 4 * bits), dtype=torch.int32, device=DEV)
    scales = (torch.rand((n, blocks * (BLOCK // STEP)), device=DEV) * 0.5 + 0.75) * (k**-0.5 * 12**0.5 / (1 << bits))
    return Matrix(n, k, tiled(words, WORDS), bits, DT, scales=tiled(scales.half(), 4), zero=1 << (bits - 1))


def timed(call: Callable[[], None], count: int, repeats: int = 11) -> float:
    """Microseconds, as a graph, divided by `count`; the median."""
    call()
    if not REAL:
        return float("nan")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    found = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        found.append(a.elapsed_time(b) * 1e3 / count)
    return sorted(found)[len(found) // 2]


def equal(a: Tensor, b: Tensor) -> bool:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def copy_rate() -> float:
    a = torch.ones(1 << (30 if REAL else 10), dtype=torch.uint8, device=DEV)
    b = torch.empty_like(a)
    rate = 2 * a.numel() / timed(lambda: b.copy_(a), 1) / 1e3
    print(f"copy {rate:.0f} GB/s")
    return rate


class Layers:
    """The matrices of all layers, and what one row of a step lies in; attention is a slice of its input."""

    def __init__(self, name: str, form: str) -> None:
        hidden, self.att, qkv, inter, layers, _, self.act, post = MODELS[name]
        shapes = ((qkv, hidden), (hidden, self.att), (2 * inter, hidden), (hidden, inter))
        self.layers = [[matrix(n, k, form) for n, k in shapes] for _ in range(layers)]
        self.x = [torch.randn((1, hidden), device=DEV) for _ in range(2)]
        self.weight, self.y = torch.ones(hidden, device=DEV), torch.randn((1, hidden), device=DEV).to(DT)
        self.post = self.weight if post else None
        self.h, self.qkv, self.gated = (torch.empty((1, n), dtype=DT, device=DEV) for n in (hidden, qkv, inter))

    @property
    def nbytes(self) -> int:
        """Of a layer."""
        return sum(m.nbytes for m in self.layers[0])

    def step(self, pdl: bool) -> None:
        for qkv, out, up, down in self.layers:
            self._joined(qkv, self.qkv, None, 0, pdl)
            linear.linear(self.qkv[:, : self.att], out, self.y, pdl=pdl)
            self._joined(up, self.gated, self.act, 1, pdl)
            linear.linear(self.gated, down, self.y, pdl=pdl)

    def _joined(self, m: Matrix, out: Tensor, act: str | None, turn: int, pdl: bool) -> None:
        before, after = self.x[turn], self.x[1 - turn]
        if segments.serves(m):
            fused = segments.Norm(before, after, self.y, self.post, self.weight, 1e-6)
            segments.few_rows(m, out, norm=fused, act=act, pdl=pdl)
        else:
            norm.add_norm(before, self.y, self.post, self.weight, self.h, after, eps=1e-6, pdl=pdl)
            linear.linear(self.h, m, out, act=act, pdl=pdl)


def chains(rate: float) -> None:
    """Each layer's four products, each reading what the one before it wrote."""
    print("chain of 4 matrix kernels a layer, one row (8B: and 2 norms): us a layer (a product)")
    for name in MODELS:
        for form in FORMS:
            layers = Layers(name, form)
            count = len(layers.layers)
            us = timed(lambda layers=layers: layers.step(True), count)
            plain = timed(lambda layers=layers: layers.step(False), count) if form == "bf16" else float("nan")
            gbs = layers.nbytes / us / 1e3
            print(
                f"  {name:5} {form:5} {us:7.2f} ({us / 4:6.2f}), without dependent launch {plain:7.2f}; "
                f"{gbs:6.0f} GB/s, {100 * gbs / rate:3.0f} % of copy",
                flush=True,
            )
            del layers


def rates(rate: float) -> None:
    """Single matrices, rotated so that the cache holds none of them: bytes of weights and scales over time."""
    print("rate of one product, us and % of copy")
    shapes = [(f"{name} head", v, h) for name, (h, _, _, _, _, v, _, _) in MODELS.items()]
    hidden, att, qkv_n, inter, *_ = MODELS["8B" if REAL else "tiny"]
    shapes += [("qkv", qkv_n, hidden), ("out", hidden, att), ("gate, up", 2 * inter, hidden), ("down", hidden, inter)]
    for name, n, k in shapes:
        for rows in (1, 16) if REAL else (1,):
            line = []
            for form in FORMS if rows == 1 else FORMS[:1]:
                size = n * k * {"bf16": 2.0, "q8": 1.125, "q4": 0.625}[form]
                some = [matrix(n, k, form) for _ in range(max(2, min(8, int(300e6 / size) + 1)) if REAL else 1)]
                h = torch.randn((rows, k), device=DEV).to(DT)
                head = "head" in name
                out = torch.empty((rows, n), dtype=torch.float32 if head else DT, device=DEV)

                def call(some: list[Matrix] = some, h: Tensor = h, out: Tensor = out, head: bool = head) -> None:
                    for m in some:
                        if segments.serves(m):
                            segments.few_rows(m, out, h=h, tile=32 if head else 16, pdl=True)
                        else:
                            chain.few_rows(m, h, out, pdl=True)

                us = timed(call, len(some), 7)
                line.append(f"{form} {us:7.1f} {100 * some[0].nbytes / us / 1e3 / rate:3.0f} %")
                del some
            print(f"  {name:10} {k:5} x {n:6} rows {rows:2}: " + "; ".join(line), flush=True)


def bits(rate: float) -> None:
    """Rows alone, in 16 and 32, and among 300; packed against dense; the library against many_rows."""
    print("bits: few rows = many rows; packed = dense; rows that the library may take")
    for name, (hidden, att, qkv_n, inter, *_) in MODELS.items():
        for n, k in ((qkv_n, hidden), (hidden, att), (2 * inter, hidden), (hidden, inter)):
            dense = matrix(n, k, "bf16")
            h = torch.randn((300 if REAL else 40, k), device=DEV).to(DT)
            many = torch.full((len(h), n), torch.nan, dtype=DT, device=DEV)
            linear.linear(h, dense, many)
            same = []
            for cut in (slice(0, 1), slice(7, 8), slice(3, 19), slice(4, 36)):
                few = torch.full_like(many[cut], torch.nan)
                linear.linear(h[cut].contiguous(), dense, few)
                same.append(equal(few, many[cut]))
            packed = []
            for form in ("q8", "q4"):
                m = matrix(n, k, form)
                whole = Matrix.dense(unpack(m, torch.empty((n, k), dtype=DT, device=DEV)))
                a, b = (torch.full((1, n), torch.nan, dtype=DT, device=DEV) for _ in range(2))
                linear.linear(h[:1].contiguous(), m, a)
                linear.linear(h[:1].contiguous(), whole, b)
                packed.append(equal(a, b) and equal(whole.weights, m.reference()))
            may = [size for size in linear.CLASSES if REAL and linear.proved(dense.weights, size)]
            print(f"  {name:5} {k:5} x {n:6}: {all(same)} {all(packed)} {may}", flush=True)


def prefill(rate: float) -> None:
    rows = 4096 if REAL else 40
    print(f"prefill, {rows} rows, TFLOP/s: ours, cuBLAS")
    for name, (hidden, att, qkv_n, inter, *_) in MODELS.items():
        for n, k in ((qkv_n, hidden), (hidden, att), (2 * inter, hidden), (hidden, inter)):
            m = matrix(n, k, "bf16")
            h = torch.randn((rows, k), device=DEV).to(DT)
            out = torch.empty((rows, n), dtype=DT, device=DEV)
            flop = 2.0 * rows * n * k
            mine = timed(lambda m=m, h=h, out=out: segments.many_rows(m.weights, None, h, out), 1, 5)
            theirs = timed(lambda m=m, h=h, out=out: torch.mm(h, m.weights.T, out=out), 1, 5)
            print(f"  {name:5} {k:5} x {n:6}: {flop / mine / 1e6:4.0f} {flop / theirs / 1e6:4.0f}", flush=True)


def main() -> None:
    torch.manual_seed(1)
    sections = {"chain": chains, "rates": rates, "bits": bits, "prefill": prefill}
    rate = copy_rate()
    for name in sys.argv[1:] or sections:
        began = time.perf_counter()
        sections[name](rate)
        print(f"[{name}: {time.perf_counter() - began:.0f} s]", flush=True)


main()
