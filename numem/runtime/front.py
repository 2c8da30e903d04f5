"""The front of the resident plane: callers in any thread or event loop, one thread that owns scheduler and model.

callers            stream, complete, run, cancel, call              any number of threads and loops
                        | commands, under one lock                  taken between two iterations
runtime thread     submit, cancel -> scheduler.step() -> tokens, outcomes
                        | an inbox per request                      bounded by what it may generate: a slow reader
                        v                                           delays nobody
"""

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Self, TypeVar

from numem.errors import ClosedError, InputError, ModelError, NumemError, RejectedError
from numem.runtime.request import Finish, Outcome, Request, Token
from numem.runtime.stream import Inbox, Stream

if TYPE_CHECKING:
    from numem.runtime.lanes.scheduler import Scheduler

T = TypeVar("T")


class Runtime:
    """Serves requests from a thread of its own, between entering and leaving a `with` or `async with` statement.

    Leaving ends every request as cancelled and joins the thread; so does the end of the interpreter. An idle thread
    sleeps. If it fails, everybody who waits is told, and so is whoever comes later.

    Args:
        scheduler_factory: called on the thread with the `on_token` that the scheduler must be given; returns the
            scheduler, or a context manager that makes it, with what it needs, and closes it.
        queue: requests that may be open at once, waiting or running; one more is refused.
    """

    def __init__(
        self,
        scheduler_factory: "Callable[[Callable[[Token], None]], Scheduler | AbstractContextManager[Scheduler]]",
        *,
        queue: int = 4096,
    ) -> None:
        self._factory = scheduler_factory
        self._queue = queue
        # Reentrant: a forgotten stream may be collected, and so cancelled, by the thread that holds the lock.
        self._lock = threading.Condition(threading.RLock())
        self._commands: deque[Callable[[Scheduler], None]] = deque()
        self._open: dict[str, Inbox] = {}
        self._calls: set[Future[None]] = set()
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._closing = False
        self._failure: Exception | None = None

    def stream(self, request: Request) -> Stream:
        """Submit a request; its tokens come by `async for token in runtime.stream(request)`.

        Raises:
            InputError: a request with this id is open.
            RejectedError: too many requests are open.
            ClosedError, ModelError: the runtime is not open, or its thread has failed.
        """
        return self.submit(request)

    async def complete(self, request: Request) -> list[Outcome]:
        """Outcomes of a request, one per sample, in order. Cancelling the task cancels the request.

        Raises:
            As `stream`, and what the scheduler refuses a request with.
        """
        async with self.submit(request, streamed=False) as stream:
            return await stream.result()

    def run(self, request: Request) -> list[Outcome]:
        """`complete` for a plain thread: blocks until the request has ended."""
        return self.submit(request, streamed=False).wait()

    def submit(self, request: Request, *, streamed: bool = True) -> Stream:
        """Submit a request; as `stream`, and without `streamed` its tokens are not kept for a reader."""
        return Stream(self._submit(request, streamed=streamed), self._abandon)

    @property
    def load(self) -> int:
        """Requests that are open, waiting or running."""
        return len(self._open)

    def holds(self, request_id: str) -> bool:
        """Whether a request of this id is open."""
        return request_id in self._open

    def cancel(self, request_id: str) -> bool:
        """End a request as cancelled if it is open; the outcome has what was generated until then."""
        with self._lock:
            inbox = self._open.get(request_id)
            return inbox is not None and self._abandon(inbox)

    def call(self, function: "Callable[[Scheduler], T]") -> T:
        """Result of a function of the scheduler, which runs between two iterations; blocks until then.

        Raises:
            What the function raises; ClosedError, ModelError: the runtime is not open, or its thread has failed.
        """
        future: Future[None] = Future()
        results: list[T] = []

        def command(scheduler: "Scheduler") -> None:
            try:
                results.append(function(scheduler))
            except Exception as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)
            else:
                future.set_result(None)

        with self._lock:
            self._check()
            self._calls.add(future)
            self._commands.append(command)
            self._lock.notify()
        try:
            future.result()
        finally:
            with self._lock:
                self._calls.discard(future)
        return results[0]

    def close(self) -> None:
        """End every request as cancelled and join the thread; closing twice is harmless."""
        self._stop()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        with self._lock:
            if self._thread is not None or self._closing:
                raise ClosedError("runtime: it was opened before; make another one")
            self._thread = threading.Thread(target=self._serve, name="numem-runtime", daemon=True)
            self._thread.start()
        # An interpreter that ends under a thread which is inside the model would be aborted.
        atexit.register(self.close)
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            return await asyncio.to_thread(self.__enter__)
        except asyncio.CancelledError:
            # Nobody will leave what was not entered: the thread ends by itself, if it has begun at all.
            self._stop()
            raise

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify()

    def _check(self) -> None:
        if self._failure is not None:
            raise _fault(self._failure)
        if self._thread is None or self._closing:
            raise ClosedError("runtime: it is not open; use it inside its `with` or `async with` statement")

    def _submit(self, request: Request, *, streamed: bool) -> Inbox:
        inbox = Inbox(request, streamed)

        def command(scheduler: "Scheduler") -> None:
            try:
                scheduler.submit(request)
            except NumemError as error:
                self._end(inbox, error)

        with self._lock:
            self._check()
            if request.id in self._open:
                raise InputError(f"request {request.id!r}: one with this id is open; give each its own")
            if len(self._open) >= self._queue:
                raise RejectedError(
                    f"request {request.id!r}: {self._queue} requests are open already; wait for some to end, or give "
                    "the runtime a longer queue",
                    "submission-queue",
                )
            self._open[request.id] = inbox
            self._commands.append(command)
            self._lock.notify()
        return inbox

    def _abandon(self, inbox: Inbox) -> bool:
        """Cancel this very request, not a later one of the same id."""
        request_id = inbox.request.id
        with self._lock:
            if self._open.get(request_id) is not inbox:
                return False
            self._commands.append(lambda scheduler: _cancel(scheduler, request_id))
            self._lock.notify()
            return True

    # From here on everything runs on the runtime's thread.

    def _serve(self) -> None:
        try:
            made = self._factory(self._token)
            with made if isinstance(made, AbstractContextManager) else closing(made) as scheduler:
                self._started.set()
                while self._take(scheduler):
                    self._step(scheduler)
                for request_id in list(self._open):
                    scheduler.cancel(request_id)
                # What is on its way to the durable plane has an outcome to come.
                while not scheduler.idle:
                    self._step(scheduler)
        except Exception as error:  # noqa: BLE001 - a defect must fail its waiters, not hang them
            self._failure = error
        finally:
            self._finish()
            self._started.set()

    def _take(self, scheduler: "Scheduler") -> bool:
        """Wait until there is something to do and do what was asked for; False once the runtime is closing."""
        with self._lock:
            while scheduler.idle and not self._commands and not self._closing:
                self._lock.wait()
            commands, self._commands = self._commands, deque()
            open_still = not self._closing
        for command in commands:
            command(scheduler)
        return open_still

    def _step(self, scheduler: "Scheduler") -> None:
        for outcome in scheduler.step():
            inbox = self._open.get(outcome.request.id)
            if inbox is not None:
                inbox.outcomes.append(outcome)
                if len(inbox.outcomes) == inbox.request.samples:
                    self._end(inbox)

    def _token(self, token: Token) -> None:
        inbox = self._open.get(token.request_id)
        if inbox is not None:
            inbox.push(token)

    def _end(self, inbox: Inbox, error: Exception | None = None) -> None:
        with self._lock:
            del self._open[inbox.request.id]
        inbox.end(error)

    def _finish(self) -> None:
        """Nothing is served any more: end what is open."""
        with self._lock:
            self._closing = True
            left, calls = list(self._open.values()), list(self._calls)
            self._open.clear()
            self._commands.clear()
        for inbox in left:
            ended = {outcome.sample for outcome in inbox.outcomes}
            for sample in set(range(inbox.request.samples)) - ended:
                inbox.outcomes.append(Outcome(inbox.request, sample, finish=Finish.CANCELLED))
            inbox.end(None if self._failure is None else _fault(self._failure))
        for future in calls:
            if not future.done():
                future.set_exception(
                    ClosedError("runtime: it was closed") if self._failure is None else _fault(self._failure)
                )


def _cancel(scheduler: "Scheduler", request_id: str) -> None:
    scheduler.cancel(request_id)


def _fault(failure: Exception) -> ModelError:
    """What a caller is told about the thread's failure, each an exception of their own."""
    error = ModelError(f"runtime: its thread failed: {type(failure).__name__}: {' '.join(str(failure).split())}")
    error.__cause__ = failure
    return error
