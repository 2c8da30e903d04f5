"""Fields: an array cut into tiles, each a piece of its own, and put together again.

array [96, 96], tile [32, 32]        field: 9 chunks, row-major, edge tiles clipped
(0,0) (0,32) (0,64)                  piece: the tile's values, C order, little-endian, raw
(32,0) ...                           equal tiles are one piece, wherever and whenever they occur
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from numem.errors import InputError
from numem.identity.digest import content_id
from numem.state.manifest import Scalar, StateField, chunk_of
from numem.state.spec import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Cut:
    """An array as a field of a node.

    Attributes:
        field: the manifest's field as plain values, for `Node.fields`.
        pieces: content id of every tile, for `Node.pieces`.
        payloads: the tiles themselves (contiguous, little-endian), in the same order.
    """

    field: Mapping[str, Any]
    pieces: tuple[bytes, ...]
    payloads: tuple[np.ndarray, ...]


def cut(
    name: str,
    array: np.ndarray,
    tile: Sequence[int],
    *,
    coordinate_space: Mapping[str, Scalar] | None = None,
    attributes: Mapping[str, Scalar] | None = None,
    key: bytes | None = None,
) -> Cut:
    """Cut an array into tiles of shape `tile`, clipped at its edges. No value is changed, -0.0 and NaN bits included.

    Args:
        key: `Identity.content_key` of the identity that the field belongs to; None for one without a salt.

    Raises:
        InputError: an element type that has no place in a manifest, no elements, or a tile of another rank.
    """
    if array.dtype.name not in DTYPE_BYTES:
        raise InputError(f"field {name!r}: dtype {array.dtype} is not one of {', '.join(sorted(DTYPE_BYTES))}")
    if not array.ndim or len(tile) != array.ndim or min(tile) <= 0 or not array.size:
        raise InputError(f"field {name!r}: tile {tuple(tile)} does not cut an array of shape {array.shape}")
    little = array.dtype.newbyteorder("<")
    chunks, pieces, payloads = [], [], []
    for cell in product(*(range(0, extent, step) for extent, step in zip(array.shape, tile, strict=True))):
        block = array[tuple(slice(at, at + step) for at, step in zip(cell, tile, strict=True))]
        payload = np.array(block, dtype=little, order="C")
        content = content_id(payload, key)
        chunks.append(chunk_of(cell, payload.shape, array.dtype.name, content).model_dump(mode="json"))
        pieces.append(content)
        payloads.append(payload)
    field = {
        "id": name,
        "value": {"dtype": array.dtype.name, "shape": list(array.shape)},
        "chunk_shape": [int(step) for step in tile],
        "coordinate_space": dict(coordinate_space or {}),
        "chunks": chunks,
        "attributes": dict(attributes or {}),
    }
    return Cut(field, tuple(pieces), tuple(payloads))


def buffers(field: StateField) -> list[tuple[bytes, np.ndarray]]:
    """A (content id, empty buffer) pair for every chunk: what `Memory.read` takes and fills."""
    return [
        (bytes.fromhex(chunk.content.digest), np.empty(chunk.stored_byte_length, dtype=np.uint8))
        for chunk in field.chunks
    ]


def join(field: StateField, filled: Sequence[tuple[bytes, np.ndarray]]) -> np.ndarray:
    """The array of a field from its filled buffers, bit for bit what was cut.

    Raises:
        InputError: an element type that numpy does not have, or buffers of another field.
    """
    try:
        dtype = np.dtype(field.value.dtype)
    except TypeError as error:
        raise InputError(f"field {field.id!r}: numpy has no {field.value.dtype}") from error
    if len(filled) != len(field.chunks):
        raise InputError(f"field {field.id!r}: {len(filled)} buffers for {len(field.chunks)} chunks")
    out = np.empty(field.value.shape, dtype=dtype)
    for chunk, (content, buffer) in zip(field.chunks, filled, strict=True):
        if content.hex() != chunk.content.digest or buffer.nbytes != chunk.logical_byte_length:
            raise InputError(f"field {field.id!r}: a buffer of {buffer.nbytes} bytes is not chunk {chunk.id}")
        order: Literal["<", ">"] = "<" if chunk.storage.byte_order == "little" else ">"
        cells = tuple(slice(at, at + extent) for at, extent in zip(chunk.offsets, chunk.shape, strict=True))
        out[cells] = buffer.view(dtype.newbyteorder(order)).reshape(chunk.shape)
    return out
