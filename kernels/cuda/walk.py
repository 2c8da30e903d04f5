"""One tile of a product, its weights fetched ahead of their use: what outputs too wide for `segments` share.

The order of a sum is that of `segments` and `chain`: for K < 4096 eight chains over `segment(K)` columns of k, added one
after another from zero on; for longer rows one chain. Weights are the tall side of the tensor core.
"""

import triton.language as tl

from numem.kernels.cuda import segments
from numem.kernels.cuda.chain import weights_at
from numem.kernels.cuda.language import jit


def length(k: int) -> int:
    """Columns of one chain of a row of `k`."""
    return segments.segment(k) if k < segments.LONG else k


@jit
def walk(
    h, m, inside, w, scales, mins, n,
    K: tl.constexpr, SEGMENT: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, MINS: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums [BN, L], float32: rows n [BN] of the weights times rows m [L] of h [., K], those not `inside` zero.

    BK divides SEGMENT; it is 128 where weights are packed.
    """
    total = tl.zeros([BN, L], tl.float32)
    acc = tl.zeros([BN, L], tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        k = at + tl.arange(0, BK)
        a = tl.load(h + m[None, :].to(tl.int64) * K + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0.0)
        b = weights_at(w, scales, mins, n, at, K, BK, BN, BITS, ZERO, MINS, DT)
        # never `total += dot(...)`: the compiler would make one chain of it
        acc = tl.dot(b, a, acc, input_precision=PRECISION)
        if SEGMENT < K:
            ends = (at + BK) % SEGMENT == 0
            total = tl.where(ends, total + acc, total)
            acc = tl.where(ends, 0.0, acc)
    return total + acc  # the one chain, or a last segment that K cuts short
