"""Canonical JSON: one byte string for one value, and no two values with the same one."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numem.errors import InputError
from numem.identity.canonical import canonical_json, flatten

KEY = st.text(st.characters(codec="utf-8"), max_size=4).filter(lambda k: not k.startswith("$"))
LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=4)
    | st.binary(max_size=4)
)
TREE = st.recursive(LEAF, lambda t: st.lists(t, max_size=3) | st.dictionaries(KEY, t, max_size=3), max_leaves=10)


def typed(value: Any) -> Any:
    """A value with its types, so that 1, 1.0, True and "1" compare unequal and -0.0 differs from 0.0."""
    if isinstance(value, Mapping):
        return ("map", {k: typed(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return ("list", [typed(v) for v in value])
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, b"1"),
        (1.0, b'{"$float":"0x1.0000000000000p+0"}'),
        ("1.0", b'"1.0"'),
        (True, b"true"),
        (0.1, b'{"$float":"0x1.999999999999ap-4"}'),
        (-0.0, b'{"$float":"-0x0.0p+0"}'),
        (b"\x00\xff", b'{"$bytes":"00ff"}'),
        (bytearray(b"\x00\xff"), b'{"$bytes":"00ff"}'),
        (memoryview(b"\x00\xff"), b'{"$bytes":"00ff"}'),
        ((1, 2), b"[1,2]"),
        ({"b": 1, "a": [None]}, b'{"a":[null],"b":1}'),
        ("é\n", '"é\\n"'.encode()),
    ],
)
def test_canonical_bytes(value: Any, expected: bytes) -> None:
    assert canonical_json(value) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREE, TREE)
def test_equal_bytes_exactly_for_equal_values(a: Any, b: Any) -> None:
    assert (canonical_json(a) == canonical_json(b)) == (typed(a) == typed(b))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEY, LEAF, max_size=6))
def test_insertion_order_does_not_matter(tree: dict[str, Any]) -> None:
    assert canonical_json(tree) == canonical_json(dict(reversed(tree.items())))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREE)
def test_the_result_is_json(value: Any) -> None:
    json.loads(canonical_json(value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_floats_are_refused_with_their_place(value: float) -> None:
    with pytest.raises(InputError, match=r"rope\.factors\[1\]"):
        canonical_json({"rope": {"factors": [1.0, value]}})


@pytest.mark.parametrize("value", [{1, 2}, object(), 1j, {"a": {2: 3}}, {"$float": "0x1p+0"}, {"a": {"$b": 1}}])
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="canonical JSON"):
        canonical_json(value)


@pytest.mark.parametrize("value", ["\ud800", ["ok", "\udfff"], {"\ud800": 1}])
def test_broken_unicode_is_a_typed_error(value: Any) -> None:
    with pytest.raises(InputError, match="Unicode"):
        canonical_json(value)


def test_flatten_names_leaves_by_dotted_path() -> None:
    tree = {"a": {"b": 1, "c": [1, 2]}, "d": {}, "e": None}
    assert flatten(tree) == {"a.b": b"1", "a.c": b"[1,2]", "d": b"{}", "e": b"null"}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEY, TREE, min_size=1, max_size=3), st.dictionaries(KEY, TREE, min_size=1, max_size=3))
def test_two_trees_flatten_alike_only_when_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (flatten(a) == flatten(b)) == (typed(a) == typed(b))


@pytest.mark.parametrize(
    ("a", "b"), [({"a.b": 1}, {"a": {"b": 1}}), ({"": {"a": 1}}, {"a": 1}), ({"a\\": {"b": 1}}, {"a\\.b": 1})]
)
def test_dots_in_keys_do_not_collide_with_nesting(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert flatten(a) != flatten(b)
