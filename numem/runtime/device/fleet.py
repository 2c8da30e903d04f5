"""Several runtimes of one model behind one front: a runtime, with a thread and pages of its own, for each GPU of a host.

A request goes where the longest prefix of its prompt was sent before and may still lie in pages, among the runtimes
that are not much busier than the idlest one; of equals the least busy, then the first. Where it goes changes no bit of
its output. What was sent is remembered by hashes of blocks of tokens: asking the runtimes themselves would wait for
their steps.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TypeVar

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS
from numem.runtime.front import Runtime
from numem.runtime.request import Outcome, Request
from numem.runtime.stream import Stream

if TYPE_CHECKING:
    from numem.runtime.lanes.scheduler import Scheduler

T = TypeVar("T")

BLOCK = 4 * PAGE_TOKENS
"""Tokens of a block that is remembered."""


class Fleet:
    """Serves requests from several runtimes, between entering and leaving a `with` statement; see `Runtime`.

    Args:
        runtimes: of decoders with one identity.
        lanes: sequences that each runs at a time: a runtime with so many requests more than the idlest one gets no more,
            whatever it holds.
        tokens: prompt tokens of each runtime that are remembered; about those that its pages hold.
    """

    def __init__(self, runtimes: Sequence[Runtime], *, lanes: int, tokens: int) -> None:
        if not runtimes:
            raise InputError("fleet: there is no runtime")
        self.runtimes = tuple(runtimes)
        self._slack = lanes
        self._limit = max(1, tokens // BLOCK)
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in runtimes]
        # Choosing and submitting are one step: two threads that submit one id must not both find it free.
        self._lock = threading.Lock()
        self._open = ExitStack()

    def stream(self, request: Request) -> Stream:
        """As `Runtime.stream`."""
        return self.submit(request)

    async def complete(self, request: Request) -> list[Outcome]:
        """As `Runtime.complete`."""
        async with self.submit(request, streamed=False) as stream:
            return await stream.result()

    def run(self, request: Request) -> list[Outcome]:
        """As `Runtime.run`."""
        return self.submit(request, streamed=False).wait()

    def submit(self, request: Request, *, streamed: bool = True) -> Stream:
        """Submit a request to one of the runtimes."""
        blocks = _blocks(request.tokens)
        with self._lock:
            if any(runtime.holds(request.id) for runtime in self.runtimes):
                raise InputError(f"request {request.id!r}: one with this id is open; give each its own")
            at = self._choose(blocks)
            stream = self.runtimes[at].submit(request, streamed=streamed)
            self._remember(at, blocks)
        return stream

    def cancel(self, request_id: str) -> bool:
        """As `Runtime.cancel`."""
        return any(runtime.cancel(request_id) for runtime in self.runtimes)

    def call(self, function: "Callable[[Scheduler], T]") -> list[T]:
        """Results of a function of each scheduler, in the order of the runtimes; see `Runtime.call`."""
        return [runtime.call(function) for runtime in self.runtimes]

    @property
    def load(self) -> int:
        """Requests that are open."""
        return sum(runtime.load for runtime in self.runtimes)

    def close(self) -> None:
        """End every request as cancelled and join the threads; closing twice is harmless."""
        self._open.close()

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            for runtime in self.runtimes:
                entered.enter_context(runtime)
            self._open = entered.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _choose(self, blocks: Sequence[int]) -> int:
        loads = [runtime.load for runtime in self.runtimes]
        bound = min(loads) + self._slack
        able = [at for at, load in enumerate(loads) if load < bound]
        return min(able, key=lambda at: (-self._known(at, blocks), loads[at], at))

    def _known(self, at: int, blocks: Sequence[int]) -> int:
        """How many of the first blocks were sent there."""
        sent = self._sent[at]
        return next((n for n, block in enumerate(blocks) if block not in sent), len(blocks))

    def _remember(self, at: int, blocks: Sequence[int]) -> None:
        sent = self._sent[at]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._limit:
            sent.popitem(last=False)


def _blocks(tokens: Sequence[int]) -> list[int]:
    """A hash of every whole block of a prompt and all before it."""
    out, parent = list[int](), 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hash((parent, *map(int, tokens[start : start + BLOCK])))
        out.append(parent)
    return out
