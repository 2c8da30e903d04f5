"""The paged runtime as a Dagster resource: how a run decodes, and who watches its progress.

Belongs here: what a single run may choose, from the launchpad too. Pages, lanes and kernels: `numem.runtime`.

Dagster concept: https://docs.dagster.io/guides/build/external-resources
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import Field

from numem.job.record import Progress
from numem.job.settings import Decoding
from numem.runtime.sampling import Sampler

__all__ = ["Progress", "RuntimeResource", "watch"]

_watchers: list[Progress] = []


class RuntimeResource(dg.ConfigurableResource[Any]):
    """Fixed-capacity lanes over a page pool; see `numem.job.settings.Decoding`."""

    lanes: int = Field(default=4, ge=1, le=256, description="Prompts decoded at once.")
    tier: str = Field(default="ssd", description="Tier of this node that prefixes are promoted to and restored from.")
    max_new_tokens: int = Field(default=64, ge=0, description="Tokens decoded per prompt at most.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_k: int = Field(default=0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Keep the most likely tokens up to this probability.")
    seed: int = Field(default=0, description="Seed of the sampling; prompt i of the table uses seed + i.")
    ignore_eos: bool = Field(default=False, description="Decode past the end-of-sequence token.")
    arrivals: str = Field(
        default="measured",
        description="How a prompt's rows come: measured (what is soonest), restore, recompute or two-ended.",
    )
    cache_mib: int = Field(
        default=256, ge=0, description="Memory for the state of ended prompts that is kept for later ones, MiB."
    )
    proof: bool = Field(default=True, description="Rerun one prompt per prefix alone and compare bytes.")
    again: bool = Field(
        default=False, description="Decode every prompt, also those that an earlier run finished under equal settings."
    )

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Refuse settings that no run could use before anything is computed."""
        self.decoding()

    def decoding(self) -> Decoding:
        """These settings for the library."""
        return Decoding(
            max_new_tokens=self.max_new_tokens,
            sampler=Sampler(self.temperature, self.top_k, self.top_p, self.seed),
            ignore_eos=self.ignore_eos,
            lanes=self.lanes,
            tier=self.tier,
            arrivals=self.arrivals,
            cache_mib=self.cache_mib,
            proof=self.proof,
            again=self.again,
        )

    def progress(self, stage: str, done: int, total: int, tokens: int = 0) -> None:
        """Tell the watchers of this process, if any."""
        for watcher in tuple(_watchers):
            watcher(stage, done, total, tokens)


@contextmanager
def watch(watcher: Progress) -> Iterator[None]:
    """Call `watcher(stage, done, total, tokens)` as runs of this process advance, until left."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
