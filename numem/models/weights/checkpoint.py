"""A model directory: config.json and one or more safetensors files that agree with each other.

model.safetensors                        one file (any *.safetensors name will do), or
model.safetensors.index.json + shards    weight_map: tensor name -> file name, whatever the shards are called
"""

import struct
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from numem.errors import CheckpointError
from numem.models.weights.lockfile import Lock, read_json, read_lock
from numem.models.weights.safetensors_file import DTYPES, SafetensorsFile

INDEX_SUFFIX = ".safetensors.index.json"


class Checkpoint:
    """Weights and configuration of a model directory, read through memory maps.

    Opening reads headers only. Where numem recorded digests beside the model, configuration files are verified here
    and weights by `digest`.

    Attributes:
        directory: the model directory.
        names: sorted tensor names.
        config: config.json.
        generation_config: generation_config.json, empty where there is none.

    Raises:
        CheckpointError: a missing or malformed file, or files that contradict each other; the message names the file.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: not a directory; give a model directory with config.json")
        if not (self.directory / "config.json").is_file():
            raise CheckpointError(f"{self.directory}: no config.json; not a Hugging Face model directory")
        self._lock = read_lock(self.directory)
        self.config = self._read("config.json")
        generation = self.directory / "generation_config.json"
        self.generation_config = self._read(generation.name) if generation.is_file() else {}
        self._files: dict[str, SafetensorsFile] = {}
        self._where = self._open()
        self.names = tuple(sorted(self._where))
        self._digest: bytes | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._file(name).tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return DTYPES[self._file(name).tensors[name].dtype]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as a view of its file's memory map (private: writing to it never reaches the file)."""
        return self._file(name).tensor(name)

    def release(self, name: str) -> None:
        """Drop the mapped pages of a tensor; touched again, they are read again, and what was written to it is lost."""
        self._file(name).release(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        return {name: self.shape(name) for name in self.names}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        infos = (self._file(name).tensors[name] for name in self.names)
        return sum(info.end - info.begin for info in infos)

    def digest(self) -> bytes:
        """BLAKE3-256 over the sorted (name, dtype, shape, bytes) of all tensors; 32 bytes, computed once, in windows.

        How the tensors are spread over files does not enter.

        Raises:
            CheckpointError: the weights differ from those recorded beside the model; the message names the file.
        """
        if self._digest is None:
            from blake3 import blake3

            hasher = blake3(max_threads=blake3.AUTO)
            hasher.update(b"numem/weights/v1")
            for name in self.names:
                info = self._file(name).tensors[name]
                key = name.encode()
                hasher.update(struct.pack(">Q", len(key)) + key)
                hasher.update(struct.pack(">Q", len(info.dtype)) + info.dtype.encode())
                hasher.update(struct.pack(f">Q{len(info.shape)}Q", len(info.shape), *info.shape))
                hasher.update(struct.pack(">Q", info.end - info.begin))
                for window in self._file(name).windows(name):
                    hasher.update(window)
            digest = bytes(hasher.digest())
            if self._lock is not None and digest.hex() != self._lock.weights:
                self._blame(self._lock)
            self._digest = digest
        return self._digest

    def _blame(self, lock: Lock) -> None:
        for name in sorted(self._files):
            lock.check_file(self.directory, name)
        raise CheckpointError(
            f"{self.directory}: the weights differ from the digest recorded when they were fetched or imported; "
            "remove the directory and fetch or import the model again"
        )

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._files[self._where[name]]
        except KeyError:
            raise CheckpointError(f"{self.directory}: no tensor named {name}") from None

    def _read(self, name: str) -> dict[str, Any]:
        if self._lock is not None:
            self._lock.check_file(self.directory, name)
        return read_json(self.directory / name)

    def _open(self) -> dict[str, str]:
        """Open the files and map each tensor to its file."""
        indices = sorted(path.name for path in self.directory.glob(f"*{INDEX_SUFFIX}") if path.is_file())
        singles = sorted(path.name for path in self.directory.glob("*.safetensors") if path.exists())
        if len(indices) > 1:
            raise CheckpointError(f"{self.directory}: several indices ({', '.join(indices)}); keep one")
        if indices:
            return self._open_shards(indices[0])
        if not singles:
            other = [n for n in ("pytorch_model.bin", "model.gguf") if (self.directory / n).exists()]
            hint = f"; {other[0]} is not read, convert it first" if other else ""
            raise CheckpointError(f"{self.directory}: no *.safetensors file{hint}")
        if len(singles) > 1:
            raise CheckpointError(
                f"{self.directory}: several safetensors files without an index ({_some(singles)}); "
                f"add model{INDEX_SUFFIX} or keep one file"
            )
        self._files[singles[0]] = SafetensorsFile(self.directory / singles[0])
        return dict.fromkeys(self._files[singles[0]].tensors, singles[0])

    def _open_shards(self, index_name: str) -> dict[str, str]:
        index_path = self.directory / index_name
        weight_map = self._read(index_name).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{index_path}: weight_map is missing or empty")
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index_path}: tensor {tensor} is mapped to {shard!r}, not a safetensors file name"
                )
        single = index_name.removesuffix(".index.json")
        if (self.directory / single).exists() and single not in weight_map.values():
            raise CheckpointError(f"{self.directory}: both {single} and {index_name} are present; keep one")
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (self.directory / shard).is_file()]
        if missing:
            raise CheckpointError(f"{index_path}: names {_some(missing)}, which is not in the directory")
        for shard in shards:
            self._files[shard] = SafetensorsFile(self.directory / shard)
        for tensor, shard in weight_map.items():
            if tensor not in self._files[shard].tensors:
                raise CheckpointError(f"{index_path}: tensor {tensor} is mapped to {shard}, which does not hold it")
        for shard, file in self._files.items():
            for tensor in file.tensors:
                if tensor not in weight_map:
                    raise CheckpointError(f"{self.directory / shard}: holds tensor {tensor}, which {index_name} lacks")
                if weight_map[tensor] != shard:
                    raise CheckpointError(
                        f"{index_path}: tensor {tensor} is in two files, {weight_map[tensor]} and {shard}"
                    )
        return dict(weight_map)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
