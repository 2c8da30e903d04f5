"""Several runtimes behind one front: where requests go, and that it changes nothing."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from numem import LM, Memory, load_lm
from numem.errors import ClosedError, InputError, ModelError
from numem.job.batch import make_batch
from numem.job.decode import decode
from numem.job.prompts import Prompt
from numem.job.settings import Decoding
from numem.job.several import Several
from numem.runtime.device.fleet import Fleet
from numem.runtime.front import Runtime
from numem.runtime.request import Finish, Request
from numem.runtime.sampling import Sampler
from tests.test_runtime_front import Counting


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, 256, length))


@pytest.fixture
def two(tiny_dir: Path, tiny_lm: LM) -> LM:
    lm = load_lm(tiny_dir)
    lm.others = (tiny_lm,)
    return lm


class Workers:
    """Runtimes over schedulers that count; all of them held in a step until `go`."""

    def __init__(self, count: int, *, lanes: int = 4, tokens: int = 4096) -> None:
        self.made: list[Counting] = []
        self.fleet = Fleet([Runtime(self._make) for _ in range(count)], lanes=lanes, tokens=tokens)  # type: ignore[arg-type]

    def _make(self, on_token: object) -> Counting:
        self.made.append(Counting(on_token))  # type: ignore[arg-type]
        return self.made[-1]

    def hold(self) -> None:
        for each in self.made:
            each.gate.clear()

    @contextmanager
    def serving(self) -> Iterator[Fleet]:
        with self.fleet as fleet:
            try:
                yield fleet
            finally:
                self.go()  # a thread that is held cannot be joined

    def go(self) -> None:
        for each in self.made:
            each.gate.set()

    def loads(self) -> list[int]:
        return [runtime.load for runtime in self.fleet.runtimes]


def test_outputs_are_those_of_one_runtime(two: LM, memory: Memory) -> None:
    shared = prompt(130)
    requests = [
        Request(str(i), (*shared, 3 + i), 6, sampler=Sampler(0.4 * (i % 3), 0, 1.0, i), publish=i % 2 == 0)
        for i in range(10)
    ]
    with two.runtime(lanes=2, tokens=160) as runtime:
        alone = [runtime.run(replace(request, publish=False))[0].generated for request in requests]
    with two.fleet(lanes=2, memory=memory, tokens=160) as fleet, ThreadPoolExecutor(10) as pool:
        outcomes = list(pool.map(lambda request: fleet.run(request)[0], requests))
        used = fleet.call(lambda scheduler: scheduler.decode_tokens)
    assert [outcome.generated for outcome in outcomes] == alone
    assert all(outcome.finish in (Finish.LENGTH, Finish.EOS) for outcome in outcomes)
    assert len(used) == 2 and all(used)


def test_a_prompt_follows_its_prefix() -> None:
    workers = Workers(3)
    with workers.serving() as fleet:
        workers.hold()
        a, b = prompt(200, 1), prompt(200, 2)
        streams = [fleet.submit(Request("a", a, 3)), fleet.submit(Request("b", b, 3))]
        assert workers.loads() == [1, 1, 0]
        streams += [fleet.submit(Request("b2", (*b[:128], 5, 6), 3)), fleet.submit(Request("a2", (*a, 7), 3))]
        assert workers.loads() == [2, 2, 0]
        streams.append(fleet.submit(Request("short", b[:63], 3)))  # shorter than a block: nothing to follow
        assert workers.loads() == [2, 2, 1]
        workers.go()
        assert all(stream.wait()[0].finish is Finish.LENGTH for stream in streams)
        assert fleet.load == 0


def test_a_busy_holder_sheds_to_the_idlest() -> None:
    """A prefix that every prompt begins with must not put all of them on one GPU."""
    workers = Workers(2, lanes=3)
    with workers.serving() as fleet:
        workers.hold()
        text = prompt(128)
        streams = [fleet.submit(Request(str(i), (*text, i), 2)) for i in range(9)]
        assert max(workers.loads()) - min(workers.loads()) <= 3
        assert min(workers.loads()) >= 3
        workers.go()
        for stream in streams:
            stream.wait()


def test_what_is_remembered_is_bounded() -> None:
    workers = Workers(2, tokens=256)
    with workers.serving() as fleet:
        old = prompt(128, 0)
        fleet.run(Request("old", old, 1))
        for i in range(1, 6):
            fleet.run(Request(str(i), prompt(128, i), 1))
        assert all(len(sent) <= 4 for sent in fleet._sent)
        workers.hold()
        first = fleet.submit(Request("busy", prompt(10), 1))
        stream = fleet.submit(Request("again", old, 1))
        assert workers.loads() == [1, 1]
        workers.go()
        first.wait(), stream.wait()


def test_an_id_is_open_once_in_all_of_them() -> None:
    workers = Workers(2)
    with workers.serving() as fleet:
        workers.hold()
        stream = fleet.submit(Request("x", (1,), 2))
        with pytest.raises(InputError, match="'x': one with this id is open"):
            fleet.submit(Request("x", (1,), 2))
        assert fleet.cancel("x") and not fleet.cancel("y")
        workers.go()
        assert stream.wait()[0].finish is Finish.CANCELLED
        assert fleet.run(Request("x", (1,), 2))[0].generated == [0, 1]


def test_streams_and_tasks() -> None:
    workers = Workers(2)

    async def main() -> None:
        tokens = [token.token async for token in workers.fleet.stream(Request("s", (1, 2), 4))]
        assert tokens == [0, 1, 2, 3]
        done = await asyncio.gather(*(workers.fleet.complete(Request(str(i), (1,), 3)) for i in range(20)))
        assert all(outcome.generated == [0, 1, 2] for (outcome,) in done)

    with workers.fleet:
        asyncio.run(main())
    assert all(each.steps for each in workers.made)


def test_closing_ends_everything_twice() -> None:
    workers = Workers(2)
    with workers.serving() as fleet:
        streams = [fleet.submit(Request(str(i), (1,), 10**6)) for i in range(4)]
        fleet.close()
        fleet.close()
        assert all(stream.wait()[0].finish is Finish.CANCELLED for stream in streams)
        with pytest.raises(ClosedError):
            fleet.run(Request("late", (1,), 1))
    assert all(each.closed for each in workers.made)
    assert not [thread for thread in threading.enumerate() if thread.name == "numem-runtime"]


def test_a_runtime_that_cannot_start_leaves_none_open() -> None:
    workers = Workers(1)

    def failing(on_token: object) -> Counting:
        raise ModelError("no room on cuda:1")

    fleet = Fleet([*workers.fleet.runtimes, Runtime(failing)], lanes=1, tokens=64)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no room on cuda:1"), fleet:
        raise AssertionError("entered")
    assert workers.made[0].closed
    with pytest.raises(InputError, match="there is no runtime"):
        Fleet([], lanes=1, tokens=64)


def test_the_decode_stage_gives_the_completions_of_one_gpu(
    two: LM, tiny_lm: LM, memory: Memory, tmp_path: Path
) -> None:
    prompts = [Prompt(f"p{i}", f"t:{i}", text="the thing in a tin " * (3 + i % 3) + str(i)) for i in range(9)]
    batch = make_batch(tiny_lm, prompts, model="tiny")
    decoding = Decoding(5, lanes=2, ignore_eos=True, again=True)
    one, _ = decode(memory, tiny_lm, batch, "one", out=tmp_path / "one", decoding=decoding)
    told: list[int] = []
    several, witnesses = decode(
        memory, two, batch, "two", out=tmp_path / "two", decoding=decoding, witnesses=[4],
        progress=lambda stage, done, total, tokens=0: told.append(done),
    )  # fmt: skip
    assert several.outputs_digest == one.outputs_digest and several.prompts == 9 and not several.failed
    assert witnesses[4].witness is not None
    assert several.decode_tokens == one.decode_tokens and told[-1] == 9


def test_an_interrupt_ends_what_is_under_way() -> None:
    workers = Workers(2)
    with workers.serving() as fleet:
        for each in workers.made:
            vars(each).update(decode_tokens=0, decode_ms=0.0)
        outcomes = Several(fleet, 2).run((Request(str(i), (1,), 50 if i else 1) for i in range(20)), lambda: None)
        assert next(outcomes).request.id == "0"
        outcomes.close()  # type: ignore[attr-defined]
        assert fleet.load == 0
