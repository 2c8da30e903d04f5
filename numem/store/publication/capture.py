"""The first stage of publication: the caller's bytes become the store's own, digested, within limits.

    publish ──admit──> [captures waiting] ──copy, digest──> captured ──> committer's queue ──> published
               │                                                              │
               └ cache: refused when full; checkpoint: the caller waits       └ the same two contracts

With `capture="now"` the caller's thread copies and digests; with "later" the worker does, and the caller leaves the
buffers alone until `captured` is done.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread

from numem.errors import ClosedError, InputError, IntegrityError, NumemError, RejectedError, StoreError
from numem.identity.digest import checksum, content_id
from numem.state.node import Node
from numem.store import barrier
from numem.store.payload.pieces import SMALL, Piece, aligned
from numem.store.publication.committer import Committer
from numem.store.publication.publish import QUEUES, NodeJob
from numem.store.reports import PublishReceipt, Ticket
from numem.store.stats import Stats

CAPTURES = ("now", "later")


@dataclass(frozen=True, slots=True)
class PublicationLimits:
    """How much may be under way.

    Attributes:
        max_staging_bytes: payload copied, or about to be, and not yet published. A checkpoint larger than that goes
            through alone.
        max_pending_captures: captures that wait for the one that runs (`capture="later"` only).
        max_pending_publications: captured nodes that wait for a commit, in each of the two queues.

    Raises:
        InputError: a limit below 1.
    """

    max_staging_bytes: int = 256 << 20
    max_pending_captures: int = 64
    max_pending_publications: int = 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise InputError(f"publication limits: {name} is {getattr(self, name)}; it is at least 1")


@dataclass(slots=True, eq=False)
class Capture:
    """Payloads on their way into the store."""

    node: Node
    views: Sequence[memoryview]
    key: bytes | None
    queue: str
    nbytes: int
    captured: "Future[None]" = field(default_factory=Future)
    published: "Future[PublishReceipt]" = field(default_factory=Future)
    timings: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    cancelled: bool = False

    def __post_init__(self) -> None:
        # From here on whoever waits for them cannot cancel them; `Ticket.cancel` is the way.
        self.captured.set_running_or_notify_cancel()
        self.published.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        for future in (self.captured, self.published):
            if not future.done():
                future.set_exception(error)

    def pieces(self) -> tuple[Piece, ...]:
        """Copy, then digest the copy: the bytes that are checked are the bytes that are written.

        Raises:
            IntegrityError: a payload is not what its content id says.
        """
        pieces = []
        for content, view in zip(self.node.pieces, self.views, strict=True):
            held = aligned(len(view)) if len(view) >= SMALL else None
            copy = held[: len(view)] if held is not None else memoryview(bytearray(len(view)))
            copy[:] = view
            require_content(self.node, content, copy, self.key)
            pieces.append(Piece(content, len(copy), checksum(copy), partial(_copy_into, copy), held))
        return tuple(pieces)


class CaptureStage:
    """Admits publications, copies and digests, and hands them to the committer."""

    def __init__(self, committer: Committer, stats: Stats, limits: PublicationLimits) -> None:
        self._committer = committer
        self._stats = stats
        self._limits = limits
        self._changed = Condition()
        self._waiting: deque[Capture] = deque()
        self._running: Capture | None = None
        self._held = 0
        self._closing = False
        self._thread: Thread | None = None

    def publish(
        self, node: Node, views: Sequence[memoryview], key: bytes | None, *, queue: str, capture: str
    ) -> Ticket:
        """See `Memory.publish`."""
        if queue not in QUEUES:
            raise InputError(f"publish: queue {queue!r}; use {' or '.join(QUEUES)}")
        if capture not in CAPTURES:
            raise InputError(f"publish: capture {capture!r}; use {' or '.join(CAPTURES)}")
        task = Capture(node, views, key, queue, sum(len(view) for view in views))
        later = capture == "later"
        error = self._admit(task, later)
        self._stats.add("captures_rejected" if error else "captures_accepted", 1)
        if error is not None:
            task.fail(error)
        elif not later:
            try:
                self._capture(task)
            except BaseException as failure:
                task.fail(failure)
                raise
        return Ticket(
            error is None,
            task.captured,
            task.published,
            task.nbytes,
            task.timings,
            partial(self._cancel, task.published),
        )

    def refuse(self, error: NumemError) -> Ticket:
        """The ticket of a cache entry that is refused for a reason outside this stage, counted like any other."""
        self._stats.add("captures_rejected", 1)
        captured: Future[None] = Future()
        published: Future[PublishReceipt] = Future()
        captured.set_exception(error)
        published.set_exception(error)
        return Ticket(False, captured, published)

    def drain(self) -> None:
        """Return when every capture that was admitted is with the committer."""
        with self._changed:
            while self._waiting or self._running is not None:
                self._changed.wait()

    def close(self) -> None:
        """Stop accepting, then finish what was accepted; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def gauges(self) -> dict[str, int]:
        """What is under way now."""
        with self._changed:
            return {"capture_queue": len(self._waiting), "staging_bytes": self._held}

    def _admit(self, task: Capture, later: bool) -> NumemError | None:
        """Room for a publication, waited for where it is a checkpoint; None, or why there is none."""
        with self._changed:
            while not self._closing:
                full = self._full(task, later)
                if full is None:
                    break
                if task.queue == "cache":
                    self._stats.add("captures_rejected_bytes", task.nbytes)
                    return full
                self._committer.hurry()
                self._changed.wait()
            if self._closing:
                return ClosedError("memory: closed; open it again to publish")
            self._held += task.nbytes
            task.published.add_done_callback(partial(self._release, task.nbytes))
            if later:
                self._waiting.append(task)
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="numem-capture", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
            return None

    def _full(self, task: Capture, later: bool) -> RejectedError | None:
        limits = self._limits
        alone = task.queue == "checkpoint" and not self._held
        if self._held + task.nbytes > limits.max_staging_bytes and not alone:
            return RejectedError(
                f"publish: {task.nbytes} bytes do not fit the staging budget, {self._held} of "
                f"{limits.max_staging_bytes} are taken; wait for published, or raise max_staging_bytes",
                "staging-bytes",
            )
        # Its own callbacks must not wait for the worker they run in.
        if later and len(self._waiting) >= limits.max_pending_captures and threading.current_thread() != self._thread:
            return RejectedError(
                f"publish: {len(self._waiting)} captures wait, as many as max_pending_captures allows; wait for captured",
                "capture-queue",
            )
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                task = self._running = self._waiting.popleft()
                self._changed.notify_all()
            try:
                self._capture(task)
            except NumemError as error:
                task.fail(error)
            except Exception as error:  # noqa: BLE001 - a defect must fail its waiters, not hang them
                task.fail(StoreError(f"capture: {type(error).__name__}: {error}"))
            with self._changed:
                self._running = None
                del task
                self._changed.notify_all()

    def _capture(self, task: Capture) -> None:
        began = time.perf_counter()
        pieces = task.pieces()
        task.views = ()
        queued = time.perf_counter()
        task.timings["capture"] = (queued - began) * 1e3
        barrier.reached("captured", task.node.id.hex())
        task.captured.set_result(None)
        if task.cancelled:
            task.fail(CancelledError())
            return
        error = self._committer.offer(
            NodeJob(task.node, pieces, task.published, task.queue, task.timings, task.started, queued)
        )
        if error is not None:
            self._stats.add("publications_rejected", 1)
            task.fail(error)

    def _cancel(self, published: "Future[PublishReceipt]") -> bool:
        found = None
        with self._changed:
            for task in self._waiting:
                if task.published is published:
                    found = task
            if found is not None:
                self._waiting.remove(found)
                self._changed.notify_all()
            elif (
                self._running is not None and self._running.published is published and not self._running.captured.done()
            ):
                self._running.cancelled = True
                self._stats.add("publications_cancelled", 1)
                return True
        if found is not None:
            found.fail(CancelledError())
        elif not self._committer.cancel(published):
            return False
        self._stats.add("publications_cancelled", 1)
        return True

    def _release(self, nbytes: int, published: "Future[PublishReceipt]") -> None:
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()


def require_content(node: Node, content: bytes, payload: memoryview, key: bytes | None) -> None:
    """IntegrityError where a payload is not what its content id says."""
    found = content_id(payload, key)
    if found != content:
        raise IntegrityError(
            f"node {node.id.hex()}: a payload has content id {found.hex()}, the node says {content.hex()}"
        )


def _copy_into(copy: memoryview, view: memoryview) -> None:
    view[:] = copy
