"""What stays in the pages after a sequence ended: found by its tokens, evicted as planned, exact when used again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numem import LM
from numem.errors import InputError
from numem.identity.chain import common_tokens
from numem.policy import NAMES
from numem.runtime.engine import Engine
from numem.runtime.paging import page_tree
from numem.runtime.paging.page_tree import PageTree
from numem.runtime.paging.residency import Residency
from numem.state.groups import Floor
from tests.residency_fixtures import Still, audit, grown, keep, line


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
