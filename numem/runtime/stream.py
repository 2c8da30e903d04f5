"""One request as its caller sees it: the tokens as they come, the outcomes at the end."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Self

from numem.errors import ModelError
from numem.runtime.request import Finish, Outcome, Request, Token


class Inbox:
    """What the runtime's thread hands to one reader.

    There is no lock, so that neither side waits for the other: the writer appends and then looks for `wake`, the reader
    sets `wake` and then looks again for what has come. Only the reader clears it.

    Attributes:
        request: whose.
        tokens: not read yet, None where nobody reads them; at most samples x max_new_tokens.
        outcomes: of the samples that have ended.
        error: what is raised instead of an outcome.
        done: nothing comes any more; set last.
    """

    def __init__(self, request: Request, streamed: bool) -> None:
        self.request = request
        self.tokens: deque[Token] | None = deque() if streamed else None
        self.outcomes: list[Outcome] = []
        self.error: Exception | None = None
        self.done = False
        self.wake: Callable[[], object] | None = None

    def push(self, token: Token) -> None:
        tokens = self.tokens
        if tokens is not None:
            tokens.append(token)
            self._notify()

    def end(self, error: Exception | None = None) -> None:
        """Nothing comes any more; `error` is raised to the reader."""
        self.error = error
        self.outcomes.sort(key=lambda outcome: outcome.sample)
        self.done = True
        self._notify()

    def ready(self) -> bool:
        return self.done or bool(self.tokens)

    def result(self) -> list[Outcome]:
        """Outcomes after the end, or the error raised."""
        if self.error is not None:
            raise self.error
        return self.outcomes

    def wait(self) -> None:
        """Block the calling thread until something has come."""
        event = threading.Event()
        self.wake = event.set
        try:
            if not self.ready():
                event.wait()
        finally:
            self.wake = None

    async def wait_async(self) -> None:
        """Suspend the calling task until something has come."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self.wake = lambda: loop.call_soon_threadsafe(event.set)
        try:
            if not self.ready():
                await event.wait()
        finally:
            self.wake = None

    def _notify(self) -> None:
        wake = self.wake
        if wake is not None:
            # Where the reader's event loop was closed under it, nobody waits any more.
            with contextlib.suppress(RuntimeError):
                wake()


class Stream:
    """An asynchronous iterator over the tokens of one request; made by `Runtime.stream`, read by one task.

    Leaving the `async for` early ends the request as cancelled and gives its pages back, as soon as nothing refers to
    the stream any more; a stream that has a name is closed by `async with` or `aclose`. So does a cancelled task, or a
    timeout, while it waits for a token.

    Attributes:
        outcomes: how the samples ended, in order; complete when the iteration has ended.
    """

    def __init__(self, inbox: Inbox, cancel: Callable[[Inbox], object]) -> None:
        self._inbox = inbox
        self._cancel = cancel

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self._inbox.outcomes)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """The next token of any sample.

        Raises:
            StopAsyncIteration: the request has ended; `outcomes` says how.
            NumemError: the request was refused, a sample ended in an error, or the runtime's thread failed.
        """
        inbox = self._inbox
        while not inbox.tokens:
            if inbox.done:
                for outcome in inbox.result():
                    if outcome.finish == Finish.ERROR:
                        raise ModelError(f"request {inbox.request.id!r}, sample {outcome.sample}: {outcome.error}")
                raise StopAsyncIteration
            await self._wait()
        return inbox.tokens.popleft()

    async def result(self) -> list[Outcome]:
        """Wait for the end and return the outcomes; tokens that were not read are dropped."""
        self._inbox.tokens = None
        while not self._inbox.done:
            await self._wait()
        return self._inbox.result()

    def wait(self) -> list[Outcome]:
        """As `result`, for a plain thread: blocks until the end; a thread that is interrupted cancels the request."""
        inbox = self._inbox
        inbox.tokens = None
        try:
            while not inbox.done:
                inbox.wait()
        finally:
            self._cancel(inbox)
        return inbox.result()

    async def aclose(self) -> None:
        """End the request as cancelled, unless it has ended."""
        self._cancel(self._inbox)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._cancel(self._inbox)

    async def _wait(self) -> None:
        try:
            await self._inbox.wait_async()
        except asyncio.CancelledError:
            self._cancel(self._inbox)
            raise
