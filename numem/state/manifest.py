"""Manifest, schema version 1: what a boundary of numerical state consists of, independent of where it is stored.

No path, bucket, handle or device appears in a manifest. A field is a regular grid of chunks; the chunks cover it
exactly, row-major, with clipped edges. Documents of another version are refused, unknown keys too.
"""

import json
import math
from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from numem.errors import ManifestError
from numem.state.spec import DTYPE_BYTES

SCHEMA_VERSION = 1
Scalar = str | int | bool | None
Hex32 = Field(pattern=r"^[0-9a-f]{64}$")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Content(_Strict):
    """Content address of a chunk's bytes."""

    algorithm: Literal["blake3-256"] = "blake3-256"
    digest: str = Hex32


class Storage(_Strict):
    """How the bytes encode the values."""

    format: Literal["raw"] = "raw"
    byte_order: Literal["little", "big"] = "little"


class Chunk(_Strict):
    """One cell of a field's chunk grid; offsets and shape in elements."""

    id: str
    offsets: list[int]
    shape: list[int]
    logical_byte_length: int
    stored_byte_length: int = Field(gt=0)
    content: Content
    storage: Storage = Storage()
    attributes: dict[str, Scalar] = {}


class Value(_Strict):
    """Element type and shape of a field."""

    dtype: str
    shape: list[int]

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        return dtype


class StateField(_Strict):
    """A named array with its chunk grid and coordinates."""

    id: str
    value: Value
    chunk_shape: list[int]
    coordinate_space: dict[str, Scalar] = {}
    chunks: list[Chunk]
    attributes: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _covers(self) -> "StateField":
        shape, grid = self.value.shape, self.chunk_shape
        if len(shape) != len(grid) or not shape or min(shape) <= 0 or min(grid) <= 0:
            raise ValueError(
                f"field {self.id!r}: shape {shape} and chunk shape {grid} must be positive and of one rank"
            )
        count = math.prod(-(-extent // step) for extent, step in zip(shape, grid, strict=True))
        if count != len(self.chunks):
            raise ValueError(f"field {self.id!r}: {len(self.chunks)} chunks do not cover a grid of {count} cells")
        cells = product(*(range(0, extent, step) for extent, step in zip(shape, grid, strict=True)))
        item = DTYPE_BYTES[self.value.dtype]
        for cell, chunk in zip(cells, self.chunks, strict=True):
            clipped = [min(step, extent - at) for at, step, extent in zip(cell, grid, shape, strict=True)]
            if list(cell) != chunk.offsets or clipped != chunk.shape:
                raise ValueError(
                    f"field {self.id!r}: chunk {chunk.id!r} at {chunk.offsets} of shape {chunk.shape} "
                    f"is not the row-major cell at {list(cell)} of shape {clipped}"
                )
            if chunk.logical_byte_length != item * math.prod(clipped):
                raise ValueError(f"field {self.id!r}: chunk {chunk.id!r} states {chunk.logical_byte_length} bytes")
        return self


class Contract(_Strict):
    """What a reader may rely on. `compatibility_id` is the scope the state belongs to."""

    mode: str
    determinism: Literal["bitwise", "reproducible-order", "toleranced", "nondeterministic"]
    compatibility_id: str = Hex32


class Manifest(_Strict):
    """A boundary of numerical state.

    Attributes:
        id: causal id, 64 hex digits.
        parents: causal ids of the states it was made from.
        logical_coordinate: where it stands, for example {"processed_count": 600} or {"step": 200}.
    """

    schema_version: Literal[1] = 1
    id: str = Hex32
    parents: list[Annotated[str, Hex32]] = []
    logical_coordinate: dict[str, int]
    fields: list[StateField] = Field(min_length=1)
    numerical_contract: Contract
    provenance: dict[str, str]
    attributes: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        names = [f.id for f in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"field ids repeat: {names}")
        if len(set(self.parents)) != len(self.parents) or self.id in self.parents:
            raise ValueError("parents repeat or contain the state itself")
        if "program_fingerprint" not in self.provenance:
            raise ValueError("provenance.program_fingerprint is missing")
        return self

    def to_json(self) -> bytes:
        """Byte-stable JSON: equal manifests give equal bytes, and reading them back gives an equal manifest."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()

    @classmethod
    def from_json(cls, document: bytes | str) -> "Manifest":
        """Parse and check a document.

        Raises:
            ManifestError: not JSON, another schema version, an unknown key, or an inconsistency; names the field.
        """
        try:
            tree = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"manifest: not JSON ({error})") from error
        found = tree.get("schema_version") if isinstance(tree, dict) else None
        if type(found) is not int or found != SCHEMA_VERSION:
            raise ManifestError(
                f"manifest: schema_version is {found!r}, this numem reads {SCHEMA_VERSION}; upgrade numem or export anew"
            )
        return build(tree)

    @property
    def content_ids(self) -> tuple[bytes, ...]:
        """Content ids of all chunks in field and grid order."""
        return tuple(bytes.fromhex(c.content.digest) for f in self.fields for c in f.chunks)

    @property
    def logical_bytes(self) -> int:
        return sum(c.logical_byte_length for f in self.fields for c in f.chunks)


def build(tree: dict[str, Any]) -> Manifest:
    """Validate a tree of plain values as a manifest; ManifestError names the first field at fault."""
    try:
        return Manifest.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ManifestError(f"manifest: {where}: {first['msg']}{more}") from error


def differences(expected: Manifest, found: Manifest) -> list[str]:
    """What must agree before any byte is opened: fields, shapes, coordinates, contract. Order, chunking, content ids
    and placement do not matter. Metadata compares bit-preservingly (as JSON text). Returns the names that differ."""

    def essence(m: Manifest) -> dict[str, Any]:
        tree: dict[str, Any] = {
            "logical_coordinate": m.logical_coordinate,
            "numerical_contract": m.numerical_contract.model_dump(mode="json"),
        }
        for f in m.fields:
            tree[f"fields.{f.id}.value"] = f.value.model_dump(mode="json")
            tree[f"fields.{f.id}.coordinate_space"] = f.coordinate_space
        return {key: json.dumps(value, sort_keys=True) for key, value in tree.items()}

    mine, theirs = essence(expected), essence(found)
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def chunk_of(index: Sequence[int], shape: Sequence[int], dtype: str, content: bytes, **attributes: Scalar) -> Chunk:
    """A chunk of raw little-endian values at element offsets `index`."""
    nbytes = DTYPE_BYTES[dtype] * math.prod(shape)
    return Chunk(
        id="/".join(str(i) for i in index),
        offsets=list(index),
        shape=list(shape),
        logical_byte_length=nbytes,
        stored_byte_length=nbytes,
        content=Content(digest=content.hex()),
        attributes=dict(attributes),
    )
