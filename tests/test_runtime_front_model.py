"""The asynchronous front over a model: what is streamed is what the model says alone, and every page comes back."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numem import LM, Memory
from numem.errors import ModelError
from numem.models.conversation import Conversation
from numem.runtime.continuation import Session
from numem.runtime.engine import Rows, pages_for_lanes
from numem.runtime.front import Runtime
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.pages import PageStorage
from numem.runtime.request import Finish, Request, Token
from numem.runtime.sampling import Sampler


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, 256, length))


@contextmanager
def serving(lm: LM, lanes: int = 4, **settings: Any) -> Iterator[tuple[Runtime, Session]]:
    """A runtime without kept pages; afterwards every page must be free."""
    session = lm.session(pages=pages_for_lanes(lanes, 200), debug=True)

    def make(on_token: Callable[[Token], None]) -> Scheduler:
        return Scheduler(session, lanes, detokenize=lm.tokenizer.stream, on_token=on_token, **settings)

    with Runtime(make) as runtime:
        yield runtime, session
    free(session)


def free(session: Session) -> None:
    stats = session.engine.pool.stats()
    assert (stats.free, stats.resident, stats.reserved, stats.routes, stats.leases) == (stats.physical, 0, 0, 0, 0)
    session.engine.pool.check()


def settled(runtime: Runtime, session: Session) -> None:
    """All pages are free while the runtime goes on; a cancellation takes effect before anything that is asked later."""
    for _ in range(2):
        runtime.call(lambda _: None)
    runtime.call(lambda _: free(session))


def alone(lm: LM, request: Request) -> list[int]:
    with lm.start(request.tokens) as c:
        out: list[int] = []
        while len(out) < request.max_new_tokens and not (out and out[-1] in request.eos):
            out.append(c.step(request.sampler))
        return out


def test_many_streams_are_each_as_if_alone(tiny_lm: LM) -> None:
    requests = [
        Request(str(i), prompt(3 + 13 * i, i), 5 + 2 * i, Sampler(temperature=0.7 * (i % 2), seed=i)) for i in range(10)
    ]

    async def main(runtime: Runtime) -> None:
        async def read(request: Request) -> tuple[list[Token], str]:
            stream = runtime.stream(request)
            tokens = [token async for token in stream]
            return tokens, stream.outcomes[0].text

        found = await asyncio.gather(*(read(request) for request in requests))
        for request, (tokens, text) in zip(requests, found, strict=True):
            expected = alone(tiny_lm, request)
            assert [t.token for t in tokens] == expected
            assert [t.index for t in tokens] == list(range(len(expected)))
            assert "".join(t.text for t in tokens) == text == tiny_lm.tokenizer.decode(expected)

    with serving(tiny_lm) as (runtime, _):
        asyncio.run(main(runtime))


def test_leaving_early_frees_the_pages(tiny_lm: LM) -> None:
    async def main(runtime: Runtime) -> None:
        async for token in runtime.stream(Request("a", prompt(40), 150)):
            if token.index == 2:
                break
        gc.collect()

    with serving(tiny_lm) as (runtime, session):
        asyncio.run(main(runtime))
        settled(runtime, session)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.01, 0.03])
def test_a_cancelled_task_frees_the_pages(tiny_lm: LM, delay_s: float) -> None:
    """At any moment: before admission, while the prompt arrives, while tokens come."""

    async def main(runtime: Runtime) -> None:
        async def read() -> None:
            async with runtime.stream(Request("a", prompt(150), 50)) as stream:
                async for _ in stream:
                    pass
                await asyncio.Event().wait()

        task = asyncio.create_task(read())
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(tiny_lm) as (runtime, session):
        asyncio.run(main(runtime))
        settled(runtime, session)


def test_leaving_while_streaming(tiny_lm: LM) -> None:
    with serving(tiny_lm, 2) as (runtime, _):

        async def main() -> None:
            streams = [runtime.stream(Request(str(i), prompt(30, i), 120)) for i in range(4)]
            first = await anext(streams[0])
            assert first.index == 0
            await asyncio.to_thread(runtime.close)
            for stream in streams:
                (outcome,) = await stream.result()
                assert outcome.finish == Finish.CANCELLED or len(outcome.generated) == 120
                assert outcome.generated == alone(tiny_lm, outcome.request)[: len(outcome.generated)]

        asyncio.run(main())


def test_two_loops_and_a_thread(tiny_lm: LM) -> None:
    requests = [Request(f"{i}", prompt(20 + i, i), 12) for i in range(3)]
    found: dict[str, list[int]] = {}
    with serving(tiny_lm) as (runtime, _):

        def loop(request: Request) -> None:
            async def main() -> list[int]:
                return [token.token async for token in runtime.stream(request)]

            found[request.id] = asyncio.run(main())

        def plain(request: Request) -> None:
            found[request.id] = runtime.run(request)[0].generated

        threads = [
            threading.Thread(target=target, args=(request,))
            for target, request in zip((loop, loop, plain), requests, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {request.id: alone(tiny_lm, request) for request in requests}


def test_a_deadline_ends_a_stream(tiny_lm: LM) -> None:
    """Whatever has come by then has come; the clock goes by the rows that the model has computed."""
    sessions: list[Session] = []

    async def main(runtime: Runtime) -> None:
        stream = runtime.stream(Request("a", prompt(10), 150, deadline_s=15.0))
        tokens = [token.token async for token in stream]
        (outcome,) = stream.outcomes
        assert outcome.finish == Finish.DEADLINE
        assert tokens == outcome.generated and 1 < len(tokens) < 10

    with serving(tiny_lm, clock=lambda: float(sum(s.engine.rows_computed for s in sessions))) as (runtime, session):
        sessions.append(session)
        asyncio.run(main(runtime))
        settled(runtime, session)


def test_a_stop_string_ends_a_stream(tiny_lm: LM) -> None:
    """Nothing of the stop string is told, also where it lies across tokens."""
    ids = alone(tiny_lm, Request("a", prompt(25), 40))
    text = tiny_lm.tokenizer.decode(ids)
    stop = text[11:14]
    assert len(stop) == 3

    async def main(runtime: Runtime) -> None:
        stream = runtime.stream(Request("a", prompt(25), 40, stop=(stop, "never said")))
        told = [token.text async for token in stream]
        (outcome,) = stream.outcomes
        assert outcome.finish == Finish.STOP
        assert "".join(told) == outcome.text == text[: text.index(stop)]
        assert outcome.generated == ids[: len(outcome.generated)]

    with serving(tiny_lm) as (runtime, _):
        asyncio.run(main(runtime))


def test_a_failing_model_reaches_everybody(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    forward = tiny_lm.decoder.forward

    def failing(rows: Rows, storage: PageStorage) -> Any:
        calls[0] += 1
        if calls[0] > 6:
            raise MemoryError("no activations")
        return forward(rows, storage)

    async def main(runtime: Runtime) -> Sequence[object]:
        requests = [Request(str(i), prompt(20, i), 50) for i in range(6)]
        return await asyncio.gather(*(runtime.complete(r) for r in requests), return_exceptions=True)

    with serving(tiny_lm) as (runtime, _):
        monkeypatch.setattr(tiny_lm.decoder, "forward", failing)
        found = asyncio.run(main(runtime))
        assert len(found) == 6
        for error in found:
            assert isinstance(error, ModelError) and isinstance(error.__cause__, MemoryError)


def test_the_models_own_runtime(tiny_lm: LM, memory: Memory) -> None:
    """Published by one runtime and open to the next; ended sequences stay for those that begin alike."""
    first = Request("a", prompt(300), 8, publish=True)

    async def main() -> None:
        async with tiny_lm.runtime(lanes=2, memory=memory, tokens=400) as runtime:
            (outcome,) = await runtime.complete(first)
            assert outcome.finish == Finish.LENGTH and not outcome.error
            assert outcome.computed + outcome.restored == 300
            assert outcome.generated == alone(tiny_lm, first)
            second = Request("b", (*first.tokens, *outcome.generated, 5), 4)
            (follower,) = await runtime.complete(second)
            assert follower.shared == len(first.tokens) + 7
            assert follower.generated == alone(tiny_lm, second)

    asyncio.run(main())
    assert sum(node.count for node in memory.nodes()) == 307
    asyncio.run(main())


def test_the_interpreter_may_end_while_a_runtime_runs(tiny_dir: Path) -> None:
    code = (
        "import asyncio, sys, numem\n"
        "runtime = numem.load_lm(sys.argv[1]).runtime(lanes=2).__enter__()\n"
        "stream = runtime.stream(numem.Request('x', (3, 4, 5), 200))\n"
        "asyncio.run(stream.__anext__())\n"
    )
    command = [sys.executable, "-c", code, str(tiny_dir)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_leaving_waits_for_what_is_being_published(tiny_lm: LM, memory: Memory) -> None:
    """A sequence that has ended when the runtime is left keeps its outcome, and its state becomes durable."""

    async def main() -> None:
        async with tiny_lm.runtime(lanes=2, memory=memory, tokens=400) as runtime:
            stream = runtime.stream(Request("a", prompt(40), 5, publish=True))
            async for token in stream:
                if token.index == 4:
                    await asyncio.to_thread(runtime.close)
        (outcome,) = stream.outcomes
        assert outcome.finish == Finish.LENGTH and not outcome.error and len(outcome.generated) == 5

    asyncio.run(main())
    assert sum(node.count for node in memory.nodes()) == 44


def test_a_conversation_over_a_runtime(tiny_lm: LM) -> None:
    """The second turn shares every row of the first: prime-rl#1863."""
    with tiny_lm.runtime(lanes=2, tokens=400) as runtime, Conversation(tiny_lm, max_new_tokens=12) as own:
        chat = Conversation(tiny_lm, runtime, max_new_tokens=12)
        for text in ("One?\n\n", "\n\nTwo?"):
            assert chat.say(text) == own.say(text)
        assert chat.tokens == own.tokens

        def kept(scheduler: Scheduler) -> int:
            assert scheduler.residency is not None
            found = scheduler.residency.match(chat.tokens)
            return 0 if found is None else found[1]

        assert runtime.call(kept) == len(chat.tokens) - 1
