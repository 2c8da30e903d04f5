"""A factory of schedulers that are closed and found empty afterwards, and what their tests look at."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from numem import LM, Memory
from numem.policy.decision import Decision
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.residency import Residency
from numem.runtime.restore.arrivals import Arrivals
from tests.scheduler_fixtures import empty

Make = Callable[..., Scheduler]


@pytest.fixture
def make(tiny_lm: LM) -> Iterator[Make]:
    made: list[Scheduler] = []
    arrivals: list[Arrivals] = []

    def build(
        capacity: int = 4, *, pages: int = 200, policy: str = "", keep: bool = False, **options: Any
    ) -> Scheduler:
        session = tiny_lm.session(pages=pages, debug=True)
        memory = options.get("memory")
        if policy:
            arrivals.append(Arrivals(session, memory, policy=policy))
            options["arrivals"] = arrivals[-1]
        if keep:
            options["residency"] = Residency(session.engine)
        made.append(Scheduler(session, capacity, **options))
        return made[-1]

    yield build
    for scheduler in made:
        scheduler.close()
        if scheduler.residency is not None:
            scheduler.residency.clear()
        empty(scheduler)
    for one in arrivals:
        one.close()


class Log:
    """Decisions as a list."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def record(self, decision: Decision) -> str:
        self.decisions.append(decision)
        return "00"


def published(memory: Memory) -> list[tuple[int, int]]:
    memory.flush()
    return sorted((node.start, node.count) for node in memory.nodes())
