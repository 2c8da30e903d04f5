"""The request traces that docs/benchmarks.md reports: hit ratios of every policy, and of admission on second touch."""

import os
from pathlib import Path
from typing import Any

from numem.bench.trace import read_trace, replay, trace

NAMES = ("conversation", "synthetic")
# The capacity at which the report shows what admission on second touch does for a small cache.
SMALL = 5_000


def traces() -> dict[str, Any]:
    """Replays of `NAME.jsonl.gz` in the directory that NUMEM_TRACES names; what is not there is skipped, by name."""
    directory = os.environ.get("NUMEM_TRACES", "")
    results: dict[str, Any] = {}
    for name in NAMES:
        path = Path(directory) / f"{name}.jsonl.gz"
        if directory and path.is_file():
            results[name] = replayed(path)
        else:
            results[name] = {"skipped": f"{name}.jsonl.gz: set NUMEM_TRACES to the directory that holds it"}
    return results


def replayed(path: Path) -> dict[str, Any]:
    """Sizes of a trace, hit ratios by policy and capacity, and admission on second touch with `lru`."""
    requests = read_trace(path)
    unique = len({id for ids in requests for id in ids})
    touched: dict[str, Any] = {}
    for what, capacity in (("unbounded", unique), ("small", min(SMALL, unique))):
        always, second = (replay(requests, "lru", capacity, selective) for selective in (False, True))
        touched[what] = {
            "capacity": capacity,
            "hit_ratio": [round(one.hit_ratio, 4) for one in (always, second)],
            "written": [always.written, second.written],
        }
    return {
        "requests": len(requests),
        "references": sum(map(len, requests)),
        "blocks": unique,
        "hit_ratio": {
            policy: {capacity: round(one.hit_ratio, 6) for capacity, one in row.items()}
            for policy, row in trace(path).items()
        },
        "second_touch": touched,
    }
