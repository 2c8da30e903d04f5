"""Eight lanes against one, what a step costs beside the model, and what publication takes from decoding."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from numem.bench.core import temporary_memory
from numem.bench.pairs import figure, interleaved, median_ms, ratios
from numem.bench.text import tokens
from numem.runtime.continuation import Session
from numem.runtime.engine import Decoder, Rows, pages_for_lanes
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.pages import PageStorage
from numem.runtime.paging.residency import Residency
from numem.runtime.request import Request, Token

if TYPE_CHECKING:
    from numem.models.lm import LM
    from numem.store.memory import Memory

LANES = 8
BARS = {"lanes8_vs_1": 4, "one_lane_vs_core": 1, "step_overhead_us": 200, "publish_cost": 0.05}


class Clocked:
    """A decoder that sums the time of its forward passes.

    Attributes:
        seconds: of all passes so far.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.spec = decoder.spec
        self.kv_heads, self.head_dim = decoder.kv_heads, decoder.head_dim
        self.vocab, self.max_position = decoder.vocab, decoder.max_position
        self.device, self.max_rows = decoder.device, decoder.max_rows
        self.seconds = 0.0
        self._forward = decoder.forward

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        began = time.perf_counter()
        out = self._forward(rows, storage)
        self.seconds += time.perf_counter() - began
        return out


def prompts(lm: "LM", count: int, length: int) -> list[list[int]]:
    """Prompts of English text that have no token in common from the first on."""
    text = tokens(lm.tokenizer, length + 32 * count)
    first = len(lm.tokenizer.encode("a"))  # any small number of ids; they only have to differ
    return [[first + n, *text[32 * n : 32 * n + length - 1]] for n in range(count)]


def lanes(lm: "LM", prompt: int, steps: int, pairs: int) -> dict[str, Any]:
    """`lanes8_vs_1`: decode tokens/s of eight lanes over that of one. `one_lane_vs_core`: speed of one lane over that of
    the decode loop of `numem bench core`. `step_overhead_us`: time of a step of eight lanes outside the forward pass.

    The prompts' rows are resident; only steps in which every lane decodes are timed. The three take turns.
    """
    texts = prompts(lm, LANES, prompt)
    session = lm.session(pages=pages_for_lanes(3 * LANES, prompt + steps + 2 * LANES))
    engine, pool = session.engine, session.engine.pool
    clocked = engine.decoder = Clocked(engine.decoder)
    residency = Residency(engine)
    for n, text in enumerate(texts):
        route = pool.allocate()
        engine.append([(route, text)], logits="none")
        residency.retain(f"prompt {n}", route, text, durable=False, pinned=True)
    outside: list[float] = []
    took: dict[int, list[float]] = {1: [], LANES: []}

    def decode(count: int) -> None:
        step_s, forward_s = _decode(session, residency, clocked, texts[:count], steps)
        took[count].append(sum(step_s))
        if count == LANES:
            outside.extend((step - forward) * 1e6 for step, forward in zip(step_s, forward_s, strict=True))

    core: list[float] = []

    def loop() -> None:
        route = pool.fork(*_kept(residency, texts[0]))
        token = texts[0][-1:]
        for _ in range(2):  # as many steps as a lane takes before it is timed
            token = [int(engine.append([(route, token)])[0].argmax())]
        began = time.perf_counter()
        for _ in range(steps):
            token = [int(engine.append([(route, token)])[0].argmax())]
        core.append(time.perf_counter() - began)
        engine.release(route)

    interleaved({"lanes8": lambda: decode(LANES), "lane1": lambda: decode(1), "core": loop}, pairs)
    residency.clear()
    one, eight, core, outside = took[1][1:], took[LANES][1:], core[1:], outside[steps:]
    speed = [LANES * slow / fast for slow, fast in zip(one, eight, strict=True)]
    return {
        "lanes8_vs_1": figure(
            speed,
            least=BARS["lanes8_vs_1"],
            prompt=prompt,
            steps=steps,
            tokens_per_s_8=round(LANES * steps / median_ms(eight) * 1e3, 2),
            tokens_per_s_1=round(steps / median_ms(one) * 1e3, 2),
        ),
        "one_lane_vs_core": figure(
            ratios(core, one),
            least=BARS["one_lane_vs_core"],
            tokens_per_s_core=round(steps / median_ms(core) * 1e3, 2),
        ),
        "step_overhead_us": figure(
            outside, most=BARS["step_overhead_us"], step_ms=round(median_ms(eight) / steps, 3), lanes=LANES
        ),
    }


def _kept(residency: Residency, text: Sequence[int]) -> Any:
    found = residency.match(text[:-1])
    if found is None:
        raise RuntimeError("bench: a pinned prompt is not resident")
    return found


def _decode(
    session: Session, residency: Residency, clocked: Clocked, texts: Sequence[Sequence[int]], steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of each of `steps` steps in which all lanes decode, whole and in the forward pass."""
    begun: set[str] = set()
    scheduler = Scheduler(session, len(texts), residency=residency, on_token=lambda token: begun.add(token.request_id))
    for n, text in enumerate(texts):
        scheduler.submit(Request(f"{n}", tuple(text), steps + 2 * len(texts) + 2))
    while len(begun) < len(texts):
        scheduler.step()
    scheduler.step()
    whole, inside = [], []
    for _ in range(steps):
        before, began = clocked.seconds, time.perf_counter()
        scheduler.step()
        whole.append(time.perf_counter() - began)
        inside.append(clocked.seconds - before)
    scheduler.residency = None  # what these lanes generated is not kept
    scheduler.close()
    return whole, inside


def publishing(lm: "LM", prompt: int, new: int, count: int, pairs: int) -> dict[str, Any]:
    """`publish_cost`: part of the time until the last token that is lost where every sequence is published as it ends.

    `count` requests over eight lanes, all chunks of the prompts included, into a memory that is empty at first on both
    sides; lengths differ, so that sequences end, and are published, while others decode. `drain_ms` is the time from the
    last token until everything is durable, `decode_ratio` that of the mean time of a decoded token.
    """
    texts = prompts(lm, count, prompt)
    lengths = [max(2, new // 2 + new * (n % LANES) // LANES) for n in range(count)]
    session = lm.session(pages=pages_for_lanes(2 * LANES, prompt + max(lengths)))
    until: dict[bool, list[float]] = {False: [], True: []}
    decoded: dict[bool, list[float]] = {False: [], True: []}
    drain: list[float] = []

    def stream(publish: bool) -> None:
        with temporary_memory() as memory:
            last_s, ended_s, token_ms = _stream(session, memory, texts, lengths, publish)
        until[publish].append(last_s)
        decoded[publish].append(token_ms)
        if publish:
            drain.append((ended_s - last_s) * 1e3)

    interleaved({"kept": lambda: stream(False), "published": lambda: stream(True)}, pairs)
    without, given = until[False][1:], until[True][1:]
    return {
        "publish_cost": figure(
            [1 - a / b for a, b in zip(without, given, strict=True)],
            most=BARS["publish_cost"],
            requests=count,
            prompt=prompt,
            new_tokens=lengths,
            without_s=[round(value, 3) for value in without],
            published_s=[round(value, 3) for value in given],
            drain_ms=[round(value, 1) for value in drain[1:]],
            decode_ratio=[round(b / a, 3) for a, b in zip(decoded[False][1:], decoded[True][1:], strict=True)],
        )
    }


def _stream(
    session: Session, memory: "Memory", texts: Sequence[Sequence[int]], lengths: Sequence[int], publish: bool
) -> tuple[float, float, float]:
    """Seconds until the last token and until everything has ended, and ms per decoded token."""
    told = [0.0]

    def on_token(token: Token) -> None:
        told[0] = time.perf_counter()

    scheduler = Scheduler(session, LANES, memory=memory, share=False, on_token=on_token)
    requests = [
        Request(f"{n}", tuple(text), length, publish=publish)
        for n, (text, length) in enumerate(zip(texts, lengths, strict=True))
    ]
    began = time.perf_counter()
    failed = [outcome.error for outcome in scheduler.run(requests) if outcome.error]
    ended = time.perf_counter()
    scheduler.close()
    if failed:
        raise RuntimeError(f"bench: publication failed: {failed[0]}")
    return told[0] - began, ended - began, scheduler.decode_ms / max(1, scheduler.decode_tokens)
