"""The figures of the durable plane, each held against its bar: what `numem bench store --json` prints."""

import math
from typing import Any

from numem.bench.machine import machine
from numem.bench.pairs import judged
from numem.bench.store_catalog import appending, lookups
from numem.bench.store_lmcache import against_lmcache
from numem.bench.store_read import restoring
from numem.bench.store_s3 import s3_restoring
from numem.bench.store_write import overhead, publishing

# Speed of a verified restore as a ratio to plain preadv.
BARS = {"restore_vs_pread_warm": 0.8, "restore_vs_pread_cold": 0.9}


def store(scale: float = 1.0) -> dict[str, Any]:
    """All figures; a ratio has its median and quartiles over interleaved pairs, its bar, and the absolute times.

    Args:
        scale: 1 for the record. Less measures the same with fewer pairs, rows and commits, whose figures say little.
    """

    def least(count: int, floor: int = 2) -> int:
        return max(floor, math.ceil(count * scale))

    restored = {
        name: {**figure, **judged(figure, least=BARS[name])} for name, figure in restoring(pairs=least(21)).items()
    }
    return {
        "machine": machine(),
        **restored,
        **publishing(pairs=least(21)),
        **overhead(),
        **lookups(pairs=least(21), rows=least(100_000, 400)),
        **appending(blocks=least(15), appends=least(20), late=least(2_000, 60)),
        **s3_restoring(pairs=least(15)),
        **against_lmcache(pairs=least(21)),
    }
