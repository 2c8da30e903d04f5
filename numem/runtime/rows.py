"""Rows of a forward call, and the arrays they are written to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS
from numem.kernels.linear import Peaks
from numem.runtime.sampling import Peak


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
        kept: the logits stay with a decoder that chooses of them itself, which returns none.
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
    kept: bool = False


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


class Arrays:
    """Where the rows of a call are written; kept for the next call, as decoding repeats one shape for long.

    A table may go on, behind the pages of its lane, with pages of an earlier call: no row of the lane sees those.

    Args:
        shape: rows, lanes, pages of the longest lane, rows whose logits are wanted.
        vocab: ids of which the largest is noted.
        logits: where these go, or None for a fresh array.
        kept: they stay with the decoder, which notes their largest alone.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], vocab: int, logits: np.ndarray | None = None, *, kept: bool = False
    ) -> None:
        rows, lanes, pages, wanted = self.shape = shape
        self.rows = np.empty((3, rows), dtype=np.int64)
        self.lane = np.empty(rows, dtype=np.int32)
        self.tables = np.full((lanes, pages), -1, dtype=np.int32)
        self.wanted = np.empty(wanted, dtype=np.int64)
        tokens, positions, slots = (torch.from_numpy(row) for row in self.rows)
        lane, tables, of = (torch.from_numpy(a) for a in (self.lane, self.tables, self.wanted))
        self.logits, self.kept = logits, kept
        self.each = [] if logits is None else list(logits)
        noted = wanted and (kept or logits is not None)
        peaks = Peaks.of(wanted, vocab) if noted else None
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
            kept=kept,
        )

    def peaks(self) -> list[Peak | None]:
        """Index and value of the largest of each row of logits."""
        return list(zip(self._index.tolist(), self._value.tolist(), strict=True))


def rows_of(spans: Sequence[Span]) -> tuple[Sequence[int], ...]:
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
        wanted += range(len(tokens) - results(s), len(tokens))
    return tokens, positions, slots, rows, wanted


def results(span: Span) -> int:
    """Rows of a span, the last ones, whose logits it asks for."""
    return 1 if span.logits == "last" else len(span.tokens) if span.logits == "all" else 0
