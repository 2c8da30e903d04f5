"""The committer: one thread per process that gathers jobs and facts into group commits."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition, Thread

from numem.errors import ClosedError, NumemError, StorageFullError, StoreError
from numem.store.catalog import Facts
from numem.store.lance_errors import lance_errors
from numem.store.publish import NodeJob

WINDOW_S = 0.1
# Decisions and observations alone are no reason for a commit of their own ten times a second.
FACTS_WINDOW_S = 1.0
GROUP_PIECES = 64
GROUP_BYTES = 512 << 20
# Payload that publish() may hold in memory; more waits (checkpoints are never dropped).
STAGING_BYTES = 256 << 20


class Committer:
    """Group commit: a batch every 100 ms or 64 pieces, at once where somebody waits for it.

    Args:
        commit: makes one group durable and resolves the futures of its jobs.
    """

    def __init__(self, commit: Callable[[Sequence[NodeJob], Facts], None]) -> None:
        self._commit = commit
        self._changed = Condition()
        self._jobs: deque[NodeJob] = deque()
        self._facts = Facts()
        self._flushes: list[Future[None]] = []
        self._pieces = 0
        self._held = 0
        self._urgent = False
        self._closing = False
        self._busy = False
        self._error: Exception | None = None
        self._thread: Thread | None = None

    def submit(self, jobs: Sequence[NodeJob], *, urgent: bool = False, held_bytes: int = 0) -> None:
        """Queue jobs. `held_bytes` of payload in memory count against the budget; over it the caller waits."""
        with self._changed:
            while held_bytes and self._held and self._held + held_bytes > STAGING_BYTES and not self._closing:
                self._urgent = True
                self._changed.notify_all()
                self._changed.wait(0.05)
            self._require_open()
            self._jobs.extend(jobs)
            self._pieces += sum(len(job.pieces) for job in jobs)
            self._held += held_bytes
            self._urgent |= urgent
            self._wake()

    def submit_facts(self, facts: Facts) -> None:
        """Queue facts; they are durable after the next group commit, at the latest after `flush`."""
        with self._changed:
            self._require_open()
            self._facts.extend(facts)
            self._wake()

    @property
    def pending_facts(self) -> bool:
        """Whether facts of this process are queued or being committed."""
        with self._changed:
            return bool(self._facts) or self._busy

    def released(self, nbytes: int) -> None:
        """Payload in memory was let go of."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything queued before is durable; raises what facts failed with since the last flush."""
        done: Future[None] = Future()
        with self._changed:
            if self._thread is None and not self._facts and not self._jobs:
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

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._facts or self._flushes or self._closing):
                    self._changed.wait()
                started = time.monotonic()
                while not (self._urgent or self._closing) and self._pieces < GROUP_PIECES:
                    left = started + (WINDOW_S if self._jobs else FACTS_WINDOW_S) - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                jobs, facts, flushes = self._take()
                if not (jobs or facts or flushes) and self._closing:
                    return
            self._commit_group(jobs, facts)
            with self._changed:
                self._busy = False
            self._finish(flushes)

    def _take(self) -> tuple[list[NodeJob], Facts, list["Future[None]"]]:
        jobs: list[NodeJob] = []
        size = 0
        while self._jobs and (not jobs or size + self._jobs[0].nbytes <= GROUP_BYTES):
            jobs.append(self._jobs.popleft())
            size += jobs[-1].nbytes
            self._pieces -= len(jobs[-1].pieces)
        facts, self._facts = self._facts, Facts()
        self._busy = bool(facts)
        flushes: list[Future[None]] = []
        if not self._jobs:
            flushes, self._flushes = self._flushes, []
            self._urgent = False
        return jobs, facts, flushes

    def _commit_group(self, jobs: Sequence[NodeJob], facts: Facts) -> None:
        if not jobs and not facts:
            return
        try:
            with lance_errors("publication"):
                self._commit(jobs, facts)
        except NumemError as error:
            self._failed(jobs, facts, error)
        except Exception as error:  # noqa: BLE001 - a defect must fail its waiters, not hang them
            self._failed(jobs, facts, StoreError(f"publication: {type(error).__name__}: {error}"), error)

    def _failed(self, jobs: Sequence[NodeJob], facts: Facts, error: Exception, cause: Exception | None = None) -> None:
        error.__cause__ = cause or error.__cause__
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)
        with self._changed:
            if facts:
                self._error = error
                if isinstance(error, StorageFullError) and not self._closing:
                    # Facts wait for space; they are small and nobody else holds them.
                    facts.extend(self._facts)
                    self._facts = facts

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
