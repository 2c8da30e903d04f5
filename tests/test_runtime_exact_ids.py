"""What is found under an id is what was written under it: other bytes, other tokens and no tokens are told apart."""

import pytest

from numem import LM, Memory
from numem.identity.chain import plan
from numem.runtime.restore.prefix import lookup
from tests.test_runtime_exact import prompt


def test_waiting_tells_of_other_bytes_under_the_same_id(tiny_lm: LM, memory: Memory) -> None:
    """First wins; the second publisher is told that its bytes are not the durable ones (an event says so too)."""
    from numem.errors import IntegrityError

    session = tiny_lm.session(pages=64)
    with session.start(prompt(40)) as first, session.start(prompt(40)) as second:
        first.publish(memory).wait()
        content = memory.nodes()[0].pieces[0]
        session.engine.storage.k[:, second.route.pages[0]] += 1
        from numem.runtime.restore.capture import capture

        class Forgetful:
            """The memory as another process saw it before the first publication."""

            durable = staticmethod(lambda _: False)

        found = capture(Forgetful(), session.engine, tiny_lm.identity, second.tokens, second.route)  # type: ignore[arg-type]  # a stand-in
        from numem.runtime.continuation import Published

        ticket = memory.publish(found.nodes[0], found.payloads[0])
        with pytest.raises(IntegrityError, match="other bytes"):
            Published((ticket,), ()).wait()
        assert memory.nodes()[0].pieces[0] == content and len(memory.events) == 1


@pytest.mark.parametrize("bad", [[1.5, 2.0], [True, False], ["a"], [2**63, 1], [-1, 2], [10**6]])
def test_tokens_that_are_no_tokens(tiny_lm: LM, bad: list[int]) -> None:
    from numem.errors import InputError

    with pytest.raises(InputError):
        tiny_lm.session().start([*bad, 1])


def test_a_hit_compares_tokens_as_well_as_ids(tiny_lm: LM, memory: Memory) -> None:
    """vllm#12621 (CVE-2025-25183), openvino.genai#3722: whatever an index returns under a parent, other tokens or a
    wrong id are not served."""
    from dataclasses import replace

    ids, other = prompt(257), prompt(257, seed=9)
    with tiny_lm.session().start(ids) as c:
        c.publish(memory).wait()
    (node,) = memory.nodes()
    (wanted,) = plan(tiny_lm.identity.scope, other)

    class Colliding:
        """A memory whose index answers every parent with one node."""

        available = staticmethod(lambda _id, _tier=None, _pieces=None: True)
        hold = staticmethod(memory.hold)
        looked = staticmethod(memory.looked)

        def __init__(self, answer: object) -> None:
            self.answer = answer

        def children(self, parent: bytes) -> tuple[object, ...]:
            return (self.answer,)

    for answer in (replace(node, id=wanted.id), replace(node, applied=wanted.applied)):
        with lookup(Colliding(answer), tiny_lm.identity.scope, other) as match:  # type: ignore[arg-type]  # a stand-in
            assert match.tokens == 0
    with lookup(Colliding(node), tiny_lm.identity.scope, ids) as match:  # type: ignore[arg-type]  # a stand-in
        assert match.tokens == 256
