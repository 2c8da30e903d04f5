"""One safetensors file: a validated header over a memory map, and the writer that importers use.

    u64le n | n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end)}, "__metadata__"?: {str: str}} | data

Every byte of the data section belongs to exactly one tensor; anything else is refused before a tensor is read.
"""

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from numem.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# The limit of the safetensors library: a longer header is an attack or an accident.
MAX_HEADER = 100_000_000

# Bytes that a pass over a whole file holds at a time.
WINDOW = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: dtype code, shape, and byte range [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A safetensors file, mapped privately; tensors are views of the map and never change the file.

    Attributes:
        tensors: name -> where it lies.
        metadata: the header's `__metadata__`.

    Raises:
        CheckpointError: for every way in which header and file can contradict each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file; it was cut short")
                # Copy-on-write: torch wants a writable buffer, the file stays as it is.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        self.tensors, self.metadata = _parse(path, self._map, size)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as a view of the map, without a copy."""
        info = self.tensors[name]
        dtype = DTYPES[info.dtype]
        count = math.prod(info.shape)
        if count == 0:
            return torch.empty(info.shape, dtype=dtype)
        if info.begin % dtype.itemsize:
            # Legal in the format, but kernels read whole words.
            return torch.frombuffer(bytearray(self.buffer(name)), dtype=dtype).reshape(info.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=info.begin).reshape(info.shape)

    def buffer(self, name: str) -> memoryview:
        """A tensor's bytes."""
        info = self.tensors[name]
        return memoryview(self._map)[info.begin : info.end]

    def windows(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes in pieces; each is dropped from memory once the next is asked for."""
        info = self.tensors[name]
        for begin in range(info.begin, info.end, WINDOW):
            end = min(begin + WINDOW, info.end)
            yield memoryview(self._map)[begin:end]
            self._drop(begin, end)

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Drop the mapped pages of a tensor's bytes [begin, end) (default: all); touched again, they are read again.

        What was written to a view of them is lost, as it never reached the file.
        """
        info = self.tensors[name]
        self._drop(info.begin + begin, info.end if end is None else info.begin + end)

    def _drop(self, begin: int, end: int) -> None:
        begin -= begin % mmap.PAGESIZE
        if end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _parse(path: Path, data: mmap.mmap, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    (length,) = struct.unpack("<Q", data[:8])
    if length > size - 8:
        raise CheckpointError(f"{path}: the header claims {length} bytes of a file of {size}; it was cut short")
    if length > MAX_HEADER:
        raise CheckpointError(f"{path}: a header of {length} bytes exceeds the format's {MAX_HEADER}")
    try:
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not an object of strings")
    tensors = {name: _info(path, name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            problem = "overlaps the tensor before it" if info.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {name} {problem} (byte {info.begin}, expected {position})")
        position = info.end
    if position > size:
        raise CheckpointError(f"{path}: tensors end at byte {position} of a file of {size}; it was cut short")
    if position < size:
        raise CheckpointError(f"{path}: {size - position} trailing bytes belong to no tensor")
    return tensors, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return out


def _info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the entry of tensor {name} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise CheckpointError(f"{path}: tensor {name} has shape {shape!r}, not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise CheckpointError(f"{path}: tensor {name} has data_offsets {offsets!r}, not two offsets of at least 0")
    begin, end = offsets
    if end < begin:
        raise CheckpointError(f"{path}: tensor {name} has data_offsets {offsets!r} that end before they begin")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: tensor {name} {dtype}{shape} needs {needed} bytes, data_offsets give {end - begin}"
        )
    return TensorInfo(dtype, tuple(shape), base + begin, base + end)


def write_safetensors(
    path: Path,
    layout: Mapping[str, tuple[str, Sequence[int]]],
    payloads: Iterable[tuple[str, bytes | memoryview]],
    metadata: Mapping[str, str],
) -> str:
    """Write a file tensor by tensor and return its SHA-256, hex.

    Args:
        layout: name -> (dtype code, shape), in file order.
        payloads: (name, bytes) in the same order; only one is held at a time.
        metadata: the header's `__metadata__`.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in layout.items():
        end = position + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keep the data aligned to 8 bytes
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for block in (struct.pack("<Q", len(text)), text):
            hasher.update(block)
            file.write(block)
        expected = iter(layout)
        for name, payload in payloads:
            begin, end = header[name]["data_offsets"]
            if name != next(expected) or len(payload) != end - begin:
                raise ValueError(f"payload of {name} is out of order or has {len(payload)} bytes, not {end - begin}")
            hasher.update(payload)
            file.write(payload)
    return hasher.hexdigest()
