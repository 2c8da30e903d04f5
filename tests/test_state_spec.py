"""State specs: slabs, rows, the payload plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.errors import InputError
from numem.identity.canonical import canonical_json
from numem.state.spec import DTYPE_BYTES, Part, Slab, StateSpec


def kv(layers: int, width: int, dtype: str = "float32") -> StateSpec:
    return StateSpec((Slab("key", layers, width), Slab("value", layers, width)), dtype)


def test_payload_order_is_slab_then_member_then_rows() -> None:
    assert kv(2, 8).parts(3) == (
        Part("key", 0, 0, 24),
        Part("key", 1, 24, 24),
        Part("value", 0, 48, 24),
        Part("value", 1, 72, 24),
    )


@pytest.mark.parametrize(
    ("layers", "width", "dtype", "row_bytes"),
    [(2, 8, "float32", 128), (30, 192, "float32", 46_080), (18, 256, "float16", 18_432), (26, 256, "float16", 26_624)],
)
def test_bytes_of_one_position(layers: int, width: int, dtype: str, row_bytes: int) -> None:
    assert kv(layers, width, dtype).row_bytes == row_bytes


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.sampled_from(list(DTYPE_BYTES)))
def test_parts_tile_the_payload_without_gap(a: int, b: int, width: int, rows: int, dtype: str) -> None:
    spec = StateSpec((Slab("x", a, width), Slab("y", b, width)), dtype)
    at = 0
    for part in spec.parts(rows):
        assert part.offset == at
        at += part.elements
    assert at * DTYPE_BYTES[dtype] == rows * spec.row_bytes


@pytest.mark.parametrize(
    ("slabs", "dtype", "word"),
    [
        ((), "float32", "at least one"),
        ((Slab("key", 1, 2), Slab("key", 1, 2)), "float32", "repeat"),
        ((Slab("key", 1, 2),), "float128", "float128"),
        ((Slab("key", 1, 2), Slab("scale", 1, 1)), "float32", "widths"),
    ],
)
def test_specs_that_are_not_one_regular_field_are_refused(slabs: tuple[Slab, ...], dtype: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        StateSpec(slabs, dtype)


@pytest.mark.parametrize(("name", "members", "width"), [("", 1, 1), ("x", 0, 1), ("x", 1, 0), ("x", -1, 1)])
def test_slabs_without_extent_are_refused(name: str, members: int, width: int) -> None:
    with pytest.raises(InputError, match="slab"):
        Slab(name, members, width)


def test_a_description_separates_every_property() -> None:
    """lmcache#4463, dynamo#14416: equal shapes do not make equal layouts."""
    base = kv(2, 8)
    others = [
        kv(2, 8, "bfloat16"),
        kv(2, 8, "float16"),
        kv(8, 2),
        StateSpec(base.slabs, "float32", axis="step"),
        StateSpec(base.slabs, "float32", layout="row-member-slab/v1"),
        StateSpec(base.slabs[::-1], "float32"),
    ]
    assert len({canonical_json(spec.describe()) for spec in [base, *others]}) == 7
