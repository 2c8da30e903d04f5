"""Nodes and their projection to the manifest of a boundary."""

import json
from dataclasses import replace
from typing import Any

import pytest

from numem.errors import ManifestError
from numem.identity.chain import Chunk, plan
from numem.identity.digest import content_id
from numem.state.manifest import chunk_of
from numem.state.node import Node, project
from numem.state.spec import Slab, StateSpec

SCOPE = bytes(range(32))
SPEC = StateSpec((Slab("key", 2, 8), Slab("value", 2, 8)), "float32")


def node_of(chunk: Chunk, **changes: Any) -> Node:
    content = content_id(chunk.id)
    cell = chunk_of((0, chunk.start, 0), (4, chunk.count, 8), "float32", content)
    field = {
        "id": "kv",
        "value": {"dtype": "float32", "shape": [4, chunk.end, 8]},
        "chunk_shape": [4, 256, 8],
        "coordinate_space": {"axis": "token", "origin": 0},
        "chunks": [cell.model_dump(mode="json")],
        "attributes": {},
    }
    return Node(
        id=chunk.id,
        parent=chunk.parent,
        scope=SCOPE,
        kind="kv",
        start=chunk.start,
        count=chunk.count,
        applied=chunk.applied,
        marks=chunk.pages,
        pieces=(content,),
        fields=({**field, **changes.pop("field", {})},),
        coordinate={"processed_count": chunk.end},
        append_axis=1,
        **changes,
    )


def chain(tokens: int) -> list[Node]:
    return [node_of(chunk) for chunk in plan(SCOPE, list(range(tokens)), tokens)]


def test_the_manifest_of_600_tokens() -> None:
    """The worked example of the manifest projection: one chunk is one cell of a regular grid, the tail clipped."""
    nodes = chain(600)
    manifest = project(nodes)
    (field,) = manifest.fields
    assert field.value.shape == [4, 600, 8] and field.chunk_shape == [4, 256, 8]
    assert [c.offsets for c in field.chunks] == [[0, 0, 0], [0, 256, 0], [0, 512, 0]]
    assert [c.shape for c in field.chunks] == [[4, 256, 8], [4, 256, 8], [4, 88, 8]]
    assert manifest.logical_bytes == 76_800
    assert manifest.id == nodes[-1].id.hex() and manifest.parents == [nodes[1].id.hex()]
    assert manifest.logical_coordinate == {"processed_count": 600}
    assert manifest.numerical_contract.compatibility_id == SCOPE.hex()
    assert manifest.numerical_contract.determinism == "bitwise"
    assert manifest.content_ids == tuple(n.pieces[0] for n in nodes)


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 512])
def test_the_chain_projects_at_any_length(tokens: int) -> None:
    nodes = chain(tokens)
    manifest = project(nodes)
    assert manifest.fields[0].value.shape == [4, tokens, 8]
    assert manifest.logical_bytes == tokens * SPEC.row_bytes
    assert manifest.parents == ([] if tokens <= 256 else [nodes[-2].id.hex()])


def test_a_broken_chain_is_refused_with_the_place() -> None:
    first, second, third = chain(600)
    with pytest.raises(ManifestError, match="empty chain"):
        project([])
    with pytest.raises(ManifestError, match="does not start at its scope"):
        project([second, third])
    with pytest.raises(ManifestError, match="breaks at position 512"):
        project([first, third])
    with pytest.raises(ManifestError, match="breaks at position 256"):
        project([first, replace(second, parent=third.id), third])
    with pytest.raises(ManifestError, match="breaks at position 256"):
        project([first, replace(second, scope=bytes(32)), third])


def test_unequal_interior_chunks_are_refused() -> None:
    tokens = list(range(400))
    first = plan(SCOPE, tokens, 200)[0]
    second = plan(first.id, tokens[200:], 200)[0]
    shifted = replace(second, start=200)
    with pytest.raises(ManifestError, match="manifest: "):
        project([node_of(first), node_of(shifted)])


@pytest.mark.parametrize(
    "field",
    [
        {"value": {"dtype": "int32", "shape": [4, 512, 8]}},
        {"value": {"dtype": "float32", "shape": [8, 512, 8]}},
        {"chunk_shape": [4, 128, 8]},
        {"coordinate_space": {"axis": "token", "origin": 256}},
    ],
)
def test_a_field_that_changes_midway_is_refused(field: dict[str, Any]) -> None:
    """vllm#54338: bits are never reinterpreted, not even between two dtypes of one size."""
    first, second = plan(SCOPE, list(range(512)), 512)
    with pytest.raises(ManifestError, match="changes its"):
        project([node_of(first), node_of(second, field=field)])


def test_whole_fields_stand_alone_and_keep_their_parent() -> None:
    first, second = chain(512)
    cell = chunk_of((0, 0), (2, 2), "float64", content_id(b"x")).model_dump(mode="json")
    field = {
        "id": "u",
        "value": {"dtype": "float64", "shape": [2, 2]},
        "chunk_shape": [2, 2],
        "chunks": [cell],
    }
    node = replace(second, append_axis=None, fields=(field,), kind="field", coordinate={"step": 512})
    manifest = project([first, node])
    assert [f.id for f in manifest.fields] == ["u"] and manifest.parents == [first.id.hex()]
    assert manifest == project([node])


def test_extras_of_a_node_are_byte_stable_and_hold_no_column_twice() -> None:
    node = replace(chain(10)[0], provenance={"torch": "2", "numem": "1"})
    text = node.extras()
    assert text == replace(node, provenance={"numem": "1", "torch": "2"}).extras()
    assert set(json.loads(text)) == {"append_axis", "coordinate", "fields", "provenance"}


@pytest.mark.parametrize("change", [{"id": b"x"}, {"parent": bytes(31)}, {"scope": bytes(33)}])
def test_ids_of_another_size_are_refused(change: dict[str, bytes]) -> None:
    with pytest.raises(ManifestError, match="bytes, not 32"):
        replace(chain(10)[0], **change)  # type: ignore[arg-type]  # one field at a time


@pytest.mark.parametrize("change", [{"count": 0}, {"count": -1}, {"start": -1}])
def test_ranges_without_extent_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ManifestError, match="range"):
        replace(chain(10)[0], **change)  # type: ignore[arg-type]  # one field at a time
