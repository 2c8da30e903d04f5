"""The GGUF container: metadata and tensors of a file, read through a memory map and checked before use.

    "GGUF" | u32 version | u64 tensors | u64 keys | keys | tensor infos | padding | data section      (little-endian)

Every count is held against the bytes that are left before anything is allocated for it, so that a damaged file is
refused at once. Layout: the format's specification, version 3 (version 2 is the same).
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from numem.errors import CheckpointError, UnsupportedModelError

_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
# Values that are dequantised at a time.
_BLOCK_VALUES = 1 << 22
_STRING, _ARRAY = 8, 9
# Value type -> struct code; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        shape: row-major, slowest dimension first.
        kind: how its values are stored.
        begin, end: bytes of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    begin: int
    end: int


class GgufFile:
    """A GGUF file.

    Attributes:
        path: the file.
        metadata: key -> number, text, truth value, or list of them.
        tensors: name -> where it lies.

    Raises:
        CheckpointError: not GGUF, cut short, or contradicting itself.
        UnsupportedModelError: a version or a tensor type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error
        cursor = _Cursor(path, self._map)
        if cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file: it does not begin with GGUF")
        version = cursor.number("I")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            raise UnsupportedModelError(
                f"{path}: GGUF {'is big-endian' if swapped else f'version {version}'}, which is not read; "
                f"known: little-endian, version {' or '.join(map(str, _VERSIONS))}"
            )
        tensors = cursor.count("tensors", 24)
        keys = cursor.count("keys", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = cursor.text()
            if key in self.metadata:
                raise CheckpointError(f"{path}: metadata {key[:80]!r} appears twice")
            self.metadata[key] = cursor.value(cursor.number("I"))
        infos = [cursor.tensor() for _ in range(tensors)]
        alignment = self.get("general.alignment", int, 32)
        if not 0 < alignment <= 1 << 20:
            raise CheckpointError(f"{path}: general.alignment is {alignment}")
        base = -(-cursor.at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise CheckpointError(f"{path}: tensor {name[:80]!r} appears twice")
            self.tensors[name] = self._place(name, shape, kind, base + offset)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None, *, required: bool = False) -> Any:
        """Value of a metadata key, or the default.

        Raises:
            CheckpointError: a required key is missing, or a value is of another kind.
        """
        if key not in self.metadata:
            if required:
                raise CheckpointError(f"{self.path}: metadata lacks {key}")
            return default
        value = self.metadata[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise CheckpointError(f"{self.path}: metadata {key} is a {type(value).__name__}")
        return value

    def items(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """A list of the metadata, required where there is no default.

        Raises:
            CheckpointError: it is missing, or one of its items is of another kind.
        """
        found: list[Any] = self.get(key, list, default, required=default is None)
        other = next((type(item).__name__ for item in found if type(item) is not kind), None)
        if other is not None:
            raise CheckpointError(f"{self.path}: metadata {key} holds a {other}; it is a list of {kind.__name__}")
        return found

    def convert(self, name: str, dtype: str, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """A tensor in another form, of which float32 exists only block by block.

        Args:
            dtype: of the result.
            to: makes the result's rows of float32 rows.

        Raises:
            UnsupportedModelError: a type that the gguf library does not dequantise.
        """
        tensor = self.tensors[name]
        width = tensor.shape[-1]
        rows = math.prod(tensor.shape) // width
        stored = np.frombuffer(self._map, np.uint8, tensor.end - tensor.begin, tensor.begin).reshape(rows, -1)
        out = np.empty((rows, width), dtype)
        step = max(1, _BLOCK_VALUES // width)
        for at in range(0, rows, step):
            try:
                out[at : at + step] = to(gguf.quants.dequantize(stored[at : at + step], tensor.kind))
            except (ValueError, NotImplementedError) as error:
                raise UnsupportedModelError(f"{self.path}: {name} has type {tensor.kind.name}: {error}") from error
        return out.reshape(tensor.shape)

    def _place(self, name: str, shape: tuple[int, ...], number: int, begin: int) -> GgufTensor:
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModelError(f"{self.path}: tensor {name} has unknown type {number}") from None
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name} has shape {list(shape)}, which {kind.name} cannot have")
        end = begin + math.prod(shape) // block * size
        if end > len(self._map):
            raise CheckpointError(
                f"{self.path}: cut short: tensor {name} ends at byte {end}, the file has {len(self._map)}"
            )
        return GgufTensor(name, shape, kind, begin, end)


class _Cursor:
    """Reads the header from front to back and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.at = 0
        self._data = data
        self._size = len(data)

    def take(self, size: int) -> bytes:
        if size > self._size - self.at:
            raise CheckpointError(
                f"{self.path}: cut short, or not a GGUF file: byte {self.at} begins {size} bytes more"
            )
        begin, self.at = self.at, self.at + size
        return self._data[begin : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, least: int) -> int:
        """A count of things of at least `least` bytes each."""
        number: int = self.number("Q")
        if number * least > self._size - self.at:
            raise CheckpointError(f"{self.path}: cut short, or not a GGUF file: {number} {what} do not fit in it")
        return number

    def text(self) -> str:
        length: int = self.number("Q")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: text before byte {self.at} is not UTF-8: {error.reason}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: metadata before byte {self.at} has unknown type {kind}")
        element = self.number("I")
        if element == _STRING:
            return [self.text() for _ in range(self.count("texts", 8))]
        if element not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata before byte {self.at} is a list of type {element}")
        code = _SCALARS[element]
        number = self.count("values", struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{number}{code}", self.take(number * struct.calcsize(f"<{code}"))))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        rank = self.number("I")
        if rank > _MOST_DIMENSIONS:
            raise CheckpointError(f"{self.path}: tensor {name[:80]!r} has {rank} dimensions")
        # The file lists the fastest-varying dimension first.
        shape = tuple(reversed([int(self.number("Q")) for _ in range(rank)]))
        return name, shape, self.number("I"), self.number("Q")
