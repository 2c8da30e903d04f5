"""The node of a chunk of attention state: one field and one piece per retention group, appended along the token axis."""

from collections.abc import Sequence
from typing import Any

from numem.errors import InputError
from numem.identity.chain import CHUNK_TOKENS, Chunk
from numem.state.groups import Group
from numem.state.manifest import chunk_of
from numem.state.node import Node
from numem.state.spec import StateSpec

KIND = "kv"


def chunk_node(
    chunk: Chunk,
    scope: bytes,
    spec: StateSpec,
    contents: Sequence[bytes],
    provenance: dict[str, str],
    chunk_tokens: int = CHUNK_TOKENS,
) -> Node:
    """The causal fact of one chunk of attention state, of a plan in chunks of `chunk_tokens`.

    Args:
        contents: content id of each group's payload, in the order of `spec.retained`. All parts of a chunk are always
            published; what a boundary does not need is left out when it is restored.
    """
    groups = spec.retained
    if len(contents) != len(groups):
        raise InputError(f"chunk node: {len(contents)} payloads for the {len(groups)} groups of the layout")
    return Node(
        id=chunk.id,
        parent=chunk.parent,
        scope=scope,
        kind=KIND,
        start=chunk.start,
        count=chunk.count,
        applied=chunk.applied,
        marks=chunk.pages,
        pieces=tuple(contents),
        fields=tuple(
            _field(chunk, spec, group, content, chunk_tokens) for group, content in zip(groups, contents, strict=True)
        ),
        coordinate={"processed_count": chunk.end},
        append_axis=1,
        provenance=provenance,
    )


def chunk_grid(node: Node) -> int:
    """Rows of a full chunk of the plan that a node was cut by."""
    return int(node.fields[0]["chunk_shape"][1])


def has_layout(node: Node, spec: StateSpec) -> bool:
    """Whether a node has every group of a layout, in its order, as one piece each. Shapes and dtype are the scope's:
    the layout is part of the identity."""
    groups = spec.retained
    return len(node.pieces) == len(groups) and [str(field["id"]) for field in node.fields] == [g.id for g in groups]


def _field(chunk: Chunk, spec: StateSpec, group: Group, content: bytes, chunk_tokens: int) -> dict[str, Any]:
    cell = chunk_of((0, chunk.start, 0), spec.group_shape(group, chunk.count), spec.dtype, content)
    space: dict[str, Any] = {"axis": spec.axis, "layout": spec.layout, "origin": 0}
    if group.window is not None:
        space["window"] = group.window
    return {
        "id": group.id,
        "value": {"dtype": spec.dtype, "shape": list(spec.group_shape(group, chunk.end))},
        "chunk_shape": list(spec.group_shape(group, chunk_tokens)),
        "coordinate_space": space,
        "chunks": [cell.model_dump(mode="json")],
        "attributes": {},
    }
