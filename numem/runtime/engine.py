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
from numem.kernels.linear import Peaks
from numem.runtime.paging.pages import PageStorage
from numem.runtime.paging.pool import Capacity, PagePool, Reservation, Route
from numem.runtime.sampling import Peak
from numem.state.spec import StateSpec

# Rows of one forward call on the CPU. Any value gives the same bits; this one keeps the activations of a layer in cache.
MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of rows for one forward call.

    Attributes:
        tokens, positions: int64 [M].
        slots: int64 [M], page * 16 + offset where the row's key and value go.
        lane: int32 [M], index into `tables`.
        tables: int32 [lanes, pages], block tables padded with -1.
        wanted: int64 [R], rows whose logits are asked for, ascending.
        out: float32 [R, vocab], where they are to be written, or None.
        peaks: where the largest of each of them is to be noted, or None.
        lengths: int32 [lanes], tokens of each lane, for a model whose rows see what follows them; None else.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lane: torch.Tensor
    tables: torch.Tensor
    wanted: torch.Tensor
    out: torch.Tensor | None = None
    peaks: Peaks | None = None
    lengths: torch.Tensor | None = None


@dataclass(slots=True)
class Span:
    """Tokens to evaluate at consecutive positions of a page table.

    Attributes:
        pages: physical pages from position 0 on.
        start: position of the first token.
        tokens: at least one.
        logits: "last" for the last token, "all" for every token, "none".
    """

    pages: Sequence[int] | np.ndarray
    start: int
    tokens: Sequence[int]
    logits: str = "last"


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
        self.decoder = decoder
        self.vocab = decoder.vocab if vocab is None else vocab
        if not 0 < self.vocab <= decoder.vocab:
            raise InputError(f"engine: vocab {vocab} lies outside [1, {decoder.vocab}]")
        self.max_position = decoder.max_position
        physical = pages or -(-decoder.max_position // PAGE_TOKENS)
        self.storage = PageStorage(
            decoder.spec,
            decoder.kv_heads,
            decoder.head_dim,
            physical,
            poison=debug,
            canary=canary,
            device=decoder.device,
        )
        self.pool = PagePool(physical, PAGE_TOKENS, self.storage.guard)
        self.page_copies = 0
        self.rows_computed = 0
        self._arrays = _Arrays((0, 0, 0, 0), self.vocab, None)

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
            count = _results(s)
            out.append(flat[at] if s.logits == "last" else flat[at : at + count] if count else flat[:0, 0])
            at += count
        return out

    def evaluate_lent(self, spans: Sequence[Span]) -> tuple[list[np.ndarray], list[Peak | None]]:
        """As `evaluate`, for spans of which at most the last logits are asked for; these lie in a buffer that the next
        call overwrites.

        Returns:
            One array per span, [vocab] or [0], and where its largest logit that may be chosen is, None of no logits.
        """
        flat = self._evaluate(spans, lend=True)
        arrays = self._arrays
        if flat is arrays.logits:
            each, peaks = arrays.each, arrays.peaks()
        else:
            found = Peaks.of(len(flat), self.vocab)
            found.find(torch.from_numpy(flat))
            each, peaks = list(flat), list(zip(found.index.tolist(), found.value.tolist(), strict=True))
        if len(each) == len(spans):
            return each, peaks
        rows = [flat[:0].reshape(-1)] * len(spans)
        where: list[Peak | None] = [None] * len(spans)
        asked = [at for at, s in enumerate(spans) if _results(s)]
        for at, row, peak in zip(asked, each, peaks, strict=True):
            rows[at], where[at] = row, peak
        return rows, where

    def _evaluate(self, spans: Sequence[Span], *, lend: bool) -> np.ndarray:
        """Logits [R, vocab] of the rows that the spans ask for, in their order."""
        if self.storage.guard is not None:
            self.storage.guard.verify({page for s in spans for page in s.pages[: s.start // PAGE_TOKENS]})
        tokens, positions, slots, lanes, wanted = _rows(spans)
        if min(tokens) < 0 or max(tokens) >= self.decoder.vocab:
            raise InputError(f"append: a token id lies outside [0, {self.decoder.vocab})")
        shape = (len(tokens), len(spans), max(len(s.pages) for s in spans), len(wanted))
        arrays = self._arrays
        if arrays.shape != shape or (arrays.logits is not None) is not lend:
            lent = np.empty((len(wanted), self.decoder.vocab), dtype=np.float32) if lend else None
            arrays = self._arrays = _Arrays(shape, self.vocab, lent)
        arrays.rows[:] = (tokens, positions, slots)
        arrays.lane[:] = lanes
        arrays.wanted[:] = wanted
        for lane, s in enumerate(spans):
            arrays.tables[lane, : len(s.pages)] = s.pages
        flat = self._forward(arrays)
        self.rows_computed += len(tokens)
        return flat

    def _forward(self, arrays: "_Arrays") -> np.ndarray:
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


class _Arrays:
    """Where the rows of a call are written; kept for the next call, as decoding repeats one shape for long.

    A table may go on, behind the pages of its lane, with pages of an earlier call: no row of the lane sees those.

    Args:
        shape: rows, lanes, pages of the longest lane, rows whose logits are wanted.
        vocab: ids of which the largest is noted.
        logits: where these go, or None for a fresh array.
    """

    def __init__(self, shape: tuple[int, int, int, int], vocab: int, logits: np.ndarray | None) -> None:
        rows, lanes, pages, wanted = self.shape = shape
        self.rows = np.empty((3, rows), dtype=np.int64)
        self.lane = np.empty(rows, dtype=np.int32)
        self.tables = np.full((lanes, pages), -1, dtype=np.int32)
        self.wanted = np.empty(wanted, dtype=np.int64)
        tokens, positions, slots = (torch.from_numpy(row) for row in self.rows)
        lane, tables, of = (torch.from_numpy(a) for a in (self.lane, self.tables, self.wanted))
        self.logits = logits
        self.each = [] if logits is None else list(logits)
        peaks = None if logits is None or not wanted else Peaks.of(wanted, vocab)
        self._index = np.empty(0, dtype=np.int64) if peaks is None else peaks.index.numpy()
        self._value = np.empty(0, dtype=np.float32) if peaks is None else peaks.value.numpy()
        self.tensors = Rows(
            tokens,
            positions,
            slots,
            lane,
            tables,
            of,
            None if logits is None else torch.from_numpy(logits),
            peaks,
        )

    def peaks(self) -> list[Peak | None]:
        """Index and value of the largest of each row of logits."""
        return list(zip(self._index.tolist(), self._value.tolist(), strict=True))


def _rows(spans: Sequence[Span]) -> tuple[Sequence[int], ...]:
    """Tokens, positions, slots and lanes of the rows of spans, and the rows whose logits are asked for."""
    lanes = range(len(spans))
    if all(len(s.tokens) == 1 and s.logits == "last" for s in spans):  # nothing but decoding
        positions = [s.start for s in spans]
        slots = [int(s.pages[s.start // PAGE_TOKENS]) * PAGE_TOKENS + s.start % PAGE_TOKENS for s in spans]
        return [s.tokens[0] for s in spans], positions, slots, lanes, lanes
    tokens: list[int] = []
    positions, slots = list[int](), list[int]()
    rows, wanted = list[int](), list[int]()
    for lane, s in zip(lanes, spans, strict=True):
        start, pages = s.start, s.pages
        end = start + len(s.tokens)
        tokens += s.tokens
        positions += range(start, end)
        slots += [int(pages[p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for p in range(start, end)]
        rows += [lane] * (end - start)
        wanted += range(len(tokens) - _results(s), len(tokens))
    return tokens, positions, slots, rows, wanted


def _results(span: Span) -> int:
    """Rows of a span, the last ones, whose logits it asks for."""
    return 1 if span.logits == "last" else len(span.tokens) if span.logits == "all" else 0


def whole_texts(texts: Sequence[Sequence[int]], wanted: str = "all") -> tuple[Rows, int]:
    """Rows of whole texts, each a lane with pages of its own, without padding; for models that keep nothing.

    Args:
        texts: token ids, at least one each.
        wanted: rows of each text whose result is asked for: "all", "first" or "last".

    Returns:
        The rows, and how many pages, from 0 on, their tables name.

    Raises:
        InputError: no text, one without tokens, or tokens that are no whole numbers.
    """
    counts = [len(text) for text in texts]
    if not counts or not min(counts):
        raise InputError("texts: there is none, or one has no tokens")
    sizes = [-(-n // PAGE_TOKENS) for n in counts]
    firsts = np.cumsum([0, *sizes])
    tables = np.full((len(texts), max(sizes)), -1, dtype=np.int32)
    for at, size in enumerate(sizes):
        tables[at, :size] = range(firsts[at], firsts[at] + size)
    ends = np.cumsum(counts)
    starts = ends - counts
    lane = np.arange(len(texts), dtype=np.int32).repeat(counts)
    positions = np.arange(ends[-1]) - starts[lane]
    asked = {"all": np.arange(ends[-1]), "first": starts, "last": ends - 1}[wanted]
    ids = np.concatenate(texts)
    if ids.dtype.kind not in "iu":
        raise InputError(f"texts: token ids are {ids.dtype}, not whole numbers")
    arrays = (ids.astype(np.int64), positions, firsts[lane] * PAGE_TOKENS + positions, lane, tables)
    tokens, places, slots, lanes, table = (torch.from_numpy(a) for a in arrays)
    lengths = torch.tensor(counts, dtype=torch.int32)
    return Rows(tokens, places, slots, lanes, table, torch.from_numpy(asked), lengths=lengths), int(firsts[-1])


def pages_for_lanes(lanes: int, tokens: int) -> int:
    """Pages that `lanes` sequences of `tokens` tokens may need at once, with a copied tail each."""
    if lanes <= 0 or tokens <= 0:
        raise CapacityError(f"pages: {lanes} lanes of {tokens} tokens")
    return lanes * (-(-tokens // PAGE_TOKENS) + 1)
