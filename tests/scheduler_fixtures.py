"""What the scheduler's tests share: prompts, a pool that is looked at after every step, and runs alone."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from numem import LM
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.request import Outcome, Request


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(length: int, seed: int = 0, vocab: int = 256) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, vocab, length))


def check(scheduler: Scheduler) -> None:
    """Every page is free, held or set aside, and counted right."""
    pool = scheduler.engine.pool
    stats = pool.stats()
    assert stats.free + stats.resident + stats.reserved == stats.physical
    pool.check()


def step(scheduler: Scheduler, times: int = 1) -> list[Outcome]:
    ended = []
    for _ in range(times):
        ended += scheduler.step()
        check(scheduler)
    return ended


def drive(scheduler: Scheduler, requests: Iterable[Request] = ()) -> dict[str, Outcome]:
    """Submit and step to the end; outcomes by id, or id#sample where a request has several."""
    for request in requests:
        scheduler.submit(request)
    outcomes = {}
    for _ in range(20_000):
        if scheduler.idle:
            break
        for o in step(scheduler):
            outcomes[o.request.id if o.request.samples == 1 else f"{o.request.id}#{o.sample}"] = o
    assert scheduler.idle
    return outcomes


def same_as_alone(lm: LM, outcome: Outcome) -> None:
    """Tokens, logits and cache bytes of a witness are those of a plain continuation, and every row has one source."""
    request = outcome.request
    sampler = replace(request.sampler, seed=request.sampler.seed + outcome.sample)
    assert outcome.computed + outcome.shared + outcome.restored == len(request.tokens)
    assert not outcome.error
    with lm.session(pages=-(-len(request.tokens) // 16) + 20).start(request.tokens) as c:
        logits = []
        for token in outcome.generated:
            assert c.step(sampler) == token
            assert c.logits is not None
            logits.append(c.logits.tobytes())
        assert [row.tobytes() for row in outcome.logits] == logits
        assert outcome.kv is not None and outcome.kv.tobytes() == c.kv().tobytes()


def empty(scheduler: Scheduler) -> None:
    """Nothing is held, set aside or leased."""
    stats = scheduler.engine.pool.stats()
    assert (stats.free, stats.routes, stats.leases, stats.reserved) == (stats.physical, 0, 0, 0)
