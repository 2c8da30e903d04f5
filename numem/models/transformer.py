"""The transformer: one forward pass for every family that a descriptor describes, over pages."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from numem.errors import ContextLengthError, InputError, UnsupportedModelError
from numem.kernels.activation import softcap
from numem.kernels.attention import HEAD_DIMS
from numem.kernels.norm import layer_norm, rms_norm
from numem.kernels.operations import Linear
from numem.kernels.program import Call, Program, Tap
from numem.models.architecture.descriptor import SLIDING, Descriptor
from numem.models.forward import ModelWeights, emit
from numem.models.weights.loader import Weights
from numem.runtime.engine import MAX_ROWS, Rows, whole_texts
from numem.runtime.paging.pages import DTYPES, PageStorage, kv_spec


class Transformer:
    """A transformer on the CPU.

    Activations are float32; weights and cache are float32 or bfloat16 (a bfloat16 layer rounds the rows that enter it).
    Every row of a call is computed as if it were alone.

    Args:
        descriptor: its architecture.
        weights: its weights, read once.
        dtype: "float32" or "bfloat16", of the cache.
        max_position: positions that may be evaluated.
    """

    device = torch.device("cpu")
    max_rows = MAX_ROWS

    def __init__(self, descriptor: Descriptor, weights: Weights, *, dtype: str, max_position: int) -> None:
        if dtype not in DTYPES:
            raise InputError(f"transformer: dtype {dtype!r} is not one of {sorted(DTYPES)}")
        if descriptor.head_dim not in HEAD_DIMS:
            raise UnsupportedModelError(
                f"config.json: head_dim {descriptor.head_dim} is not run; only multiples of {HEAD_DIMS.step} up to "
                f"{HEAD_DIMS[-1]}"
            )
        d = self.descriptor = descriptor
        self.dtype = dtype
        self.max_position = max_position
        self.heads, self.kv_heads, self.head_dim, self.vocab = d.heads, d.kv_heads, d.head_dim, d.vocab
        windows = [d.window if kind == SLIDING else 0 for kind in d.layer_kinds]
        self.spec = kv_spec(d.layers, d.kv_heads, d.head_dim, dtype, windows)
        self.weights = ModelWeights.read(d, weights, max_position)
        self._program = emit(d, self.weights, dtype)
        self._tapped: Program | None = None
        # The activations are kept between calls, for one call at a time: threads take turns.
        self._lock = threading.RLock()
        self._running = False

    def forward(self, rows: Rows, storage: PageStorage, *, tap: Tap | None = None) -> torch.Tensor:
        """Evaluate rows; see `numem.runtime.engine.Decoder`.

        Args:
            tap: sees the activations of every point of `numem.models.taps`, of the last layer those of the wanted rows
                from its attention on.
        """
        self._head()
        with self._turn():
            logits = self._choose(tap).logits(self._call(rows, storage, tap))
        return torch.empty((0, self.vocab)) if logits is None else logits

    def hidden(self, rows: Rows, storage: PageStorage, *, tap: Tap | None = None) -> torch.Tensor:
        """The last hidden state of the wanted rows, after the last norm: float32 [R, hidden].

        Args:
            storage: pages of every layer, or of one that serves them all when nothing is to be kept.
        """
        with self._turn():
            return self._choose(tap).hidden(self._call(rows, storage, tap)).clone()

    def encode(self, texts: Sequence[Sequence[int]], wanted: str = "all") -> list[torch.Tensor]:
        """The last hidden state of whole texts, each as it would be alone; nothing is kept.

        Args:
            texts: token ids, at least one each.
            wanted: rows of each text that are asked for: "all", "first" or "last".

        Returns:
            float32 [rows, hidden] of each text.

        Raises:
            InputError: a text without tokens, or a token outside the vocabulary.
            ContextLengthError: a text is longer than max_position.
        """
        out: list[torch.Tensor] = []
        for group in self._groups(texts):
            rows, pages = whole_texts(group, wanted)
            found = self.hidden(rows, self.scratch(pages))
            out += torch.split(found, [len(text) if wanted == "all" else 1 for text in group])
        return out

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The last norm of rows of the residual stream, float32 [R, hidden]."""
        norm, d = self.weights.final_norm, self.descriptor.norm
        if norm is None:
            return x
        if d.kind == "rms":
            return rms_norm(x, norm.weight, d.eps, offset=d.offset)
        return layer_norm(x, norm.weight, norm.bias, d.eps, offset=d.offset)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of rows of the residual stream, float32 [R, hidden]: the last norm, then the head."""
        logits = self._head()(self.normed(x))
        cap = self.descriptor.final_softcap
        return logits if cap is None else softcap(logits, cap)

    def scratch(self, pages: int) -> PageStorage:
        """Pages of one layer, for calls after which nothing is kept."""
        return PageStorage(kv_spec(1, self.kv_heads, self.head_dim, self.dtype), self.kv_heads, self.head_dim, pages)

    def _groups(self, texts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Texts in their order, in groups of up to MAX_ROWS rows, or of one longer text."""
        first, rows = 0, 0
        for at, text in enumerate(texts):
            if not len(text):
                raise InputError(f"encode: text {at} has no tokens")
            if len(text) > self.max_position:
                raise ContextLengthError(
                    f"encode: a text of {len(text)} tokens passes max_position {self.max_position}; shorten it"
                )
            if rows and rows + len(text) > MAX_ROWS:
                yield texts[first:at]
                first, rows = at, 0
            rows += len(text)
        if rows:
            yield texts[first:]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            if self._running:
                raise InputError("tap: a tap cannot run its own model; keep what it sees and run the model afterwards")
            self._running = True
            try:
                yield
            finally:
                self._running = False

    def _head(self) -> Linear:
        if self.weights.head is None:
            raise InputError(
                f"{self.descriptor.family}: this model has no output head and gives no logits; use `encode`"
            )
        return self.weights.head

    def _choose(self, tap: Tap | None) -> Program:
        if tap is None:
            return self._program
        if self._tapped is None:
            self._tapped = emit(self.descriptor, self.weights, self.dtype, taps=True)
        return self._tapped

    def _call(self, rows: Rows, storage: PageStorage, tap: Tap | None) -> Call:
        k, v = storage.k, storage.v
        if storage.layers != self.descriptor.layers:
            k, v = (t[:1].expand(self.descriptor.layers, -1, -1, -1, -1) for t in (k, v))
        return Call(
            rows.tokens, rows.positions, rows.slots, rows.lane, rows.tables, rows.wanted, k, v,
            lengths=rows.lengths, out=rows.out, peaks=rows.peaks, tap=tap,
        )  # fmt: skip
