"""The transformer on a GPU: the same program as on the CPU, run as launches over device pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from numem.errors import UnsupportedModelError
from numem.kernels.cuda import attention_prefill, sampling, step
from numem.kernels.cuda.language import tile_keys
from numem.kernels.cuda.program import DeviceCall, DeviceProgram
from numem.models.architecture.descriptor import SLIDING, Descriptor
from numem.models.devices import gpu_refuses
from numem.models.forward import ModelWeights, emit
from numem.runtime.device.graph import DecodeGraphs
from numem.runtime.device.state import LaneState, settings_of
from numem.runtime.device.streams import turn
from numem.runtime.engine import Rows
from numem.runtime.paging.pages import DTYPES, PageStorage, kv_spec
from numem.runtime.sampling import Sampler

FEW_ROWS = 32  # rows of as many lanes run as a decode step


Results = dict[int, tuple[Tensor, Tensor, Tensor]]
"""By the number of rows that there is room for: logits, and index and value of the largest."""


@dataclass(slots=True)
class _Passes:
    """What `forward` left of one engine's pages, until its next pass over them."""

    last: Tensor
    kept: Results = field(default_factory=dict)


class DeviceTransformer:
    """A decoder whose weights and pages lie on one GPU.

    Args:
        descriptor: its architecture.
        weights: on the device, matrices as `numem.kernels.cuda.matrix.Matrix`.
        dtype: of weights and pages: "bfloat16"; "float32" where Triton's interpreter runs the kernels.
        max_position: positions that may be evaluated.
        device: where everything lies.

    Raises:
        UnsupportedModelError: an architecture without kernels on a GPU.
    """

    max_rows = 8192  # of one pass: the library's large products are at their best

    def __init__(
        self, descriptor: Descriptor, weights: ModelWeights, *, dtype: str, max_position: int, device: torch.device
    ) -> None:
        d = self.descriptor = descriptor
        # the interpreter multiplies float32 alone as it should
        if refused := gpu_refuses(d, "bfloat16" if device.type == "cpu" else dtype):
            raise UnsupportedModelError(f"{refused}; load it with device='cpu'")
        self.dtype, self.device, self.max_position, self.weights = dtype, device, max_position, weights
        self.heads, self.kv_heads, self.head_dim, self.vocab = d.heads, d.kv_heads, d.head_dim, d.vocab
        self.tile = tile_keys(d.head_dim)
        windows = [d.window if kind == SLIDING else 0 for kind in d.layer_kinds]
        self.spec = kv_spec(d.layers, d.kv_heads, d.head_dim, dtype, windows)
        self.program = DeviceProgram(emit(d, weights, dtype, join=False), DTYPES[dtype], device)
        self._kept: Results = {}
        self._passes = WeakTensorKeyDictionary()  # of the keys' pages
        self._graphs: dict[int, WeakKeyDictionary[PageStorage, DecodeGraphs]] = {}

    def ahead(self, storage: PageStorage, limit: int | None = None) -> DecodeGraphs:
        """Decoding of several steps over these pages, of ids below `limit` (default: all); kept as long as the pages."""
        limit = self.vocab if limit is None else limit
        kept = self._graphs.setdefault(limit, WeakKeyDictionary())
        if storage not in kept:
            kept[storage] = DecodeGraphs(self, storage, limit)
        return kept[storage]

    def step(
        self, state: LaneState, storage: PageStorage, history: Tensor, tiles: int, sampled: bool, limit: int
    ) -> None:
        """One step of all lanes; see `numem.runtime.device.graph.Stepper`."""
        call = DeviceCall(
            state.tokens, state.positions, state.tables, storage.k, storage.v, decode=True, tiles=tiles, pdl=True
        )
        h = self.program.hidden(call)
        logits, index, value = self._results(self._kept, len(h))
        after = (state.tokens, state.positions, history, state.counter)
        if not sampled:
            step.finish_greedy(self.program.logits_parts(h, logits, limit, pdl=True), *after, pdl=True)
            return
        self.program.logits(h, logits, limit, index, value, pdl=True)
        settings = sampling.Settings(state.temperature, state.top_k, state.top_p, state.seed)
        sampling.sample(logits, limit, settings, state.positions, index, pdl=True)
        step.advance(index, value, *after, pdl=True)

    def forward(self, rows: Rows, storage: PageStorage) -> Tensor:
        """Evaluate rows; see `numem.runtime.engine.Decoder`. Logits come back on the CPU."""
        with torch.no_grad(), turn(self.device):
            h = self.program.hidden(self._call(rows, storage))
            wanted = len(rows.wanted)
            if not wanted:
                return torch.empty((0, self.vocab))
            if len(h) != wanted:
                h = h[rows.wanted.to(self.device)]
            if storage.k not in self._passes:
                self._passes[storage.k] = _Passes(torch.empty((0, self.vocab), device=self.device))
            passes = self._passes[storage.k]
            logits, index, value = self._results(passes.kept if wanted <= FEW_ROWS else {}, wanted)
            limit = self.vocab if rows.peaks is None else rows.peaks.limit
            self.program.logits(h, logits, limit, index, value)
            passes.last = logits
            if rows.peaks is not None:
                rows.peaks.index.copy_(index)
                rows.peaks.value.copy_(value)
            if rows.kept:
                return torch.empty((0, self.vocab))
            if rows.out is not None:
                return rows.out.copy_(logits)
            return logits.to("cpu", copy=True)

    def choose(
        self,
        samplers: Sequence[tuple[Sampler, int]],
        limit: int,
        storage: PageStorage,
        rows: Sequence[int] | None = None,
    ) -> list[int]:
        """Tokens chosen from the logits of the last `forward` over these pages, one (sampler, position) a wanted row, or
        each from the row that is named for it."""
        settings = sampling.Settings(*settings_of([sampler for sampler, _ in samplers], self.device))
        positions = torch.tensor([position for _, position in samplers], device=self.device)
        out = torch.empty(len(samplers), dtype=torch.int64, device=self.device)
        with turn(self.device):
            last = self._passes[storage.k].last
            sampling.sample(
                last[: len(samplers)] if rows is None else last[list(rows)], limit, settings, positions, out
            )
        return list(out.tolist())

    def _results(self, kept: Results, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, and index and value of the largest; kept for good, as graphs hold their addresses."""
        size = 1 << (rows - 1).bit_length()
        if size not in kept:
            kept[size] = (
                torch.empty((size, self.vocab), device=self.device),
                torch.empty(size, dtype=torch.int64, device=self.device),
                torch.empty(size, device=self.device),
            )
        logits, index, value = kept[size]
        return logits[:rows], index[:rows], value[:rows]

    def _call(self, rows: Rows, storage: PageStorage) -> DeviceCall:
        place = self.device
        positions = rows.positions.numpy()
        lane = rows.lane.numpy()
        tokens, at = rows.tokens.to(place), rows.positions.to(place)
        if len(lane) <= FEW_ROWS and len(np.unique(lane)) == len(lane):
            tables = rows.tables[rows.lane.long()].contiguous().to(place)
            tiles = int(positions.max()) // self.tile + 1
            return DeviceCall(tokens, at, tables, storage.k, storage.v, decode=True, tiles=tiles)
        wanted = rows.wanted.numpy()
        some = len(wanted) < len(lane)
        return DeviceCall(
            tokens,
            at,
            rows.tables.to(place),
            storage.k,
            storage.v,
            decode=False,
            slots=rows.slots.to(place),
            plan=self._plan(lane, positions),
            wanted_plan=self._plan(lane[wanted], positions[wanted]) if some and len(wanted) else None,
            wanted=rows.wanted.to(place) if some else None,
        )

    def _plan(self, lane: np.ndarray, positions: np.ndarray) -> attention_prefill.Plan:
        """Spans of rows of one lane at consecutive positions."""
        starts = np.flatnonzero(np.r_[True, (np.diff(lane) != 0) | (np.diff(positions) != 1)])
        counts = np.diff(np.r_[starts, len(lane)])
        spans = np.stack([lane[starts], starts, counts, positions[starts]], 1).astype(np.int32)
        return attention_prefill.plan(spans, self.device, self.head_dim)
