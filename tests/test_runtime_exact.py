"""The exactness contract on a tiny random model: cache bytes and logits compared as bytes, never by tolerance."""

import numpy as np
import pytest

from numem import LM, Memory
from numem.identity.chain import plan
from numem.runtime.continuation import Continuation
from numem.runtime.engine import pages_for_lanes
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.request import Request
from numem.runtime.restore.prefix import lookup

LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513, 2049)
STEPS = 8


def prompt(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, length)]


def trace(continuation: Continuation, steps: int = STEPS) -> tuple[list[int], list[bytes], bytes]:
    """Tokens, logits of every step and cache bytes after them."""
    tokens, logits = [], []
    for _ in range(steps):
        tokens.append(continuation.step())
        assert continuation.logits is not None
        logits.append(continuation.logits.tobytes())
    return tokens, logits, continuation.kv().tobytes()


@pytest.mark.parametrize("length", LENGTHS)
def test_restored_equals_never_evicted(tiny_lm: LM, memory: Memory, length: int) -> None:
    """Also with freed pages poisoned; at least the pending token is left to compute.

    vllm#11186, vllm#55113, UCM#1130, LMCache full hit minus one; llama.cpp#26676 (success means the bytes are used).
    """
    ids = prompt(length)
    session = tiny_lm.session(pages=pages_for_lanes(2, 2100), debug=True)
    with session.start(ids) as never:
        never.publish(memory).wait()
        expected = trace(never)
    before = session.engine.rows_computed
    with session.restore(memory, ids) as restored:
        assert restored.restored.tokens == length - 1
        assert session.engine.rows_computed == before
        assert trace(restored) == expected
        assert session.engine.rows_computed == before + STEPS
    session.engine.pool.check()


def test_prefilled_equals_generated(tiny_lm: LM, memory: Memory) -> None:
    """The same tokens, once decoded and once prefilled, give the same bytes and content ids."""
    session = tiny_lm.session(pages=pages_for_lanes(2, 700))
    with session.start(prompt(5)) as decoded:
        decoded.advance(300)
        generated = decoded.kv().tobytes()
        decoded.publish(memory).wait()
        tokens = list(decoded.tokens)
    with session.start(tokens) as prefilled:
        assert prefilled.kv().tobytes() == generated
        again = prefilled.publish(memory)
    # Deduplication is success: mooncake#180, mooncake#2967.
    assert again.tickets == () and len(again.reused) == 2


def test_fork_at_every_offset_of_a_page(tiny_lm: LM) -> None:
    """Both sides written, each equal to an independent run.

    xllm#1984, llama.cpp#3802, atlas#1193, Rapid-MLX#196, vllm#55112.
    """
    session = tiny_lm.session(pages=pages_for_lanes(4, 80), debug=True)
    for processed in range(16, 33):
        ids = prompt(processed + 1)
        left, right = [*ids, 7], [*ids, 9]
        with session.start(ids) as parent, parent.fork() as child:
            parent.step()
            child.step()
            parent.tokens[-1], child.tokens[-1] = left[-1], right[-1]
            traces = trace(parent, 3), trace(child, 3)
        for tokens, found in zip((left, right), traces, strict=True):
            with session.start(tokens) as alone:
                assert trace(alone, 3) == found
    session.engine.pool.check()


def test_fork_copies_at_most_one_page(tiny_lm: LM) -> None:
    session = tiny_lm.session(pages=pages_for_lanes(2, 2100))
    with session.start(prompt(2045)) as parent:
        before = session.engine.page_copies
        with parent.fork() as child:
            child.advance(3)
            parent.advance(3)
        assert session.engine.page_copies - before == 1


def test_fork_at_an_earlier_boundary(tiny_lm: LM) -> None:
    session = tiny_lm.session(pages=pages_for_lanes(3, 80))
    ids = prompt(60)
    with session.start(ids) as parent, parent.fork(37) as child:
        assert child.tokens == ids[:38]
        found = trace(child)
    with session.start(ids[:38]) as alone:
        assert trace(alone) == found


def test_freed_parent_leaves_the_fork_alone(tiny_lm: LM) -> None:
    """Fork and free the parent while the child goes on reading (omlx#3087, vllm#37076)."""
    session = tiny_lm.session(pages=pages_for_lanes(2, 80), debug=True)
    ids = prompt(50)
    parent = session.start(ids)
    child = parent.fork()
    parent.close()
    found = trace(child)
    child.close()
    with session.start(ids) as alone:
        assert trace(alone) == found


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_a_lane_is_as_if_alone(tiny_lm: LM, lanes: int) -> None:
    """Batch of one = lane k of N for every k, also for late joiners (imp#1314, omlx#3476, vllm#51226)."""
    requests = [Request(str(i), tuple(prompt(3 + 29 * i, seed=i)), 4 + 3 * i, witness=True) for i in range(8)]
    session = tiny_lm.session(pages=pages_for_lanes(lanes, 280), debug=True)
    outcomes = {o.request.id: o for o in Scheduler(session, lanes).run(requests)}
    assert len(outcomes) == 8
    for request in requests:
        with session.start(request.tokens) as alone:
            tokens, logits, kv = trace(alone, request.max_new_tokens)
        outcome = outcomes[request.id]
        assert outcome.generated == tokens
        assert [row.tobytes() for row in outcome.logits] == logits
        assert outcome.kv is not None and outcome.kv.tobytes() == kv
    session.engine.pool.check()


def test_lanes_share_running_prefixes(tiny_lm: LM) -> None:
    """Sources add up to the prompt's tokens (vllm#25780); output does not depend on sharing."""
    common = prompt(100)
    requests = [Request(str(i), (*common, *prompt(10, seed=i)), 6, witness=True) for i in range(6)]
    session = tiny_lm.session(pages=pages_for_lanes(6, 130), debug=True)
    outcomes = list(Scheduler(session, 6).run(requests))
    assert all(o.computed + o.shared + o.restored == len(o.request.tokens) for o in outcomes)
    assert sum(o.shared >= 100 for o in outcomes) == 5
    for outcome in outcomes:
        with session.start(outcome.request.tokens) as alone:
            assert trace(alone, 6)[0] == outcome.generated
            assert outcome.kv is not None and alone.kv().tobytes() == outcome.kv.tobytes()
    session.engine.pool.check()


def test_contiguous_equals_paged(tiny_lm: LM) -> None:
    """Scattered physical pages against pages in order."""
    ids = prompt(300)
    ordered = tiny_lm.session(pages=64)
    with ordered.start(ids) as c:
        assert c.route.pages == list(range(19))
        expected = trace(c)
    scattered = tiny_lm.session(pages=64, debug=True)
    blockers = [scattered.start(prompt(17, seed=i)) for i in range(16)]
    for blocker in blockers[::2]:
        blocker.close()
    with scattered.start(ids) as c:
        assert c.route.pages != list(range(19))
        assert trace(c) == expected


def test_chunked_prefill_equals_whole(tiny_lm: LM) -> None:
    ids = prompt(700)
    session = tiny_lm.session(pages=pages_for_lanes(2, 720))
    with session.start(ids) as whole:
        expected = trace(whole)
    for cuts in ([1, 2, 3, 250, 699], [256, 512, 699], [13, 14, 400, 699]):
        route = session.engine.pool.allocate()
        for a, b in zip([0, *cuts], cuts, strict=False):
            session.engine.append([(route, ids[a:b])], logits="none")
        with Continuation(session, list(ids), route) as chunked:
            assert trace(chunked) == expected


def test_poisoned_pages_never_leak(tiny_lm: LM) -> None:
    """vllm#57156, vllm#57158, flash-attention#1745."""
    ids = prompt(37)
    with tiny_lm.session(debug=False).start(ids) as clean, tiny_lm.session(debug=True).start(ids) as poisoned:
        a, b = trace(clean), trace(poisoned)
    assert a == b
    assert all(np.isfinite(np.frombuffer(row, dtype=np.float32)).all() for row in a[1])


def test_partial_tail_and_parted_chunk_are_reused(tiny_lm: LM, memory: Memory) -> None:
    """A short tail is reused whole; a chunk that the prompt leaves in the middle gives its shared full pages only."""
    ids = prompt(301)
    session = tiny_lm.session(pages=pages_for_lanes(2, 500))
    with session.start(ids) as c:
        c.publish(memory).wait()
    longer = [*ids[:300], *prompt(150, seed=5)]
    parting = [*ids[:275], 255 - ids[275], *prompt(40, seed=6)]
    for tokens, matched in ((longer, 300), (parting, 272), (ids[:280], 279), ([*ids[:5], 1, 2, 3], 0)):
        with session.start(tokens) as fresh, session.restore(memory, tokens) as restored:
            assert restored.restored.tokens == matched
            assert trace(fresh) == trace(restored)


def test_first_hole_ends_the_match(tiny_lm: LM, memory: Memory) -> None:
    """InfiniStore get_match_last_index; lookup stops at the first chunk that is not there."""
    ids = prompt(1025)
    session = tiny_lm.session(pages=pages_for_lanes(2, 1040))
    chunks = plan(tiny_lm.identity.scope, ids)
    with session.start(ids) as c:
        from numem.runtime.restore.capture import capture

        found = capture(memory, session.engine, tiny_lm.identity, ids, c.route)
    for index in (0, 1, 3):
        memory.publish(found.nodes[index], found.payloads[index]).published.result()
    with lookup(memory, tiny_lm.identity.scope, ids) as match:
        assert (match.tokens, match.reason) == (512, "miss")
        assert [hit.node.id for hit in match.hits] == [chunk.id for chunk in chunks[:2]]


def test_another_identity_misses(tiny_lm: LM, memory: Memory) -> None:
    """lmcache#1856, sglang#33268: another cache dtype is another identity."""
    from numem import load_lm

    ids = prompt(300)
    with tiny_lm.session().start(ids) as c:
        c.publish(memory).wait()
    half = load_lm(tiny_lm.directory, dtype="bfloat16")
    with half.session().restore(memory, ids) as other:
        assert other.restored.tokens == 0
    difference = tiny_lm.identity.compare(half.identity)
    assert "semantic.kv.dtype" in difference.fields


def test_bfloat16_restores_exactly(tiny_lm: LM, memory: Memory) -> None:
    from numem import load_lm

    session = load_lm(tiny_lm.directory, dtype="bfloat16").session(pages=pages_for_lanes(2, 600))
    ids = prompt(513)
    with session.start(ids) as never:
        never.publish(memory).wait()
        expected = trace(never)
    with session.restore(memory, ids) as restored:
        assert restored.restored.tokens == 512
        assert trace(restored) == expected


def test_resident_rows_are_never_overwritten(tiny_lm: LM, memory: Memory) -> None:
    """lmcache#2206: a partial tail chunk overlaps rows that are resident already."""
    session = tiny_lm.session(pages=pages_for_lanes(3, 400), debug=True)
    ids = prompt(301)
    with session.start(ids) as c:
        c.publish(memory).wait()
    tokens = (*ids[:280], *ids[280:300], *prompt(20, seed=3))
    runner = Scheduler(session, 2, memory=memory)
    first = Request("a", tuple(ids[:270]), 30, witness=True)
    second = Request("b", tokens, 5, witness=True)
    outcomes = {o.request.id: o for o in runner.run([first, second])}
    assert outcomes["b"].computed + outcomes["b"].shared + outcomes["b"].restored == len(tokens)
    for request in (first, second):
        with session.start(request.tokens) as alone:
            assert trace(alone, request.max_new_tokens)[0] == outcomes[request.id].generated


@pytest.mark.parametrize("length", [61, 62, 63, 64])
def test_context_ends_at_max_position(tiny_lm: LM, length: int) -> None:
    """pegainfer#220, vllm#17924, vllm#16445: never a value from outside the position table."""
    from numem import load_lm
    from numem.errors import ContextLengthError

    short = load_lm(tiny_lm.directory, max_position=64)
    session = short.session()
    with session.start(prompt(length)) as c:
        c.advance(64 - c.processed)
        with pytest.raises(ContextLengthError, match="max_position 64"):
            c.step()
    (outcome,) = Scheduler(session, 1).run([Request("x", tuple(prompt(length)), 10)])
    assert len(outcome.generated) == 64 - length + 1 and outcome.finish == "capacity"
    with pytest.raises(ContextLengthError):
        session.start(prompt(65))


def test_too_few_pages_change_nothing(tiny_lm: LM, memory: Memory) -> None:
    """llama.cpp#17118: a restore without room leaves everything as before."""
    from numem.errors import CapacityError

    ids = prompt(301)
    with tiny_lm.session(pages=40).start(ids) as c:
        c.publish(memory).wait()
    small = tiny_lm.session(pages=8)
    before = small.engine.pool.stats()
    with pytest.raises(CapacityError):
        small.restore(memory, ids)
    assert small.engine.pool.stats() == before
    small.engine.pool.check()


def test_rows_that_are_not_computed_are_never_published(tiny_lm: LM, memory: Memory) -> None:
    """The pending token's row does not exist yet: neither publish nor kv gives it."""
    from numem.errors import OutOfPlanError

    with tiny_lm.session().start(prompt(40)) as c:
        with pytest.raises(OutOfPlanError, match="computed"):
            c.publish(memory, upto=c.processed + 1)
        for rows in ((0, 40), (0, 48), (10, 5), (-1, 3)):
            with pytest.raises(OutOfPlanError):
                c.kv(*rows)
    assert memory.nodes() == ()


def test_an_interrupted_step_leaves_the_continuation_as_it_was(tiny_lm: LM, memory: Memory) -> None:
    """An exception between evaluating and choosing: the pending token is pending again, and is not evaluated twice."""
    from numem.runtime.sampling import Sampler

    class Interrupted(Sampler):
        def choose(
            self, logits: np.ndarray, position: int, vocab: int | None = None, peak: tuple[int, float] | None = None
        ) -> int:
            raise KeyboardInterrupt

    session = tiny_lm.session(pages=pages_for_lanes(2, 80), debug=True)
    ids = prompt(40)
    with session.start(ids) as c:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                c.step(Interrupted())
            assert (c.processed, c.route.length) == (39, 39)
        found = trace(c)
        c.publish(memory).wait()
    with session.start(ids) as alone:
        assert trace(alone) == found
    session.engine.pool.check()


def test_sessions_of_one_model_in_several_threads(tiny_lm: LM) -> None:
    """Activations are one call's at a time: threads take turns and every row is as if alone."""
    from concurrent.futures import ThreadPoolExecutor

    def run(seed: int) -> bytes:
        with tiny_lm.session(pages=30).start(prompt(300, seed)) as c:
            c.advance(20)
            return c.kv().tobytes()

    expected = [run(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(run, range(4))) == expected
