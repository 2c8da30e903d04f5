"""Quantised matrices of a model in one file, so that the next load reads them instead of quantising again.

    <model directory>/quantised/<key>.safetensors   or, where that cannot be written, <cache>/quantised/<key>.safetensors

`key` names everything that the bytes follow from: the digest of the source's weights, adapters, the formats with their
versions, and the choice of formats. A file is written beside its name, made durable and renamed, so that it is whole or
not there; it is believed only when a BLAKE3 over the bytes that were read equals the one that it carries.

    __metadata__: {"numem": "quantised/1", "key", "groups": JSON {group: [format, n, k] | null}, "digest": BLAKE3 hex}
    tensors: "<group>/<plane>"      null: the group is not quantised
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from torch import Tensor

from numem.errors import CheckpointError
from numem.identity.canonical import canonical_json
from numem.models.weights.safetensors_file import DTYPES, SafetensorsFile, write_safetensors

DIRECTORY = "quantised"
KIND = "quantised/1"
LOCK_TIMEOUT_S = 60

_CODES = {dtype: code for code, dtype in DTYPES.items()}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stream:
    """One quantised matrix: its format, its shape [n, k], and its raw buffers by name."""

    format: str
    n: int
    k: int
    planes: dict[str, Tensor]


Streams = dict[str, Stream | None]


class StreamFile:
    """The file of one key; its place is the first of `directories` where it can be, or was, written.

    Args:
        directories: in order of preference; made when first written.
        key: 64 hex digits.
    """

    def __init__(self, directories: tuple[Path, ...], key: str) -> None:
        self.key = key
        self._paths = tuple(directory / f"{key}.safetensors" for directory in directories)

    def load(self) -> Streams:
        """Every stream, read straight into buffers of its own; empty where there is no file, or a damaged one."""
        for path in self._paths:
            if path.is_file():
                try:
                    return _read(path, self.key)
                except (CheckpointError, OSError) as error:
                    log.warning("%s; the weights are quantised again", error)
        return {}

    def save(self, streams: Mapping[str, Stream | None]) -> None:
        """Write the file, whole or not at all. Failing to is said, and no error: the model works without it."""
        problem: OSError | None = None
        for path in self._paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with filelock.FileLock(path.parent / ".lock", timeout=LOCK_TIMEOUT_S):
                    _write(path, self.key, streams)
                return
            except OSError as error:  # a lock that is not had in time is one too
                problem = error
        log.warning("quantised weights are not kept for the next load: %s", problem)


def _write(path: Path, key: str, streams: Mapping[str, Stream | None]) -> None:
    tensors = dict(_tensors(streams))
    layout = {name: (_CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    groups = _groups(streams)
    metadata = {"numem": KIND, "key": key, "groups": groups, "digest": _digest(key, groups, tensors)}
    for left in path.parent.glob("*.partial"):
        left.unlink()  # by a killed process: whoever lives and writes holds the lock
    partial = path.with_suffix(".partial")
    try:
        write_safetensors(partial, layout, ((name, _bytes(tensor)) for name, tensor in tensors.items()), metadata)
        for place, then in ((partial, path), (path.parent, None)):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if then is not None:
                place.rename(then)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, key: str) -> Streams:
    file = SafetensorsFile(path)
    metadata = file.metadata
    if metadata.get("numem") != KIND or metadata.get("key") != key:
        raise CheckpointError(f"{path}: not the quantised weights of this model")
    groups = metadata.get("groups", "")
    tensors: dict[str, Tensor] = {}
    with path.open("rb", buffering=0) as source:
        for name, info in sorted(file.tensors.items(), key=lambda item: item[1].begin):
            tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
            source.seek(info.begin)
            view = _bytes(tensor)
            while view:
                count = source.readinto(view)
                if not count:
                    raise CheckpointError(f"{path}: was cut short while it was read")
                view = view[count:]
            tensors[name] = tensor
    if metadata.get("digest") != _digest(key, groups, tensors):
        raise CheckpointError(f"{path}: its bytes differ from their digest")
    streams: Streams = {}
    try:
        for group, entry in json.loads(groups).items():
            planes = {name.removeprefix(f"{group}/"): t for name, t in tensors.items() if name.startswith(f"{group}/")}
            if entry is None:
                streams[group] = None
            else:
                format_, n, k = entry
                streams[group] = Stream(format_, n, k, planes)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its table of matrices is malformed") from error
    return streams


def _tensors(streams: Mapping[str, Stream | None]) -> Iterator[tuple[str, Tensor]]:
    for group, stream in streams.items():
        if stream is not None:
            for plane, tensor in stream.planes.items():
                yield f"{group}/{plane}", tensor


def _groups(streams: Mapping[str, Stream | None]) -> str:
    table = {group: None if s is None else [s.format, s.n, s.k] for group, s in streams.items()}
    return canonical_json(table).decode()


def _digest(key: str, groups: str, tensors: Mapping[str, Tensor]) -> str:
    from blake3 import blake3

    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(canonical_json([KIND, key, groups]))
    for name, tensor in tensors.items():
        hasher.update(canonical_json([name, str(tensor.dtype), list(tensor.shape)]))
        hasher.update(_bytes(tensor))
    return str(hasher.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
