"""A small memory of field states: two branches over a common past."""

import numpy as np

from numem import Memory
from numem.identity.canonical import canonical_json
from numem.identity.digest import framed_sha256
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.state.field import cut
from numem.state.node import Node

IDENTITY = Identity({"program": "lineage-test"}, NumericPolicy("exact", b"\x01" * 32), "any")


def id_of(parent: bytes, label: str) -> bytes:
    """Causal id of a state."""
    return framed_sha256("numem/test/step/v1", parent, canonical_json({"label": label}))


def state(memory: Memory, parent: Node | None, values: np.ndarray, label: str = "") -> Node:
    """Publish an array of 4 tiles as the next state."""
    origin, start = (parent.id, parent.end) if parent else (IDENTITY.scope, 0)
    tiles = cut("u", values, (4,))
    node = Node(
        id=id_of(origin, label),
        parent=origin,
        scope=IDENTITY.scope,
        kind="field",
        start=start,
        count=1,
        applied=canonical_json({"label": label}),
        pieces=tiles.pieces,
        fields=(tiles.field,),
        coordinate={"step": start + 1},
        provenance={"numpy": np.__version__},
    )
    memory.publish(node, tiles.payloads).published.result(30)
    return node


def grown(memory: Memory) -> dict[str, Node]:
    """Root, middle, and two ends: `left` changes tile 0, `right` changes tiles 0 and 1.

    The ids of the two ends begin with the same hex digit, and with no other two of the four.
    """
    memory.register(IDENTITY)
    values = np.arange(16.0)
    root = state(memory, None, values)
    middle = state(memory, root, values + 100)
    left, right = values + 100, values + 100
    left[0], right[:8] = -1, -np.arange(8.0)
    taken = {node.id.hex()[:1] for node in (root, middle)}
    by_digit: dict[str, list[str]] = {}
    for label in (str(n) for n in range(30)):
        by_digit.setdefault(id_of(middle.id, label).hex()[0], []).append(label)
    first, second = next(labels for digit, labels in by_digit.items() if len(labels) == 2 and digit not in taken)
    ends = {"left": state(memory, middle, left, first), "right": state(memory, middle, right, second)}
    for name, node in ends.items():
        memory.create_branch(name, node.id, actor="test", reason=f"made for {name}")
    return {"root": root, "middle": middle, **ends}
