"""The measurements behind `numem bench`.

Each benchmark is a function without arguments that returns plain values: medians with their spread, ratios against a
peer measured in the same run, and what was warm. Peers are imported lazily.
"""

from typing import Any

from numem.errors import InputError

NAMES = ("core", "paged", "store", "trace", "runtime", "models")


def run(name: str) -> dict[str, Any]:
    """Run one benchmark.

    Raises:
        InputError: no such benchmark.
    """
    if name == "core":
        from numem.bench.core import core

        return core()
    if name == "paged":
        from numem.bench.paged import paged

        return paged()
    if name == "store":
        from numem.bench.store import store

        return store()
    if name == "trace":
        from numem.bench.traces import traces

        return traces()
    if name == "runtime":
        from numem.bench.runtime import runtime

        return runtime()
    if name == "models":
        from numem.bench.models import models

        return models()
    raise InputError(f"bench {name!r}: unknown; known: {', '.join(NAMES)}")
