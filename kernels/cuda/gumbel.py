"""Random numbers that are a function of (seed, position, column): in kernels, and by numpy.

    word    the first word of Philox-4x32-10, key seed (low half first), counter (column, position mod 2^32, 0, 0)
    t       min((float32(word) + 1/2) / 2^32, 1 - 2^-24), float32 throughout
    gumbel  -log(-log(1 - t))

1 - t is the uniform number: what lies near 1 of it, and wins, is told apart to a relative 2^-24. For t < 2^-6 the inner
logarithm is its series t (1 + t (1/2 + t (1/3 + t / 4))).
"""

import numpy as np
import triton.language as tl

from numem.kernels.cuda.language import jit

ROUNDS = 10
_UNIT = tl.constexpr(2.0**-32)
_MOST = tl.constexpr(1.0 - 2.0**-24)


@jit
def word_of(seed, position, column):
    """uint32 words of int32 columns; seed and position are int64."""
    zero = column * 0
    word, _, _, _ = tl.philox(seed, column, zero + position.to(tl.int32), zero, zero)
    return word.to(tl.uint32, bitcast=True)


@jit
def gumbel_of(word):
    """The Gumbel number of a word."""
    t = tl.minimum((word.to(tl.float32) + 0.5) * _UNIT, _MOST)
    series = t * (1.0 + t * (0.5 + t * (0.3333333333333333 + t * 0.25)))
    return -tl.log(tl.where(t < 0.015625, series, -tl.log(1.0 - t)))


def words(seed: int, position: int, columns: np.ndarray) -> np.ndarray:
    """uint32 words of columns, the same bits as `word_of`."""
    low = np.uint64(0xFFFFFFFF)
    c0 = columns.astype(np.uint64)
    c1 = np.full_like(c0, position % 2**32)
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seed % 2**32, seed % 2**64 >> 32
    for _ in range(ROUNDS):
        b, a = np.uint64(0xCD9E8D57) * c2, np.uint64(0xD2511F53) * c0
        c0, c2 = (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = b & low, a & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0.astype(np.uint32)


def gumbel(words: np.ndarray) -> np.ndarray:
    """float32 Gumbel numbers of words, in the arithmetic of `gumbel_of`."""
    one = np.float32
    t = np.minimum((words.astype(one) + one(0.5)) * one(2.0**-32), one(1.0 - 2.0**-24))
    series = t * (one(1) + t * (one(0.5) + t * (one(0.3333333333333333) + t * one(0.25))))
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(np.where(t < one(0.015625), series, -np.log(one(1) - t))), dtype=np.float32)
