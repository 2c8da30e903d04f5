"""Decoding several steps at a time in continuations: tokens, rows and errors are those of single steps."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from numem import LM, Memory
from numem.errors import CapacityError, ContextLengthError, ModelError
from numem.runtime import continuation
from numem.runtime.continuation import Session
from numem.runtime.device.state import Step
from numem.runtime.sampling import GREEDY, Sampler
from tests.ahead_fixtures import AheadDecoder, ahead_session
from tests.scheduler_fixtures import prompt

WARM = Sampler(temperature=1.5, top_k=50, seed=3)


@pytest.fixture
def session(tiny_lm: LM) -> Iterator[Session]:
    made, _ = ahead_session(tiny_lm, canary=True)
    yield made
    made.engine.pool.check()
    assert made.engine.pool.stats().routes == 0


def stepped(session: Session, ids: tuple[int, ...], count: int, sampler: Sampler) -> tuple[list[int], bytes]:
    with session.start(ids) as c:
        tokens = [c.step(sampler) for _ in range(count)]
        assert c.logits is not None
        return tokens, c.kv().tobytes()


@pytest.mark.parametrize("sampler", [GREEDY, WARM])
@pytest.mark.parametrize("steps", [1, 2, 7, 32])
def test_advance_is_so_many_steps(
    session: Session, monkeypatch: pytest.MonkeyPatch, steps: int, sampler: Sampler
) -> None:
    """Also mixed with single steps, on a fork, and behind one."""
    monkeypatch.setattr(continuation, "AHEAD_STEPS", steps)
    ids = prompt(30)
    tokens, kv = stepped(session, ids, 40, sampler)
    with session.start(ids) as c:
        assert c.advance(17, sampler) == tokens[:17] and c.logits is None
        assert c.advance(0, sampler) == []
        with c.fork() as fork:
            assert fork.advance(23, sampler) == tokens[17:]
            assert c.step(sampler) == tokens[17] and c.advance(22, sampler) == tokens[18:]
            assert fork.kv().tobytes() == c.kv().tobytes() == kv
    decoder = session.engine.decoder
    assert isinstance(decoder, AheadDecoder)
    assert max(decoder.calls) == (min(steps, 23), 1)


def test_errors_come_behind_the_tokens_before_them(tiny_lm: LM) -> None:
    """Damaged logits, the last position, the last page."""
    ids = prompt(30)
    with ahead_session(tiny_lm)[0].start(ids) as c:
        expected = c.advance(40, WARM)
        kv = c.kv(0, 39).tobytes()
    session, decoder = ahead_session(tiny_lm, broken=39)
    with session.start(ids) as c:
        with pytest.raises(ModelError, match="position 39 are not finite"):
            c.advance(40, WARM)
        assert c.tokens == [*ids, *expected[:10]] and c.processed == 39 and c.kv().tobytes() == kv
        session.engine.pool.check()
    with session.start(ids) as c:
        stream = c.stream(40, WARM)
        assert [next(stream) for _ in range(10)] == expected[:10]
        with pytest.raises(ModelError, match="position 39 are not finite"):
            next(stream)
    session, decoder = ahead_session(tiny_lm, pages=4)
    with session.start(ids) as c:
        with pytest.raises(CapacityError):
            c.advance(60, WARM)
        assert c.processed == 64 and c.tokens[30:] == expected[:35]
        assert session.engine.pool.free == 0
    decoder.max_position = session.engine.max_position = 50
    with session.start(ids) as c:
        with pytest.raises(ContextLengthError):
            c.advance(60, WARM)
        assert c.processed == 50 and c.tokens[30:] == expected[:21]


def test_a_failed_pass_leaves_a_continuation_as_before(tiny_lm: LM) -> None:
    session, decoder = ahead_session(tiny_lm)
    with session.start(prompt(30)) as c:
        c.advance(3, WARM)
        tokens, kv, stats = list(c.tokens), c.kv().tobytes(), session.engine.pool.stats()
        decoder.fail = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            c.advance(20, WARM)
        assert c.tokens == tokens and session.engine.pool.stats() == stats and c.kv().tobytes() == kv
        assert [*tokens[30:], *c.advance(20, WARM)] == stepped(session, prompt(30), 23, WARM)[0]


def test_a_stream_gives_the_tokens_before_any_failure(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages lack it decodes a few at a time, and what then fails comes behind those."""
    monkeypatch.setattr(continuation, "AHEAD_MS", 1e9)
    session, _ = ahead_session(tiny_lm, pages=4)
    decode = session.engine.decode
    with session.start(prompt(30)) as c:

        def failing(lanes: Sequence[Step], steps: int) -> Iterator[np.ndarray]:
            if lanes[0].position >= 63:
                raise RuntimeError("lost")
            return decode(lanes, steps)

        session.engine.decode = failing  # type: ignore[method-assign]
        told: list[int] = []
        with pytest.raises(RuntimeError, match="lost"):
            told.extend(c.stream(60, WARM))  # extends by each as it comes
        assert c.processed == 63 and told == c.tokens[30:]


def test_streams_decode_more_and_more(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    session, decoder = ahead_session(tiny_lm)
    monkeypatch.setattr(continuation, "AHEAD_MS", 1e9)
    with session.start(prompt(30)) as c:
        assert list(c.stream(40, WARM)) == stepped(session, prompt(30), 40, WARM)[0]
    assert [steps for steps, _ in decoder.calls] == [1, 2, 4, 8, 16, 9]
    monkeypatch.setattr(continuation, "AHEAD_MS", 0.0)
    decoder.calls.clear()
    with session.start(prompt(30)) as c:
        assert len(list(c.stream(5, WARM))) == 5
    assert decoder.calls == [(1, 1)] * 5


def test_without_a_device_a_stream_does_single_steps(tiny_lm: LM) -> None:
    with tiny_lm.session().start(prompt(30)) as c:
        stream = c.stream(10, WARM)
        first = [next(stream), next(stream)]
        assert c.tokens[30:] == first and c.logits is not None


def test_rows_decoded_ahead_are_published_and_restored(tiny_lm: LM, memory: Memory) -> None:
    session, _ = ahead_session(tiny_lm)
    with session.start(prompt(100)) as c:
        c.advance(200, WARM)
        c.publish(memory).wait()
        with session.restore(memory, c.tokens) as again:
            assert again.restored.tokens == 299 and again.kv().tobytes() == c.kv().tobytes()
            assert again.advance(9, WARM) == c.advance(9, WARM)
