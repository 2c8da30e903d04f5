"""A decoder on the CPU that decodes several steps at a time, as one on a device does."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from numem import LM
from numem.errors import ModelError
from numem.identity.chain import PAGE_TOKENS
from numem.runtime.ahead import Ahead
from numem.runtime.continuation import Session
from numem.runtime.device.state import Step
from numem.runtime.engine import Decoder, Engine, Rows
from numem.runtime.paging.pages import PageStorage
from numem.runtime.sampling import Sampler


class AheadDecoder:
    """A decoder that also decodes ahead, and chooses by a rule that is not the sampler's on the host.

    Args:
        broken: position at which the logits are not finite.

    Attributes:
        calls: steps and lanes of each time that it decodes ahead.
        fail: raised when it next decodes ahead, in place of the tokens from step `fail_at` on.
    """

    def __init__(self, inner: Decoder, *, broken: int = -1) -> None:
        self.inner = inner
        self.spec, self.device, self.max_rows = inner.spec, inner.device, inner.max_rows
        self.kv_heads, self.head_dim = inner.kv_heads, inner.head_dim
        self.vocab, self.max_position = inner.vocab, inner.max_position
        self.broken = broken
        self.calls: list[tuple[int, int]] = []
        self.fail: Exception | None = None
        self.fail_at = 0
        self._last = np.empty((0, 0), dtype=np.float32)
        self._positions: list[int] = []

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        logits = self.inner.forward(rows, storage)
        bad = rows.positions[rows.wanted] == self.broken
        if bad.any():
            logits[bad] = torch.nan
            if rows.peaks is not None:
                rows.peaks.value[bad] = torch.nan
        self._last = logits.numpy().copy()
        return logits[:0] if rows.kept else logits

    def choose(
        self, samplers: Sequence[tuple[Sampler, int]], limit: int, storage: PageStorage, rows: Sequence[int]
    ) -> list[int]:
        """As the sampler with another seed: a path that chooses on the host is found out."""
        return [_chosen(s, self._last[row], at, limit) for row, (s, at) in zip(rows, samplers, strict=True)]

    def ahead(self, storage: PageStorage, limit: int) -> Ahead:
        return _Ahead(self, storage, limit)


class _Ahead:
    def __init__(self, decoder: AheadDecoder, storage: PageStorage, limit: int) -> None:
        self._decoder, self._storage, self._limit = decoder, storage, limit

    def pieces(self, items: Sequence[Step], steps: int) -> Iterator[np.ndarray]:
        """Two steps at a time. All rows are written before the first: on a device, what is done with pages afterwards
        comes after that too."""
        tokens = self._decode(items, steps)
        for at in range(0, steps, 2):
            decoder = self._decoder
            if decoder.fail is not None and at >= decoder.fail_at:
                failure, decoder.fail = decoder.fail, None
                raise failure
            yield tokens[at : at + 2]

    def _decode(self, items: Sequence[Step], steps: int) -> np.ndarray:
        decoder, lanes = self._decoder, len(items)
        decoder.calls.append((steps, lanes))
        tokens = [step.token for step in items]
        tables = np.full((lanes, max(len(step.pages) for step in items)), -1, dtype=np.int32)
        for lane, step in enumerate(items):
            assert len(step.pages) * PAGE_TOKENS >= step.position + steps
            tables[lane, : len(step.pages)] = step.pages
        out = np.full((steps, lanes), -1, dtype=np.int64)
        for at in range(steps):
            live = [lane for lane in range(lanes) if tokens[lane] >= 0]
            if not live:
                break
            positions = [items[lane].position + at for lane in live]
            slots = [
                int(tables[n, p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS
                for n, p in zip(live, positions, strict=True)
            ]
            decoder.forward(
                Rows(
                    torch.tensor([tokens[lane] for lane in live]),
                    torch.tensor(positions),
                    torch.tensor(slots),
                    torch.tensor(live, dtype=torch.int32),
                    torch.from_numpy(tables),
                    torch.arange(len(live)),
                ),
                self._storage,
            )
            asked = [(items[lane].sampler, position) for lane, position in zip(live, positions, strict=True)]
            for lane, token in zip(
                live, decoder.choose(asked, self._limit, self._storage, range(len(live))), strict=True
            ):
                out[at, lane] = tokens[lane] = token
        return out


def _chosen(sampler: Sampler, logits: np.ndarray, position: int, limit: int) -> int:
    try:
        return replace(sampler, seed=sampler.seed ^ 0x5EED).choose(logits, position, limit)
    except ModelError:
        return -1


def ahead_session(lm: LM, *, pages: int = 200, broken: int = -1, canary: bool = False) -> tuple[Session, AheadDecoder]:
    """A session of a model whose decoder decodes ahead; free pages are NaN."""
    decoder = AheadDecoder(lm.decoder, broken=broken)
    vocab = min(lm.tokenizer.vocab_size, lm.decoder.vocab)
    return Session(Engine(decoder, pages=pages, debug=True, canary=canary, vocab=vocab), lm.identity), decoder


class Letters:
    """Ids as small letters."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def finish(self) -> str:
        return ""
