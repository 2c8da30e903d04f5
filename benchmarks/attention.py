"""Paged decode attention beside FlashInfer's, over the same pages, with the L2 cache flushed between runs."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.ceilings import graphed
from benchmarks.common import Bench, Ceilings, Stat, flusher, release, times
from numem.kernels.cuda import attention, language

PAGE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model, and how much is attended."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    lanes: int
    context: int

    @property
    def bytes(self) -> int:
        """Keys and values of all lanes, bfloat16."""
        return 4 * self.lanes * self.context * self.kv_heads * self.head_dim


SHAPES = (
    Shape("8B", 32, 8, 128, 1, 2048),
    Shape("8B", 32, 8, 128, 1, 32768),
    Shape("8B", 32, 8, 128, 32, 2048),
    Shape("8B", 32, 8, 128, 32, 8192),
    Shape("0.6B", 16, 8, 128, 1, 512),
    Shape("0.6B", 16, 8, 128, 32, 8192),
    Shape("270M", 4, 1, 256, 1, 4096),
    Shape("270M", 4, 1, 256, 32, 4096),
)
TINY = (Shape("8B", 4, 2, 32, 2, 200), Shape("270M", 4, 1, 32, 1, 140))


def run(bench: Bench, ceilings: Ceilings) -> None:
    """Every shape: ours, FlashInfer without and with tensor cores, and how far their outputs are apart."""
    bench.warm += [
        "pages resident in the same HND layout for both; one layer; 256 MiB read before each run, outside its time",
        "ours also rotates q and k and writes the new row's page; FlashInfer's plan is made before, outside its time",
        "each call a CUDA graph of its own on both sides, so that no launch waits for the host",
        "'chain' is a layer of a CUDA graph over several layers' pages that together exceed the L2 cache",
    ]
    shapes = TINY if bench.dry else SHAPES
    peer = None
    if not bench.dry and bench.args.peer != "none":
        peer = bench.attempt("FlashInfer: import and build", lambda: _build(sorted({s.head_dim for s in shapes})))
    for shape in shapes:
        name = f"{shape.name} heads {shape.heads}/{shape.kv_heads}x{shape.head_dim}, b={shape.lanes} {shape.context}"
        bench.attempt(name, lambda s=shape, n=name: _measure(bench, ceilings, n, s, peer))
        release()


def _build(head_dims: list[int]) -> Any:
    from benchmarks import peer_flashinfer

    peer_flashinfer.build(head_dims, torch.bfloat16)
    return peer_flashinfer


class _Case:
    """Tensors of a shape: `layers` layers of pages, one random row a lane, and a rotation by nothing."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self.shape = s = shape
        device, self.dtype = bench.device, torch.float32 if bench.dry else torch.bfloat16
        each = -(-s.context // PAGE)
        self.layers = 1 if bench.dry else min(32, max(2, -(-(256 << 20) // s.bytes)))
        pages = s.lanes * each
        shape5 = (self.layers, pages, s.kv_heads, PAGE, s.head_dim)
        self.k, self.v = (torch.empty(shape5, dtype=self.dtype, device=device).normal_() for _ in range(2))
        self.tables = torch.randperm(pages).to(torch.int32).view(s.lanes, each).to(device)
        self.positions = torch.full((s.lanes,), s.context - 1, dtype=torch.int64, device=device)
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.qkv = torch.randn((s.lanes, width), device=device).to(self.dtype)
        self.out = torch.full((s.lanes, s.heads * s.head_dim), float("nan"), dtype=self.dtype, device=device)
        half = s.head_dim // 2
        self.cos = torch.ones((s.context, half), device=device)
        self.sin = torch.zeros((s.context, half), device=device)
        self.tiles = -(-s.context // language.tile_keys(s.head_dim))
        self.scratch = attention.Scratch.of(s.lanes, s.heads, s.head_dim, self.tiles, device)

    @property
    def q(self) -> torch.Tensor:
        s = self.shape
        return self.qkv[:, : s.heads * s.head_dim].reshape(s.lanes, s.heads, s.head_dim).contiguous()

    def ours(self, layer: int = 0, pdl: bool = False, **form: Any) -> None:
        s = self.shape
        attention.decode(
            self.qkv, None, self.cos, self.sin, self.k[layer], self.v[layer], self.tables, self.positions, self.out,
            self.scratch, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, scale=s.head_dim**-0.5,
            tiles=self.tiles, pdl=pdl, **form,
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        """float32 attention of lane 0 by torch, after a run of ours has written the new row."""
        s = self.shape
        table = self.tables[0].long()
        k, v = (t[0, table].permute(1, 0, 2, 3).flatten(1, 2)[:, : s.context].float() for t in (self.k, self.v))
        q = self.q[0].view(s.kv_heads, -1, s.head_dim).float()
        weights = torch.softmax(q @ k.transpose(1, 2) * s.head_dim**-0.5, -1)
        return (weights @ v).flatten()


def _measure(bench: Bench, ceilings: Ceilings, name: str, shape: Shape, peer: Any) -> None:
    case = _Case(bench, shape)
    flush = flusher(bench)
    repeats = bench.size(30, 1)
    case.ours()
    mine, wanted = case.out[0].float(), case.reference()
    apart = float((mine - wanted).norm() / wanted.norm())
    ours = Stat.of(times(graphed(bench, case.ours), repeats, before=flush))
    chain = _chain(bench, case, lambda layer: case.ours(layer, pdl=True))
    bench.add(
        f"{name} ours", us=ours, share_of_copy=ours.rate(shape.bytes / 1e3) / ceilings.copy, chain_us=chain,
        chain_share=shape.bytes / 1e3 / chain / ceilings.copy, error_to_float32=apart,
    )  # fmt: skip
    if bench.args.profile:
        for warps in (1, 2, 4, 8):
            bench.attempt(
                f"{warps} warps",
                lambda w=warps: bench.add(
                    f"  {w} warps",
                    us=Stat.of(times(graphed(bench, lambda: case.ours(warps=w)), repeats, before=flush)),
                ),
            )
    if peer is None:
        return
    best = None
    for cores in (False, True):
        call = bench.attempt(
            f"plan, tensor cores {cores}",
            lambda c=cores: peer.decode(
                case.tables, shape.context, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, c,
                case.dtype,
            ),
        )  # fmt: skip
        if call is None:
            continue
        q, out = case.q, torch.full_like(case.q, float("nan"))
        call(q, case.k[0], case.v[0], out)
        theirs = out[0].flatten().float()
        alone = graphed(bench, lambda c=call, q=q, out=out: c(q, case.k[0], case.v[0], out))
        stat = Stat.of(times(alone, repeats, before=flush))
        chained = _chain(bench, case, lambda layer, c=call, q=q, out=out: c(q, case.k[layer], case.v[layer], out))
        bench.add(
            f"{name} FlashInfer{', tensor cores' if cores else ''}", us=stat,
            share_of_copy=stat.rate(shape.bytes / 1e3) / ceilings.copy, chain_us=chained,
            error_to_float32=float((theirs - wanted).norm() / wanted.norm()),
        )  # fmt: skip
        best = stat.median if best is None else min(best, stat.median)
    if best is not None:
        bench.add(f"{name} ratio", ours_times_as_fast=best / ours.median)


def _chain(bench: Bench, case: _Case, call: Any) -> float:
    """Microseconds of a layer in a graph of many."""

    def layers() -> None:
        for layer in range(case.layers):
            call(layer)

    return Stat.of(times(graphed(bench, layers), bench.size(12, 1))).median / case.layers
