"""What was committed, kept outside Lance: one line for every commit that a process made and synced.

Lance opens a missing, zero-filled or bit-flipped newest manifest without an error in some shapes. The ledger holds a
digest of every acknowledged manifest, of the small data files behind it, and the fragments it added, so that recovery
can tell a good newest manifest from a bad one and commit the fragments of a lost one again.

Every writer appends to a file of its own; a reader takes the union. A torn or damaged line is skipped.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import xxhash

from numem.store.barrier import reached, sync_directory


@dataclass(frozen=True, slots=True)
class Entry:
    """One acknowledged commit.

    Attributes:
        dataset: name of the dataset inside the memory, for example "catalog/nodes".
        version: the version the commit made.
        manifest: BLAKE3-256 of the manifest file, hex.
        fragments: the fragments that the commit appended, as Lance's JSON.
        files: xxh3-128, hex, of the data files whose whole content is checked at open.
        at: time of the line, ns since the epoch; of two lines for one version the later holds.
        whole: the commit replaced all fragments before it (a compaction): `fragments` are all that the version has.
    """

    dataset: str
    version: int
    manifest: str
    fragments: Sequence[Mapping[str, Any]]
    files: Mapping[str, str]
    at: int = 0
    whole: bool = False


class Ledger:
    """The lines of all writers of a memory, and the file of this one.

    Args:
        directory: a local directory.
        name: asked once, at the first line, for the file name of this writer (made of checked names only).
        now: time of a line, above the sequences of all facts that its commit made durable.
    """

    def __init__(self, directory: Path, name: Callable[[], str], now: Callable[[], int] = time.time_ns) -> None:
        self._name = name
        self._now = now
        self._directory = directory
        self._lock = Lock()
        self._descriptor: int | None = None

    def append(self, entry: Entry) -> None:
        """Write one line; `sync` forces it to the disk."""
        body = json.dumps(
            {
                "dataset": entry.dataset,
                "version": entry.version,
                "manifest": entry.manifest,
                "fragments": list(entry.fragments),
                "files": dict(entry.files),
                "at": entry.at or self._now(),
                "whole": entry.whole,
            },
            separators=(",", ":"),
        ).encode()
        with self._lock:
            if self._descriptor is None:
                self._descriptor = self._open()
            # The leading newline ends a torn line that a crash may have left.
            line = memoryview(b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(body).encode(), body))
            while line:
                line = line[os.write(self._descriptor, line) :]

    def sync(self) -> None:
        """Force the lines written so far to the disk; comes last before an acknowledgement."""
        with self._lock:
            if self._descriptor is not None:
                os.fdatasync(self._descriptor)
        reached("fsync ledger")

    def read(self) -> dict[str, dict[int, Entry]]:
        """All good lines of all writers: dataset -> version -> entry."""
        found: dict[str, dict[int, Entry]] = {}
        for path in sorted(self._directory.glob("*.ledger")):
            for _, entry in _lines(path):
                versions = found.setdefault(entry.dataset, {})
                if entry.version not in versions or versions[entry.version].at <= entry.at:
                    versions[entry.version] = entry
        return found

    def faults(self) -> dict[str, int]:
        """File name -> lines that are torn or damaged, of the files that have some."""
        counts = {}
        for path in sorted(self._directory.glob("*.ledger")):
            good = sum(1 for _ in _lines(path))
            if path.exists():  # else it was trimmed to nothing meanwhile
                counts[path.name] = max(0, sum(map(bool, path.read_bytes().splitlines())) - good)
        return {name: count for name, count in counts.items() if count}

    def trim(self, needed: Callable[[Entry], bool], idle: Callable[[str], AbstractContextManager[bool]]) -> int:
        """Drop lines that recovery cannot need any more; returns the bytes saved.

        The caller holds the catalog's lock, so that nobody reads the files one by one meanwhile.

        Args:
            needed: whether a line must stay.
            idle: whether the writer of a file (by its name) is not running, and held off while the with block lasts.
        """
        saved = 0
        own = self._name()
        for path in sorted(self._directory.glob("*.ledger")):
            if path.stem == own:
                with self._lock:
                    saved += _rewrite(path, needed)
                    if self._descriptor is not None:
                        os.close(self._descriptor)
                        self._descriptor = None
                continue
            with idle(path.stem) as free:
                if free:
                    saved += _rewrite(path, needed)
        if saved:
            sync_directory(self._directory)
        return saved

    def _open(self) -> int:
        path = self._directory / f"{self._name()}.ledger"
        new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if new:
            os.fsync(descriptor)
            sync_directory(self._directory)
        return descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lines(path: Path) -> Iterator[tuple[bytes, Entry]]:
    """The good lines of a file; none where it was removed meanwhile."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.splitlines():
        check, _, body = line.partition(b" ")
        if body and xxhash.xxh3_64_hexdigest(body).encode() == check:
            yield line, Entry(**json.loads(body))


def _rewrite(path: Path, needed: Callable[[Entry], bool]) -> int:
    """Keep the needed lines of a file, in a new file that takes its name when it is whole."""
    lines = list(_lines(path))
    kept = [line for line, entry in lines if needed(entry)]
    if len(kept) == len(lines):
        return 0
    before = path.stat().st_size
    if not kept:
        path.unlink()
        return before
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
        after = file.tell()
    os.replace(temporary, path)
    return before - after
