"""Choosing a token from logits, with randomness keyed by (seed, position).

There is no generator state: the sample at a position depends on the logits, the seed and the position alone, so it is
the same alone and in a batch, before and after a restore.
"""

import hashlib
import math
import struct
from dataclasses import dataclass

import numpy as np

from numem.errors import InputError, ModelError

# Index and value of the largest logit.
Peak = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling settings of a request.

    Attributes:
        temperature: 0 for greedy (ties go to the lowest token id).
        top_k: keep the k most likely tokens, 0 for all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p, 1.0 for all.
        seed: 64-bit seed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < float("inf")):
            raise InputError(f"sampler: temperature {self.temperature} must be finite and not negative")
        if self.top_k < 0 or not (0.0 < self.top_p <= 1.0):
            raise InputError(f"sampler: top_k {self.top_k} must be >= 0 and top_p {self.top_p} in (0, 1]")

    def choose(self, logits: np.ndarray, position: int, vocab: int | None = None, peak: Peak | None = None) -> int:
        """Token chosen at `position` from float32 logits [vocab_size]; ids from `vocab` on (padding) are never chosen.

        Args:
            peak: index and value of the largest of them where they are known: the first of equals, or the first NaN.

        Raises:
            ModelError: the largest logit is NaN or infinite.
        """
        if peak is None:
            row = np.asarray(logits, dtype=np.float32)[:vocab]
            best = int(row.argmax())
            peak = best, float(row[best])
        if not math.isfinite(peak[1]):
            raise not_finite(position)
        if self.temperature == 0.0:
            return peak[0]
        row = np.asarray(logits, dtype=np.float32)[:vocab]
        # Stable order: descending logit, ties by ascending id.
        order = np.argsort(-row, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        scaled = row[order].astype(np.float64)
        scaled = (scaled - scaled[0]) / max(self.temperature, 1e-6)
        weights = np.exp(scaled)
        total = np.cumsum(weights)
        kept = int(np.searchsorted(total, self.top_p * total[-1], side="left")) + 1 if self.top_p < 1.0 else len(total)
        kept = min(kept, len(total))
        point = uniform(self.seed, position) * total[kept - 1]
        return int(order[min(int(np.searchsorted(total[:kept], point, side="right")), kept - 1)])


def not_finite(position: int) -> ModelError:
    """The error of logits from which nothing can be chosen."""
    return ModelError(f"sampler: logits at position {position} are not finite; the weights or the state are damaged")


def uniform(seed: int, position: int) -> float:
    """Uniform number in [0, 1) with 53 bits, a function of (seed, position): SHA-256 in counter mode."""
    block = hashlib.sha256(b"numem/sample/v1" + struct.pack(">QQ", seed & (2**64 - 1), position)).digest()
    return (int.from_bytes(block[:8], "big") >> 11) / float(1 << 53)


GREEDY = Sampler()
