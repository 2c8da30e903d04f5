"""Lanes of keys and values in a poisoned pool, for the tests of paged attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from numem.kernels.attention import paged_attention
from numem.kernels.pages import PAGE, new_pools, scatter_rows


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass
class Lanes:
    """Lanes of given lengths, their keys and values in pages of a poisoned pool (every unwritten byte is 0xFF)."""

    lengths: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    layout: int = 0  # seed of the physical placement
    poison: int = 0xFF

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        width = self.kv_heads * self.head_dim
        # a lane's content depends on the lane's length alone, not on its place
        self.rows = [
            torch.randn((2, 1, n, width), generator=torch.Generator().manual_seed(n)).to(self.dtype)
            for n in self.lengths
        ]
        self.width = max(1, max(-(-n // PAGE) for n in self.lengths)) + 1
        need = sum(-(-n // PAGE) for n in self.lengths)
        pool = need + 5
        k, v = new_pools(1, pool, self.kv_heads, self.head_dim, self.dtype)
        k.view(torch.uint8).fill_(self.poison)
        v.view(torch.uint8).fill_(self.poison)
        order = torch.randperm(pool, generator=g.manual_seed(self.layout)).int()
        # entries that no row sees are out of range on purpose
        self.tables = torch.full((len(self.lengths), self.width), 1 << 30, dtype=torch.int32)
        for lane, n in enumerate(self.lengths):
            count = -(-n // PAGE)
            self.tables[lane, :count], order = order[:count], order[count:]
            if n:
                scatter_rows(self.rows[lane], k, v, self.tables[lane, :count].contiguous(), 0)
        self.k, self.v = k[0], v[0]

    def queries(self, lane: int, positions: Tensor) -> Tensor:
        """A query depends on its lane's length and its position alone."""
        g = torch.Generator()
        shape = (self.heads * self.head_dim,)
        return torch.stack(
            [
                torch.randn(shape, generator=g.manual_seed(self.lengths[lane] * 10000 + p)) * 2
                for p in positions.tolist()
            ]
        )

    def attend(
        self,
        q: Tensor,
        lanes: list[int],
        positions: list[int],
        window: int = 0,
        *,
        softcap: float = 0.0,
        lengths: list[int] | None = None,
        right: int = -1,
    ) -> Tensor:
        return paged_attention(
            q,
            self.k,
            self.v,
            self.tables,
            torch.tensor(lanes, dtype=torch.int32),
            torch.tensor(positions),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=window,
            softcap=softcap,
            lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
            right=right,
        )

    def last(self, lane: int, window: int = 0) -> Tensor:
        """The last row of a lane, alone."""
        position = self.lengths[lane] - 1
        return self.attend(self.queries(lane, torch.tensor([position])), [lane], [position], window)

    def exact(self, lane: int, q: Tensor, low: int, high: int, softcap: float = 0.0) -> Tensor:
        """The float64 result of one row that sees the keys [low, high)."""
        k, v = (x[0, low:high].double().view(-1, self.kv_heads, self.head_dim).transpose(0, 1) for x in self.rows[lane])
        query = q.double().view(self.kv_heads, -1, self.head_dim)
        scores = query @ k.transpose(1, 2) * self.head_dim**-0.5
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        return torch.matmul(torch.softmax(scores, -1), v).reshape(-1)
