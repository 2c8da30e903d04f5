"""From the rows of texts to one vector each: pooling, the heads after it, and its length.

Sums over tokens and components are taken in float64, one text at a time and in order, so that a vector's bits do not
depend on the texts beside it.
"""

import numpy as np
import torch

from numem.errors import InputError
from numem.kernels.linear import PackedLinear
from numem.models.embedding.modules import Dense, Modules

# As in the reference implementation: a vector of zeros stays one.
_LEAST_LENGTH = 1e-12


# Rows of a text that each rule reads, as `numem.runtime.engine.whole_texts` names them.
WANTED = {"mean": "all", "cls": "first", "last": "last"}


def pool(pooling: str, hidden: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """One vector a text: float32 [n, hidden].

    Args:
        pooling: a key of `WANTED`.
        hidden: float32 [R, hidden], the rows that it reads, text after text.
        lengths: int64 [n], tokens of each text.
    """
    if pooling != "mean":
        return hidden
    out = np.empty((len(lengths), hidden.shape[1]), dtype=np.float32)
    end = 0
    for row, length in zip(out, lengths.tolist(), strict=True):
        start, end = end, end + length
        row[:] = np.add.reduce(hidden[start:end], axis=0, dtype=np.float64) / length
    return out


class Head:
    """What is done to a pooled vector.

    Dense layers stay float32 whatever the transformer is stored in: they are small, and last.

    Attributes:
        dim: components of the result.
    """

    def __init__(self, modules: Modules) -> None:
        self.dim = modules.dim
        self._steps = [_Layer(head) if isinstance(head, Dense) else None for head in modules.heads]

    def __call__(self, pooled: np.ndarray, dim: int | None = None) -> np.ndarray:
        """Vectors [n, dim] of pooled ones [n, hidden], float32.

        Args:
            dim: leading components to keep; where the last module normalises, what is left is normalised again.

        Raises:
            InputError: a dim outside [1, self.dim].
        """
        kept = self.check(dim)
        if not len(pooled):
            return np.empty((0, kept), dtype=np.float32)
        x = pooled
        for step in self._steps:
            x = normalized(x) if step is None else step(x)
        if kept == self.dim:
            return np.ascontiguousarray(x)
        x = np.ascontiguousarray(x[:, :kept])
        return normalized(x) if self._steps and self._steps[-1] is None else x

    def check(self, dim: int | None) -> int:
        """The components that a `dim` stands for."""
        if dim is None:
            return self.dim
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or not 1 <= dim <= self.dim:
            raise InputError(f"embed: dim {dim!r} is not a whole number in [1, {self.dim}], the model's own size")
        return int(dim)


class _Layer:
    def __init__(self, dense: Dense) -> None:
        bias = None if dense.bias is None else dense.bias.to(torch.float32)
        self._linear = PackedLinear(dense.weight.to(torch.float32), bias)
        self._tanh = dense.activation == "tanh"

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y: np.ndarray = self._linear(torch.from_numpy(np.ascontiguousarray(x))).numpy()
        return _tanh(y) if self._tanh else y


def _tanh(x: np.ndarray) -> np.ndarray:
    """In float64, so that the rounding of a vector library's own tanh is lost in that to float32."""
    out: np.ndarray = np.tanh(x.astype(np.float64)).astype(np.float32)
    return out


def normalized(x: np.ndarray) -> np.ndarray:
    """Rows divided by their Euclidean lengths; float32 [n, d]."""
    wide = x.astype(np.float64)
    lengths = np.sqrt(np.add.reduce(wide * wide, axis=1))
    out: np.ndarray = (wide / np.maximum(lengths, _LEAST_LENGTH)[:, None]).astype(np.float32)
    return out


def probe(width: int) -> np.ndarray:
    """What pooling and heads make of fixed rows of `width` components, for the self-test of a numeric policy."""
    lengths = np.array([1, 2, 7], dtype=np.int64)
    values = np.arange(int(lengths.sum()) * width, dtype=np.int64) * 7919 % 2003 - 1001
    pooled = pool("mean", (values / 1001.0).astype(np.float32).reshape(-1, width), lengths)
    return np.concatenate([normalized(pooled), _tanh(pooled)])
