"""Nodes for the benchmarks of the durable plane."""

from collections.abc import Sequence

import numpy as np

from numem.identity.digest import content_id
from numem.state.manifest import chunk_of
from numem.state.node import Node

SCOPE = content_id(b"numem/bench/store")


def piece_node(pieces: Sequence[np.ndarray], *, name: bytes = b"-") -> Node:
    """A root node of one field, `uint8[pieces, 1, bytes]`, with one chunk per piece; all of one size."""
    contents = tuple(content_id(piece) for piece in pieces)
    nbytes = pieces[0].nbytes
    chunks = [
        chunk_of([number, 0, 0], [1, 1, nbytes], "uint8", content).model_dump(mode="json")
        for number, content in enumerate(contents)
    ]
    field = {
        "id": "rows",
        "value": {"dtype": "uint8", "shape": [len(pieces), 1, nbytes]},
        "chunk_shape": [1, 1, nbytes],
        "coordinate_space": {},
        "attributes": {},
        "chunks": chunks,
    }
    identity = content_id(name + b"".join(contents))
    return Node(
        id=identity,
        parent=SCOPE,
        scope=SCOPE,
        kind="rows",
        start=0,
        count=1,
        applied=name,
        pieces=contents,
        fields=(field,),
        coordinate={"row": 1},
        marks=(identity,),
        append_axis=1,
        provenance={"bench": "store"},
    )
