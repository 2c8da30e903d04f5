"""The engine: appends tokens to routes by running a decoder over pages.

One call serves prefill, chunked prefill and decode alike: every row is a token at a position with the block table of
its lane, and a row's bits do not depend on the rows beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from numem.errors import CapacityError, ContextLengthError, InputError
from numem.identity.chain import PAGE_TOKENS
from numem.runtime.pages import PageStorage
from numem.runtime.pool import PagePool, Reservation, Route
from numem.state.spec import StateSpec

# Rows of one forward call. Any value gives the same bits; this one keeps the activations of a layer in cache.
MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of rows for one forward call.

    Attributes:
        tokens, positions: int64 [M].
        slots: int64 [M], page * 16 + offset where the row's key and value go.
        lane: int32 [M], index into `tables`.
        tables: int32 [lanes, pages], block tables padded with -1.
        wanted: int64 [R], rows whose logits are asked for.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lane: torch.Tensor
    tables: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to evaluate at consecutive positions of a page table.

    Attributes:
        pages: physical pages from position 0 on.
        start: position of the first token.
        tokens: at least one.
        logits: "last" for the last token, "all" for every token, "none".
    """

    pages: Sequence[int]
    start: int
    tokens: Sequence[int]
    logits: str = "last"


class Decoder(Protocol):
    """What the engine needs of a model."""

    spec: StateSpec
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        """Write the rows' keys and values into the pages; return float32 logits [R, vocab]."""


class Engine:
    """A decoder with its pages.

    Args:
        decoder: the model.
        pages: physical pages; default: enough for one sequence of `max_position` tokens.
        debug: poison fresh and freed pages with NaN.
    """

    def __init__(self, decoder: Decoder, *, pages: int | None = None, debug: bool = False) -> None:
        self.decoder = decoder
        self.max_position = decoder.max_position
        self.pool = PagePool(pages or -(-decoder.max_position // PAGE_TOKENS), PAGE_TOKENS)
        self.storage = PageStorage(decoder.spec, decoder.kv_heads, decoder.head_dim, self.pool.physical, poison=debug)
        self.page_copies = 0
        self.rows_computed = 0

    def append(self, items: Sequence[tuple[Route, Sequence[int]]], *, logits: str = "last") -> list[np.ndarray]:
        """Evaluate tokens at the end of routes; all routes change, or none does.

        Args:
            items: (route, tokens) pairs, each with at least one token.
            logits: "last" for the last token of each item, "all" for every token, "none".

        Returns:
            One float32 array per item: [vocab], [len(tokens), vocab] or [0].

        Raises:
            ContextLengthError: a route would pass max_position.
            CapacityError: too few free pages.
        """
        for route, tokens in items:
            self.check(route.length, tokens)
        reserved: list[Reservation] = []
        try:
            for route, tokens in items:
                reserved.append(self.reserve(route, len(tokens)))
            spans = [Span(r.pages, r.expected, t, logits) for r, (_, t) in zip(reserved, items, strict=True)]
            out = self.evaluate(spans)
        except BaseException:
            self.pool.abort(reserved)
            raise
        self.pool.commit(reserved)
        return out

    def check(self, start: int, tokens: Sequence[int]) -> None:
        """Refuse tokens that cannot be evaluated at `start`: none, or past max_position."""
        if not len(tokens):
            raise InputError("append: an item has no tokens")
        if start + len(tokens) > self.max_position:
            raise ContextLengthError(
                f"append: {start} + {len(tokens)} tokens pass max_position {self.max_position}; "
                "load the model with a larger max_position or shorten the prompt"
            )

    def reserve(self, route: Route, count: int) -> Reservation:
        """Reserve room and copy a shared partial tail, so that the reserved pages may be written."""
        reservation = self.pool.reserve(route, count)
        if reservation.replaced:
            self.storage.copy(*reservation.replaced)
            self.page_copies += 1
        return reservation

    def release(self, route: Route) -> None:
        """Release a route; in debug mode the freed pages are poisoned."""
        freed = self.pool.release(route)
        if self.storage.poisoned and freed:
            self.storage.poison(freed)

    def evaluate(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """Evaluate spans in one pass; keys and values are written into their pages, and no route changes.

        The caller holds the pages (a reservation, uncommitted) and commits or aborts; every earlier position of a span's
        pages holds its row already.

        Returns:
            One float32 array per span: [vocab], [len(tokens), vocab] or [0], as its `logits` asks.

        Raises:
            InputError: a token outside the vocabulary; nothing was written.
        """
        counts = [len(s.tokens) for s in spans]
        width = max(len(s.pages) for s in spans)
        tables = np.full((len(spans), width), -1, dtype=np.int32)
        for lane, s in enumerate(spans):
            tables[lane, : len(s.pages)] = s.pages
        tokens = np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in spans])
        positions = np.concatenate(
            [np.arange(s.start, s.start + n, dtype=np.int64) for s, n in zip(spans, counts, strict=True)]
        )
        lanes = np.repeat(np.arange(len(spans), dtype=np.int32), counts)
        slots = tables[lanes, positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.decoder.vocab:
            raise InputError(f"append: a token id lies outside [0, {self.decoder.vocab})")
        ends = np.cumsum(counts)
        parts = [_wanted(s, int(b)) for s, b in zip(spans, ends, strict=True)]
        wanted = np.asarray([row for part in parts for row in part], dtype=np.int64)
        pieces = []
        for a in range(0, len(tokens), MAX_ROWS):
            b = min(a + MAX_ROWS, len(tokens))
            rows = Rows(
                torch.from_numpy(tokens[a:b]),
                torch.from_numpy(positions[a:b]),
                torch.from_numpy(slots[a:b]),
                torch.from_numpy(lanes[a:b]),
                torch.from_numpy(tables),
                torch.from_numpy(wanted[(wanted >= a) & (wanted < b)] - a),
            )
            pieces.append(self.decoder.forward(rows, self.storage).numpy())
        self.rows_computed += len(tokens)
        flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        out, at = [], 0
        for s, part in zip(spans, parts, strict=True):
            mine = flat[at : at + len(part)]
            out.append(mine[0] if s.logits == "last" else mine if s.logits == "all" else mine[:, 0])
            at += len(part)
        return out


def _wanted(span: Span, end: int) -> range:
    """Rows of the batch, of which the span's last is end - 1, whose logits it asks for."""
    if span.logits == "none":
        return range(end, end)
    return range(end - (1 if span.logits == "last" else len(span.tokens)), end)


def pages_for_lanes(lanes: int, tokens: int) -> int:
    """Pages that `lanes` sequences of `tokens` tokens may need at once, with a copied tail each."""
    if lanes <= 0 or tokens <= 0:
        raise CapacityError(f"pages: {lanes} lanes of {tokens} tokens")
    return lanes * (-(-tokens // PAGE_TOKENS) + 1)
