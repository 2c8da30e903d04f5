"""Pages that came back from a tier are kept, matched and evicted as the pages that they are, not as those they once were."""

import numpy as np

from numem import LM, Memory
from numem.runtime.paging.residency import Residency


def test_restored_pages_are_kept_and_evicted_as_their_own(tiny_lm: LM, memory: Memory) -> None:
    """atlas#373: A publishes and is evicted, B restores the same prefix into other pages, both are offered again, and a
    second A and B decode; every page's references add up after each step."""
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 256, 70)]
    session = tiny_lm.session(pages=24, debug=True)
    pool = session.engine.pool
    residency = Residency(session.engine)
    with session.start(prompt) as alone:
        expected = alone.advance(8)

    a = session.start(prompt)
    first = list(a.route.pages)
    a.publish(memory).wait()
    assert residency.retain("a", a.route, a.tokens, durable=True)
    blocker = pool.allocate()  # so that A's pages are somebody else's when B comes
    residency.drop("a")
    pool.check()
    session.engine.append([(blocker, prompt[:33])], logits="none")

    b = session.restore(memory, prompt)
    assert b.restored.tokens == len(prompt) - 1 and list(b.route.pages) != first
    b.publish(memory).wait()
    assert residency.retain("b", b.route, b.tokens, durable=True)
    pool.check()
    twin = session.restore(memory, prompt)
    assert not residency.retain("twin", twin.route, twin.tokens, durable=True)  # B's pages stay, the twin's go
    pool.check()
    found = residency.match(prompt[:-1])
    assert found is not None and found == (b.route, len(prompt) - 1)

    fork = pool.fork(*found)
    residency.drop("b")
    pool.check()
    with session.start(prompt) as second_a, session.restore(memory, prompt) as second_b:
        assert second_a.advance(8) == second_b.advance(8) == expected
        pool.check()
    for route in (fork, blocker):
        session.engine.release(route)
    pool.check()
    assert pool.free == 24
