"""The lock file beside a model that numem wrote or fetched: where it came from, and what its bytes were.

    numem.lock.json   {"version": 1, "source": {...}, "files": {name: sha256 hex}, "weights": BLAKE3 hex}

`files` are verified in full when they are written or fetched. At load the small ones are hashed again; the weights are
compared by `Checkpoint.digest()`, which every load computes for the fingerprint anyway. A directory without a lock
file is a user's own and carries no expectation.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numem.errors import CheckpointError

LOCK_NAME = "numem.lock.json"
LOCK_VERSION = 1

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Lock:
    """Recorded origin and digests of a model directory.

    Attributes:
        source: plain values that name the origin.
        files: file name -> SHA-256, hex.
        weights: `Checkpoint.digest()`, hex.
    """

    source: Mapping[str, Any]
    files: Mapping[str, str] = field(repr=False)
    weights: str

    def write(self, directory: Path) -> None:
        """Write the lock file; the caller makes it durable."""
        document = {
            "version": LOCK_VERSION,
            "source": dict(self.source),
            "files": dict(sorted(self.files.items())),
            "weights": self.weights,
        }
        (directory / LOCK_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def check_file(self, directory: Path, name: str) -> None:
        """Raise CheckpointError if a recorded file is not what was recorded, or is gone."""
        expected = self.files.get(name)
        if expected is None:
            return
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path}: recorded in {LOCK_NAME} but missing; {_REMEDY}")
        if sha256_file(path) != expected:
            raise CheckpointError(f"{path}: differs from the SHA-256 recorded in {LOCK_NAME}; {_REMEDY}")


_REMEDY = "remove the directory and fetch or import the model again"


def read_lock(directory: Path) -> Lock | None:
    """Read the lock file of a model directory, None where there is none.

    Raises:
        CheckpointError: unreadable, or of an unknown version.
    """
    path = directory / LOCK_NAME
    if not path.is_file():
        return None
    document = read_json(path)
    if document.get("version") != LOCK_VERSION:
        raise CheckpointError(f"{path}: version {document.get('version')!r} is not {LOCK_VERSION}; {_REMEDY}")
    source, files, weights = document.get("source"), document.get("files"), document.get("weights")
    if (
        not isinstance(source, dict)
        or not isinstance(files, dict)
        or not all(isinstance(digest, str) and _HEX.fullmatch(digest) for digest in [*files.values(), weights])
    ):
        raise CheckpointError(f"{path}: not a lock file of version {LOCK_VERSION}; {_REMEDY}")
    return Lock(source, files, str(weights))


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError naming the file otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object as UTF-8 with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Build a directory that appears whole or not at all.

    Yields `<final>.partial`, empty. On success every file is made durable and the directory is renamed to `final`,
    which must not exist; on an error it is removed, and what a killed process left behind is removed first.
    """
    partial = final.with_name(final.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        publish_directory(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_directory(partial: Path, final: Path) -> None:
    """Make every file of `partial` durable, then rename the directory to `final`, which must not exist."""
    for path in sorted(partial.rglob("*")):
        _fsync(path)
    _fsync(partial)
    partial.rename(final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
