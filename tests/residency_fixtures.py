"""Routes that are kept, their worth in plain numbers, and an audit of pages, for the tests of `Residency`."""

from collections.abc import Sequence

import torch

from numem.policy.decision import Decision
from numem.runtime.engine import Engine, Rows
from numem.runtime.paging.pages import PageStorage, kv_spec
from numem.runtime.paging.pool import Route
from numem.runtime.paging.residency import Residency

SCOPE = bytes(range(32))


class Still:
    """A decoder that computes nothing, for tests of bookkeeping."""

    spec = kv_spec(1, 1, 16, "float32")
    kv_heads, head_dim, vocab, max_position = 1, 16, 1000, 4096
    device, max_rows = torch.device("cpu"), 512

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        return torch.zeros((len(rows.wanted), self.vocab))


class Log(list[Decision]):
    def record(self, decision: Decision) -> str:
        self.append(decision)
        return f"{len(self):032x}"


def grown(engine: Engine, tokens: Sequence[int], route: Route | None = None) -> Route:
    """A route with the rows of `tokens`; those it holds already are its first."""
    route = engine.pool.allocate() if route is None else route
    engine.append([(route, tokens[route.length :])], logits="none")
    return route


def keep(residency: Residency, name: str, tokens: Sequence[int], *, pinned: bool = False, **terms: float) -> Route:
    route = grown(residency.engine, tokens)
    assert residency.retain(name, route, tokens, durable=False, pinned=pinned, **terms)
    return route


def use(residency: Residency, tokens: Sequence[int]) -> None:
    found = residency.match(tokens)
    assert found is not None
    residency.used(found[0])


def audit(residency: Residency) -> None:
    pool = residency.engine.pool
    pool.check()
    stats = pool.stats()
    assert stats.free + stats.resident + stats.reserved == stats.physical


def line(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# finding
