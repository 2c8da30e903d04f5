"""Restore, recompute, or both at once: on a simulated clock with exact costs, and for real on a throttled tier."""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numem.bench.core import temporary_memory
from numem.bench.pairs import figure, interleaved, median_ms
from numem.bench.text import tokens
from numem.identity.chain import CHUNK_TOKENS, plan
from numem.policy.costs import Costs
from numem.policy.decision import Decision, regret
from numem.policy.two_ended import Piece, simulate
from numem.runtime.continuation import Session
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.request import Request
from numem.runtime.restore.arrivals import Arrivals

if TYPE_CHECKING:
    from numem.models.lm import LM
    from numem.store.memory import Memory

# Time to load all rows, as a multiple of the time to compute them.
SPEEDS = (0.1, 0.5, 1.0, 2.0, 10.0)
LENGTHS = (1, 2, 3, 8)  # multiples of the shortest
REAL = ((1, 0.5), (1, 1.0), (1, 2.0), (2, 1.0))
FORCED = ("recompute", "restore", "two-ended")
DEFAULT = "measured"
BARS = {"two_ended_worst_ratio": 1.05, "two_ended_worst_ratio_real": 1.15, "policy_regret": 0.10}


class Throttled:
    """A memory whose reads take as long as a slow device would: one at a time, at `bytes_per_s`."""

    def __init__(self, memory: "Memory", bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._memory = memory
        self._device = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def read(self, requests: Sequence[tuple[bytes, np.ndarray]], **options: Any) -> Any:
        with self._device:
            began = time.perf_counter()
            result = self._memory.read(requests, **options)
            time.sleep(max(0.0, result.bytes / self.bytes_per_s - (time.perf_counter() - began)))
        return result


class Chosen:
    """Keeps the choice of the last decision; writes nothing down."""

    choice = ""

    def record(self, decision: Decision) -> str:
        self.choice = decision.choice
        return ""

    def outcome(self, decision_id: str, cost_ms: float, **terms: Any) -> None:
        """Measured costs are taken from the runs themselves."""


def restoring(lm: "LM", shortest: int, pairs: int) -> dict[str, Any]:
    """`two_ended_worst_ratio`: time of a two-ended restore over that of the better of restore and recompute, the worst
    of 20 mixes of length and tier speed on a simulated clock; `two_ended_worst_ratio_real` the worst of 4 of them
    executed. `policy_regret`: regret of the default policy over the executed alternatives, the worst of the 4.
    """
    simulated = simulated_mixes(shortest)
    worst = max(simulated, key=lambda mix: mix["ratio"])
    executed = executed_mixes(lm, shortest, pairs)
    slowest = max(executed, key=lambda mix: mix["ratio"]["median"])
    regretted = max(executed, key=lambda mix: float(mix["regret"]["median"]))
    return {
        "two_ended_worst_ratio": figure([worst["ratio"]], most=BARS["two_ended_worst_ratio"], mixes=simulated),
        "two_ended_worst_ratio_real": {**slowest["ratio"], "mixes": executed},
        "policy_regret": regretted["regret"],
    }


def simulated_mixes(shortest: int) -> list[dict[str, Any]]:
    """Every length with every speed, on a clock on which costs are exact: a token costs 1 ms and more with its position,
    as attention does; writing a chunk into pages costs a hundredth of computing it."""

    def prefill_ms(start: int, count: int) -> float:
        return count * (1 + (2 * start + count) / 2 / 4096)

    out = []
    for times in LENGTHS:
        for speed in SPEEDS:
            rows = shortest * times
            load = speed * prefill_ms(0, rows) / rows
            pieces = [
                Piece(at, min(at + CHUNK_TOKENS, rows), load * min(CHUNK_TOKENS, rows - at), 0.01 * CHUNK_TOKENS)
                for at in range(0, rows, CHUNK_TOKENS)
            ]
            ms = {policy: simulate(policy, pieces, prefill_ms).ms for policy in FORCED}
            ratio = ms["two-ended"] / min(ms["recompute"], ms["restore"])
            mix = {"tokens": rows, "load_vs_compute": speed, "ratio": round(ratio, 4)}
            out.append({**mix, **{f"{policy}_ms": round(value, 2) for policy, value in ms.items()}})
    return out


def executed_mixes(lm: "LM", shortest: int, pairs: int) -> list[dict[str, Any]]:
    """Time to first token of each forced policy and of the default, in turns, per mix; costs are learnt anew in each."""
    longest = shortest * max(times for times, _ in REAL)
    text = tokens(lm.tokenizer, longest + 1)
    session = lm.session(pages=2 * (longest // 16 + 4))
    out = []
    with temporary_memory() as memory:
        with session.start(text) as continuation:
            continuation.publish(memory).wait()
        memory.promote([chunk.id for chunk in plan(lm.identity.scope, text, longest)], "ssd")
        for times, speed in REAL:
            prompt = text[: shortest * times + 1]
            out.append(
                {"tokens": len(prompt) - 1, "load_vs_compute": speed, **_mix(session, memory, prompt, speed, pairs)}
            )
    return out


def _mix(session: Session, memory: "Memory", prompt: Sequence[int], speed: float, pairs: int) -> dict[str, Any]:
    costs = Costs()
    with Arrivals(session, None, policy="recompute", costs=costs) as arrivals:
        compute_s = min(_first_token(session, arrivals, prompt) for _ in range(2))
    nbytes = (len(prompt) - 1) * session.engine.decoder.spec.row_bytes
    slow: Any = Throttled(memory, nbytes / (speed * compute_s))
    chosen: Any = Chosen()
    choices: list[str] = []
    ways = {
        policy: Arrivals(session, slow, tier="ssd", policy=policy, costs=costs, decisions=chosen)
        for policy in (*FORCED, DEFAULT)
    }

    def run(policy: str) -> None:
        _first_token(session, ways[policy], prompt)
        if policy == DEFAULT:
            choices.append(chosen.choice)

    try:
        # A tier is read once before anything is known of it; what is measured here is what follows.
        run("restore")
        seconds = interleaved({policy: lambda policy=policy: run(policy) for policy in ways}, pairs)  # type: ignore[misc]
    finally:
        for arrivals in ways.values():
            arrivals.close()
    rounds = [dict(zip(seconds, values, strict=True)) for values in zip(*seconds.values(), strict=True)]
    # The better one is told by its median: the smallest of several noisy samples is below all of them.
    medians = {policy: median_ms(values) for policy, values in seconds.items()}
    better = min(("recompute", "restore"), key=medians.__getitem__)
    best = min(medians, key=medians.__getitem__)
    return {
        "ratio": figure([r["two-ended"] / r[better] for r in rounds], most=BARS["two_ended_worst_ratio_real"]),
        "regret": figure(
            [1 - r[best] / r[DEFAULT] for r in rounds],
            most=BARS["policy_regret"],
            of_medians=round(regret(medians, DEFAULT), 4),
        ),
        "better": better,
        "best": best,
        "choices": choices[1:],
        "ms": {policy: [round(value * 1e3, 1) for value in values] for policy, values in seconds.items()},
    }


def _first_token(session: Session, arrivals: Arrivals, prompt: Sequence[int]) -> float:
    """Seconds from a request to its first token."""
    scheduler = Scheduler(session, 1, arrivals=arrivals, share=False)
    began = time.perf_counter()
    for outcome in scheduler.run([Request("r", tuple(prompt), 1)]):
        if outcome.error:
            raise RuntimeError(f"bench: {outcome.error}")
    took = time.perf_counter() - began
    scheduler.close()
    return took
