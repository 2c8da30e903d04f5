"""The paged runtime as a Dagster resource: how a run decodes, and who watches its progress.

Belongs here: what a single run may choose, from the launchpad too. Pages, lanes and kernels: `numem.runtime`.

Dagster concept: https://docs.dagster.io/guides/build/external-resources
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import Field

Progress = Callable[[str, int, int], None]

_watchers: list[Progress] = []


class RuntimeResource(dg.ConfigurableResource[Any]):
    """Fixed-capacity lanes over a page pool."""

    lanes: int = Field(default=4, ge=1, le=256, description="Prompts decoded at once.")
    tier: str = Field(default="ssd", description="Tier of this node that prefixes are promoted to and restored from.")
    max_new_tokens: int = Field(default=64, ge=0, description="Tokens decoded per prompt at most.")
    ignore_eos: bool = Field(default=False, description="Decode past the end-of-sequence token.")
    proof: bool = Field(default=True, description="Rerun one prompt per prefix alone and compare bytes.")

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tell the watchers of this process, if any."""
        for watcher in tuple(_watchers):
            watcher(stage, done, total)


@contextmanager
def watch(watcher: Progress) -> Iterator[None]:
    """Call `watcher(stage, done, total)` as runs of this process advance, until left."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
