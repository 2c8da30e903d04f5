"""Lineage: ancestry, what two states share, the tree, and finding a state by name."""

from dataclasses import replace

import numpy as np
import pytest

from numem import Memory
from numem.errors import NotFoundError
from numem.lineage.log import ancestry, branch_heads, line, new_pieces, node_bytes, resolve, shared, tree
from tests.lineage_fixtures import IDENTITY, grown, state


def test_ancestry_is_the_chain_root_first(memory: Memory) -> None:
    nodes = grown(memory)
    assert [n.id for n in ancestry(memory, nodes["left"].id)] == [nodes[k].id for k in ("root", "middle", "left")]
    with pytest.raises(NotFoundError):
        ancestry(memory, bytes(32))


def test_two_ends_share_their_past_and_the_tiles_nobody_touched(memory: Memory) -> None:
    nodes = grown(memory)
    both = shared(memory, nodes["left"].id, nodes["right"].id)
    assert (both.fork, both.ancestors) == (nodes["middle"].id, 2)
    assert both.pieces == nodes["middle"].pieces[2:]
    assert (both.chunks, both.of, both.nbytes) == (2, 4, 64)


def test_a_state_and_its_ancestor_share(memory: Memory) -> None:
    nodes = grown(memory)
    both = shared(memory, nodes["middle"].id, nodes["left"].id)
    assert (both.fork, both.chunks) == (nodes["middle"].id, 3)
    whole = shared(memory, nodes["left"].id, nodes["left"].id)
    assert (whole.fork, whole.ancestors, whole.chunks, whole.nbytes) == (nodes["left"].id, 3, 4, 128)


def test_states_of_different_causes_may_share_bytes_alone(memory: Memory) -> None:
    nodes = grown(memory)
    other = state(memory, None, np.arange(16.0) + 100, "computed otherwise")
    both = shared(memory, nodes["middle"].id, other.id)
    assert (both.fork, both.ancestors, both.chunks) == (None, 0, 4)


def test_the_tree_indents_where_history_parts(memory: Memory) -> None:
    nodes = grown(memory)
    short = {name: node.id.hex()[:12] for name, node in nodes.items()}
    assert tree(memory).splitlines() == [
        f"{short['root']} field step 1  4 chunks, 4 new",
        f"{short['middle']} field step 2  4 chunks, 4 new",
        f"├─ {short['left']} field step 3  4 chunks, 1 new  [left]",
        f"└─ {short['right']} field step 3  4 chunks, 2 new  [right]",
    ]
    later = state(memory, nodes["left"], np.arange(16.0) + 300)
    assert tree(memory).splitlines()[3] == f"│  {later.id.hex()[:12]} field step 4  4 chunks, 4 new"


def test_a_tree_of_some_nodes_starts_where_their_parents_are_absent(memory: Memory) -> None:
    nodes = grown(memory)
    lines = tree(memory, [nodes["left"], nodes["root"]]).splitlines()
    assert [text.split()[0] for text in lines] == [nodes["root"].id.hex()[:12], nodes["left"].id.hex()[:12]]


def test_an_empty_memory_has_an_empty_tree(memory: Memory) -> None:
    assert tree(memory) == ""


def test_long_chains_do_not_nest(memory: Memory) -> None:
    grown(memory)
    (root,) = (n for n in memory.nodes() if n.is_root)
    chain = [root]
    for number in range(3000):
        chain.append(
            replace(root, id=number.to_bytes(32, "big"), parent=chain[-1].id, start=number + 1, coordinate={"step": 0})
        )
    lines = tree(memory, chain).splitlines()
    assert len(lines) == 3001 and not any(text.startswith(("├", "└", " ")) for text in lines)


def test_a_line_counts_distinct_new_pieces(memory: Memory) -> None:
    memory.register(IDENTITY)
    node = state(memory, None, np.zeros(16))
    assert new_pieces(node, None) == 1 and node_bytes(node) == 128
    assert new_pieces(node, node) == 0
    assert line(node, None, ["a", "b"]).endswith("4 chunks, 1 new  [a, b]")


def test_states_are_found_by_branch_and_by_id_prefix(memory: Memory) -> None:
    nodes = grown(memory)
    left = nodes["left"]
    assert branch_heads(memory) == {left.id: ["left"], nodes["right"].id: ["right"]}
    for name in ("left", left.id.hex(), left.id.hex()[:16], left.id.hex()[:16].upper()):
        assert resolve(memory, name) == left


def test_a_branch_named_like_an_id_wins(memory: Memory) -> None:
    nodes = grown(memory)
    name = nodes["root"].id.hex()[:8]
    memory.create_branch(name, nodes["right"].id, actor="test", reason="")
    assert resolve(memory, name) == nodes["right"]


def test_names_of_nothing_are_refused(memory: Memory) -> None:
    grown(memory)
    for name in ("", "nowhere", "0" * 64, "f" * 65, "../left", "left ", "0x12"):
        with pytest.raises(NotFoundError, match="no branch and no causal id"):
            resolve(memory, name)


def test_an_ambiguous_prefix_lists_the_candidates(memory: Memory) -> None:
    nodes = grown(memory)
    left, right = nodes["left"].id.hex(), nodes["right"].id.hex()
    with pytest.raises(NotFoundError, match=f"'{left[0]}': 2 causal ids begin so") as caught:
        resolve(memory, left[0])
    assert left[:12] in str(caught.value) and right[:12] in str(caught.value)
