"""What stays in the pages after a sequence ended: found by its tokens, evicted as planned, exact when used again."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numem import LM
from numem.errors import InputError, LeaseError
from numem.identity.chain import boundary_id, common_tokens
from numem.policy import NAMES
from numem.policy.decision import Decision
from numem.runtime.engine import Engine, Rows
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging import page_tree
from numem.runtime.paging.page_tree import PageTree
from numem.runtime.paging.pages import PageStorage, kv_spec
from numem.runtime.paging.pool import Route
from numem.runtime.paging.residency import Residency
from numem.runtime.paging.room import NAMED
from numem.runtime.request import Request
from numem.state.groups import Floor

SCOPE = bytes(range(32))


class Still:
    """A decoder that computes nothing, for tests of bookkeeping."""

    spec = kv_spec(1, 1, 16, "float32")
    kv_heads, head_dim, vocab, max_position = 1, 16, 1000, 4096

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        return torch.zeros((len(rows.wanted), self.vocab))


class Log(list[Decision]):
    def record(self, decision: Decision) -> str:
        self.append(decision)
        return f"{len(self):032x}"


def grown(engine: Engine, tokens: Sequence[int], route: Route | None = None) -> Route:
    """A route with the rows of `tokens`; those it holds already are its first."""
    route = engine.pool.allocate() if route is None else route
    engine.append([(route, tokens[route.length :])], logits="none")
    return route


def keep(residency: Residency, name: str, tokens: Sequence[int], *, pinned: bool = False, **terms: float) -> Route:
    route = grown(residency.engine, tokens)
    assert residency.retain(name, route, tokens, durable=False, pinned=pinned, **terms)
    return route


def use(residency: Residency, tokens: Sequence[int]) -> None:
    found = residency.match(tokens)
    assert found is not None
    residency.used(found[0])


def audit(residency: Residency) -> None:
    pool = residency.engine.pool
    pool.check()
    stats = pool.stats()
    assert stats.free + stats.resident + stats.reserved == stats.physical


def line(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# finding


def test_the_longest_common_prefix_is_found_to_the_token() -> None:
    """A partial page is reused, and so are the first tokens of a page that the prompt leaves in its middle."""
    residency = Residency(Engine(Still(), pages=64))
    long = keep(residency, "long", line(0, 40))
    parted = keep(residency, "parted", [*line(0, 20), *line(500, 30)])
    assert residency.match(line(0, 60)) == (long, 40)
    assert residency.match(line(0, 39)) == (long, 39)
    assert residency.match([*line(0, 20), *line(500, 5), 7]) == (parted, 25)
    found = residency.match([*line(0, 18), 7, 7])
    assert found is not None and found[1] == 18
    assert residency.match([999, *line(1, 30)]) is None and residency.match([]) is None
    residency.drop("parted")
    assert residency.match([*line(0, 20), *line(500, 5)]) == (long, 20)
    audit(residency)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=11), max_size=8),
    st.lists(st.integers(0, 7)),
    st.lists(st.integers(0, 1), max_size=12),
)
def test_the_tree_agrees_with_comparing_everything(kept: list[list[int]], gone: list[int], prompt: list[int]) -> None:
    tree = PageTree(4)
    sequences = {str(at): tokens for at, tokens in enumerate(kept)}
    for name, tokens in sequences.items():
        tree.add(name, tokens)
    for name in map(str, gone):
        if sequences.pop(name, None):
            tree.remove(name)
    assert len(tree) == len(sequences)

    def common(tokens: list[int]) -> int:
        return next(
            (n for n, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), min(len(tokens), len(prompt))
        )

    found = list(tree.matches(prompt))
    assert [length for length, _ in found] == sorted((length for length, _ in found), reverse=True)
    assert all(0 < length <= common(sequences[name]) for length, name in found)
    best = max(map(common, sequences.values()), default=0)
    assert (found[0][0] if found else 0) == best
    if best:
        assert common(sequences[found[0][1]]) == best
    # Whoever shares a whole page is named, for those of which the first cannot be cut there.
    assert {name for name, tokens in sequences.items() if common(tokens) >= 4} <= {name for _, name in found}


def test_a_match_compares_two_pages_however_many_routes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(a: bytes, b: bytes) -> int:
        compared.append(a)
        return common_tokens(a, b)

    monkeypatch.setattr(page_tree, "common_tokens", counted)
    tree = PageTree()
    for tail in range(2000):
        tree.add(str(tail), [*line(0, 32), tail, tail, 5])
    assert next(tree.matches([*line(0, 32), 1234, 1234, 6])) == (34, "1234")
    assert len(compared) <= 2


def test_a_route_without_the_rows_of_a_window_is_not_matched_where_it_cannot_be_cut() -> None:
    engine = Engine(Still(), pages=64)
    residency = Residency(engine)
    windowed = engine.pool.allocate()
    engine.pool.set_floors(windowed, [Floor("window-8", 8, 16)])
    grown(engine, line(0, 40), windowed)
    assert residency.retain("windowed", windowed, line(0, 40), durable=True)
    assert residency.match(line(0, 30)) == (windowed, 30)
    assert residency.match(line(0, 20)) is None, "position 20 attends to row 13"
    whole = keep(residency, "whole", line(0, 18))
    assert residency.match(line(0, 20)) == (whole, 18)
    assert residency.match(line(0, 30)) == (windowed, 30)
    audit(residency)


# keeping


def test_rows_that_are_kept_already_are_not_kept_twice() -> None:
    """The twin's pages are given back at once, and it counts as a use of those that are kept."""
    residency = Residency(Engine(Still(), pages=16))
    keep(residency, "first", line(0, 40))
    free = residency.engine.pool.free
    for tokens in (line(0, 40), line(0, 17)):
        assert not residency.retain("twin", grown(residency.engine, tokens), tokens, durable=False)
    assert residency.engine.pool.free == free and "twin" not in residency and len(residency) == 1
    keep(residency, "pinned", line(0, 40), pinned=True)
    assert not residency.retain("empty", residency.engine.pool.allocate(), [], durable=False)
    residency.clear()
    assert residency.engine.pool.free == 16
    audit(residency)


def test_what_cannot_be_kept_is_refused_and_stays_with_the_caller() -> None:
    residency = Residency(Engine(Still(), pages=16))
    keep(residency, "a", line(0, 20))
    route = grown(residency.engine, line(100, 20))
    for name, tokens, p_reuse in (
        ("a", line(100, 20), 0.5),
        ("", line(100, 20), 0.5),
        ("b", line(100, 19), 0.5),
        ("b", line(100, 20), 2.0),
    ):
        with pytest.raises(InputError):
            residency.retain(name, route, tokens, durable=False, p_reuse=p_reuse)
    pending = residency.engine.reserve(route, 1)
    with pytest.raises(InputError, match="append under way"):
        residency.retain("b", route, line(100, 20), durable=False)
    residency.engine.pool.abort([pending])
    assert residency.retain("b", route, [*line(100, 20), 3], durable=False), "a pending token may follow the rows"
    for call in (residency.pin, residency.unpin, residency.mark_durable):
        with pytest.raises(InputError, match="'gone'"):
            call("gone")
    assert not residency.drop("gone")
    with pytest.raises(InputError, match="best.*value"):
        Residency(residency.engine, policy="best")
    audit(residency)


# evicting


def test_the_least_worth_go_and_no_more_than_needed() -> None:
    """seed-systems §1.12: cold is worth 0.25 a page and hot 8.1, so that room for 8 tokens costs cold alone."""
    residency = Residency(Engine(Still(), pages=4))
    keep(residency, "hot", line(0, 32), p_reuse=0.9, recompute_ms=20, reload_ms=2)
    keep(residency, "cold", line(100, 32), p_reuse=0.1, recompute_ms=10, reload_ms=5)
    before = residency.snapshot()
    assert [holder.per_page for holder in before.holders] == pytest.approx([8.1, 0.25])
    plan = residency.plan(2)
    assert plan.evictions == ("cold",) and residency.snapshot() == before, "planning changes nothing"
    assert residency.make_room(2) == plan
    assert "cold" not in residency and residency.engine.pool.free == 2
    assert residency.make_room(2).evictions == (), "there is room"
    audit(residency)


@pytest.mark.parametrize("policy", ["value", *NAMES])
def test_an_inadmissible_plan_changes_nothing(policy: str) -> None:
    residency = Residency(Engine(Still(), pages=8), policy=policy)
    for at, name in enumerate("abcd"):
        keep(residency, name, line(100 * at, 32))
    residency.pin("a")
    before = residency.snapshot()
    plan = residency.make_room(5, protected={"b"}, request="r")
    assert (plan.admissible, plan.evictions, plan.available_pages, plan.shortfall_pages) == (False, (), 4, 1)
    assert residency.snapshot() == before and len(residency) == 4
    assert residency.make_room(4, protected={"b"}).admissible
    assert "a" in residency and "b" in residency and len(residency) == 2
    residency.unpin("a")
    assert residency.make_room(8).admissible and len(residency) == 0
    audit(residency)


def test_a_match_that_is_leased_or_forked_outlives_an_eviction(tiny_lm: LM) -> None:
    """vllm#39702: an eviction between a lookup and its use. A lease forbids it; under a fork the pages stay."""
    session = tiny_lm.session(pages=8, debug=True)
    engine = session.engine
    residency = Residency(engine)
    tokens = line(3, 40)
    keep(residency, "a", tokens)
    found = residency.match([*tokens, 5])
    assert found is not None
    with engine.pool.lease(found[0]):
        assert not residency.make_room(6).admissible and "a" in residency
    with engine.pool.lease(found[0]):
        fork = engine.pool.fork(*found)
    rows = engine.storage.save(fork.pages, 0, 40)
    assert not residency.make_room(6).admissible, "the fork holds every page"
    residency.drop("a")
    assert torch.equal(engine.storage.save(fork.pages, 0, 40), rows) and not torch.isnan(rows).any()
    engine.release(fork)
    assert engine.pool.free == 8
    audit(residency)


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
