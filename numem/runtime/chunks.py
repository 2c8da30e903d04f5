"""The node of a chunk of attention state: one field, one piece, appended along the token axis."""

from numem.identity.chain import CHUNK_TOKENS, Chunk
from numem.state.manifest import chunk_of
from numem.state.node import Node
from numem.state.spec import StateSpec

KIND = "kv"


def chunk_node(
    chunk: Chunk,
    scope: bytes,
    spec: StateSpec,
    content: bytes,
    provenance: dict[str, str],
    chunk_tokens: int = CHUNK_TOKENS,
) -> Node:
    """The causal fact of one chunk of attention state, of a plan in chunks of `chunk_tokens`."""
    cell = chunk_of((0, chunk.start, 0), (spec.members, chunk.count, spec.width), spec.dtype, content)
    return Node(
        id=chunk.id,
        parent=chunk.parent,
        scope=scope,
        kind=KIND,
        start=chunk.start,
        count=chunk.count,
        applied=chunk.applied,
        marks=chunk.pages,
        pieces=(content,),
        fields=(
            {
                "id": KIND,
                "value": {"dtype": spec.dtype, "shape": [spec.members, chunk.end, spec.width]},
                "chunk_shape": [spec.members, chunk_tokens, spec.width],
                "coordinate_space": {"axis": spec.axis, "layout": spec.layout, "origin": 0},
                "chunks": [cell.model_dump(mode="json")],
                "attributes": {},
            },
        ),
        coordinate={"processed_count": chunk.end},
        append_axis=1,
        provenance=provenance,
    )
