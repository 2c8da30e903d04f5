"""Fields: cut into tiles and joined again, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem import Memory
from numem.errors import InputError
from numem.identity.digest import content_id, framed_sha256
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.state.field import buffers, cut, join
from numem.state.manifest import StateField
from numem.state.node import Node

DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"]


def back(name: str, array: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """Cut and joined through buffers filled as a memory would fill them."""
    pieces = cut(name, array, tile)
    field = StateField.model_validate(pieces.field)
    filled = buffers(field)
    held = {content: payload for content, payload in zip(pieces.pieces, pieces.payloads, strict=True)}
    for content, buffer in filled:
        buffer[:] = held[content].reshape(-1).view(np.uint8)
    return join(field, filled)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
def test_every_bit_survives(extents: list[tuple[int, int]], dtype: str, seed: int) -> None:
    shape, tile = tuple(e for e, _ in extents), tuple(t for _, t in extents)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).view(dtype).reshape(shape)
    joined = back("u", array, tile)
    assert joined.dtype == array.dtype and joined.shape == array.shape
    assert joined.tobytes() == array.tobytes()


def test_signed_zeros_and_nan_payloads_survive() -> None:
    array = np.array([0.0, -0.0, np.nan, -np.nan, np.inf])
    array.view(np.uint64)[2] |= 0xABCD
    assert back("u", array, (2,)).tobytes() == array.tobytes()


def test_tiles_are_row_major_clipped_and_named_by_content() -> None:
    array = np.arange(35, dtype=np.float64).reshape(5, 7)
    pieces = cut("temperature", array, (2, 4), coordinate_space={"axes": "y,x"}, attributes={"unit": "K"})
    field = StateField.model_validate(pieces.field)
    assert [c.offsets for c in field.chunks] == [[0, 0], [0, 4], [2, 0], [2, 4], [4, 0], [4, 4]]
    assert field.chunks[-1].shape == [1, 3] and field.value.shape == [5, 7] and field.chunk_shape == [2, 4]
    assert (field.coordinate_space, field.attributes) == ({"axes": "y,x"}, {"unit": "K"})
    assert pieces.pieces[1] == content_id(array[0:2, 4:7].tobytes())
    assert [bytes.fromhex(c.content.digest) for c in field.chunks] == list(pieces.pieces)


def test_layout_and_byte_order_in_memory_do_not_matter() -> None:
    array = np.arange(24, dtype=np.float64).reshape(4, 6)
    for other in (np.asfortranarray(array), array.astype(">f8"), array[::-1][::-1], np.repeat(array, 2, 1)[:, ::2]):
        assert cut("u", other, (3, 4)).pieces == cut("u", array, (3, 4)).pieces


def test_equal_tiles_are_one_piece() -> None:
    array = np.zeros((8, 8))
    array[5, 5] = 1.0
    assert len(set(cut("u", array, (4, 4)).pieces)) == 2


def test_a_payload_is_a_copy_of_the_moment() -> None:
    array = np.zeros((4, 4))
    pieces = cut("u", array, (4, 4))
    array[:] = 7
    assert content_id(pieces.payloads[0]) == pieces.pieces[0]


def test_a_tenants_pieces_are_keyed_and_the_memory_takes_them(memory: Memory) -> None:
    policy = NumericPolicy("exact", b"\x01" * 32)
    tenants = [Identity({"program": "field-test"}, policy, "any", salt) for salt in (b"", b"\x05" * 32, b"\x06" * 32)]
    pieces: set[bytes] = set()
    for tenant in tenants:
        tiles = cut("u", np.zeros((4, 4)), (4, 4), key=tenant.content_key)
        node = Node(
            id=framed_sha256("numem/test/step/v1", tenant.scope), parent=tenant.scope, scope=tenant.scope,
            kind="field", start=0, count=1, applied=b"", pieces=tiles.pieces, fields=(tiles.field,), coordinate={"step": 1},
        )  # fmt: skip
        memory.register(tenant)
        assert memory.publish(node, tiles.payloads).published.result(30).stored == 1
        pieces.update(tiles.pieces)
    assert len(pieces) == 3 and memory.verify().ok


@pytest.mark.parametrize(
    ("array", "tile"),
    [
        (np.zeros((2, 2), dtype=complex), (1, 1)),
        (np.array(["a"]), (1,)),
        (np.array([object()]), (1,)),
        (np.zeros(()), ()),
        (np.zeros((0, 2)), (1, 1)),
        (np.zeros((2, 2)), (1,)),
        (np.zeros((2, 2)), (1, 0)),
    ],
)
def test_what_is_no_field_is_refused(array: np.ndarray, tile: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="field 'u'"):
        cut("u", array, tile)


def test_buffers_of_another_field_are_refused() -> None:
    field = StateField.model_validate(cut("u", np.arange(4.0), (2,)).field)
    filled = buffers(field)
    with pytest.raises(InputError, match="1 buffers for 2 chunks"):
        join(field, filled[:1])
    with pytest.raises(InputError, match="is not chunk"):
        join(field, [filled[1], filled[0]])
    with pytest.raises(InputError, match="is not chunk"):
        join(field, [(filled[0][0], np.empty(8, np.uint8)), filled[1]])
