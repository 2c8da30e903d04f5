"""The memory as a Dagster resource: opened once per process, closed when the last run of the process lets go of it.

Belongs here: config and lifecycle. What a memory is and does: `numem.store.memory`, which knows nothing of Dagster.

Dagster concept: https://docs.dagster.io/guides/build/external-resources
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import dagster as dg
from pydantic import Field, PrivateAttr

from dagster_project.resources.environment import from_deployment_only
from dagster_project.resources.process import dagster_thread, shared
from numem.environment import parse_tiers, storage_options
from numem.errors import ClosedError

if TYPE_CHECKING:
    from numem.store.memory import Memory


class MemoryResource(dg.ConfigurableResource[Any]):
    """The durable plane of this deployment: tiers, catalog and spool."""

    home: str = Field(default="", description="Directory or s3:// URL; empty: the user's cache directory.")
    node: str = Field(default="local", description="Name of this node.")
    local: str = Field(default="", description="Directory of spool, locks and local tiers of a remote memory.")
    tiers: str = Field(default="", description='Tiers, as "name=url;option=value,name=url".')

    _memory: Any = PrivateAttr(None)

    @property
    def resolved_home(self) -> str:
        """The home in force."""
        if self.home:
            return self.home
        from numem.models.hub.registry import cache_dir

        return str(cache_dir() / "memory")

    @contextmanager
    def opened(self) -> "Iterator[Memory]":
        """The memory, shared with every other holder of an equal config in this process."""
        from numem.store.memory import Memory

        home = self.resolved_home

        def open_() -> Memory:
            return Memory(
                home,
                tiers=parse_tiers(self.tiers),
                node=self.node,
                local=self.local or None,
                storage_options=storage_options(),  # from the environment alone: config is shown in the UI
            )

        with shared(("memory", home, self.node, self.local, self.tiers), open_, Memory.close) as memory:
            yield memory

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Generator[Self, None, None]:
        """Hold the memory, and this process's one turn at Dagster, for the length of a run or step process."""
        from_deployment_only(context, "memory")
        with dagster_thread(), self.opened() as memory:
            self._memory = memory
            try:
                yield self
            finally:
                self._memory = None

    def get(self) -> "Memory":
        """The open memory.

        Raises:
            ClosedError: outside a run.
        """
        if self._memory is None:
            raise ClosedError("memory resource: not open; it is opened by a run, or by `with resource.opened()`")
        memory: Memory = self._memory
        return memory
