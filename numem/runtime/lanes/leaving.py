"""What becomes of a sequence's rows when it leaves its lane.

ended        published (leased until captured) | kept by the residency | given back
preempted    full chunks published | kept by the residency | given back; all tokens so far bring the rows in again
"""

import concurrent.futures
from collections.abc import Iterable
from typing import TYPE_CHECKING

from numem.errors import NumemError
from numem.identity.chain import CHUNK_TOKENS
from numem.runtime.continuation import Session
from numem.runtime.lanes.publisher import Publisher
from numem.runtime.lanes.sequence import Entry, State
from numem.runtime.request import Finish, Outcome
from numem.runtime.restore.kv import raw

if TYPE_CHECKING:
    from numem.runtime.paging.residency import Residency
    from numem.store.memory import Memory


class Leaving:
    """Takes rows from sequences that lose their lanes.

    Args:
        memory: where they are published, or None.
        residency: what keeps them, or None.
    """

    def __init__(self, session: Session, memory: "Memory | None", residency: "Residency | None") -> None:
        self.residency = residency
        self._engine = session.engine
        self._publisher = None if memory is None else Publisher(session, memory)
        self._publishing: dict[str, Entry] = {}

    def __len__(self) -> int:
        """Ended sequences whose state is on its way to the durable plane."""
        return len(self._publishing)

    def __contains__(self, request_id: object) -> bool:
        return any(entry.request.id == request_id for entry in self._publishing.values())

    def end(self, entry: Entry, finish: Finish, error: str = "") -> bool:
        """End a sequence; whether its outcome is complete, else it comes by `collect`."""
        entry.cut(self._engine.pool)
        outcome, route = entry.outcome, entry.route
        outcome.finish, outcome.error = finish, error
        if entry.text is not None:
            outcome.text += entry.text.finish()
        if route is not None and finish is not Finish.ERROR:
            if entry.request.witness and not route.floors:
                try:
                    outcome.kv = raw(self._engine.storage.save(route.pages, 0, route.length))
                except NumemError as damage:
                    outcome.finish, outcome.error = Finish.ERROR, str(damage)
            wanted = entry.request.publish and finish is not Finish.CANCELLED and route.length > 0
            if wanted and self._publisher is not None:
                self._publisher.submit(entry.name, entry.tokens, route)
                self._publishing[entry.name] = entry
            if self.residency is not None:
                entry.route = None
                self.residency.retain(entry.name, route, tuple(entry.tokens[: route.length]), durable=False)
        self._vacate(entry)
        entry.state = State.ENDED
        return entry.name not in self._publishing

    def undo(self, entry: Entry) -> None:
        """Preempt a running sequence: it waits again."""
        entry.cut(self._engine.pool)
        route = entry.held
        assert route is not None
        whole = route.length - route.length % CHUNK_TOKENS if route.pending is None else 0
        if self._publisher is not None and whole:
            try:
                with self._engine.pool.lease(route) as lease:
                    entry.tickets = list(self._publisher.publish(entry.tokens, lease, whole).tickets)
            except (NumemError, OSError) as error:
                entry.outcome.restore.failures.append(f"preemption: nothing was published: {error}")
        if entry.state is State.DECODING:
            entry.counted = max(entry.counted, route.length)
        entry.outcome.preempted += 1
        # Where nobody needs its pages it goes on with them, and need not wait for what is being published.
        if self._vacate(entry, keep_as=f"{entry.name}/{entry.outcome.preempted}" if route.pending is None else ""):
            entry.tickets = []
        entry.state = State.WAITING

    def collect(self) -> list[Outcome]:
        """Outcomes of what has been published since, or failed to be."""
        if self._publisher is None or not self._publishing:
            return []
        outcomes = []
        for publication in self._publisher.collect():
            outcome = self._publishing.pop(publication.name).outcome
            outcome.error = outcome.error or publication.error
            if self.residency is not None and not publication.error and publication.name in self.residency:
                self.residency.mark_durable(publication.name)
            outcomes.append(outcome)
        return outcomes

    def wait(self, waiting: Iterable[Entry], timeout_s: float) -> None:
        """Wait a little for a publication, of ended sequences or of preempted ones that wait for theirs."""
        if self._publisher is not None and self._publishing:
            self._publisher.wait(timeout_s)
        elif tickets := [t.published for e in waiting for t in e.tickets if not t.published.done()]:
            concurrent.futures.wait(tickets, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def close(self) -> None:
        """Wait until what is being published is captured, and give its pages back."""
        if self._publisher is not None:
            self._publisher.close()
        self._publishing.clear()

    def _vacate(self, entry: Entry, keep_as: str = "") -> bool:
        """Take the rows away; whether the residency keeps them, under that name."""
        route, kept = entry.route, False
        if entry.arrival is not None:
            entry.account()
            route = entry.arrival.stop()
        if route is not None and not route.released:
            if keep_as and self.residency is not None:
                kept = self.residency.retain(keep_as, route, tuple(entry.tokens[: route.length]), durable=False)
            else:
                self._engine.release(route)
        if entry.capacity is not None:
            entry.capacity.release()
        entry.arrival = entry.route = entry.capacity = entry.tail = None
        return kept
