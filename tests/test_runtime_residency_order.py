"""Which kept routes go first, what is recorded of it, and that no output changes."""

import random

import numpy as np
import pytest

from numem import LM
from numem.errors import LeaseError
from numem.identity.chain import boundary_id
from numem.policy import NAMES
from numem.runtime.engine import Engine
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.residency import Residency
from numem.runtime.paging.room import NAMED
from numem.runtime.request import Request
from tests.residency_fixtures import SCOPE, Log, Still, audit, grown, keep, line, use


def test_probes_do_not_keep_a_route_for_ever() -> None:
    """mooncake#2187: being asked for again and again is a use, not a pin."""
    residency = Residency(Engine(Still(), pages=4))
    keep(residency, "a", line(0, 64))
    for _ in range(1000):
        found = residency.match(line(0, 64))
        assert found is not None
        residency.used(found[0])
    assert residency.make_room(4).evictions == ("a",)
    audit(residency)


def test_what_is_used_again_stays() -> None:
    """Of equal routes the one that was matched is worth more, also where it is the oldest."""
    residency = Residency(Engine(Still(), pages=12))
    for at, name in enumerate("abc"):
        keep(residency, name, line(100 * at, 64))
    for _ in range(3):
        use(residency, line(0, 64))
    residency.match(line(100, 64))  # asking is no use
    assert residency.make_room(4).evictions == ("b",)
    assert residency.make_room(8).evictions == ("c",)
    assert "a" in residency and residency.evicted == 2
    residency.used(residency.engine.pool.allocate())  # not kept: nothing happens


def test_rows_that_load_fast_are_cheaper_to_lose() -> None:
    class Known:
        def prefill_ms(self, start: int, count: int) -> float:
            return float(count)

        def load_ms(self, tier: str, nbytes: int, parts: int) -> float | None:
            return {"ssd": nbytes / 1e6 + parts, "slow": 1e9}.get(tier)

    for tier, first in (("ssd", "b"), ("slow", "a"), ("unread", "a"), (None, "a")):
        residency = Residency(Engine(Still(), pages=8), costs=Known(), tier=tier)
        keep(residency, "a", line(0, 64))
        keep(residency, "b", line(100, 64))
        residency.mark_durable("b")
        assert residency.make_room(1).evictions == (first,)


def test_a_named_policy_gives_the_order() -> None:
    residency = Residency(Engine(Still(), pages=12), policy="lru")
    for at, name in enumerate("abc"):
        keep(residency, name, line(100 * at, 64), p_reuse=at / 2)
    use(residency, line(0, 64))
    assert residency.make_room(4).evictions == ("b",)
    assert residency.make_room(8).evictions == ("c",)


@pytest.mark.parametrize("policy", ["value", *NAMES])
def test_a_leaf_goes_before_what_it_continues_or_frees_as_much(policy: str) -> None:
    """A fork that continues a kept route shares its pages; whatever the order, the plan counts what becomes free."""
    engine = Engine(Still(), pages=10)
    residency = Residency(engine, policy=policy)
    root = keep(residency, "root", line(0, 64))
    for name in ("left", "right"):
        tokens = [*line(0, 64), *line(200 + 50 * (name == "left"), 32)]
        assert residency.retain(name, grown(engine, tokens, engine.pool.fork(root)), tokens, durable=False)
    assert engine.pool.free == 2
    assert set(residency.make_room(4).evictions) < {"root", "left", "right"}
    residency.pin(next(name for name in ("left", "right") if name in residency))
    assert residency.make_room(6).shortfall_pages == 2, "a pinned leaf holds the pages of what it continues"
    audit(residency)


@pytest.mark.parametrize("policy", ["value", *NAMES])
def test_a_long_run_leaks_no_page_and_is_exact(policy: str, tiny_lm: LM) -> None:
    """Prompts over a few prefixes in a pool that holds a fraction of them: the logits are those of each alone."""
    rng = random.Random(7)
    session = tiny_lm.session(pages=24, debug=True)
    engine = session.engine
    residency = Residency(engine, policy=policy)
    alone = tiny_lm.session(pages=24)
    reused = 0
    for number in range(40):
        prompt = [40 + rng.randrange(3)] * rng.randrange(1, 40) + [
            rng.randrange(200) for _ in range(rng.randrange(1, 20))
        ]
        found = residency.match(prompt[:-1])
        route = engine.pool.fork(*found) if found else engine.pool.allocate()
        if found:
            residency.used(found[0])
        reused += route.length
        if rng.random() < 0.2:
            residency.drop(str(rng.randrange(number + 1)))
        assert residency.make_room(engine.pool.pages_for(len(prompt)) - len(route.pages) + 1).admissible
        audit(residency)
        (logits,) = engine.append([(route, prompt[route.length :])])
        with alone.start(prompt) as continuation:
            continuation.step()
            assert continuation.logits is not None
            assert np.array_equal(logits.view(np.uint32), continuation.logits.view(np.uint32))
        residency.retain(str(number), route, prompt, durable=False)
        audit(residency)
    assert reused > 200 and residency.evicted > 10
    residency.clear()
    assert engine.pool.free == 24
    audit(residency)


def test_a_route_that_grew_behind_its_back_is_refused_whole() -> None:
    """A kept route belongs to the residency; an append under way on it makes it ineligible, and dropping it an error."""
    residency = Residency(Engine(Still(), pages=8))
    route = keep(residency, "a", line(0, 64))
    pending = residency.engine.reserve(route, 1)
    assert not residency.make_room(8).admissible
    with pytest.raises(LeaseError):
        residency.drop("a")
    assert "a" in residency
    residency.engine.pool.abort([pending])
    assert residency.make_room(8).admissible
    audit(residency)


# decisions


def test_an_eviction_names_every_holder_and_why_others_stayed() -> None:
    log = Log()
    residency = Residency(Engine(Still(), pages=6), decisions=log, scope=SCOPE)
    keep(residency, "cold", line(0, 32), p_reuse=0.1, recompute_ms=10)
    keep(residency, "hot", line(100, 32), p_reuse=0.9, recompute_ms=10)
    keep(residency, "held", line(200, 32), pinned=True)
    assert residency.make_room(0).admissible and not log, "nothing had to be decided"
    residency.make_room(2, request="r7")
    admit, evict = log
    assert (admit.kind, admit.choice, admit.request, admit.policy) == ("admit", "admit", "r7", "value")
    assert (evict.kind, evict.choice, evict.request) == ("evict", "evict:cold", "r7")
    assert evict.subject == boundary_id(SCOPE, line(0, 32), 32) and evict.others == ()
    assert [(a.name, a.declined) for a in evict.alternatives] == [
        ("evict:cold", ""),
        ("evict:hot", ""),
        ("evict:held", "pinned"),
    ]
    assert [a.cost_ms for a in evict.alternatives[:2]] == pytest.approx([0.5, 4.5]), "value per page"
    assert evict.inputs["required_pages"] == 2 and evict.inputs["free_pages_after_eviction"] == 2
    residency.make_room(6, request="r8")
    refused = log[-1]
    assert (refused.kind, refused.choice, len(log)) == ("admit", "refuse", 3)
    assert refused.inputs["shortfall_pages"] == 2 and "2 pages short" in refused.alternatives[0].declined


def test_a_decision_names_at_most_so_many_holders_and_counts_the_rest() -> None:
    log = Log()
    residency = Residency(Engine(Still(), pages=NAMED + 8), decisions=log, scope=SCOPE)
    for at in range(NAMED + 8):
        keep(residency, f"{at}", [at] * 16)
    residency.make_room(NAMED + 4)
    evict = log[-1]
    assert len(evict.alternatives) == NAMED and evict.inputs["not_named"] == 8
    assert len(evict.others) == NAMED + 3 and evict.inputs["evictions"] == NAMED + 4


# under the scheduler


def alone(lm: LM, request: Request) -> list[int]:
    with lm.session().start(request.tokens) as continuation:
        return continuation.advance(request.max_new_tokens)


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(tiny_lm: LM) -> None:
    """Every row of the first turn is reused, the partial page included (seed-systems, trap 38), and it counts as used."""
    session = tiny_lm.session(pages=40, debug=True)
    residency = Residency(session.engine, policy="lru")
    scheduler = Scheduler(session, 2, residency=residency)
    first = Request("first", tuple(line(3, 50)), 5)
    other = Request("other", tuple(line(100, 50)), 5)
    turns = {outcome.request.id: outcome for outcome in scheduler.run([first, other])}
    assert len(residency) == 2
    second = Request("second", (*first.tokens, *turns["first"].generated, *line(60, 7)), 4)
    (outcome,) = scheduler.run([second])
    assert (outcome.shared, outcome.computed) == (54, 8), "rows of 50 tokens and 4 of 5 generated ones"
    assert outcome.generated == alone(tiny_lm, second)
    (gone,) = residency.make_room(session.engine.pool.free + 1).evictions
    assert gone.startswith("other#"), "the first turn was used since"
    scheduler.close()
    residency.clear()
    assert session.engine.pool.free == 40
    audit(residency)


@pytest.mark.parametrize("policy", ["value", "interval"])
def test_kept_routes_give_way_to_requests_and_change_no_output(policy: str, tiny_lm: LM) -> None:
    rng = random.Random(3)
    session = tiny_lm.session(pages=30, debug=True)
    log = Log()
    residency = Residency(session.engine, policy=policy, decisions=log, scope=tiny_lm.identity.scope)
    scheduler = Scheduler(session, 3, residency=residency)
    requests = [
        Request(f"r{n}", tuple([40 + rng.randrange(3)] * rng.randrange(20, 60) + [rng.randrange(200)] * 5), 6)
        for n in range(24)
    ]
    outcomes = []
    for outcome in scheduler.run(requests, lambda: audit(residency)):
        outcomes.append(outcome)
        audit(residency)
    assert all(outcome.generated == alone(tiny_lm, outcome.request) for outcome in outcomes)
    assert len(outcomes) == 24 and sum(outcome.shared for outcome in outcomes) > 400
    assert residency.evicted > 5 and {decision.kind for decision in log} == {"admit", "evict"}
    assert {decision.request for decision in log} <= {request.id for request in requests}
    scheduler.close()
    residency.clear()
    assert session.engine.pool.free == 30
