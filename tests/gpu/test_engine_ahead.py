"""The scheduler and continuations on a device, many steps at a time: what is generated is that of single steps.

Random weights of small models, in bfloat16 on the GPU, where the cache is compared as bytes, in float32 in the
interpreter.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from benchmarks.shapes import Random, config_of, descriptor_of, weights_of
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.models.device_transformer import DeviceTransformer
from numem.runtime.continuation import Session
from numem.runtime.device.form import TokenMajor
from numem.runtime.device.state import Step
from numem.runtime.engine import Engine
from numem.runtime.lanes import ahead
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.pages import PageStorage
from numem.runtime.request import Finish, Outcome, Request
from numem.runtime.sampling import GREEDY, Sampler

LIMIT, PAGES = 512, 160
WARM = Sampler(temperature=1.2, top_k=60, top_p=0.95, seed=5)


@pytest.fixture(scope="module")
def decoder(device: torch.device, big: bool) -> DeviceTransformer:
    d = descriptor_of(config_of("0.6b", dry=True) | ({} if big else {"num_hidden_layers": 1, "intermediate_size": 128}))
    torch.manual_seed(13)
    dtype = "bfloat16" if big else "float32"
    weights = weights_of(d, Random("bf16", getattr(torch, dtype), device), LIMIT)
    return DeviceTransformer(d, weights, dtype=dtype, max_position=LIMIT, device=device)


def _session(decoder: DeviceTransformer, *, single: bool = False) -> Session:
    """A session over fresh pages; `single`: without decoding ahead. The last ids of the vocabulary are padding."""
    big = decoder.device.type == "cuda"
    engine = Engine(decoder, pages=PAGES, canary=big, debug=big, vocab=decoder.vocab - 7)
    if not big:  # the form that device kernels read
        form = TokenMajor(decoder.device)
        engine.storage = PageStorage(decoder.spec, decoder.kv_heads, decoder.head_dim, PAGES, form=form)
        for pool in (engine.storage.k, engine.storage.v):
            pool.fill_(torch.nan)
        engine.ahead = decoder.ahead(engine.storage, engine.vocab)
    if single:
        engine.ahead = None
    return Session(engine, Identity({"model": "random"}, NumericPolicy("test", bytes(32)), "test"))


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 256, length))


def _run(session: Session, requests: list[Request], lanes: int) -> dict[tuple[str, int], Outcome]:
    scheduler = Scheduler(session, lanes)
    outcomes = {(o.request.id, o.sample): o for o in scheduler.run(requests)}
    scheduler.close()
    session.engine.pool.check()
    assert session.engine.pool.stats().free == PAGES
    return outcomes


@pytest.mark.parametrize("steps", [2, 7, 32])
def test_requests(decoder: DeviceTransformer, big: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled lanes, some that end early, samples of one prompt: in any number of steps at a time."""
    if not big and steps != 2:
        pytest.skip("takes long in the interpreter; runs on the GPU")
    count = 90 if big else 4  # one by the prompt's pass, one alone, two at a time
    some = frozenset(range(0, 256, 11))
    requests = [
        Request(
            "samples",
            _prompt(130 if big else 17, 2),
            count,
            WARM,
            some if big else frozenset(),
            samples=3 if big else 2,
        ),
        Request("greedy", _prompt(20, 0), count),
        Request("eos", _prompt(40, 1), count, WARM, some),
        Request("long", _prompt(300, 3), count, GREEDY),
    ][: 4 if big else 1]
    expected = _run(_session(decoder, single=True), requests, 6)
    # Whatever the clock says, as many steps as there may be.
    monkeypatch.setattr(ahead, "AHEAD_STEPS", steps)
    session = _session(decoder)
    taken: list[int] = []
    decode = session.engine.decode

    def spy(lanes: Sequence[Step], steps: int) -> Iterator[np.ndarray]:
        taken.append(steps)
        return decode(lanes, steps)

    session.engine.decode = spy  # type: ignore[method-assign]
    scheduler = Scheduler(session, 6, ahead_ms=1e9)
    found = {(o.request.id, o.sample): o for o in scheduler.run(requests)}
    scheduler.close()
    session.engine.pool.check()
    for key, outcome in expected.items():
        assert found[key].generated == outcome.generated and found[key].finish is outcome.finish
        assert max(outcome.generated) < decoder.vocab - 7 and not found[key].error
    assert max(taken) == steps
    if big:
        assert Finish.EOS in {o.finish for o in found.values()}
        witness = [Request(r.id, r.tokens, r.max_new_tokens, r.sampler, r.eos, witness=True) for r in requests[:2]]
        for key, outcome in _run(_session(decoder), witness, 2).items():
            assert outcome.generated == expected[key].generated and len(outcome.logits) == len(outcome.generated)


@pytest.mark.parametrize("sampler", [GREEDY, WARM])
def test_continuations(decoder: DeviceTransformer, big: bool, sampler: Sampler) -> None:
    """Steps, many steps and a stream choose the same tokens and leave the same rows."""
    if not big and sampler is GREEDY:
        pytest.skip("takes long in the interpreter; runs on the GPU")
    count, ids = (100, _prompt(150, 4)) if big else (3, _prompt(15, 4))
    session = _session(decoder)
    with session.start(ids) as one, session.start(ids) as many:
        tokens = [one.step(sampler) for _ in range(count)]
        assert many.advance(count, sampler) == tokens
        rows, other = one.kv(), many.kv()
        if not big:
            np.testing.assert_allclose(other.view(np.float32), rows.view(np.float32), rtol=1e-4, atol=1e-4)
            return
        with session.start(ids) as streamed:
            assert list(streamed.stream(count, sampler)) == tokens
            assert other.tobytes() == rows.tobytes() == streamed.kv().tobytes()
