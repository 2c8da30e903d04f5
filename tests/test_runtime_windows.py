"""Sliding windows as retention groups: what a restore loads, what it leaves out, and that nobody ever reads that."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from numem import LM, Memory, load_lm
from numem.errors import OutOfPlanError
from numem.identity.chain import CHUNK_TOKENS, plan
from numem.kernels import native
from numem.runtime.continuation import Continuation, Session
from numem.runtime.engine import pages_for_lanes
from numem.runtime.restore.kv import group_rows, held_rows, hit_bytes
from numem.runtime.restore.prefix import lookup, select
from numem.state.groups import floor_of
from numem.state.load import load_plan
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import State
from tests.model_fixtures import tiny_model
from tests.store_fixtures import flip

WINDOW = 24
STEPS = 6


@pytest.fixture(scope="module")
def five_to_one(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """Six layers, of which every sixth sees everything and the others 24 rows."""
    directory = tmp_path_factory.mktemp("models") / "windowed"
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    tiny_model(
        directory, "qwen3", num_hidden_layers=6, layer_types=kinds, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=0, max_position_embeddings=1200, num_key_value_heads=1, head_dim=16, hidden_size=32,
    )  # fmt: skip
    return load_lm(directory)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]


def trace(c: Continuation, steps: int = STEPS) -> tuple[list[int], list[bytes]]:
    """Tokens and logits of the next steps."""
    tokens, logits = [], []
    for _ in range(steps):
        tokens.append(c.step())
        assert c.logits is not None and not np.isnan(c.logits).any()
        logits.append(c.logits.tobytes())
    return tokens, logits


def settled(session: Session) -> None:
    """Nobody holds a page any more, and the books agree."""
    session.engine.pool.check()
    stats = session.engine.pool.stats()
    assert stats.free == stats.physical and stats.resident == stats.reserved == 0


@pytest.fixture
def checked(five_to_one: LM) -> Iterator[Session]:
    """A session whose free pages are poison and whose full pages are sealed."""
    session = five_to_one.session(pages=pages_for_lanes(3, 1200), debug=True, canary=True)
    yield session
    settled(session)


def drop(memory: Memory, content: bytes) -> None:
    """Record every copy of a piece as evicted."""
    parts = memory._parts
    facts = [place.turned(parts.clock.next(), State.EVICTED, "test") for place in memory.placements(content)]
    parts.catalog.append(Facts(placements=facts))


def test_the_groups_of_a_windowed_model(five_to_one: LM) -> None:
    spec = five_to_one.decoder.spec
    assert [(g.id, g.window, len(g.members)) for g in spec.retained] == [("global", None, 2), ("window-24", 24, 10)]
    assert spec.retained[0].members == (("key", 5), ("value", 5))
    assert spec.retained[1].members == tuple((s, layer) for s in ("key", "value") for layer in range(5))


@pytest.mark.parametrize("n", [1, 23, 24, 25, 255, 256, 278, 279, 280, 600, 1030])
def test_restore_around_the_window_is_exact_and_reads_what_it_needs(
    five_to_one: LM, checked: Session, memory: Memory, n: int
) -> None:
    """llama.cpp#13194, llama.cpp#21749: at n < W, n = W and n > W, also where a window crosses a chunk."""
    ids = prompt(n + 1)
    spec = five_to_one.decoder.spec
    with checked.start(ids) as cold:
        cold.publish(memory).wait()
        expected = trace(cold)
        with checked.restore(memory, ids) as restored:
            floor = floor_of(n, WINDOW, CHUNK_TOKENS)
            wanted = load_plan(spec, n, CHUNK_TOKENS)
            assert restored.restored.tokens == n and not restored.restored.failures
            assert restored.restored.bytes == wanted.nbytes
            assert restored.route.floors == wanted.floors and [f.start for f in wanted.floors] == [floor] * (floor > 0)
            assert trace(restored) == expected
            # What the restored one holds is what the cold one holds there.
            parts = [
                group_rows(checked.engine, cold.route, a, cold.processed - a, group).view(-1).view(torch.uint8)
                for group, a in zip(spec.retained, (0, floor), strict=True)
            ]
            assert held_rows(checked.engine, restored.route, restored.processed).tobytes() == bytes(torch.cat(parts))
        manifest = memory.manifest(plan(five_to_one.identity.scope, ids)[-1].id)
        assert manifest.logical_bytes == wanted.nbytes and len(manifest.content_ids) == len(wanted.parts)
        assert manifest.fields[1].coordinate_space["origin"] == floor


@pytest.fixture(params=[*native.isas(), pytest.param("torch", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every build of the kernels, and their torch references."""
    before = native.isa()
    native.use(request.param)
    yield request.param
    native.use(before)


@pytest.mark.usefixtures("kernels")
def test_rows_below_a_floor_stay_poison_and_are_never_read(checked: Session, memory: Memory) -> None:
    """Windows are a loop bound: the pages below the floor hold NaN in windowed layers, and no logit does."""
    ids = prompt(290)
    with checked.start(ids) as cold:
        cold.publish(memory).wait()
        expected = trace(cold, 3)
    with checked.restore(memory, ids) as restored:
        assert [floor.start for floor in restored.route.floors] == [256] and trace(restored, 3) == expected
        storage = checked.engine.storage
        below = torch.tensor(restored.route.pages[: 256 // 16])
        for pool in (storage.k, storage.v):
            assert bool(pool[:5, below].isnan().all()) and not bool(pool[5, below].isnan().any())


def test_forks_and_captures_below_a_floor_are_refused(five_to_one: LM, checked: Session, memory: Memory) -> None:
    ids = prompt(601)
    engine = checked.engine
    with checked.start(ids) as cold:
        cold.publish(memory).wait()
        with checked.restore(memory, ids) as c:
            assert [f.start for f in c.route.floors] == [512]
            # The first boundary whose window of 24 lies above the floor is 512 + 23.
            for at in (600, 536, 535, 0):
                with c.fork(at) as child:
                    assert child.route.floors == (c.route.floors if at else ())
                    with cold.fork(at) as other:
                        assert trace(child) == trace(other)
                assert engine.pool.fork_allowed(c.route, at)
            for at in (534, 513, 512, 256, 1):
                assert not engine.pool.fork_allowed(c.route, at)
                with pytest.raises(OutOfPlanError, match="group window-24 needs rows below 512"):
                    c.fork(at)
            everything, windowed = engine.decoder.spec.retained
            assert group_rows(engine, c.route, 256, 256, everything).shape == (2, 1, 256, 16)
            with pytest.raises(OutOfPlanError, match="group window-24: those below 512"):
                group_rows(engine, c.route, 256, 256, windowed)
            with pytest.raises(OutOfPlanError, match="below 512"):
                c.kv()
            assert c.kv(512).tobytes() == cold.kv(512).tobytes()
            # What is durable need not be read; what is not cannot be made up.
            assert c.publish(memory).tickets == ()
            with Memory(memory.home + "-other") as other_memory, pytest.raises(OutOfPlanError, match="left out"):
                c.publish(other_memory)
            engine.pool.check()


def test_a_later_boundary_of_a_restored_sequence_is_published_and_restored(checked: Session, memory: Memory) -> None:
    ids = prompt(601)
    with checked.start(ids) as cold:
        cold.publish(memory, upto=512).wait()
    with checked.restore(memory, ids) as c:
        assert c.restored.tokens == 512 and [f.start for f in c.route.floors] == [256]
        c.publish(memory).wait()
        expected = trace(c)
    with checked.restore(memory, ids) as again:
        assert again.restored.tokens == 600 and trace(again) == expected


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("bad", range(4))
def test_the_prefix_is_the_least_over_the_groups(
    five_to_one: LM, checked: Session, memory: Memory, bad: int, group: int
) -> None:
    """sglang#31108: with one group's part of one chunk gone, no group's rows from there on are used, unless the boundary
    does not need that part."""
    ids = prompt(1025)
    spec = five_to_one.decoder.spec
    with checked.start(ids) as cold:
        cold.publish(memory).wait()
        expected = trace(cold)
    nodes = memory.chain(plan(five_to_one.identity.scope, ids)[-1].id)
    drop(memory, nodes[bad].pieces[group])
    # Of the windowed group the boundary 1,024 needs the last chunk alone.
    usable = bad * 256 if group == 0 or bad == 3 else 1024
    with lookup(memory, five_to_one.identity.scope, ids, spec=spec) as match:
        assert (match.tokens, match.reason) == (usable, "complete" if usable == 1024 else "hole")
        assert sum(hit_bytes(spec, hit) for hit in match.hits) == load_plan(spec, usable, CHUNK_TOKENS).nbytes
    with checked.restore(memory, ids) as c:
        assert c.restored.tokens == usable and trace(c) == expected


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("bad", range(4))
def test_a_part_that_turns_out_bad_ends_the_prefix_of_all_groups(
    five_to_one: LM, checked: Session, memory: Memory, bad: int, group: int
) -> None:
    """sglang#31108, vllm#49250: after the read too. The boundary before it needs an earlier windowed part, which is read
    then."""
    ids = prompt(1025)
    with checked.start(ids) as cold:
        cold.publish(memory).wait()
        expected = trace(cold)
    nodes = memory.chain(plan(five_to_one.identity.scope, ids)[-1].id)
    place = memory.placements(nodes[bad].pieces[group])[0]
    path = memory._parts.tiers[place.tier].volume(place.volume).sidecar(place.file, place.blob)
    assert path is not None
    flip(path, place.offset + 5)
    usable = bad * 256 if group == 0 or bad == 3 else 1024
    with checked.restore(memory, ids) as c:
        assert c.restored.tokens == usable and len(c.restored.failures) == (usable < 1024)
        assert [f.start for f in c.route.floors] == [a for a in [floor_of(usable, WINDOW, CHUNK_TOKENS)] if a]
        assert trace(c) == expected


def test_rows_that_are_resident_leave_no_gap(five_to_one: LM, checked: Session, memory: Memory) -> None:
    """A restore on top of shared rows: floors only where rows are missing between them and what was loaded."""
    from numem.runtime.restore.kv import load

    ids = prompt(1025)
    scope, spec = five_to_one.identity.scope, five_to_one.decoder.spec
    with checked.start(ids) as cold:
        cold.publish(memory).wait()
        expected = trace(cold)
        for held, floor in ((100, 768), (770, 0), (1000, 0)):
            route = checked.engine.pool.fork(cold.route, held)
            with lookup(memory, scope, ids, spec=spec) as match:
                route, report = load(memory, checked.engine, route, match)
            assert report.tokens == 1024 - held and [f.start for f in route.floors] == [floor] * (floor > 0)
            with Continuation(checked, list(ids), route) as c:
                assert trace(c) == expected


def test_a_cut_of_a_match_asks_for_the_parts_of_its_own_boundary(
    five_to_one: LM, checked: Session, memory: Memory
) -> None:
    ids = prompt(1025)
    spec = five_to_one.decoder.spec
    with checked.start(ids) as cold:
        cold.publish(memory).wait()
    with lookup(memory, five_to_one.identity.scope, ids, spec=spec) as match:
        assert [hit.parts for hit in match.hits] == [(0,), (0,), (0,), (0, 1)]
        assert [hit.parts for hit in select(spec, match.hits, 512)] == [(0,), (0, 1)]
    with lookup(memory, five_to_one.identity.scope, ids, spec=spec, limit=780) as match:
        assert match.tokens == 780 and [hit.parts for hit in match.hits] == [(0,), (0,), (0, 1), (0, 1)]
