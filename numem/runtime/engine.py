"""The engine: appends tokens to routes by running a decoder over pages.

One call serves prefill, chunked prefill and decode alike: every row is a token at a position with the block table of
its lane, and a row's bits do not depend on the rows beside it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from numem.errors import CapacityError, ContextLengthError, InputError
from numem.identity.chain import PAGE_TOKENS
from numem.kernels.linear import Peaks
from numem.runtime.ahead import DeviceDecoder
from numem.runtime.device.state import Step
from numem.runtime.paging.pages import PageStorage
from numem.runtime.paging.pool import Capacity, PagePool, Reservation, Route
from numem.runtime.rows import Arrays, Rows, Span, results, rows_of, whole_texts
from numem.runtime.sampling import Peak
from numem.state.spec import StateSpec

__all__ = ["MAX_ROWS", "Decoder", "Engine", "Rows", "Span", "pages_for_lanes", "whole_texts"]

# Rows of one forward call on the CPU. Any value gives the same bits; this one keeps the activations of a layer in cache.
MAX_ROWS = 512


class Decoder(Protocol):
    """What the engine needs of a model.

    Attributes:
        device: where its pages lie.
        max_rows: rows of one forward call.
    """

    spec: StateSpec
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    max_rows: int
    device: torch.device

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        """Write the rows' keys and values into the pages; return float32 logits [R, vocab]."""


class Engine:
    """A decoder with its pages.

    Args:
        decoder: the model.
        pages: physical pages; default: enough for one sequence of `max_position` tokens.
        debug: free pages are NaN, and a page taken from them must still be.
        canary: full pages are hashed when they are committed, and compared whenever they are read.
        vocab: ids from here on are padding of the embedding: they have logits and are never chosen. Default: none are.

    Attributes:
        chooser: the decoder where it chooses tokens by a rule of its own, else None.
        ahead: what decodes several steps at a time, for `decode`, or None.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        pages: int | None = None,
        debug: bool = False,
        canary: bool = False,
        vocab: int | None = None,
    ) -> None:
        self.decoder = d = decoder
        self.vocab = decoder.vocab if vocab is None else vocab
        if not 0 < self.vocab <= decoder.vocab:
            raise InputError(f"engine: vocab {vocab} lies outside [1, {decoder.vocab}]")
        self.max_position = decoder.max_position
        physical = pages or -(-decoder.max_position // PAGE_TOKENS)
        self.storage = PageStorage(
            d.spec, d.kv_heads, d.head_dim, physical, poison=debug, canary=canary, device=d.device
        )
        self.pool = PagePool(physical, PAGE_TOKENS, self.storage.guard)
        self.chooser = decoder if isinstance(decoder, DeviceDecoder) else None
        self.ahead = None if self.chooser is None else self.chooser.ahead(self.storage, self.vocab)
        self.page_copies = 0
        self.rows_computed = 0
        self._arrays = Arrays((0, 0, 0, 0), self.vocab)

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

    def reserve(self, route: Route, count: int, capacity: Capacity | None = None) -> Reservation:
        """Reserve room, drawn from `capacity` first, and copy a shared partial tail, so that the reserved pages may be
        written."""
        reservation = self.pool.reserve(route, count, capacity)
        if reservation.replaced:
            try:
                self.storage.copy(*reservation.replaced)
            except BaseException:
                self.pool.abort([reservation])
                raise
            self.page_copies += 1
        return reservation

    def release(self, route: Route) -> None:
        """Give a route's pages back."""
        self.pool.release(route)

    def evaluate(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """Evaluate spans in one pass; keys and values are written into their pages, and no route changes.

        The caller holds the pages (a reservation, uncommitted) and commits or aborts; every earlier position of a span's
        pages holds its row already.

        Returns:
            One float32 array per span: [vocab], [len(tokens), vocab] or [0], as its `logits` asks.

        Raises:
            InputError: a token outside the vocabulary; nothing was written.
            IntegrityError: a sealed page that a span reads changed; nothing was written.
        """
        flat = self._evaluate(spans, lend=False)
        out, at = [], 0
        for s in spans:
            count = results(s)
            out.append(flat[at] if s.logits == "last" else flat[at : at + count] if count else flat[:0, 0])
            at += count
        return out

    def decode(self, lanes: Sequence[Step], steps: int) -> Iterator[np.ndarray]:
        """Decode `steps` tokens of each lane ahead; its pages are held as for `evaluate`, with room for as many rows.

        Returns:
            Tokens in order, piece by piece; see `numem.runtime.ahead.Ahead`. Nothing is done before the first is asked
            for, and the pages are written until the last has come.

        Raises:
            IntegrityError: a sealed page that a lane reads changed; nothing was written.
        """
        if self.ahead is None:
            raise InputError("decode: the model decodes one step at a time; use `append`")
        if self.storage.guard is not None:
            self.storage.guard.verify({int(page) for s in lanes for page in s.pages[: s.position // PAGE_TOKENS]})
        for tokens in self.ahead.pieces(lanes, steps):
            self.rows_computed += tokens.size
            yield tokens

    def evaluate_lent(self, spans: Sequence[Span], *, kept: bool = False) -> tuple[list[np.ndarray], list[Peak | None]]:
        """As `evaluate`, for spans of which at most the last logits are asked for; these lie in a buffer that the next
        call overwrites.

        Args:
            kept: they stay with the decoder, for `chooser`, and the arrays returned are empty.

        Returns:
            One array per span, [vocab] or [0], and where its largest logit that may be chosen is, None of no logits.
        """
        flat = self._evaluate(spans, lend=not kept, kept=kept)
        arrays = self._arrays
        if kept:
            each, peaks = [flat[:0].reshape(-1)] * arrays.shape[-1], arrays.peaks()
        elif flat is arrays.logits:
            each, peaks = arrays.each, arrays.peaks()
        else:
            found = Peaks.of(len(flat), self.vocab)
            found.find(torch.from_numpy(flat))
            each, peaks = list(flat), list(zip(found.index.tolist(), found.value.tolist(), strict=True))
        if len(each) == len(spans):
            return each, peaks
        rows = [flat[:0].reshape(-1)] * len(spans)
        where: list[Peak | None] = [None] * len(spans)
        asked = [at for at, s in enumerate(spans) if results(s)]
        for at, row, peak in zip(asked, each, peaks, strict=True):
            rows[at], where[at] = row, peak
        return rows, where

    def _evaluate(self, spans: Sequence[Span], *, lend: bool, kept: bool = False) -> np.ndarray:
        """Logits [R, vocab] of the rows that the spans ask for, in their order."""
        if self.storage.guard is not None:
            self.storage.guard.verify({page for s in spans for page in s.pages[: s.start // PAGE_TOKENS]})
        tokens, positions, slots, lanes, wanted = rows_of(spans)
        if min(tokens) < 0 or max(tokens) >= self.decoder.vocab:
            raise InputError(f"append: a token id lies outside [0, {self.decoder.vocab})")
        shape = (len(tokens), len(spans), max(len(s.pages) for s in spans), len(wanted))
        arrays = self._arrays
        if arrays.shape != shape or (arrays.logits is not None) is not lend or arrays.kept is not kept:
            lent = np.empty((len(wanted), self.decoder.vocab), dtype=np.float32) if lend else None
            arrays = self._arrays = Arrays(shape, self.vocab, lent, kept=kept)
        arrays.rows[:] = (tokens, positions, slots)
        arrays.lane[:] = lanes
        arrays.wanted[:] = wanted
        for lane, s in enumerate(spans):
            arrays.tables[lane, : len(s.pages)] = s.pages
        flat = self._forward(arrays)
        self.rows_computed += len(tokens)
        return flat

    def _forward(self, arrays: Arrays) -> np.ndarray:
        """Logits of the wanted rows, evaluated at most `max_rows` at a time."""
        rows, count = arrays.tensors, arrays.shape[0]
        most = self.decoder.max_rows
        if count <= most:
            logits = self.decoder.forward(rows, self.storage)
            return arrays.logits if arrays.logits is not None and logits is rows.out else logits.numpy()
        pieces = []
        for a in range(0, count, most):
            b = a + most
            part = Rows(
                rows.tokens[a:b],
                rows.positions[a:b],
                rows.slots[a:b],
                rows.lane[a:b],
                rows.tables,
                rows.wanted[(rows.wanted >= a) & (rows.wanted < b)] - a,
            )
            pieces.append(self.decoder.forward(part, self.storage).numpy())
        return np.concatenate(pieces)


def pages_for_lanes(lanes: int, tokens: int) -> int:
    """Pages that `lanes` sequences of `tokens` tokens may need at once, with a copied tail each."""
    if lanes <= 0 or tokens <= 0:
        raise CapacityError(f"pages: {lanes} lanes of {tokens} tokens")
    return lanes * (-(-tokens // PAGE_TOKENS) + 1)
