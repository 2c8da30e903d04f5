"""The scheduler over a model with sliding windows: restored sequences lack rows below a floor, and nobody reads them."""

from pathlib import Path

import pytest

from numem import LM, Memory, load_lm
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.residency import Residency
from numem.runtime.request import Outcome, Request
from numem.runtime.restore.arrivals import Arrivals
from tests.model_fixtures import tiny_model
from tests.scheduler_fixtures import drive, empty, prompt, step


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """Three layers, two of which see 24 rows."""
    directory: Path = tmp_path_factory.mktemp("models") / "windowed"
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    tiny_model(
        directory, "qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=24, max_window_layers=0,
        max_position_embeddings=1200,
    )  # fmt: skip
    return load_lm(directory)


def same_as_alone(lm: LM, outcome: Outcome) -> None:
    with lm.session().start(outcome.request.tokens) as c:
        for token, row in zip(outcome.generated, outcome.logits, strict=True):
            assert c.step(outcome.request.sampler) == token
            assert c.logits is not None and c.logits.tobytes() == row.tobytes()
        if outcome.kv is not None:
            assert outcome.kv.tobytes() == c.kv().tobytes()


@pytest.mark.parametrize("keep", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_restored_shared_preempted_and_forked(windowed: LM, memory: Memory, keep: bool) -> None:
    """Sequences restored above a floor are shared only where the floor allows, and published as far as they can be."""
    ids = prompt(700)
    with windowed.session().start(ids) as c:
        c.publish(memory).wait()
    session = windowed.session(pages=400, debug=True, canary=True)
    residency = Residency(session.engine) if keep else None
    with Arrivals(session, memory, policy="restore") as arrivals:
        scheduler = Scheduler(session, 4, memory=memory, arrivals=arrivals, residency=residency)
        scheduler.submit(Request("a", ids, 40, witness=True, publish=True))
        while not scheduler.decode_tokens:
            assert not step(scheduler)
        scheduler.submit(Request("same", ids, 6, witness=True))
        scheduler.submit(Request("short", (*ids[:300], 3, 4), 6, witness=True, publish=True))
        scheduler.submit(Request("cold", prompt(400, seed=4), 20, witness=True))
        step(scheduler, 3)
        scheduler.fork("a", "b", max_new_tokens=5)
        step(scheduler, 2)
        assert scheduler.preempt("a") and scheduler.preempt("cold")
        outcomes = drive(scheduler)
        assert outcomes["a"].restored == 699 and outcomes["same"].shared == 699
        outcomes |= drive(scheduler, [Request("later", (*ids[:280], 9, 9), 6, witness=True)])
        scheduler.close()
    assert sorted(outcomes) == ["a", "b", "cold", "later", "same", "short"]
    for outcome in outcomes.values():
        assert not outcome.error
        same_as_alone(windowed, outcome)
    if residency is not None:
        residency.clear()
    empty(scheduler)
