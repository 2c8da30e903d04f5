"""Publication of ended sequences beside decoding.

owner thread     lease the pages | decode goes on ......................... | release the lease, outcome out
worker thread                    | pages -> payload, digest, memory.publish | group commit
"""

import concurrent.futures
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from numem.identity.chain import CHUNK_TOKENS, PAGE_TOKENS
from numem.runtime.continuation import Published, Session, provenance
from numem.runtime.paging.route import PageLease, Route
from numem.runtime.restore.capture import capture_pages

if TYPE_CHECKING:
    from numem.runtime.device.streams import Event
    from numem.store.memory import Memory


@dataclass(slots=True)
class Publication:
    """State of one sequence on its way to the durable plane."""

    name: str
    lease: PageLease
    captured: "Future[Published]" = field(repr=False)

    @property
    def futures(self) -> "list[Future]":  # type: ignore[type-arg]  # futures of several types, only waited for
        """What it waits for now."""
        return list(self.captured.result().published) if _made(self.captured) else [self.captured]

    @property
    def done(self) -> bool:
        """Whether it is durable, or failed."""
        return all(future.done() for future in self.futures) and self.captured.done()

    @property
    def error(self) -> str:
        """Why it is not durable; empty where it is."""
        try:
            self.captured.result(0).wait(0)
        except Exception as error:  # noqa: BLE001 - whatever it raised, it is this publication that failed
            return f"publish: {error}"
        return ""


class Publisher:
    """Publishes leased pages in a thread of its own; made, asked and closed on the thread that owns the pages."""

    def __init__(self, session: Session, memory: "Memory") -> None:
        self._session = session
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="numem-publish")
        self._pending: list[Publication] = []

    def submit(self, name: str, tokens: Sequence[int], route: Route) -> None:
        """Publish the rows of a route up to `boundary`; the route may be released at once."""
        engine = self._session.engine
        lease = engine.pool.lease(route)
        # On a device the rows are there behind this point; their copies wait for it, and decoding for nothing.
        after = engine.storage.fence()
        future = self._thread.submit(self.publish, list(tokens), lease, boundary(route.length), after)
        self._pending.append(Publication(name, lease, future))

    def publish(self, tokens: Sequence[int], lease: PageLease, upto: int, after: "Event | None" = None) -> Published:
        """Capture rows [0, upto) of leased pages and hand them to the memory; waits where its queue is full.

        Args:
            after: on a device, behind which the rows are written.
        """
        session = self._session
        self._memory.register(session.identity)
        found = capture_pages(
            self._memory, session.engine, session.identity, tokens, lease, upto, provenance(), after=after
        )
        pairs = zip(found.nodes, found.payloads, strict=True)
        # The payloads are copies already, which nobody else writes: the memory need not copy them again.
        tickets = tuple(self._memory.publish(node, payloads, capture="later") for node, payloads in pairs)
        return Published(tickets, tuple(found.reused))

    def collect(self) -> list[Publication]:
        """Those that have ended since; leases of captured pages are released."""
        # First who has ended: whoever ends meanwhile keeps its lease until the next call.
        ended = [p for p in self._pending if p.done]
        for publication in self._pending:
            if publication.captured.done() and not publication.lease.released:
                publication.lease.release()
        self._pending = [p for p in self._pending if p not in ended]
        return ended

    def wait(self, timeout_s: float) -> None:
        """Wait until something of the oldest publication is done."""
        concurrent.futures.wait(self._pending[0].futures, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def close(self) -> None:
        """Wait until all pages are captured and release the leases; what was captured is published by the memory."""
        self._thread.shutdown()
        for publication in self._pending:
            if not publication.lease.released:
                publication.lease.release()
        self._pending = []


def boundary(rows: int) -> int:
    """Rows to publish of so many: all, but for a tail of less than a page after a full chunk, which would cost a
    publication and save no page."""
    tail = rows % CHUNK_TOKENS
    return rows - tail if rows > CHUNK_TOKENS and tail < PAGE_TOKENS else rows


def _made(future: "Future[Published]") -> bool:
    return future.done() and future.exception() is None
