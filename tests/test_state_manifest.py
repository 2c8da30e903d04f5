"""Manifest schema version 1: what it accepts, what it refuses, and that its bytes are stable."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.errors import ManifestError
from numem.state.manifest import Manifest, build, chunk_of, differences
from numem.state.spec import DTYPE_BYTES


def document(shape: tuple[int, ...] = (5, 7), grid: tuple[int, ...] = (2, 4), dtype: str = "float64") -> dict[str, Any]:
    """A valid manifest of one field, as plain values."""
    cells: list[tuple[int, ...]] = [()]
    for extent, step in zip(shape, grid, strict=True):
        cells = [(*cell, at) for cell in cells for at in range(0, extent, step)]
    chunks = []
    for number, cell in enumerate(cells):
        clipped = [min(g, s - at) for at, g, s in zip(cell, grid, shape, strict=True)]
        chunks.append(chunk_of(cell, clipped, dtype, number.to_bytes(32, "big"), level=number).model_dump(mode="json"))
    return {
        "schema_version": 1,
        "id": "0a" * 32,
        "parents": ["0b" * 32],
        "logical_coordinate": {"step": 40},
        "fields": [
            {
                "id": "temperature",
                "value": {"dtype": dtype, "shape": list(shape)},
                "chunk_shape": list(grid),
                "coordinate_space": {"axes": "y,x", "origin": 0},
                "chunks": chunks,
                "attributes": {"unit": "K"},
            }
        ],
        "numerical_contract": {"mode": "field", "determinism": "bitwise", "compatibility_id": "0c" * 32},
        "provenance": {"program_fingerprint": "0c" * 32, "numem": "0.1.0"},
        "attributes": {"kind": "field", "é": "ü"},
    }


def encode(tree: Any) -> str:
    return json.dumps(tree)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
    st.sampled_from(sorted(DTYPE_BYTES)),
)
def test_a_round_trip_is_byte_stable(extents: list[tuple[int, int]], dtype: str) -> None:
    manifest = build(document(tuple(e for e, _ in extents), tuple(g for _, g in extents), dtype))
    once = manifest.to_json()
    again = Manifest.from_json(once)
    assert again == manifest and again.to_json() == once
    assert Manifest.from_json(encode(json.loads(once))).to_json() == once


def test_key_order_and_spacing_of_a_document_do_not_matter() -> None:
    tree = document()
    shuffled = json.dumps(dict(reversed(tree.items())), indent=2)
    assert Manifest.from_json(shuffled).to_json() == build(tree).to_json()


def test_totals_and_content_ids() -> None:
    manifest = build(document())
    assert manifest.logical_bytes == 5 * 7 * 8
    assert manifest.content_ids == tuple(n.to_bytes(32, "big") for n in range(6))


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None])
def test_other_schema_versions_are_refused_by_value(version: Any) -> None:
    with pytest.raises(ManifestError, match="schema_version") as caught:
        Manifest.from_json(encode({**document(), "schema_version": version}))
    assert repr(version) in str(caught.value)


def test_a_document_without_a_version_is_refused() -> None:
    tree = document()
    del tree["schema_version"]
    with pytest.raises(ManifestError, match="schema_version is None"):
        Manifest.from_json(encode(tree))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', b"\xff\xfe", "[" * 100_000])
def test_what_is_not_a_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(ManifestError, match="manifest"):
        Manifest.from_json(text)


def edit(change: Callable[[dict[str, Any]], None]) -> str:
    tree = copy.deepcopy(document())
    change(tree)
    return encode(tree)


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        node: Any = tree
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        node: Any = tree
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]

    return change


FIELD = ("fields", 0)
CHUNK = (*FIELD, "chunks", 1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (put("path", value="/data"), "path"),
        (put(*FIELD, "bucket", value="b"), "bucket"),
        (put(*CHUNK, "storage", "codec", value="zstd"), "codec"),
        (put(*CHUNK, "storage", "byte_order", value="native"), "byte_order"),
        (put(*CHUNK, "storage", "format", value="pickle"), "format"),
        (put(*CHUNK, "content", "algorithm", value="md5"), "algorithm"),
        (put(*CHUNK, "content", "digest", value="ab"), "digest"),
        (put(*CHUNK, "stored_byte_length", value=0), "stored_byte_length"),
        (put(*CHUNK, "logical_byte_length", value=1), "states 1 bytes"),
        (put(*CHUNK, "logical_byte_length", value=2**32 + 64), "bytes"),
        (put(*CHUNK, "offsets", value=[0, 5]), "row-major"),
        (put(*CHUNK, "offsets", value=[0, 4.0]), "offsets"),
        (put(*CHUNK, "shape", value=[2, 4]), "row-major"),
        (drop(*CHUNK), "5 chunks do not cover a grid of 6"),
        (put(*FIELD, "chunks", value=[]), "0 chunks"),
        (put(*FIELD, "value", "dtype", value="float16"), "states"),
        (put(*FIELD, "value", "dtype", value="object"), "object"),
        (put(*FIELD, "value", "shape", value=[5, 7, 1]), "rank"),
        (put(*FIELD, "value", "shape", value=[]), "rank"),
        (put(*FIELD, "value", "shape", value=[-5, 7]), "positive"),
        (put(*FIELD, "value", "shape", value=[2**63, 2**63]), "do not cover"),
        (put(*FIELD, "chunk_shape", value=[0, 4]), "positive"),
        (put("fields", value=[]), "fields"),
        (put("fields", value=document()["fields"] * 2), "repeat"),
        (put("id", value="0A" * 32), "id"),
        (put("id", value="0a" * 32 + "\n"), "id"),
        (put("parents", value=["0b" * 32, "0b" * 32]), "parents"),
        (put("parents", value=["0a" * 32]), "parents"),
        (put("parents", value=["somewhere/else"]), "parents"),
        (put("logical_coordinate", value={"step": 1.5}), "step"),
        (put("logical_coordinate", value={"step": True}), "step"),
        (drop("logical_coordinate"), "logical_coordinate"),
        (put("numerical_contract", "determinism", value="mostly"), "determinism"),
        (drop("numerical_contract"), "numerical_contract"),
        (drop("provenance", "program_fingerprint"), "program_fingerprint"),
        (put("attributes", "deep", value={"a": 1}), "deep"),
    ],
)
def test_a_document_at_fault_is_refused_by_name(change: Callable[[dict[str, Any]], None], word: str) -> None:
    """vllm#54338, mooncake 3a89304 (#2570): an edited dtype or length fails closed, unknown keys too."""
    with pytest.raises(ManifestError, match="manifest: ") as caught:
        Manifest.from_json(edit(change))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[2**31, 2**31], [10**15, 1]])
def test_a_giant_grid_is_refused_without_being_built(value: list[int]) -> None:
    """mooncake 3a89304 (#2570): length fields may say anything."""

    def change(tree: dict[str, Any]) -> None:
        tree["fields"][0]["value"]["shape"] = value
        tree["fields"][0]["chunk_shape"] = [1, 1]

    with pytest.raises(ManifestError, match="do not cover"):
        Manifest.from_json(edit(change))


def test_differences_ignore_bytes_and_chunking_and_name_the_rest() -> None:
    expected = build(document())
    rechunked = document(grid=(5, 7))
    rechunked["provenance"]["numem"] = "0.2.0"
    assert differences(expected, build(rechunked)) == []
    other = document()
    other["logical_coordinate"] = {"step": 41}
    other["fields"][0]["coordinate_space"]["origin"] = 1
    other["numerical_contract"]["determinism"] = "toleranced"
    assert differences(expected, build(other)) == [
        "fields.temperature.coordinate_space",
        "logical_coordinate",
        "numerical_contract",
    ]
    assert differences(expected, build(document(dtype="int64"))) == ["fields.temperature.value"]
    renamed = document()
    renamed["fields"][0]["id"] = "salinity"
    assert "fields.salinity.value" in differences(expected, build(renamed))
