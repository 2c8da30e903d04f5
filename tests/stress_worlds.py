"""Worlds of random operations: continuations stepped by hand, and requests over a scheduler."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from numem.errors import CapacityError, OutOfPlanError, StorageFullError
from numem.lineage.decisions import DecisionLog
from numem.policy import NAMES
from numem.policy.costs import Costs
from numem.runtime.continuation import Continuation
from numem.runtime.engine import Rows
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.pages import PageStorage
from numem.runtime.paging.residency import Residency
from numem.runtime.request import Finish, Outcome, Request, Token
from numem.runtime.restore.arrivals import POLICIES, Arrivals
from numem.runtime.sampling import Sampler
from numem.state.groups import Floor
from tests.stress_fixtures import (
    LANES,
    REFUSED,
    SAMPLERS,
    STEPS,
    Alone,
    Disturbed,
    Prompts,
    audit,
    cache,
    same_rows,
    seeded,
)

# Nothing is told of what is held back when a sequence is ended.
ENDED_FROM_OUTSIDE = (Finish.CANCELLED, Finish.DEADLINE, Finish.CAPACITY)


class Broken(Exception):
    """What a broken step raises."""


class Continuations:
    """Sequences stepped by hand, with what they must be."""

    def __init__(self, alone: Alone, disturbed: Disturbed, prompts: Prompts, seed: int) -> None:
        self.rng = random.Random(seed)
        self.prompts = prompts
        self.disturbed = disturbed
        lm, self.alone = alone.lm, alone
        self.session = lm.session(pages=LANES * 40, debug=True, canary=True)
        self.live: list[tuple[Continuation, tuple[int, ...], Sampler, list[bytes]]] = []
        self.operations: list[str] = []
        self.short = 0

    def operate(self) -> None:
        rng = self.rng
        kinds = {"start": 3, "restore": 5, "step": 12, "fork": 5, "publish": 5, "close": 4, "disturb": 2, "fault": 2}
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        if kind in ("start", "restore") and len(self.live) == LANES:
            kind = "close"
        if kind in ("step", "fork", "publish", "close") and not self.live:
            kind = "restore"
        self.operations.append(kind)
        getattr(self, kind)()
        audit(self.session.engine.pool)

    def start(self) -> None:
        self._begin(self.session.start)

    def restore(self) -> None:
        self._begin(lambda tokens: self.session.restore(self.disturbed.memory, tokens))

    def _begin(self, make: Callable[[tuple[int, ...]], Continuation]) -> None:
        tokens, sampler = self.prompts.pick(), self.rng.choice(SAMPLERS)
        self.operations[-1] += f" {len(tokens)} tokens"
        before = self.session.engine.pool.stats()
        try:
            self.live.append((make(tokens), tokens, sampler, []))
        except CapacityError:
            self.short += 1
            assert self.session.engine.pool.stats() == before

    def step(self) -> None:
        at = self.rng.randrange(len(self.live))
        c, tokens, sampler, logits = self.live[at]
        for _ in range(min(self.rng.randint(1, 4), STEPS - len(logits))):
            try:
                c.step(sampler)
            except CapacityError:
                self.short += 1
                break
            assert c.logits is not None
            logits.append(c.logits.tobytes())
        self.operations[-1] += f" {at}"
        expected = self.alone(tokens, sampler)
        assert tuple(c.tokens[len(tokens) :]) == expected.generated[: len(logits)]
        assert tuple(logits) == expected.logits[: len(logits)]

    def fork(self) -> None:
        at = self.rng.randrange(len(self.live))
        if len(self.live) == LANES:
            self.close()
            return
        c, _, _, _ = self.live[at]
        boundary = self.rng.choice((c.processed, self.rng.randint(0, c.processed)))
        self.operations[-1] += f" {at} at {boundary}"
        try:
            child = c.fork(boundary)
        except OutOfPlanError:
            assert c.route.floors
            return
        self.live.append((child, tuple(child.tokens), self.rng.choice(SAMPLERS), []))

    def publish(self) -> None:
        at = self.rng.randrange(len(self.live))
        c = self.live[at][0]
        upto = self.rng.choice((None, self.rng.randint(0, c.processed)))
        self.operations[-1] += f" {at} up to {upto}"
        try:
            published = c.publish(self.disturbed.memory, upto=upto)
            if self.rng.random() < 0.5:
                published.wait()
        except OutOfPlanError:
            assert c.route.floors
        except StorageFullError as error:
            assert str(error) == REFUSED

    def close(self) -> None:
        at = self.rng.randrange(len(self.live))
        self.operations[-1] += f" {at}"
        c, tokens, sampler, logits = self.live.pop(at)
        expected = self.alone(tokens, sampler)
        spec, engine = self.alone.spec, self.session.engine
        payload = engine.storage.save(c.route.pages, 0, c.processed)
        assert c.processed == len(tokens) - 1 + len(logits)
        found = cache(payload.view(-1).view(torch.uint8).numpy(), spec)
        assert same_rows(found, expected.kv, c.route.floors, spec)
        c.close()

    def disturb(self) -> None:
        self.operations[-1] = self.disturbed.disturb()

    def fault(self) -> None:
        self.disturbed.fail_next(self.rng.randint(1, 3))

    def end(self) -> None:
        while self.live:
            self.close()
            audit(self.session.engine.pool)
        stats = self.session.engine.pool.stats()
        assert (stats.free, stats.routes, stats.leases) == (stats.physical, 0, 0)


class Scheduled:
    """Requests over a scheduler with everything on, with what they must be."""

    def __init__(self, alone: Alone, disturbed: Disturbed, prompts: Prompts, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.prompts = prompts
        self.disturbed = disturbed
        lm, self.alone = alone.lm, alone
        self.session = lm.session(
            pages=rng.choice((prompts.longest // 16 + 8, LANES * 12, LANES * 40)), debug=True, canary=True
        )
        self.now = 0.0
        self.count = 0
        self.due: dict[str, int] = {}
        self.told: dict[tuple[str, int], list[Token]] = {}
        self.left: dict[tuple[str, int], tuple[np.ndarray, tuple[Floor, ...]]] = {}
        memory, engine = disturbed.memory, self.session.engine
        log = DecisionLog(memory)
        arriving, keeping = rng.choice((*POLICIES, "restore", "restore")), rng.choice(("value", *NAMES))
        costs = Costs()
        if rng.random() < 0.6:
            # As a larger model would have it: loading is worth its while.
            costs.observe_prefill(0, 256, 1e6)
        self.arrivals = Arrivals(self.session, memory, policy=arriving, costs=costs, decisions=log)
        self.residency = Residency(engine, policy=keeping, decisions=log, scope=self.session.identity.scope)
        chunk, rows = rng.choice((16, 64, 256)), rng.choice((9, 40, 512))
        decided, kept, share = rng.random() < 0.8, rng.random() < 0.6, rng.random() < 0.7
        setting = f"arrivals {arriving if decided else 'plain'}, residency {keeping if kept else 'none'}, share {share}"
        self.operations = [f"{setting}, chunk {chunk}, rows {rows}, {engine.pool.physical} pages"]
        self.scheduler = Scheduler(
            self.session,
            LANES,
            memory=memory,
            arrivals=self.arrivals if decided else None,
            residency=self.residency if kept else None,
            decisions=log,
            detokenize=lm.tokenizer.stream,
            max_batched_tokens=rows,
            prefill_chunk=chunk,
            share=share,
            clock=lambda: self.now,
            on_token=self._token,
        )
        self._forward = self.session.engine.decoder.forward
        self.failing = ""
        self._ended = self.scheduler.ended
        self.scheduler.ended = self._watched  # type: ignore[method-assign]  # the rows and floors are gone with the route

    def operate(self) -> None:
        rng = self.rng
        kinds = {
            "admit": 8, "step": 16, "fork": 3, "cancel": 2, "preempt": 3, "evict": 4, "disturb": 2, "fault": 2, "time": 1,
            "broken": 2,
        }  # fmt: skip
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        self.operations.append(kind)
        getattr(self, kind)()
        audit(self.session.engine.pool)

    def admit(self) -> None:
        rng = self.rng
        if len(self.due) > 3 * LANES:
            self.step()
            return
        self.count += 1
        tokens, sampler = self.prompts.pick(), rng.choice(SAMPLERS)
        text = self.alone.lm.tokenizer.decode(self.alone(tokens, sampler).generated)
        at = rng.randrange(max(1, len(text)))
        request = Request(
            f"r{self.count}",
            tokens,
            rng.choice((0, 1, 2, STEPS)),
            sampler=sampler,
            stop=rng.choice(((), (), ("never said", text[at : at + rng.randint(1, 5)] or "x"))),
            eos=frozenset(rng.sample(range(256), rng.choice((0, 0, 30)))),
            samples=rng.choice((1, 1, 1, 3)),
            priority=rng.choice((0, 0, 1, 2)),
            deadline_s=rng.choice((None, None, None, 3.0)),
            publish=rng.random() < 0.6,
            witness=True,
        )
        self.operations[-1] += (
            f" {request.id}: {len(request.tokens)} tokens, {request.max_new_tokens} new, {request.samples} samples, "
            f"priority {request.priority}{', publish' if request.publish else ''}"
        )
        try:
            self.scheduler.submit(request)
        except CapacityError:
            assert len(request.tokens) + STEPS > (self.session.engine.pool.physical - 1) * 16
        else:
            self.due[request.id] = request.samples

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            for outcome in self.scheduler.step():
                self._verify(outcome)

    def broken(self) -> None:
        """A step in which the forward pass, or whoever listens, fails: it is told, and everything goes on."""
        self.failing = self.rng.choice(("forward", "token"))
        self.operations[-1] += f" {self.failing}"
        decoder = self.session.engine.decoder
        decoder.forward = self._failed if self.failing == "forward" else self._forward  # type: ignore[method-assign]
        ended: list[Outcome] = []
        with contextlib.suppress(Broken):
            ended = self.scheduler.step()
        self.failing = ""
        decoder.forward = self._forward  # type: ignore[method-assign]
        for outcome in ended:
            self._verify(outcome)

    def _failed(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        """Fails after it has written its rows."""
        self._forward(rows, storage)
        raise Broken("forward")

    def fork(self) -> None:
        decoding = [e for e in self.scheduler._running if e.state.value == "decoding" and e.outcome.generated]
        if not decoding:
            return
        origin = self.rng.choice(decoding).request.id
        self.count += 1
        self.operations[-1] += f" {origin} as r{self.count}"
        self.scheduler.fork(origin, f"r{self.count}", sampler=self.rng.choice((None, *SAMPLERS)))
        self.due[f"r{self.count}"] = 1

    def cancel(self) -> None:
        if self.due:
            chosen = self.rng.choice(sorted(self.due))
            self.operations[-1] += f" {chosen}"
            self.scheduler.cancel(chosen)

    def preempt(self) -> None:
        running = self.scheduler.running
        if running:
            chosen = self.rng.choice(running)
            self.operations[-1] += f" {chosen}"
            assert self.scheduler.preempt(chosen)

    def evict(self) -> None:
        rng, pool = self.rng, self.session.engine.pool
        names = [holder.id for holder in self.residency.snapshot().holders]
        if rng.random() < 0.3:
            self.residency.clear()
        elif rng.random() < 0.3 and names:
            assert self.residency.drop(rng.choice(names))
        else:
            pages = rng.randint(1, pool.physical)
            free = pool.free
            plan = self.residency.make_room(pages)
            self.operations[-1] += f" {pages} pages, {len(plan.evictions)} go"
            assert pool.free >= pages if plan.admissible else pool.free == free

    def disturb(self) -> None:
        self.operations[-1] = self.disturbed.disturb()

    def fault(self) -> None:
        self.disturbed.fail_next(self.rng.randint(1, 3))

    def time(self) -> None:
        self.now += 1.0

    def end(self) -> None:
        for _ in range(20_000):
            if self.scheduler.idle:
                break
            self.step()
            audit(self.session.engine.pool)
        assert self.scheduler.idle and not self.due, self.due
        self.residency.clear()
        self.scheduler.close()
        self.arrivals.close()
        stats = self.session.engine.pool.stats()
        assert (stats.free, stats.routes, stats.leases) == (stats.physical, 0, 0), stats

    def _token(self, token: Token) -> None:
        told = self.told.setdefault((token.request_id, token.sample), [])
        assert token.index == len(told)
        told.append(token)
        if self.failing == "token":
            raise Broken("listener")

    def _watched(self, entry: Any, finish: Finish, error: str = "") -> None:
        route = entry.held
        if route is not None:
            saved = self.session.engine.storage.save(route.pages, 0, route.length)
            self.left[entry.request.id, entry.sample] = (
                cache(saved.view(-1).view(torch.uint8).numpy(), self.alone.spec),
                route.floors,
            )
        self._ended(entry, finish, error)

    def _verify(self, outcome: Outcome) -> None:
        request, key = outcome.request, (outcome.request.id, outcome.sample)
        self.due[request.id] -= 1
        if not self.due[request.id]:
            del self.due[request.id]
        assert outcome.finish is not Finish.ERROR, outcome.error
        # Rows that a restore left out cannot be published; everything else is durable.
        assert not outcome.error or "left out" in outcome.error or REFUSED in outcome.error, outcome.error
        expected = self.alone(request.tokens, seeded(request.sampler, outcome.sample))
        n = len(outcome.generated)
        assert tuple(outcome.generated) == expected.generated[:n]
        assert tuple(row.tobytes() for row in outcome.logits) == expected.logits[:n]
        told = self.told.pop(key, [])
        assert [token.token for token in told] == outcome.generated
        text = self.alone.lm.tokenizer.decode(outcome.generated)
        said = "".join(token.text for token in told)
        assert outcome.text == text[: min([at for at in map(text.find, request.stop) if at >= 0], default=len(text))]
        assert said == outcome.text or (outcome.text.startswith(said) and outcome.finish in ENDED_FROM_OUTSIDE)
        if outcome.finish is Finish.LENGTH:
            assert n == request.max_new_tokens
        elif outcome.finish is Finish.STOP:
            assert outcome.text != text
        elif outcome.finish is Finish.EOS:
            assert outcome.generated[-1] in request.eos and not request.eos & set(outcome.generated[:-1])
        if outcome.finish in (Finish.LENGTH, Finish.EOS, Finish.STOP):
            assert outcome.computed + outcome.shared + outcome.restored == len(request.tokens)
            assert self.left[key][0].shape[2] == len(request.tokens) - 1 + n
        if key in self.left:
            found, floors = self.left.pop(key)
            assert same_rows(found, expected.kv, floors, self.alone.spec)
            whole = outcome.finish in (Finish.LENGTH, Finish.EOS, Finish.STOP) and not floors
            assert outcome.kv is None or outcome.kv.tobytes() == found.tobytes()
            assert outcome.kv is not None or not whole
