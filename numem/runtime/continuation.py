"""Continuations: a sequence that can be stepped, forked, published and restored.

tokens        t0 t1 ... t(n-1) | t(n)        len(tokens) = processed + 1, always
cache         [0, n)           |  ^ pending, evaluated at position n by the next step
"""

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Self

import numpy as np

from numem.errors import CapacityError, ContextLengthError, InputError, IntegrityError, OutOfPlanError
from numem.identity.chain import pack_tokens, unpack_tokens
from numem.identity.fingerprint import Identity
from numem.runtime.ahead import AHEAD_MS, AHEAD_STEPS, pick
from numem.runtime.device.state import Step
from numem.runtime.engine import Engine
from numem.runtime.paging.pool import Route
from numem.runtime.restore.capture import capture
from numem.runtime.restore.kv import Restored, raw, restore_rows
from numem.runtime.sampling import GREEDY, Sampler, not_finite

if TYPE_CHECKING:
    from numem.store.memory import Memory, PublishReceipt, Ticket


@dataclass(frozen=True, slots=True)
class Published:
    """Tickets of one publication, a chunk each, and the ids that were durable already."""

    tickets: "tuple[Ticket, ...]"
    reused: tuple[bytes, ...]

    @property
    def captured(self) -> list[Future[None]]:
        return [ticket.captured for ticket in self.tickets]

    @property
    def published(self) -> "list[Future[PublishReceipt]]":
        return [ticket.published for ticket in self.tickets]

    def wait(self, timeout: float | None = None) -> "Published":
        """Return when every chunk is durable.

        Raises:
            IntegrityError: the memory holds other bytes under a chunk's causal id; those stay, and an event was recorded.
            StoreError: what the first failing publication raised.
        """
        for future in self.published:
            receipt = future.result(timeout)
            if receipt.conflict or receipt.missing:
                why = receipt.missing or "the memory holds other bytes under this id; see its events"
                raise IntegrityError(f"publish: chunk {receipt.id.hex()[:16]} is not durable: {why}")
        return self


class Session:
    """An engine under one identity: where continuations start, restore and are published.

    Args:
        engine: decoder with pages.
        identity: identity of the state it makes.
    """

    def __init__(self, engine: Engine, identity: Identity) -> None:
        self.engine = engine
        self.identity = identity

    def start(self, tokens: Sequence[int]) -> "Continuation":
        """Evaluate all but the last of `tokens`; the last one is pending.

        Raises:
            InputError: no tokens.
            ContextLengthError: more tokens than max_position (equality is allowed: one step then fits).
        """
        checked = self._check(tokens)
        route = self.engine.pool.allocate()
        return self._complete(Continuation(self, checked, route), Restored())

    def restore(self, memory: "Memory", tokens: Sequence[int], *, tier: str | None = None) -> "Continuation":
        """Like `start`, with the longest durable prefix loaded instead of computed.

        Chunks that are missing or fail verification are recomputed; `continuation.restored` tells what was used.
        """
        checked = self._check(tokens)
        route = self.engine.pool.allocate()
        try:
            route, report, _ = restore_rows(memory, self.engine, self.identity.scope, route, checked, tier=tier)
        except BaseException:
            if not route.released:
                self.engine.release(route)
            raise
        return self._complete(Continuation(self, checked, route), report)

    def _complete(self, continuation: "Continuation", report: Restored) -> "Continuation":
        continuation.restored = report
        rest = continuation.tokens[continuation.route.length : -1]
        if rest:
            try:
                self.engine.append([(continuation.route, rest)], logits="none")
            except BaseException:
                self.engine.release(continuation.route)
                raise
        return continuation

    def _check(self, tokens: Sequence[int]) -> list[int]:
        if not len(tokens):
            raise InputError("start: the prompt has no tokens")
        if len(tokens) > self.engine.max_position:
            raise ContextLengthError(
                f"start: {len(tokens)} tokens exceed max_position {self.engine.max_position}; "
                "load the model with a larger max_position or shorten the prompt"
            )
        if any(isinstance(token, bool) for token in tokens):
            raise InputError("start: a token is True or False; token ids are integers")
        return unpack_tokens(pack_tokens(tokens))


class Continuation:
    """A sequence with its cache; made by a Session, released by `close` or the `with` statement.

    Attributes:
        tokens: all tokens, the pending one last.
        route: its pages.
        restored: what a restore loaded (all zero after a plain start).
        logits: float32 [vocab] of the last step; None before the first, and behind tokens decoded ahead.
    """

    def __init__(self, session: Session, tokens: list[int], route: Route) -> None:
        self.session = session
        self.tokens = tokens
        self.route = route
        self.restored = Restored()
        self.logits: np.ndarray | None = None

    @property
    def processed(self) -> int:
        """Positions in the cache: [0, processed)."""
        return len(self.tokens) - 1

    def step(self, sampler: Sampler = GREEDY) -> int:
        """Evaluate the pending token, choose the next one, append and return it.

        Raises:
            ContextLengthError: the cache is full (processed == max_position).
        """
        engine = self.session.engine
        position = self._settled()
        (logits,) = engine.append([(self.route, self.tokens[-1:])])
        try:
            token = pick(engine, logits, position, sampler)
        except BaseException:
            # The pending token is pending again: its row goes, so that nothing is evaluated or published twice.
            longer, self.route = self.route, engine.pool.fork(self.route, position)
            engine.release(longer)
            raise
        self.logits = logits
        self.tokens.append(token)
        return token

    def advance(self, count: int, sampler: Sampler = GREEDY) -> list[int]:
        """`count` steps; returns the chosen tokens. Where it raises, `tokens` has those chosen before.

        On a device they are decoded ahead, many at a time.

        Raises:
            As `step`.
        """
        at = len(self.tokens)
        while (left := at + count - len(self.tokens)) > 0:
            if self.session.engine.ahead is None:
                self.step(sampler)
            else:
                self._decode(min(left, AHEAD_STEPS), sampler)
        return self.tokens[at:]

    def stream(self, count: int, sampler: Sampler = GREEDY) -> Iterator[int]:
        """As `advance`, with each token as it is chosen. On a device more and more of them are decoded at a time, as long
        as none waits longer than AHEAD_MS; whoever stops early leaves those behind in `tokens`.

        Raises:
            As `step`, behind the tokens chosen before.
        """
        at = len(self.tokens)
        end, steps = at + count, 1
        while at < end:
            began, failure = time.perf_counter(), None
            try:
                self.advance(min(steps, end - at), sampler)
            except Exception as error:  # noqa: BLE001 - raised behind the tokens chosen before it
                failure = error
            if self.session.engine.ahead is not None and time.perf_counter() - began < AHEAD_MS / 2e3:
                steps = min(2 * steps, AHEAD_STEPS)
            chosen = self.tokens[at:]
            yield from chosen
            if failure is not None:
                raise failure
            at += len(chosen)

    def _decode(self, steps: int, sampler: Sampler) -> None:
        """Decode up to so many steps ahead, at least one: as many as there are positions and pages for."""
        engine, route = self.session.engine, self.route
        position = self._settled()
        engine.check(position, self.tokens[-1:])
        steps = min(steps, engine.max_position - position)
        while True:
            try:
                reserved = engine.reserve(route, steps)
                break
            except CapacityError:
                if steps == 1:
                    raise
                steps //= 2
        try:
            decoded = list(engine.decode([Step(self.tokens[-1], position, reserved.pages, sampler)], steps))
        except BaseException:
            engine.pool.abort([reserved])
            raise
        engine.pool.commit([reserved])
        self.logits = None
        chosen = [token for piece in decoded for (token,) in piece.tolist()]
        good = chosen.index(-1) if -1 in chosen else steps
        self.tokens += chosen[:good]
        if good < steps:
            self.route = engine.pool.fork(route, position + good)
            engine.release(route)
            raise not_finite(position + good)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append given tokens: the pending one and all but the last of them are evaluated, the last one is pending.

        Raises:
            InputError, ContextLengthError, CapacityError: nothing has changed.
        """
        self._settled()
        checked = unpack_tokens(pack_tokens(tokens))
        if not checked:
            return
        self.session.engine.append([(self.route, [self.tokens[-1], *checked[:-1]])], logits="none")
        self.tokens += checked

    def fork(self, processed: int | None = None) -> "Continuation":
        """A continuation over the same pages, at this boundary or an earlier one.

        At an earlier boundary `p` its pending token is `tokens[p]`. Copies at most one page, at the first write.
        """
        self._settled()
        processed = self.processed if processed is None else processed
        if not 0 <= processed <= self.processed:
            raise InputError(f"fork: boundary {processed} lies outside [0, {self.processed}]")
        route = self.session.engine.pool.fork(self.route, processed)
        return Continuation(self.session, self.tokens[: processed + 1], route)

    def publish(self, memory: "Memory", *, upto: int | None = None) -> Published:
        """Make `[0, upto)` (default: all that is processed) durable; chunks already durable are not written again."""
        self._settled()
        memory.register(self.session.identity)
        captured = capture(
            memory,
            self.session.engine,
            self.session.identity,
            self.tokens,
            self.route,
            upto=upto,
            provenance=provenance(),
        )
        tickets = tuple(
            memory.publish(node, payloads) for node, payloads in zip(captured.nodes, captured.payloads, strict=True)
        )
        return Published(tickets, tuple(captured.reused))

    def kv(self, start: int = 0, end: int | None = None) -> np.ndarray:
        """The cache rows [start, end) as raw bytes (uint8), in canonical payload order.

        Raises:
            OutOfPlanError: rows that are not computed, or that a restore left out of windowed layers.
        """
        end = self._settled() if end is None else end
        if not 0 <= start <= end <= self.route.length:
            raise OutOfPlanError(f"kv: rows [{start}, {end}) lie outside [0, {self.route.length})")
        for floor in self.route.floors:
            if start < floor.start:
                raise OutOfPlanError(
                    f"kv: rows below {floor.start} of group {floor.group} were left out by the restore; ask from there on"
                )
        return raw(self.session.engine.storage.save(self.route.pages, start, end - start))

    def _settled(self) -> int:
        """The boundary, after checking that the cache holds exactly the processed tokens."""
        if self.route.released or self.route.length != self.processed:
            raise InputError(
                f"continuation: {self.processed} tokens are processed and {self.route.length} rows held; it was closed, "
                "or its tokens or route were changed from outside"
            )
        return self.processed

    def close(self) -> None:
        """Release the pages; closing twice is harmless."""
        if not self.route.released:
            self.session.engine.release(self.route)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def provenance() -> dict[str, str]:
    """Versions that made a piece of state: recorded with it, never part of an id."""
    names = ["numem", "torch", *(["triton"] if "triton" in sys.modules else [])]  # it is imported for a GPU alone
    return {**{name: _version(name) for name in names}, "python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "uninstalled"
