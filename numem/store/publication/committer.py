"""The committer: one thread per process that gathers jobs and facts into group commits.

A group is committed while it still gathers: its payload is written as jobs arrive, and its window only decides when it
ends. Checkpoints and cache entries wait in queues of their own, checkpoints go first.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from types import TracebackType

from numem.errors import ClosedError, NumemError, RejectedError, StorageFullError, StoreError
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Record, to_json
from numem.store.lance_errors import lance_errors
from numem.store.publication.publish import QUEUES, NodeJob
from numem.store.reports import PublishReceipt

WINDOW_S = 0.1
# Decisions and observations alone are no reason for a commit of their own ten times a second.
FACTS_WINDOW_S = 1.0
# Notes are read by people, later.
NOTES_WINDOW_S = 5.0
GROUP_NOTES = 4096
MOST_NOTES = 16 * GROUP_NOTES
GROUP_PIECES = 64
GROUP_BYTES = 512 << 20

Commit = Callable[[Iterator[NodeJob], Callable[[], Facts]], None]


@dataclass(slots=True, eq=False)
class _Group:
    """What one commit takes: its jobs as they arrive, facts and flushes when it ends."""

    jobs: list[NodeJob] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    notes: list[Record] = field(default_factory=list)
    flushes: "list[Future[None]]" = field(default_factory=list)
    left: int | None = None  # jobs that still join, once the window is closed
    ended: bool = False


class Committer:
    """Group commit: a batch every 100 ms or 64 pieces, at once where somebody waits for it.

    Args:
        commit: makes the jobs that it is given one after the other, and the facts that it asks for once there are no
            more jobs, durable; then resolves the futures of the jobs. It may be called again with the same jobs.
        limit: jobs that may wait in each queue.
        on_full: asked once per group that finds no space to free that many bytes; True to try the group again.
    """

    def __init__(self, commit: Commit, limit: int, on_full: Callable[[int], bool]) -> None:
        self._commit = commit
        self._limit = limit
        self._on_full = on_full
        self._changed = Condition()
        self._queues: dict[str, deque[NodeJob]] = {name: deque() for name in QUEUES}
        self._facts = Facts()
        self._notes: list[Record] = []
        self._noted = 0.0  # when the first of them came
        self._groups = 1  # that ended, and the one to come
        self.notes_lost = 0
        self._flushes: list[Future[None]] = []
        self._urgent = False
        self._closing = False
        self._busy = False
        self._error: Exception | None = None
        self._thread: Thread | None = None

    def submit(self, jobs: Sequence[NodeJob]) -> None:
        """Queue checkpoints whose bytes lie in the spool, and commit soon; ClosedError after `close`."""
        with self._changed:
            self._require_open()
            for job in jobs:
                self._queues[job.queue].append(job)
            self._urgent = True
            self._wake()

    def offer(self, job: NodeJob) -> NumemError | None:
        """Queue a job whose bytes are in memory; a checkpoint waits for room. None, or why it was not taken."""
        with self._changed:
            queue = self._queues[job.queue]
            # A callback of a future runs in this thread, and must not wait for it.
            while len(queue) >= self._limit and not self._closing and threading.current_thread() != self._thread:
                if job.queue == "cache":
                    return RejectedError(
                        f"publish: dropped, {len(queue)} cache entries wait, as many as max_pending_publications allows",
                        "publication-queue",
                    )
                self._urgent = True
                self._changed.notify_all()
                self._changed.wait()
            if self._closing:
                return ClosedError("memory: closed; open it again to publish")
            queue.append(job)
            self._wake()
            return None

    def cancel(self, published: "Future[PublishReceipt]") -> bool:
        """Take a job back that no group has; its future then carries CancelledError."""
        with self._changed:
            found = [job for queue in self._queues.values() for job in queue if job.future is published]
            for job in found:
                self._queues[job.queue].remove(job)
            self._changed.notify_all()
        for job in found:
            job.future.set_exception(CancelledError())
        return bool(found)

    def hurry(self) -> None:
        """Somebody waits: end the group that gathers."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    def submit_facts(self, facts: Facts) -> None:
        """Queue facts; they are durable after the next group commit, at the latest after `flush`."""
        with self._changed:
            self._require_open()
            self._facts.extend(facts)
            self._wake()

    def note(self, record: Record) -> int:
        """Queue a record that stands in nobody's way: written with a later commit, lost (and counted) where that fails.

        Returns:
            The number of the group that takes it, see `amend`; 0 where it is lost already.
        """
        with self._changed:
            if self._closing or len(self._notes) >= MOST_NOTES:
                self.notes_lost += 1
                return 0
            self._notes.append(record)
            if len(self._notes) == 1:
                self._noted = time.monotonic()
                self._wake()
            elif len(self._notes) == GROUP_NOTES:
                self._urgent = True
                self._wake()
            return self._groups

    def amend(self, group: int, change: Callable[[], None]) -> bool:
        """Change the body of a note whose group has not ended; False, and nothing is changed, where it has."""
        with self._changed:
            if group != self._groups:
                return False
            change()
            return True

    @property
    def pending_facts(self) -> bool:
        """Whether facts of this process are queued or being committed, as far as the caller could wait for them."""
        with self._changed:
            # A callback of a future runs in this thread, when what was committed with it is durable.
            return (bool(self._facts) or self._busy) and threading.current_thread() != self._thread

    @property
    def pending(self) -> bool:
        """The same of facts and notes."""
        with self._changed:
            return bool(self._notes) and threading.current_thread() != self._thread or self.pending_facts

    @property
    def depth(self) -> int:
        """Jobs that wait for a group."""
        with self._changed:
            return self._count()

    def flush(self) -> None:
        """Return when everything queued before is durable; raises what facts failed with since the last flush.

        Raises:
            StoreError: called by a callback of a publication, which would wait for itself.
        """
        if threading.current_thread() == self._thread:
            raise StoreError("flush: called by a callback of a publication, which would wait for itself; use a thread")
        done: Future[None] = Future()
        with self._changed:
            if self._thread is None and not self._queued:
                return
            self._require_open()
            self._flushes.append(done)
            self._urgent = True
            self._wake()
        done.result()

    def close(self) -> None:
        """Drain and stop; idempotent. Raises what queued facts failed with, since nobody else would hear of it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _require_open(self) -> None:
        if self._closing:
            raise ClosedError("memory: closed; open it again to publish")

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="numem-committer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    @property
    def _queued(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self._facts or self._notes or self._count())

    @property
    def _notes_due(self) -> bool:
        """Whether a group takes the notes: not each one that publishes something, which would make it longer."""
        late = len(self._notes) >= GROUP_NOTES or time.monotonic() >= self._noted + NOTES_WINDOW_S
        return bool(self._notes) and (late or bool(self._flushes) or self._closing)

    def _count(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queued or self._flushes or self._closing):
                    self._changed.wait()
                began = time.monotonic()
                while not (self._count() or self._urgent or self._closing):
                    until = began + FACTS_WINDOW_S if self._facts else self._noted + NOTES_WINDOW_S
                    left = until - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                if self._closing and not (self._queued or self._flushes):
                    return
            group = _Group()
            # What a traceback refers to includes the payloads; whoever keeps the error must not keep those.
            for trace in self._commit_group(group):
                traceback.clear_frames(trace)
            with self._changed:
                self._busy = False
            self._finish(group.flushes)
            del group

    def _commit_group(self, group: _Group) -> list[TracebackType]:
        """Commit a group or fail its jobs; returns the tracebacks that end here."""
        arriving = self._arriving(group)
        try:
            with lance_errors("publication"):
                try:
                    self._commit(arriving, lambda: self._end(group))
                except StorageFullError:
                    self._take_rest(group, arriving)
                    if not self._on_full(sum(job.nbytes for job in group.jobs)):
                        raise
                    self._commit(iter(tuple(group.jobs)), lambda: self._end(group))
        except NumemError as error:
            return self._failed(group, error)
        except Exception as error:  # noqa: BLE001 - a defect must fail its waiters, not hang them
            failure = StoreError(f"publication: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return self._failed(group, failure)
        return []

    def _arriving(self, group: _Group) -> Iterator[NodeJob]:
        """Jobs of a group as they arrive. Once its window closes only those that are queued already still join."""
        until = time.monotonic() + WINDOW_S
        pieces = size = 0
        while True:
            with self._changed:
                while group.left is None:
                    if self._urgent or self._closing or pieces >= GROUP_PIECES or time.monotonic() >= until:
                        group.left = self._count()
                    elif self._count():
                        break
                    else:
                        self._changed.wait(until - time.monotonic())
                queue = next((queue for queue in self._queues.values() if queue), None)
                if group.left == 0 or queue is None or (size and size + queue[0].nbytes > GROUP_BYTES):
                    return
                group.left = None if group.left is None else group.left - 1
                job = queue.popleft()
                group.jobs.append(job)
                self._changed.notify_all()
            job.entered()
            pieces += len(job.pieces)
            size += job.nbytes
            yield job

    def _take_rest(self, group: _Group, arriving: Iterator[NodeJob]) -> None:
        """What was to join a group whose payload found no space shares its fate, instead of trying in parts."""
        if group.left is not None:
            for _ in arriving:  # each is noted in the group
                continue

    def _end(self, group: _Group) -> Facts:
        """Take the facts, and whoever waits for all that is queued, where nothing is left behind."""
        with self._changed:
            if not group.ended:
                group.ended = True
                group.facts, self._facts = self._facts, Facts()
                if self._notes_due:
                    group.notes, self._notes = self._notes, []
                    self._groups += 1
                self._busy = bool(group.facts or group.notes)
                if not self._count():
                    group.flushes, self._flushes = self._flushes, []
                    self._urgent = False
        # A body is its caller's until here: one that cannot be written must not take the others with it.
        kept = [note for note in group.notes if _writable(note)]
        if len(kept) < len(group.notes):
            with self._changed:
                self.notes_lost += len(group.notes) - len(kept)
            group.notes = kept
        if not group.notes:
            return group.facts
        both = Facts(records=list(group.notes))
        both.extend(group.facts)
        return both

    def _failed(self, group: _Group, error: NumemError) -> list[TracebackType]:
        traces = _tracebacks(error)
        with self._changed:
            self.notes_lost += len(group.notes)
            if not (group.ended or self._queued):
                group.flushes, self._flushes = self._flushes, []
                self._urgent = False
            if group.facts:
                self._error = error
                if isinstance(error, StorageFullError) and not self._closing:
                    # Facts wait for space; they are small and nobody else holds them.
                    group.facts.extend(self._facts)
                    self._facts = group.facts
        for job in group.jobs:
            if not job.future.done():
                job.future.set_exception(error)
        return traces

    def _finish(self, flushes: Sequence["Future[None]"]) -> None:
        if not flushes:
            return
        with self._changed:
            error, self._error = self._error, None
        for flush in flushes:
            if error is None:
                flush.set_result(None)
            else:
                flush.set_exception(error)


def _writable(note: Record) -> bool:
    """Whether a record can be written: its body is JSON, and all of its text is Unicode."""
    try:
        f"{note.kind}{to_json(note.body)}".encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _tracebacks(error: BaseException | None) -> list[TracebackType]:
    """Tracebacks of an error and of what led to it."""
    found = []
    while error is not None:
        if error.__traceback__ is not None:
            found.append(error.__traceback__)
        error = error.__cause__ or error.__context__
    return found
