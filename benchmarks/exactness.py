"""Exactness as bytes on the real shapes, and what it costs in decoding against products of cuBLAS.

The cost in prefill is in section `prefill`; the stress tests of the resident plane are in tests/gpu.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ceilings import graphed
from benchmarks.common import Bench, Ceilings, Stat, release, times
from benchmarks.models import Made
from benchmarks.shapes import TITLES
from numem.identity.chain import PAGE_TOKENS
from numem.kernels.cuda import head, linear
from numem.kernels.cuda.matrix import Matrix

LANES = 32
FORMATS = {"270m": ("bf16", "q8"), "0.6b": ("bf16", "q8"), "8b": ("bf16",)}


def run(bench: Bench, ceilings: Ceilings) -> None:
    """Every shape and format: bytes first, then the cost of exact products."""
    bench.warm.append("weights and pages resident; a pass is 'equal True', its digest is of the keys and values")
    for shape in bench.args.shapes.split(","):
        for form in FORMATS[shape]:
            name = f"{TITLES[shape]} {form}"
            bench.attempt(f"bytes, {name}", lambda s=shape, f=form, n=name: _bytes(bench, n, s, f))
            release()
        bench.attempt(f"cost, {TITLES[shape]}", lambda s=shape: _cost(bench, s))
        release()


def _bytes(bench: Bench, name: str, shape: str, form: str) -> None:
    """One text in many lanes: whole, in chunks, moved, continued by decoding and evaluated again."""
    prompt, new = bench.size(1000, 36), bench.size(48, 2)
    lanes = bench.size(LANES, 3)
    made = Made.of(bench, shape, form, lanes=lanes, context=prompt + new)
    made.storage.k.fill_(float("nan"))
    made.storage.v.fill_(float("nan"))
    tokens = made.tokens(prompt)
    whole = made.prefill(tokens)
    first = Lane(made, 0).rows(0, prompt)
    found = {}
    for at, cuts in enumerate(((256,), (17, 100, 1), (255, 257), (511, 513)), start=1):
        if at >= lanes:
            break
        logits = _chunked(made, tokens, cuts, lane=at)
        same = torch.equal(first, Lane(made, at).rows(0, prompt)) and torch.equal(
            whole.view(torch.int32), logits.view(torch.int32)
        )
        found[f"chunks_{'_'.join(map(str, cuts))}"] = same
    # what was computed is copied to the other lanes, whose pages lie elsewhere
    for lane in range(1, lanes):
        Lane(made, lane).write(0, first)
    alone = _alone(made, prompt, new)
    kept = Lane(made, 0).rows(0, prompt + new)
    for lane in range(lanes):
        Lane(made, lane).clear(prompt, new)
    together = torch.from_numpy(made.decode(prompt, new, same=True))
    found["lanes_tokens"] = bool((together == alone[:, None]).all())
    found["lanes_bytes"] = all(torch.equal(kept, Lane(made, n).rows(0, prompt + new)) for n in range(lanes))
    # generated = prefilled: the tokens that decoding fed itself, evaluated at once
    fed = torch.tensor([made.steps(prompt)[0].token, *alone[:-1].tolist()])
    Lane(made, 1).clear(0, prompt + new)
    made.prefill(torch.cat([tokens, fed]), lane=1)
    found["generated_as_prefilled"] = torch.equal(kept, Lane(made, 1).rows(0, prompt + new))
    digest = hashlib.sha256(kept.cpu().numpy().tobytes()).hexdigest()[:16]
    bench.add(f"bytes, {name}", equal=all(found.values()), digest=digest, **found)


class Lane:
    """The keys and values of a lane as bytes."""

    def __init__(self, made: Made, lane: int) -> None:
        self._pages = torch.from_numpy(made.tables[lane].copy()).long().to(made.storage.k.device)
        self._made = made

    def rows(self, start: int, count: int) -> Tensor:
        """Whole numbers [2, layers, count, kv_heads, head_dim] of positions [start, start + count)."""
        kind = torch.int32 if self._made.storage.k.element_size() == 4 else torch.int16
        return torch.stack([self._flat(t)[:, start : start + count] for t in self._both()]).view(kind)

    def write(self, start: int, rows: Tensor) -> None:
        """What `rows` gave, at `start`."""
        slots = torch.arange(start, start + rows.shape[2], device=self._pages.device)
        pages, offsets = self._pages[slots // PAGE_TOKENS], slots % PAGE_TOKENS
        for target, part in zip(self._both(), rows, strict=True):
            target[:, pages, :, offsets] = part.view(target.dtype).transpose(0, 1)

    def clear(self, start: int, count: int) -> None:
        """NaN at positions [start, start + count)."""
        k = self._made.storage.k
        shape = (2, k.shape[0], count, k.shape[2], k.shape[4])
        self.write(start, torch.full(shape, float("nan"), dtype=k.dtype, device=k.device))

    def _both(self) -> tuple[Tensor, Tensor]:
        return self._made.storage.k, self._made.storage.v

    def _flat(self, pages: Tensor) -> Tensor:
        return pages[:, self._pages].transpose(2, 3).flatten(1, 2)


def _chunked(made: Made, tokens: Tensor, cuts: tuple[int, ...], lane: int) -> Tensor:
    """Prefill in chunks of these sizes by turns."""
    at, turn, logits = 0, 0, torch.empty(0)
    while at < len(tokens):
        part = tokens[at : at + cuts[turn % len(cuts)]]
        logits = made.prefill(part, start=at, lane=lane)
        at, turn = at + len(part), turn + 1
    return logits


def _alone(made: Made, context: int, steps: int) -> Tensor:
    """Tokens that lane 0 decodes by itself."""
    step = made.steps(context)[:1]
    return torch.from_numpy(made.decoder.ahead(made.storage).decode(step, steps)[:, 0])


def _cost(bench: Bench, shape: str) -> None:
    """Products of a step as a step launches them, and cuBLAS' of the same matrices, as graphs over all layers.

    Gates are gated in our product, where a step of so many rows does that, and the head writes float32 and finds the largest
    logit: cuBLAS does less there.
    """
    made = Made.of(bench, shape, "bf16", lanes=1, context=16)
    layers = made.weights.layers
    groups: dict[str, list[Matrix]] = {
        "qkv": [one.qkv for one in layers],
        "out": [one.attn_out for one in layers],
        "up": [one.feed.up for one in layers],
        "down": [one.feed.down for one in layers],
        "head": [made.weights.head],
    }
    for lanes in (1, 32):
        ours_all = theirs_all = 0.0
        for what, matrices in groups.items():
            k, n = matrices[0].in_features, matrices[0].out_features
            h = torch.randn((lanes, k), device=bench.device).to(matrices[0].dtype)
            out = torch.empty((lanes, n), dtype=h.dtype, device=bench.device)
            ours = _ours(what, matrices, h, made.descriptor.act)

            def theirs(m: list[Matrix] = matrices, h: Tensor = h, out: Tensor = out) -> None:
                for one in m:
                    torch.mm(h, one.weights.t(), out=out)

            mine, cublas = _us(bench, ours, len(matrices)), _us(bench, theirs, len(matrices))
            bench.add(
                f"  {TITLES[shape]} {what} {k} x {n}, {lanes} rows", us=mine, cublas_us=cublas,
                gbs=matrices[0].nbytes / 1e3 / mine, cublas_gbs=matrices[0].nbytes / 1e3 / cublas,
            )  # fmt: skip
            ours_all += mine * len(matrices)
            theirs_all += cublas * len(matrices)
        bench.add(
            f"products of a step, {TITLES[shape]}, {lanes} rows", us=ours_all, cublas_us=theirs_all,
            exact_costs=ours_all / theirs_all - 1,
        )  # fmt: skip


def _ours(what: str, matrices: list[Matrix], h: Tensor, act: str) -> Callable[[], None]:
    """Every matrix times `h`, as a step does it."""
    lanes, n = len(h), matrices[0].out_features
    if what == "head":
        logits = torch.empty((lanes, n), device=h.device)

        def products() -> None:
            for one in matrices:
                head.logits_parts(h, one, logits, n, pdl=True)
    else:
        gated = act if what == "up" and linear.gates(matrices[0], lanes) else None
        out = torch.empty((lanes, n // 2 if gated else n), dtype=h.dtype, device=h.device)

        def products() -> None:
            for one in matrices:
                linear.linear(h, one, out, act=gated, pdl=True)

    return products


def _us(bench: Bench, call: Callable[[], None], count: int) -> float:
    return Stat.of(times(graphed(bench, call), bench.size(12, 1), warm=bench.size(3, 0))).median / count
