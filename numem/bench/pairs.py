"""Interleaved measurements, and figures with the bar that they are held against."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numem.bench.store_read import quartiles

Call = Callable[[], object]


def interleaved(calls: Mapping[str, Call], pairs: int, before: Call = lambda: None) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns: the first round warms up and is dropped, and who is first changes.

    Args:
        before: runs before every call, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(pairs + 1):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before()
            started = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}


def ratios(peer: Sequence[float], mine: Sequence[float]) -> list[float]:
    """Speed of `mine` as a ratio to `peer`, pair by pair."""
    return [a / b for a, b in zip(peer, mine, strict=True)]


def median_ms(seconds: Sequence[float]) -> float:
    return float(quartiles([value * 1e3 for value in seconds])["median"])


def figure(values: Sequence[float], *, least: float | None = None, most: float | None = None, **more: Any) -> Any:
    """Median and quartiles of values, and whether they meet a bar.

    Args:
        least, most: the bar; one of them, or neither.
        more: absolute figures to go with it.
    """
    found = quartiles(list(values))
    bar = {} if least is None and most is None else judged(found, least=least, most=most)
    return {**found, **bar, **more}


def judged(found: Mapping[str, float], *, least: float | None = None, most: float | None = None) -> dict[str, str]:
    """The bar in words, and "met", "missed" or "straddled" (the bar lies between the quartiles)."""
    if least is not None:
        low, high, text = found["q1"] >= least, found["q3"] >= least, f">= {least:g}"
    else:
        assert most is not None
        low, high, text = found["q1"] <= most, found["q3"] <= most, f"<= {most:g}"
    return {"bar": text, "verdict": "met" if low and high else "straddled" if low or high else "missed"}
