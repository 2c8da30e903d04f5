"""Prefill of 16,384 tokens: time to the logits of the last, beside transformers with SDPA, and product by product."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import Bench, Ceilings, Stat, release, times, wall
from benchmarks.models import Made
from benchmarks.peer_transformers import Peer
from benchmarks.shapes import TITLES, flops
from numem.kernels.cuda import linear

TOKENS = 16384


def run(bench: Bench, ceilings: Ceilings) -> None:
    """Every shape in bfloat16."""
    bench.warm += [
        "weights and pages resident, kernels compiled and run before; token ids start on the host",
        "peer: weights resident, one call over all tokens, dynamic cache, logits of the last token, run before",
        "non-exact: our time, with that of our products and attention replaced by cuBLAS' and SDPA's",
    ]
    for shape in bench.args.shapes.split(","):
        name = f"prefill, {TITLES[shape]} bf16"
        ours = bench.attempt(name, lambda s=shape, n=name: _ours(bench, ceilings, n, s))
        release()
        if bench.args.peer != "none":
            bench.attempt(f"transformers SDPA, {name}", lambda s=shape, n=name, o=ours: _peer(bench, n, s, o))
            release()


def _ours(bench: Bench, ceilings: Ceilings, name: str, shape: str) -> Stat:
    count = bench.size(TOKENS, 40)
    made = Made.of(bench, shape, "bf16", lanes=1, context=count)
    tokens = made.tokens(count)
    stat = Stat.of([us / 1e3 for us in wall(lambda: made.prefill(tokens), bench.size(5, 1), warm=bench.size(2, 0))])
    products, scores = flops(made.descriptor, count)
    rate = (products + scores) / stat.median / 1e9
    bench.add(
        f"{name}, {count} tokens", ms=stat, tflops=rate, share_of_matmul=rate / ceilings.matmul,
        products_tflop=products / 1e12, attention_tflop=scores / 1e12,
    )  # fmt: skip
    bench.attempt(f"parts of {name}", lambda: _parts(bench, ceilings, name, made, stat, count))
    return stat


def _parts(bench: Bench, ceilings: Ceilings, name: str, made: Made, whole: Stat, count: int) -> None:
    """One layer's products and attention, ours and the non-exact ones, on random rows."""
    layer, d = made.weights.layers[0], made.descriptor
    chunk = min(made.decoder.max_rows, count)
    calls = count / chunk
    saved = 0.0
    for what, matrix in (("qkv", layer.qkv), ("out", layer.attn_out), ("up", layer.feed.up), ("down", layer.feed.down)):
        h = torch.randn((chunk, matrix.in_features), device=bench.device).to(matrix.dtype)
        out = torch.empty((chunk, matrix.out_features), dtype=matrix.dtype, device=bench.device)
        weight = matrix.weights
        ours = _ms(bench, lambda h=h, m=matrix, o=out: linear.linear(h, m, o))
        theirs = _ms(bench, lambda h=h, w=weight, o=out: torch.mm(h, w.t(), out=o))
        work = 2.0 * chunk * weight.numel()
        bench.add(
            f"  {what} {chunk} x {matrix.in_features} x {matrix.out_features}", us=ours * 1e3,
            tflops=work / ours / 1e9, share_of_matmul=work / ours / 1e9 / ceilings.matmul,
            cublas_us=theirs * 1e3, cublas_tflops=work / theirs / 1e9,
        )  # fmt: skip
        saved += (ours - theirs) * calls * d.layers
    for window in sorted({d.window if kind == "sliding" else 0 for kind in d.layer_kinds}):
        layers = sum((d.window if kind == "sliding" else 0) == window for kind in d.layer_kinds)
        ours, theirs = attention_ms(bench, made, count, window)
        bench.add(
            f"  attention of a layer, window {window}", ms=ours, sdpa_ms=theirs, layers=layers,
            tflops=_attention_flops(d.heads * d.head_dim, count, window) / ours / 1e9,
        )  # fmt: skip
        saved += (ours - theirs) * layers
    free = whole.median - saved
    bench.add(f"  non-exact {name}", ms=free, exact_costs=whole.median / free - 1)


def attention_ms(bench: Bench, made: Made, count: int, window: int) -> tuple[float, float]:
    """Milliseconds of one layer's attention over `count` rows in the decoder's chunks, and of SDPA over all at once.

    SDPA has no form for a window without a mask as large as the scores: it sees everything.
    """
    import numpy as np

    from numem.kernels.cuda import attention_prefill

    d, place = made.descriptor, bench.device
    dtype = made.storage.k.dtype
    chunk = min(made.decoder.max_rows, count)
    tables = torch.from_numpy(made.tables[:1].copy()).to(place)
    made.storage.k[0].normal_()
    made.storage.v[0].normal_()
    q = torch.randn((chunk, d.heads * d.head_dim), device=place).to(dtype)
    out = torch.empty_like(q)
    plans = [
        attention_prefill.plan(np.array([[0, 0, min(chunk, count - at), at]], dtype=np.int32), place, d.head_dim)
        for at in range(0, count, chunk)
    ]

    def ours() -> None:
        for plan in plans:
            attention_prefill.prefill(
                q, made.storage.k[0], made.storage.v[0], tables, plan, out, heads=d.heads, kv_heads=d.kv_heads,
                head_dim=d.head_dim, scale=d.attn_scale, window=window,
            )  # fmt: skip

    def heads(n: int) -> Tensor:
        return torch.randn((1, n, count, d.head_dim), device=place).to(dtype)

    a, b, c = heads(d.heads), heads(d.kv_heads), heads(d.kv_heads)

    def sdpa() -> None:
        torch.nn.functional.scaled_dot_product_attention(
            a, b, c, is_causal=True, scale=d.attn_scale, enable_gqa=True
        )  # fmt: skip

    return _ms(bench, ours), _ms(bench, sdpa)


def _ms(bench: Bench, call: Callable[[], object]) -> float:
    return Stat.of(times(call, bench.size(10, 1), warm=bench.size(3, 0))).median / 1e3


def _attention_flops(width: int, count: int, window: int) -> float:
    span = min(window, count) if window else count
    return 4.0 * width * (span * (span + 1) // 2 + (count - span) * span)


def _peer(bench: Bench, name: str, shape: str, ours: Stat | None) -> None:
    count = bench.size(TOKENS, 40)
    peer = Peer(bench, shape)
    tokens = torch.randint(0, peer.config.vocab_size, (1, count), device=bench.device)
    stat = Stat.of([us / 1e3 for us in wall(lambda: peer.prefill(tokens), bench.size(3, 1))])
    bench.add(
        f"transformers SDPA, {name}", ms=stat,
        ours_times_as_fast=float("nan") if ours is None else stat.median / ours.median,
    )  # fmt: skip
