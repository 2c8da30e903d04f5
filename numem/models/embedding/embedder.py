"""Embedding models: loading, and the verb embed."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from numem.errors import CheckpointError, InputError, UnsupportedModelError
from numem.identity.chain import PAGE_TOKENS
from numem.identity.fingerprint import Identity
from numem.models.architecture.descriptor import Descriptor
from numem.models.architecture.reading import read_descriptor
from numem.models.devices import CPU, device_class
from numem.models.embedding.encoding import TextEncoder, read_encoder
from numem.models.embedding.files import ModelFiles
from numem.models.embedding.modules import Modules, read_modules
from numem.models.embedding.pooling import WANTED, Head, pool, probe
from numem.models.embedding.prompts import PUBLISHED, QUERY, QWEN3_QUERY, Prompts, read_prompts
from numem.models.hub.registry import resolve
from numem.models.numerics import policy_of
from numem.models.text.tokenizer import Tokenizer, check_text
from numem.models.transformer import Transformer
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.loader import Weights
from numem.runtime.engine import whole_texts
from numem.runtime.paging.pages import PageStorage, kv_spec

# Pages of one pass, unless a single text needs more: they bound the memory, and any value gives the same bits. This one
# keeps the activations of a layer in cache.
PASS_PAGES = 64

# Texts that are split into tokens, evaluated and finished together: they bound the memory too.
SLICE_TEXTS = 1024

# Qwen3-Embedding pools the row of this token, which its tokenizer appends to every text.
_QWEN3_END = "<|endoftext|>"


class Embedder:
    """A loaded embedding model; made by `load_embedder`.

    Attributes:
        directory: where its files are.
        descriptor, transformer, modules, prompts: its parts.
        identity: identity of the vectors it makes; equal texts under equal identities have equal bytes.
        max_tokens: tokens of a text that are read, those at its ends included; longer texts are cut.
    """

    def __init__(
        self,
        directory: Path,
        descriptor: Descriptor,
        transformer: Transformer,
        encoder: TextEncoder,
        modules: Modules,
        prompts: Prompts,
        identity: Identity,
        head: Head,
    ) -> None:
        self.directory = directory
        self.descriptor = descriptor
        self.transformer = transformer
        self.modules = modules
        self.prompts = prompts
        self.identity = identity
        self.max_tokens = encoder.limit
        self._encoder = encoder
        self._head = head
        # One layer's pages serve all layers in turn; kept between calls, for one call at a time.
        self._storage: PageStorage | None = None
        self._turn = threading.Lock()

    @property
    def dim(self) -> int:
        """Components of a vector."""
        return self._head.dim

    def embed_texts(
        self,
        texts: Iterable[str],
        *,
        instruct: str | None = None,
        kind: str | None = None,
        dim: int | None = None,
    ) -> np.ndarray:
        """One vector a text; its bytes do not depend on the other texts.

        Args:
            texts: any number of them; those longer than `max_tokens` are cut, with the tokens at their ends kept.
            instruct: what to look for, in place of the instruction that the model's query prompt holds.
            kind: "document" (the default), "query" (the default with `instruct`), or the name of another prompt of the
                model; the prompt is put in front of each text and counts as part of it.
            dim: leading components to keep, normalised again. Only vectors of models that were trained for it (Matryoshka)
                keep most of their meaning; which models were is not recorded in their files, so none is refused.

        Returns:
            float32 [n, dim].

        Raises:
            InputError: not a list of texts, a dim that the model does not have, an unknown kind, or an instruction for a
                model that takes none.
        """
        texts, prompt = _checked(texts, instruct), self.prompts.of(kind, instruct)
        out = np.empty((len(texts), self._head.check(dim)), dtype=np.float32)
        for at in range(0, len(texts), SLICE_TEXTS):
            part = slice(at, at + SLICE_TEXTS)
            out[part] = self._embed(self._ids(texts[part], prompt, at), dim)
        return out

    def tokenize(
        self, texts: Iterable[str], *, instruct: str | None = None, kind: str | None = None
    ) -> list[list[int]]:
        """Token ids of texts as `embed_texts` reads them."""
        return self._ids(_checked(texts, instruct), self.prompts.of(kind, instruct), 0)

    def _ids(self, texts: Sequence[str], prompt: str, first: int) -> list[list[int]]:
        """Token ids of texts, of which the first is number `first` in messages."""
        ids = self._encoder.encode(texts, prompt, first)
        largest = max(map(max, ids), default=0)
        if largest >= self.descriptor.vocab:
            raise CheckpointError(
                f"{self.directory}: the tokenizer gives id {largest}, but the embedding has {self.descriptor.vocab} rows"
            )
        return ids

    def _embed(self, ids: list[list[int]], dim: int | None) -> np.ndarray:
        pooled = np.empty((len(ids), self.descriptor.hidden), dtype=np.float32)
        with self._turn:
            for start, end in passes([len(one) for one in ids], PASS_PAGES):
                part = ids[start:end]
                rows, pages = whole_texts(part, WANTED[self.modules.pooling])
                hidden = self.transformer.hidden(rows, self._pages(pages)).numpy()
                lengths = np.fromiter(map(len, part), np.int64, len(part))
                pooled[start:end] = pool(self.modules.pooling, hidden, lengths)
        return self._head(pooled, dim)

    def _pages(self, count: int) -> PageStorage:
        if self._storage is None or self._storage.k.shape[1] < count:
            t = self.transformer
            spec = kv_spec(1, t.kv_heads, t.head_dim, t.dtype)
            self._storage = PageStorage(spec, t.kv_heads, t.head_dim, max(count, PASS_PAGES))
        return self._storage


def _checked(texts: Iterable[str], instruct: str | None) -> list[str]:
    """The texts as a list, each a string of whole characters."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise InputError(f"embed: texts is a {type(texts).__name__}; give a list of texts")
    texts = list(texts)
    for at, text in enumerate(texts):
        check_text(text, f"embed: text {at}")
    if instruct is not None:
        check_text(instruct, "embed: instruct")
    return texts


def passes(lengths: Sequence[int], pages: int) -> Iterator[tuple[int, int]]:
    """Cut texts, in order, into runs [start, end) of at most `pages` pages; a longer text is a run of its own."""
    start = used = 0
    for at, length in enumerate(lengths):
        needed = -(-length // PAGE_TOKENS)
        if used + needed > pages and at > start:
            yield start, at
            start, used = at, 0
        used += needed
    if start < len(lengths):
        yield start, len(lengths)


def load_embedder(
    key_or_dir: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    quantise: str | None = None,
    max_tokens: int | None = None,
    offline: bool = False,
) -> Embedder:
    """Load an embedding model by registry key or from a directory in the layout of sentence-transformers.

    Args:
        key_or_dir: for example "all-minilm-l6-v2", or a path.
        device: "cpu", or "auto", which is the CPU too: embedding models are not run on GPUs.
        dtype: "float32" or "bfloat16", of weights and of the rows that enter linear layers; pooling and what follows it
            are float32.
        quantise: a format of `numem.kernels.formats`, of the transformer's matrices; None leaves them as they are.
        max_tokens: tokens of a text that are read (default: the model's own limit, at most 8,192).
        offline: never reach for the network.

    Raises:
        UnknownModelError, FetchError, CheckpointError, UnsupportedModelError, InputError.
    """
    if device not in ("cpu", "auto"):
        raise UnsupportedModelError(f"device {device!r}: embedding models are run on the CPU alone; use device='cpu'")
    directory = resolve(key_or_dir, offline=offline)
    files = ModelFiles(directory)
    checkpoint = Checkpoint(directory)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    modules = read_modules(files, descriptor.hidden)
    qwen3 = descriptor.family == "qwen3" and modules.pooling == "last"
    prompts = read_prompts(files, {QUERY: QWEN3_QUERY} if qwen3 else PUBLISHED.get(str(key_or_dir), {}))
    tokenizer = Tokenizer(directory)
    encoder = read_encoder(
        files, tokenizer, descriptor.position_limit, max_tokens=max_tokens, end_token=_QWEN3_END if qwen3 else None
    )
    weights = Weights(checkpoint, descriptor, dtype=dtype, quantise=quantise)
    transformer = Transformer(descriptor, weights, dtype=dtype, max_position=encoder.limit)
    weights.release()
    head = Head(modules)
    semantic = {
        "architecture": descriptor.canonical(),
        "encoding": encoder.describe(),
        "modules": modules.describe(),
        "program": "numem/embedder/v1",
        "prompts": prompts.describe(),
        **weights.describe(),
    }
    policy = policy_of(descriptor, dtype, [probe(descriptor.hidden)], quantised=weights.formats)
    identity = Identity(semantic, policy, device_class(CPU))
    return Embedder(directory, descriptor, transformer, encoder, modules, prompts, identity, head)
