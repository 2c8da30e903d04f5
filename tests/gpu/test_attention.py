"""Attention over pages: against torch, and the form of one row a lane bit for bit against that of many rows."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.kernels.cuda import attention, attention_prefill, rotary
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.rotary import HeadNorms

PAGE = 16


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    norms: bool = False
    partial: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        return {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}


SHAPES = [
    Shape(2, 1, 16),
    Shape(6, 2, 32, norms=True),
    Shape(2, 2, 16, window=100),
    Shape(4, 1, 32, window=40, softcap=5.0, norms=True, partial=True),
    Shape(2, 1, 136, window=90, norms=True),
]
TRUE_SHAPES = [
    Shape(32, 8, 128),
    Shape(16, 8, 128, norms=True),
    Shape(4, 1, 256, window=512, norms=True),
    Shape(9, 3, 64),
    Shape(8, 4, 256, softcap=50.0, window=300),
    Shape(16, 1, 96, partial=True),
]

FORMS = [(4, None), (8, None), (4, (2, 2)), (8, (4, 1))]


class Case:
    """Random rows of lanes of some lengths; pages lie anywhere, and what no row sees is NaN."""

    def __init__(self, shape: Shape, lengths: list[int], dtype: torch.dtype, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.lengths, self.dtype, self.device = shape, lengths, dtype, device
        d, kv = shape.head_dim, shape.kv_heads
        half = d // 4 if shape.partial else d // 2
        width = -(-max(lengths) // PAGE) + 1
        pages = width * len(lengths) + 3
        order = torch.randperm(pages, generator=generator)[: width * len(lengths)]
        self.tables = order.view(len(lengths), width).to(torch.int32).to(device)
        new = (pages, kv, PAGE, d)
        self.k, self.v = (torch.full(new, torch.nan, dtype=dtype, device=device) for _ in range(2))
        angle = torch.rand((max(lengths), half), generator=generator) * 6.3
        self.cos, self.sin = torch.cos(angle).to(device), torch.sin(angle).to(device)
        columns = (shape.heads + 2 * kv) * d
        self.qkv = [torch.randn((n, columns), generator=generator).to(dtype).to(device) for n in lengths]
        self.norms = None
        if shape.norms:
            q, k = (torch.rand(d, generator=generator).to(device) for _ in range(2))
            self.norms = HeadNorms(q, k, 1e-6, 0.5)
        self.scale = d**-0.5

    def prefill(self, cuts: list[int] | None = None) -> list[Tensor]:
        """Outputs of every lane, all rows in one call or in pieces that end at `cuts`."""
        outs = [torch.full((n, self.shape.heads * self.shape.head_dim), torch.nan) for n in self.lengths]
        outs = [out.to(self.dtype).to(self.device) for out in outs]
        edges = [0, *(cuts or []), max(self.lengths)]
        for low, high in itertools.pairwise(edges):
            parts = [(lane, low, min(high, n)) for lane, n in enumerate(self.lengths) if n > low]
            qkv = torch.cat([self.qkv[lane][a:b] for lane, a, b in parts])
            positions = torch.cat([torch.arange(a, b) for _, a, b in parts]).to(self.device)
            lanes = torch.cat([torch.full((b - a,), lane) for lane, a, b in parts]).to(self.device)
            slots = self.tables[lanes, positions // PAGE].long() * PAGE + positions % PAGE
            q = torch.full((len(qkv), self.shape.heads * self.shape.head_dim), torch.nan).to(self.dtype).to(self.device)
            rotary.rope_write(
                qkv, self.norms, self.cos, self.sin, positions, slots, self.k, self.v, q, **self.shape.sizes
            )
            starts = np.cumsum([0, *(b - a for _, a, b in parts)])
            spans = np.array([(lane, starts[i], b - a, a) for i, (lane, a, b) in enumerate(parts)], dtype=np.int32)
            out = torch.full_like(q, torch.nan)
            attention_prefill.prefill(
                q, self.k, self.v, self.tables, attention_prefill.plan(spans, self.device, self.shape.head_dim), out,
                **self.shape.sizes, scale=self.scale, window=self.shape.window, softcap=self.shape.softcap,
            )  # fmt: skip
            for i, (lane, a, b) in enumerate(parts):
                outs[lane][a:b] = out[starts[i] : starts[i + 1]]
        return outs

    def decode(self, rows: list[int], warps: int = 4, split: tuple[int, int] | None = None) -> Tensor:
        """Output of one row of each lane (-1: idle), whose keys before it are in the pages."""
        qkv = torch.stack([self.qkv[lane][max(row, 0)] for lane, row in enumerate(rows)])
        positions = torch.tensor(rows).to(self.device)
        out = torch.full((len(rows), self.shape.heads * self.shape.head_dim), torch.nan).to(self.dtype).to(self.device)
        tiles = max(rows) // nl.tile_keys(self.shape.head_dim) + 1
        scratch = attention.Scratch.of(len(rows), self.shape.heads, self.shape.head_dim, tiles + 1, self.device)
        scratch.words.fill_(-1)
        scratch.a.fill_(torch.nan)
        attention.decode(
            qkv, self.norms, self.cos, self.sin, self.k, self.v, self.tables, positions, out, scratch,
            **self.shape.sizes, scale=self.scale, window=self.shape.window, softcap=self.shape.softcap, tiles=tiles,
            split=split, warps=warps,
        )  # fmt: skip
        assert not scratch.count.any()
        return out

    def reference(self, lane: int) -> Tensor:
        """By torch in float64, from the queries and keys as the pages hold them."""
        s = self.shape
        n, group = self.lengths[lane], s.heads // s.kv_heads
        positions = torch.arange(n, device=self.device)
        page = self.tables[lane, positions // PAGE].long()
        k = self.k[page, :, positions % PAGE].double().transpose(0, 1).repeat_interleave(group, 0)
        v = self.v[page, :, positions % PAGE].double().transpose(0, 1).repeat_interleave(group, 0)
        x = self.qkv[lane].double().view(n, -1, s.head_dim)[:, : s.heads]
        if self.norms is not None:
            x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (0.5 + self.norms.q.double())
        w = self.cos.shape[1]
        c, si = self.cos[:n, None].double(), self.sin[:n, None].double()
        a, b = x[..., :w], x[..., w : 2 * w]
        x = torch.cat((a * c - b * si, b * c + a * si, x[..., 2 * w :]), -1).transpose(0, 1)
        scores = x @ k.transpose(1, 2) * self.scale
        if s.softcap:
            scores = torch.tanh(scores / s.softcap) * s.softcap
        gap = positions[:, None] - positions[None]
        seen = (gap >= 0) & ((gap < s.window) if s.window else torch.tensor(True, device=self.device))
        scores = scores.masked_fill(~seen, -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(n, -1)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def _shapes(big: bool) -> list[Shape]:
    return TRUE_SHAPES if big else SHAPES


@pytest.mark.parametrize("at", range(6))
def test_rows_prefilled_chunked_and_decoded(
    at: int, device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    """Whole, in pieces or one by one, a row's output and the bytes in its page are equal; NaN in other pages stays out.

    Covers groups of 3, windows, soft caps, partial rotation, norms by head, several lanes and idle ones.
    """
    shapes = _shapes(big)
    if at >= len(shapes):
        return
    shape = shapes[at]
    lengths = [700, 1, 130, 513] if big else [140, 1, 17]
    for dtype in dtypes:
        case = Case(shape, lengths, dtype, device, seed=at)
        whole = case.prefill()
        k, v = case.k.clone(), case.v.clone()
        close = 2.0**-6 if dtype is torch.bfloat16 else 2e-5
        for lane in range(len(lengths)):
            expected = case.reference(lane)
            torch.testing.assert_close(whole[lane].double(), expected, rtol=close, atol=close)
        equal = _equal(device)
        case.k.fill_(torch.nan), case.v.fill_(torch.nan)
        chunked = case.prefill([16, 128] if not big else [16, 100, 256, 511])
        for lane, out in enumerate(chunked):
            equal(out, whole[lane])
        assert torch.equal(_bits(case.k), _bits(k)) and torch.equal(_bits(case.v), _bits(v))
        rows = (
            sorted({0, 15, 16, 127, 128, 129, max(lengths) - 1}) if not big else [0, 15, 127, 128, 255, 511, 512, 699]
        )
        for row in rows:
            each = [row if row < n else (n - 1 if lane else -1) for lane, n in enumerate(lengths)]
            for warps, split in FORMS if big else [(4, None), (4, (2, 2))]:
                out = case.decode(each, warps, split)
                for lane, r in enumerate(each):
                    if r < 0:
                        assert out[lane].isnan().all()
                    else:
                        equal(out[lane], whole[lane][r])
        assert torch.equal(_bits(case.k), _bits(k)) and torch.equal(_bits(case.v), _bits(v))


def _equal(device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Bits on the GPU; the interpreter's products follow the library's own order, which depends on their shape."""

    def check(a: Tensor, b: Tensor) -> None:
        if device.type == "cuda":
            assert torch.equal(_bits(a), _bits(b))
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    return check
