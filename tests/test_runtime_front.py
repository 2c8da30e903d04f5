"""The asynchronous front, over a scheduler that generates at once: order, cancellation, errors, threads and loops."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import pytest

from numem.errors import ClosedError, InputError, ModelError, RejectedError
from numem.runtime.front import Runtime
from numem.runtime.request import Finish, Outcome, Request, Token

T = TypeVar("T")


class Counting:
    """Generates 0, 1, 2, ... for every sample of every request, one token a step; counts its steps.

    A `gate` that is closed holds the runtime's thread in a step, as a long evaluation does.
    """

    def __init__(self, on_token: Callable[[Token], None]) -> None:
        self.on_token = on_token
        self.open: dict[tuple[str, int], Outcome] = {}
        self.ended: list[Outcome] = []
        self.steps = 0
        self.closed = False
        self.fail: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.thread = threading.current_thread()

    @property
    def idle(self) -> bool:
        return not self.open and not self.ended

    def submit(self, request: Request) -> None:
        assert threading.current_thread() is self.thread
        if not request.tokens:
            raise InputError(f"request {request.id!r}: the prompt is empty")
        for sample in range(request.samples):
            self.open[request.id, sample] = Outcome(request, sample)

    def cancel(self, request_id: str) -> bool:
        mine = [key for key in self.open if key[0] == request_id]
        for key in mine:
            outcome = self.open.pop(key)
            outcome.finish = Finish.CANCELLED
            self.ended.append(outcome)
        return bool(mine)

    def step(self) -> list[Outcome]:
        self.gate.wait()
        time.sleep(1e-4)
        self.steps += 1
        if self.fail is not None:
            raise self.fail
        for (request_id, sample), outcome in list(self.open.items()):
            index = len(outcome.generated)
            outcome.generated.append(index)
            self.on_token(Token(request_id, sample, index, index, f"{index} "))
            if index + 1 == outcome.request.max_new_tokens:
                self.ended.append(self.open.pop((request_id, sample)))
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.open.clear()
        self.closed = True


class Served:
    """A runtime and the scheduler that it made."""

    def __init__(self, **settings: Any) -> None:
        self.made: list[Counting] = []
        self.runtime = Runtime(cast(Any, self._make), **settings)

    def _make(self, on_token: Callable[[Token], None]) -> Counting:
        self.made.append(Counting(on_token))
        return self.made[0]

    @property
    def scheduler(self) -> Counting:
        return self.made[0]


def request(name: str, count: int = 5, **settings: Any) -> Request:
    return Request(name, (1, 2, 3), count, **settings)


def drive(main: Coroutine[Any, Any, T]) -> T:
    """Run in a loop of its own, with a limit that only a hang reaches."""

    async def limited() -> T:
        return await asyncio.wait_for(main, 60)

    return asyncio.run(limited())


async def read(stream: AsyncIterator[Token]) -> list[Token]:
    return [token async for token in stream]


def test_tokens_come_in_order_without_holes() -> None:
    async def main() -> None:
        served = Served()
        async with served.runtime as runtime:
            stream = runtime.stream(request("a", 50))
            tokens = await read(stream)
            assert [(t.request_id, t.sample, t.index, t.token) for t in tokens] == [("a", 0, i, i) for i in range(50)]
            (outcome,) = stream.outcomes
            assert outcome.finish == Finish.LENGTH and outcome.generated == list(range(50))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    drive(main())


def test_samples_come_mixed_and_end_in_order() -> None:
    async def main() -> None:
        async with Served().runtime as runtime:
            tokens = await read(runtime.stream(request("a", 4, samples=3)))
            for sample in range(3):
                assert [t.index for t in tokens if t.sample == sample] == list(range(4))
            outcomes = await runtime.complete(request("a", 4, samples=3))
            assert [o.sample for o in outcomes] == [0, 1, 2]

    drive(main())


def test_many_at_once() -> None:
    async def main() -> None:
        async with Served().runtime as runtime:
            counts = [1 + i % 17 for i in range(200)]
            found = await asyncio.gather(*(read(runtime.stream(request(str(i), n))) for i, n in enumerate(counts)))
            assert [[t.index for t in tokens] for tokens in found] == [list(range(n)) for n in counts]
            outcomes = await asyncio.gather(*(runtime.complete(request(str(i), n)) for i, n in enumerate(counts)))
            assert [o.request.id for (o,) in outcomes] == [str(i) for i in range(200)]

    drive(main())


def test_an_idle_thread_sleeps() -> None:
    async def main() -> None:
        served = Served()
        async with served.runtime as runtime:
            await runtime.complete(request("a"))
            steps = served.scheduler.steps
            await asyncio.sleep(0.2)
            assert served.scheduler.steps == steps

    drive(main())


def test_leaving_the_loop_early_cancels() -> None:
    async def main() -> None:
        served = Served()
        async with served.runtime as runtime:
            async for token in runtime.stream(request("a", 10**9)):
                if token.index == 3:
                    break
            gc.collect()
            # The id is free again once the cancellation has gone through.
            await asyncio.to_thread(runtime.call, lambda _: None)
            (outcome,) = await runtime.complete(request("a", 2))
            assert outcome.finish == Finish.LENGTH
            assert served.scheduler.idle

    drive(main())


def test_a_named_stream_is_closed_by_its_context() -> None:
    async def main() -> None:
        served = Served()
        async with served.runtime as runtime, runtime.stream(request("a", 10**9)) as stream:
            async for _ in stream:
                break
            await stream.aclose()
            (outcome,) = await stream.result()
            assert outcome.finish == Finish.CANCELLED and 0 < len(outcome.generated) < 10**9

    drive(main())


@pytest.mark.parametrize("how", ["stream", "complete"])
def test_cancelling_a_task_cancels_its_request(how: str) -> None:
    async def main() -> None:
        served = Served()
        async with served.runtime as runtime:
            started = asyncio.Event()

            async def reader() -> None:
                started.set()
                if how == "complete":
                    await runtime.complete(request("a", 10**9))
                async for _ in runtime.stream(request("a", 10**9)):
                    pass

            task = asyncio.create_task(reader())
            await started.wait()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            await asyncio.to_thread(runtime.call, lambda _: None)
            assert await asyncio.to_thread(runtime.call, lambda scheduler: scheduler.idle)

    drive(main())


def test_cancel_by_name() -> None:
    async def main() -> None:
        async with Served().runtime as runtime:
            waiting = asyncio.create_task(runtime.complete(request("a", 10**9)))
            await asyncio.sleep(0.01)
            assert runtime.cancel("a")
            (outcome,) = await waiting
            assert outcome.finish == Finish.CANCELLED
            assert not runtime.cancel("a") and not runtime.cancel("never")

    drive(main())


def test_an_abandoned_stream_does_not_cancel_its_successor() -> None:
    async def main() -> None:
        async with Served().runtime as runtime:
            first = runtime.stream(request("a", 2))
            await read(first)
            second = asyncio.create_task(read(runtime.stream(request("a", 2000))))
            await asyncio.sleep(0)
            await first.aclose()
            del first
            assert len(await second) == 2000

    drive(main())


def test_a_slow_reader_delays_nobody() -> None:
    async def main() -> None:
        async with Served().runtime as runtime:
            slow = runtime.stream(request("slow", 300))
            first = await anext(slow)
            (outcome,) = await runtime.complete(request("quick", 1000))
            assert len(outcome.generated) == 1000
            rest = await read(slow)
            assert [t.index for t in [first, *rest]] == list(range(300))

    drive(main())


def test_a_refused_request_tells_its_caller_alone() -> None:
    async def main() -> None:
        async with Served().runtime as runtime:
            other = asyncio.create_task(runtime.complete(request("b", 500)))
            with pytest.raises(InputError, match="'a'"):
                await runtime.complete(Request("a", (), 3))
            with pytest.raises(InputError, match="'a'"):
                await read(runtime.stream(Request("a", (), 3)))
            assert len((await other)[0].generated) == 500

    drive(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": 7}, {"id": b"r"}, {"id": "\ud800"}, {"tokens": None}, {"tokens": "abc"}, {"max_new_tokens": 1.5},
        {"max_new_tokens": "3"}, {"samples": 1.5}, {"samples": True}, {"priority": "high"}, {"deadline_s": "1"},
        {"sampler": None}, {"eos": None}, {"eos": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_request_of_wrong_types_is_refused_before_it_can_end_the_others(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="^request "):
        Request(**{"id": "r", "tokens": (1, 2), "max_new_tokens": 3, **wrong})


def test_ids_and_the_queue_are_bounded() -> None:
    async def main() -> None:
        served = Served(queue=3)
        async with served.runtime as runtime:
            served.scheduler.gate.clear()
            streams = [runtime.stream(request(str(i))) for i in range(3)]
            with pytest.raises(InputError, match="'2'"):
                runtime.stream(request("2"))
            with pytest.raises(RejectedError, match="3 requests are open") as caught:
                runtime.stream(request("3"))
            assert caught.value.code == "submission-queue"
            served.scheduler.gate.set()
            assert [len(await read(stream)) for stream in streams] == [5, 5, 5]
            assert len(await read(runtime.stream(request("3")))) == 5

    drive(main())


def test_a_failure_of_the_thread_reaches_everybody() -> None:
    async def main() -> None:
        served = Served()
        async with served.runtime as runtime:
            served.scheduler.gate.clear()
            waiting = [asyncio.create_task(runtime.complete(request(str(i)))) for i in range(3)]
            waiting.append(asyncio.create_task(read(runtime.stream(request("s")))))  # type: ignore[arg-type]  # as one
            blocked = asyncio.create_task(asyncio.to_thread(runtime.run, request("r")))
            await asyncio.sleep(0.05)
            served.scheduler.fail = ValueError("the weights\nare gone")
            served.scheduler.gate.set()
            for task in (*waiting, blocked):
                with pytest.raises(ModelError, match="ValueError: the weights are gone") as caught:
                    await task
                assert caught.value.__cause__ is served.scheduler.fail
            with pytest.raises(ModelError, match="the weights"):
                await runtime.complete(request("later"))
            with pytest.raises(ModelError, match="the weights"):
                runtime.call(lambda _: None)
            assert served.scheduler.closed

    drive(main())


def test_a_scheduler_that_cannot_be_made() -> None:
    def refuse(_: Callable[[Token], None]) -> Any:
        raise InputError("no lanes")

    with pytest.raises(InputError, match="no lanes"), Runtime(refuse):
        pass


def test_leaving_ends_everything_as_cancelled() -> None:
    async def main() -> None:
        served = Served()
        async with served.runtime as runtime:
            stream = runtime.stream(request("s", 10**9))
            completing = asyncio.create_task(runtime.complete(request("c", 10**9, samples=2)))
            await anext(stream)
        outcomes = [*(await completing), *(await stream.result())]
        assert [o.finish for o in outcomes] == [Finish.CANCELLED] * 3
        assert served.scheduler.closed and not served.scheduler.thread.is_alive()
        with pytest.raises(ClosedError):
            runtime.stream(request("late"))
        with pytest.raises(ClosedError):
            await runtime.complete(request("late"))
        with pytest.raises(ClosedError):
            async with runtime:
                pass
        assert not runtime.cancel("s")

    drive(main())


def test_a_runtime_that_was_not_entered() -> None:
    runtime = Served().runtime
    with pytest.raises(ClosedError, match="with"):
        runtime.run(request("a"))
    runtime.close()


def test_several_loops_and_plain_threads() -> None:
    served = Served()
    with served.runtime as runtime:

        def loop(name: str) -> list[int]:
            async def main() -> list[int]:
                streams = [read(runtime.stream(request(f"{name}{i}", 40 + i))) for i in range(5)]
                return [len(tokens) for tokens in await asyncio.gather(*streams)]

            return drive(main())

        def plain(name: str) -> list[int]:
            return [len(runtime.run(request(f"{name}{i}", 40 + i))[0].generated) for i in range(5)]

        with ThreadPoolExecutor(6) as pool:
            tasks = [pool.submit(loop, f"l{i}-") for i in range(3)] + [pool.submit(plain, f"p{i}-") for i in range(3)]
            assert [task.result(60) for task in tasks] == [[40, 41, 42, 43, 44]] * 6
        assert served.scheduler.idle


def test_a_loop_that_was_closed_over_its_stream() -> None:
    served = Served()
    with served.runtime as runtime:
        kept = []

        async def main() -> None:
            kept.append(runtime.stream(request("a", 10**9)))
            await anext(kept[0])
            # A reader that never comes back: its loop is closed while it waits.
            kept.append(asyncio.ensure_future(read(kept[0])))  # type: ignore[arg-type]  # kept alive
            await asyncio.sleep(0)

        drive(main())
        (outcome,) = runtime.run(request("b", 100))
        assert outcome.finish == Finish.LENGTH
        assert served.runtime.call(lambda scheduler: scheduler.idle)


def test_a_call_runs_between_iterations() -> None:
    with Served().runtime as runtime:
        assert runtime.call(lambda _: threading.current_thread().name) == "numem-runtime"
        with pytest.raises(ZeroDivisionError):
            runtime.call(lambda _: 1 // 0)
        assert runtime.run(request("a", 1))[0].generated == [0]
