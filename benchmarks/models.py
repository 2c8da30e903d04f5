"""A model of random weights on the device with its pages, and what runs on it."""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common import Bench
from benchmarks.shapes import Random, config_of, descriptor_of, weights_of
from numem.identity.chain import PAGE_TOKENS
from numem.models.architecture.descriptor import Descriptor
from numem.models.device_transformer import DeviceTransformer
from numem.models.forward import ModelWeights
from numem.runtime.device.form import TokenMajor
from numem.runtime.device.state import Step
from numem.runtime.device.transfer import Transfers
from numem.runtime.engine import Rows
from numem.runtime.paging.pages import PageStorage
from numem.runtime.sampling import GREEDY


@dataclass(slots=True)
class Made:
    """A model, its weights, and pages for `lanes` sequences of `context` tokens, in shuffled order."""

    shape: str
    descriptor: Descriptor
    weights: ModelWeights
    decoder: DeviceTransformer
    storage: PageStorage
    tables: np.ndarray

    @classmethod
    def of(cls, bench: Bench, shape: str, form: str, *, lanes: int, context: int) -> "Made":
        """`form` as in `Random`; in a dry run float32 stands for bfloat16, which the interpreter multiplies wrongly."""
        d = descriptor_of(config_of(shape, dry=bench.dry))
        dtype = "float32" if bench.dry else "bfloat16"
        pages = -(-context // PAGE_TOKENS)
        limit = min(d.position_limit, max(1024, pages * PAGE_TOKENS))
        weights = weights_of(d, Random(form, getattr(torch, dtype), bench.device), limit)
        decoder = DeviceTransformer(d, weights, dtype=dtype, max_position=limit, device=bench.device)
        pages_form = TokenMajor(bench.device)
        storage = PageStorage(decoder.spec, d.kv_heads, d.head_dim, lanes * pages, device=bench.device, form=pages_form)
        order = np.random.default_rng(1).permutation(lanes * pages).astype(np.int32)
        return cls(shape, d, weights, decoder, storage, order.reshape(lanes, pages))

    @property
    def transfers(self) -> Transfers:
        """What moves rows between these pages and the host."""
        assert self.storage.transfers is not None
        return self.storage.transfers

    def fill(self, std: float = 0.5) -> None:
        """Random keys and values in every page, so that decoding at any context reads plain numbers."""
        for pages in (self.storage.k, self.storage.v):
            for layer in pages:
                layer.normal_(std=std)

    def steps(self, context: int, *, same: bool = False) -> list[Step]:
        """Greedy lanes whose next token, the same of all or different, is at position `context`."""
        return [Step(7 + lane * (not same), context, table, GREEDY) for lane, table in enumerate(self.tables)]

    def decode(self, context: int, steps: int, *, same: bool = False) -> np.ndarray:
        """Decode all lanes from `context` on; int64 [steps, lanes]."""
        return self.decoder.ahead(self.storage).decode(self.steps(context, same=same), steps)

    def prefill(self, tokens: torch.Tensor, start: int = 0, lane: int = 0) -> torch.Tensor:
        """Evaluate tokens of one lane from position `start` on, in the decoder's chunks; logits of the last."""
        out = torch.empty(0)
        chunk = self.decoder.max_rows
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            last = first + len(part) == len(tokens)
            out = self.decoder.forward(self.rows(part, start + first, lane, last), self.storage)
        return out

    def rows(self, tokens: torch.Tensor, start: int, lane: int, wanted: bool) -> Rows:
        """Rows of one chunk; `wanted`: the logits of its last token."""
        at = np.arange(start, start + len(tokens))
        slots = self.tables[lane][at // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + at % PAGE_TOKENS
        return Rows(
            tokens,
            torch.from_numpy(at),
            torch.from_numpy(slots),
            torch.zeros(len(tokens), dtype=torch.int32),
            torch.from_numpy(self.tables[lane : lane + 1].copy()),
            torch.tensor([len(tokens) - 1] if wanted else [], dtype=torch.int64),
        )

    def tokens(self, count: int) -> torch.Tensor:
        """Random token ids, int64 on the host."""
        return torch.randint(0, self.descriptor.vocab, (count,), generator=torch.Generator().manual_seed(3))
