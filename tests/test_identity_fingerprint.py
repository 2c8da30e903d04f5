"""Identity: every axis separates state, and comparing two identities names exactly what differs."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from numem.errors import IncompatibleError, InputError
from numem.identity.chain import plan
from numem.identity.digest import content_id
from numem.identity.fingerprint import Grade, Identity, NumericPolicy
from numem.state.manifest import chunk_of
from numem.state.node import Node, project

POLICY = NumericPolicy("cpu-fma-v1", b"\x11" * 32)
SEMANTIC: dict[str, Any] = {
    "adapters": [],
    "architecture": {
        "heads": 9,
        "kv_heads": 3,
        "rms_eps": 1e-5,
        "rope": {"theta": 100000.0, "scaling": None},
        "windows": None,
        "tied_head": True,
    },
    "chunk_tokens": 256,
    "kv": {
        "axis": "token",
        "byte_order": "little",
        "dtype": "float32",
        "layout": "slab-member-row/v1",
        "slabs": [{"name": "key", "members": 30, "width": 192}, {"name": "value", "members": 30, "width": 192}],
    },
    "page_tokens": 16,
    "program": "numem/decoder/v1",
    "quantisation": None,
    "tokenizer": "aa" * 32,
    "weights": "bb" * 32,
}


def identity(semantic: Mapping[str, Any] = SEMANTIC, salt: bytes = b"") -> Identity:
    return Identity(semantic, POLICY, "cpu-x86_64", salt)


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def other(value: Any) -> Any:
    """A value that differs as little as the type allows."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1] != "0" else "1")
    if isinstance(value, list):
        return [*value, "one more"]
    return "something"


def changed(path: tuple[str, ...]) -> dict[str, Any]:
    tree = copy.deepcopy(SEMANTIC)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = other(node[path[-1]])
    return tree


@pytest.mark.parametrize("path", list(leaves(SEMANTIC)), ids=".".join)
def test_every_semantic_leaf_changes_the_scope_and_is_named(path: tuple[str, ...]) -> None:
    """vllm#56311, #55904, #49261; lmcache#1856; lmcache#4463; mlx-serve#323; lmdeploy#4917; llm-d-kv-cache 1470bb8."""
    mine, theirs = identity(), identity(changed(path))
    assert mine.scope != theirs.scope and mine.fingerprint != theirs.fingerprint
    result = mine.compare(theirs)
    assert result.fields == ("semantic." + ".".join(path),)
    assert result.grade is Grade.TRANSFORM


@pytest.mark.parametrize("path", list(leaves(SEMANTIC)), ids=".".join)
def test_a_missing_leaf_is_named_too(path: tuple[str, ...]) -> None:
    tree = copy.deepcopy(SEMANTIC)
    node = tree
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    assert identity(tree).scope != identity().scope
    assert identity().compare(identity(tree)).fields == ("semantic." + ".".join(path),)


@pytest.mark.parametrize(
    ("theirs", "fields", "grade"),
    [
        (
            Identity(SEMANTIC, NumericPolicy("cpu-torch-v1", b"\x11" * 32), "cpu-x86_64"),
            ("policy.name",),
            Grade.NUMERICAL,
        ),
        (
            Identity(SEMANTIC, NumericPolicy("cpu-fma-v1", b"\x11" * 31 + b"\x12"), "cpu-x86_64"),
            ("policy.self_test",),
            Grade.NUMERICAL,
        ),
        (Identity(SEMANTIC, POLICY, "cuda-sm90"), ("device_class",), Grade.NUMERICAL),
        (Identity(SEMANTIC, POLICY, "cpu-x86_64", b"\x01" * 32), ("salt",), Grade.TRANSFORM),
        (
            Identity({**SEMANTIC, "weights": "cc"}, POLICY, "cuda-sm90"),
            ("device_class", "semantic.weights"),
            Grade.TRANSFORM,
        ),
        (Identity(dict(reversed(SEMANTIC.items())), POLICY, "cpu-x86_64"), (), Grade.EXACT),
    ],
)
def test_the_other_axes_are_named_and_graded(theirs: Identity, fields: tuple[str, ...], grade: Grade) -> None:
    """sglang#33268, vllm PR#56331: structured identity, one test per axis."""
    result = identity().compare(theirs)
    assert (result.fields, result.grade) == (fields, grade)
    assert (theirs.scope == identity().scope) is (grade is Grade.EXACT)


def test_two_salts_do_not_share_a_scope_nor_appear_in_a_description() -> None:
    a, b = identity(salt=b"\x01" * 32), identity(salt=b"\x02" * 32)
    assert len({a.scope, b.scope, identity().scope}) == 3
    assert a.describe() == b.describe() and a.describe()["salted"] is True
    assert "0101" not in repr(a.describe())


def test_trees_that_differ_only_in_nesting_are_not_exact() -> None:
    a, b = identity({"a.b": 1}), identity({"a": {"b": 1}})
    assert a.scope != b.scope
    assert a.compare(b).grade is Grade.TRANSFORM


def test_require_exact_names_the_fields_on_one_line() -> None:
    theirs = identity({**SEMANTIC, "weights": "cc", "tokenizer": "dd"})
    with pytest.raises(IncompatibleError) as caught:
        identity().require_exact(theirs, "the checkpoint")
    assert caught.value.fields == ("semantic.tokenizer", "semantic.weights")
    assert "semantic.weights" in str(caught.value) and "\n" not in str(caught.value)
    identity().require_exact(identity())


def test_an_identity_without_content_is_refused() -> None:
    with pytest.raises(InputError, match="semantic"):
        Identity({}, POLICY, "cpu")
    with pytest.raises(InputError, match="device_class"):
        Identity(SEMANTIC, POLICY, "")


def test_library_versions_are_recorded_but_enter_no_id() -> None:
    """Upgrading a library that computes the same bits keeps every chunk reachable."""
    payload = bytes(4 * 20 * 8 * 4)
    ids = []
    for provenance in ({"numem": "0.1.0", "torch": "2.13.0"}, {"numem": "9.9.9", "torch": "3.0.0", "code": "ff"}):
        (chunk,) = plan(identity().scope, list(range(21)))
        cell = chunk_of((0, 0, 0), (4, 20, 8), "float32", content_id(payload))
        field = {
            "id": "kv",
            "value": {"dtype": "float32", "shape": [4, 20, 8]},
            "chunk_shape": [4, 256, 8],
            "chunks": [cell.model_dump(mode="json")],
        }
        node = Node(
            id=chunk.id,
            parent=chunk.parent,
            scope=identity().scope,
            kind="kv",
            start=0,
            count=20,
            applied=chunk.applied,
            pieces=(content_id(payload),),
            fields=(field,),
            coordinate={"processed_count": 20},
            append_axis=1,
            provenance=provenance,
        )
        manifest = project([node])
        assert {k: manifest.provenance[k] for k in provenance} == provenance
        ids.append((node.id, node.pieces, manifest.id, manifest.numerical_contract.compatibility_id))
    assert ids[0] == ids[1]
