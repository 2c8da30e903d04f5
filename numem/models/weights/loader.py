"""The weights of a model in the form that kernels take: each matrix in its final dtype and place, by role."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numem.errors import UnsupportedModelError
from numem.identity.canonical import canonical_json
from numem.kernels import formats
from numem.kernels.formats import FORMATS
from numem.kernels.operations import Linear
from numem.models.architecture.descriptor import Descriptor, Source
from numem.models.hub.registry import cache_dir
from numem.models.weights import quantisation
from numem.models.weights.adapters import Given, Merge
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.maker import CpuMaker, Maker
from numem.models.weights.streams import DIRECTORY, Stream, StreamFile
from numem.runtime.paging.pages import DTYPES

# Never rounded: a router that flips between two experts changes everything after it.
_FLOAT32_ROLES = frozenset({"moe_router"})

# Stored dtypes that kernels convert by themselves, and those that are weights at all: integers and eight-bit floats need
# scales that lie elsewhere.
_READ = frozenset({torch.float32, torch.float16, torch.bfloat16})
_STORED = _READ | {torch.float64}

# Bytes of a matrix that are looked at or merged at a time.
_SLAB = 4 << 20


class Weights:
    """Weights of one model, handed out by role; nothing is kept here but what is shared.

    Each matrix goes from the mapped file straight into its final form, and its mapped pages are dropped. The embedding
    and head come first: they are the largest, and then nothing else is held beside their source.

    Args:
        checkpoint: where they are read from.
        descriptor: names and shapes of the roles.
        dtype: "float32" or "bfloat16", of matrices that are not quantised.
        quantise: a name of `numem.models.weights.quantisation`, None for none. Quantised matrices are kept in a file for
            the next load; see `numem.models.weights.streams`.
        adapters: LoRA directories, or (directory, scale), merged in order.
        maker: what puts them where their kernels read them; default: the CPU's. The codes of quantised matrices and the
            merged weights are the same for all.

    Raises:
        InputError, CheckpointError, UnsupportedModelError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        descriptor: Descriptor,
        *,
        dtype: str,
        quantise: str | None = None,
        adapters: Sequence[Given] = (),
        maker: Maker | None = None,
    ) -> None:
        descriptor.check_dtype(dtype)
        if quantise is not None:
            quantisation.check_scheme(quantise)
        shapes = checkpoint.shapes()
        descriptor.check_shapes(shapes)
        for name in descriptor.shapes():
            if checkpoint.dtype(name) not in _STORED:
                raise UnsupportedModelError(
                    f"tensor {name} is stored as {str(checkpoint.dtype(name)).removeprefix('torch.')}; quantised weights "
                    "are not read, use the float checkpoint"
                )
        self.checkpoint = checkpoint
        self.descriptor = descriptor
        self.dtype = dtype
        self.quantise = quantise
        self._maker = CpuMaker() if maker is None else maker
        embed = descriptor.tensor("embed")
        self._merge = Merge(adapters, {n: s for n, s in shapes.items() if len(s) == 2 and n != embed})
        self._formats: dict[str, dict[tuple[int, int], str]] = {}
        self._file = None if quantise is None else StreamFile(self._directories(), self._key(quantise))
        self._kept = {} if self._file is None else self._file.load()
        self._made: dict[str, Stream | None] = {}
        self._embed = self.linear(("embed",))
        self._head = self.linear(("lm_head",)) if "lm_head" in descriptor.names else self._embed

    def linear(self, roles: tuple[str, ...], layer: int = 0, expert: int | None = None) -> Linear:
        """The matrices of some roles as one layer: their rows one after another, and their biases where any has one."""
        sources = [self.descriptor.source(role, layer, expert or 0) for role in roles]
        biases = [self._values(f"{role}_bias", layer) for role in roles]
        bias = None
        if any(b is not None for b in biases):
            sizes = [self.checkpoint.shape(source.name)[0] for source in sources]
            bias = torch.cat([torch.zeros(n) if b is None else b for n, b in zip(sizes, biases, strict=True)])
        made: Linear | None = None
        if self.quantise is not None and not _FLOAT32_ROLES.issuperset(roles):
            made = self._quantised(roles, layer, expert, sources, bias)
        if made is None:
            dtype = torch.float32 if _FLOAT32_ROLES.issuperset(roles) else DTYPES[self.dtype]
            made = self._maker.dense([self._part(source) for source in sources], dtype, bias)
        for source in sources:
            self.checkpoint.release(source.name)
        return made

    def stack(self, roles: tuple[str, ...], layer: int, count: int) -> Sequence[Linear]:
        """`linear` of each of `count` experts, as kernels read them by number."""
        return self._maker.stack([self.linear(roles, layer, expert) for expert in range(count)])

    def vector(self, role: str, layer: int = 0) -> Tensor | None:
        """A norm's weight, a bias or a table of positions as float32; None where the model lacks the role."""
        values = self._values(role, layer)
        return None if values is None else self._maker.vector(values)

    def place(self, table: Tensor) -> Tensor:
        """A float32 table that is no weight, where kernels read it."""
        return self._maker.vector(table)

    def _values(self, role: str, layer: int) -> Tensor | None:
        if role not in self.descriptor.names:
            return None
        name = self.descriptor.tensor(role, layer)
        values = self.checkpoint.tensor(name).to(torch.float32, copy=True)
        self.checkpoint.release(name)
        return values

    def embed(self) -> Linear:
        """The embedding; its rows are read by `rows`."""
        return self._embed

    def head(self) -> Linear:
        """The output head: the embedding itself where the checkpoint has no head of its own."""
        return self._head

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of the matrices handed out so far, sorted."""
        used = {text.split("/")[0] for places in self._formats.values() for text in places.values()}
        return tuple(sorted(used.intersection(FORMATS)))

    def describe(self) -> dict[str, Any]:
        """What of the weights joins the fingerprint; complete once every matrix was handed out.

        `quantisation` has the format and its version of each role, as a list where layers (or experts) differ.
        """
        quantised: dict[str, Any] | None = None
        if self.quantise is not None:
            quantised = {}
            for role, by_place in sorted(self._formats.items()):
                listed = [by_place[place] for place in sorted(by_place)]
                quantised[role] = listed[0] if len(set(listed)) == 1 else listed
        return {
            "adapters": self._merge.describe(),
            "quantisation": quantised,
            "weight_dtype": self.dtype,
            "weights": self.checkpoint.digest().hex(),
        }

    def release(self) -> None:
        """Say that the model is made: what was quantised is kept for the next load, and no longer held here."""
        if self._file is not None and any(
            self._kept.get(group, ...) is not stream for group, stream in self._made.items()
        ):
            self._file.save(self._made)
        self._kept, self._made = {}, {}

    def _quantised(
        self, roles: tuple[str, ...], layer: int, expert: int | None, sources: list[Source], bias: Tensor | None
    ) -> Linear | None:
        group = "+".join(roles) + f".{layer}" + ("" if expert is None else f".{expert}")
        stored = [self._stored(source) for source in sources]
        n, k = sum(len(part) for part in stored), stored[0].shape[1]
        stream = self._kept.get(group)
        if group not in self._kept or (stream is not None and (stream.n, stream.k) != (n, k)):
            stream = None
            chosen = quantisation.choose(self.quantise or "", roles, k, lambda: self._slabs(sources))
            if chosen is not None:
                name = " + ".join(s.name for s in sources)
                planes = formats.quantise([self._part(s) for s in sources], chosen, name)
                stream = Stream(chosen, n, k, planes)
        self._made[group] = stream
        for role in roles:
            text = self.dtype if stream is None else f"{stream.format}/{FORMATS[stream.format].version}"
            self._formats.setdefault(role, {})[layer, expert or 0] = text
        return None if stream is None else self._maker.quantised(stream.format, n, k, stream.planes, bias)

    def _stored(self, source: Source) -> Tensor:
        return self.checkpoint.tensor(source.name)[source.index]

    def _part(self, source: Source) -> Tensor:
        """A matrix as it is stored where kernels read that, else in float32; merged in float32."""
        stored = self._stored(source)
        if not self._merge.changes(source.name):
            return stored if stored.dtype in _READ else stored.to(torch.float32)
        merged = torch.empty(stored.shape)
        for start, rows in self._rows(source):
            merged[start : start + len(rows)] = rows
        return merged

    def _slabs(self, sources: Sequence[Source]) -> Iterator[Tensor]:
        return (rows for source in sources for _, rows in self._rows(source))

    def _rows(self, source: Source) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a matrix, merged, float32."""
        stored = self._stored(source)
        step = max(1, _SLAB // (4 * stored.shape[1]))
        for start in range(0, len(stored), step):
            yield start, self._merge.rows(source.name, stored[start : start + step], start)

    def _directories(self) -> tuple[Path, ...]:
        return (self.checkpoint.directory / DIRECTORY, cache_dir() / DIRECTORY)

    def _key(self, quantise: str) -> str:
        """Everything that the bytes of the quantised matrices follow from."""
        tree = {
            "adapters": self._merge.describe(),
            "choice": quantisation.VERSION,
            "formats": {name: item.version for name, item in FORMATS.items()},
            "quantise": quantise,
            "weights": self.checkpoint.digest().hex(),
        }
        return hashlib.sha256(canonical_json(tree)).hexdigest()
