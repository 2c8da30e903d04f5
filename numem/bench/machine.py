"""Where and when a measurement was made, and how samples are summarised."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from numem.job.reports import nearest_rank


def machine() -> dict[str, Any]:
    """Date, processor, cores, threads and the versions that matter."""
    from numem.kernels import native

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernels": native.isa() if native.available() else "torch",
        "threads": threads(),
    }


def threads() -> int:
    """Threads that both sides of a comparison use."""
    return min(2, os.cpu_count() or 1)


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or "unknown"
    return platform.processor() or "unknown"


def summary(samples_ms: Sequence[float]) -> dict[str, Any]:
    """Samples with min, nearest-rank median and p95, and max, in ms."""
    return {
        "samples-ms": [round(s, 4) for s in samples_ms],
        "min-ms": round(min(samples_ms), 4),
        "median-ms": round(nearest_rank(samples_ms, 0.5) or 0.0, 4),
        "p95-ms": round(nearest_rank(samples_ms, 0.95) or 0.0, 4),
        "max-ms": round(max(samples_ms), 4),
    }


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def alternate(pairs: Sequence[Callable[[], float]], repetitions: int) -> list[list[float]]:
    """Samples of several measurements taken in turns, so that noise falls on all of them alike."""
    out: list[list[float]] = [[] for _ in pairs]
    for _ in range(repetitions):
        for samples, call in zip(out, pairs, strict=True):
            samples.append(call())
    return out
