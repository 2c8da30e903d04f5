"""The volumes of a tier as files: their creation markers, their sizes, and their removal.

`<volume>.volume` is made before the volume itself, by exactly one writer, and says whose it is. When a volume is removed
its marker goes first, so that nobody counts on it any more. The newest marker of a writer stays, marked as removed: a
number is never used twice, since the ledger and older facts may still speak of the volume that had it.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from numem.store import barrier
from numem.store.payload.objects import Objects
from numem.store.urls import Location

# Owner of a volume that no writer goes on with.
NOBODY = "archive"
VOLUME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\.w\d{3}\.\d{6}")


class Shelf:
    """Volume files below one location.

    Args:
        objects: the same location as an object store; None where it is local.
        owner: random id of this node's local state, written into the markers of its volumes.
    """

    def __init__(self, location: Location, objects: Objects | None, owner: str) -> None:
        self._location = location
        self._objects = objects
        self._owner = owner

    def marked(self, prefix: str = "") -> list[str]:
        """Volumes with a marker whose name starts so, removed ones included, in name order."""
        if self._objects is not None:
            names = self._objects.names(prefix)
        elif self._location.path is not None and self._location.path.is_dir():
            names = [path.name for path in self._location.path.glob(f"{prefix}*.volume")]
        else:
            names = []
        volumes = (name.removesuffix(".volume") for name in names if name.endswith(".volume"))
        return sorted(name for name in volumes if VOLUME.fullmatch(name))

    def mark(self, name: str, node: str) -> bool:
        """Claim a name for a new volume; False where it is taken."""
        marker = json.dumps({"format": 1, "node": node, "owner": self._owner}).encode()
        if self._objects is not None:
            return self._objects.create(f"{name}.volume", marker)
        path = self._path()
        barrier.make_directory(path)
        return barrier.write_exclusive(path / f"{name}.volume", marker, path / f".{name}.{self._owner}.tmp")

    def owned(self, name: str) -> bool:
        """Whether a volume is there and belongs to this node's local state."""
        marker = self._marker(name)
        return marker.get("owner") == self._owner and not marker.get("removed")

    def newest(self, names: Iterable[str]) -> set[str]:
        """Of volumes in name order the newest of every writer. Two local states of one node name (two machines that share
        a home, say) are two writers, though they take turns at the numbers. What an archive brought back has none."""
        found: dict[tuple[str, object], str] = {}
        for name in names:
            found[name.rsplit(".", 1)[0], self._marker(name).get("owner")] = name
        return {name for (_, owner), name in found.items() if owner != NOBODY}

    def exists(self, name: str) -> bool:
        """Whether a volume was made and not removed."""
        if self._objects is None and not (self._path() / f"{name}.lance").exists():
            return False
        marker = self._marker(name)
        return bool(marker) and not marker.get("removed")

    def removed(self, name: str) -> bool:
        """Whether a volume was removed on purpose, as far as its marker still tells."""
        return bool(self._marker(name).get("removed"))

    def nbytes(self, name: str) -> int:
        """Bytes of a volume's files."""
        return sum(size for _, size in self._files(name))

    def remove(self, name: str) -> int:
        """Remove a volume, marker first; returns the bytes of its files. What a crash leaves is an orphan."""
        nbytes = self.nbytes(name)
        writer = name.rsplit(".", 1)[0]
        newest = self.marked(f"{writer}.")[-1:] == [name]
        tombstone = json.dumps({"format": 1, "owner": self._owner, "removed": True}).encode()
        if self._objects is not None:
            if newest:
                self._objects.replace(f"{name}.volume", tombstone, self._objects.fetch(f"{name}.volume").mark)
            else:
                self._objects.delete([f"{name}.volume"])
            self._objects.delete([file for file, _ in self._files(name)])
            return nbytes
        path = self._path()
        marker = path / f"{name}.volume"
        if newest:
            temporary = path / f".{name}.{self._owner}.tmp"
            temporary.write_bytes(tombstone)
            barrier.sync_file(temporary)
            os.replace(temporary, marker)
        else:
            marker.unlink(missing_ok=True)
        barrier.sync_directory(path)
        barrier.reached("volume unmarked", name)
        shutil.rmtree(path / f"{name}.lance", ignore_errors=True)
        return nbytes

    def orphans(self, grace_s: float) -> list[str]:
        """Volumes that have files but no marker (a removal that a crash cut short), older than a grace."""
        late = int((time.time() - grace_s) * 1e9)
        # Files before markers: a writer marks a volume before it makes it.
        newest = self._newest_files()
        known = {name for name in self.marked() if not self._marker(name).get("removed")}
        return sorted(name for name, at in newest.items() if name not in known and at <= late)

    def _newest_files(self) -> dict[str, int]:
        """When each volume that has files was last written to, in ns since the epoch."""
        newest: dict[str, int] = {}
        if self._objects is not None:
            for listed in self._objects.listing():
                name, inside, _ = listed.name.partition(".lance/")
                if inside and VOLUME.fullmatch(name):
                    newest[name] = max(newest.get(name, 0), listed.modified)
        elif self._path().is_dir():
            for path in self._path().glob("*.lance"):
                name = path.name.removesuffix(".lance")
                if VOLUME.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        newest[name] = path.stat().st_mtime_ns
        return newest

    def sweep(self, name: str) -> int:
        """Remove the files of an orphan; returns their bytes."""
        nbytes = self.nbytes(name)
        if self._objects is not None:
            self._objects.delete([file for file, _ in self._files(name)])
        else:
            shutil.rmtree(self._path() / f"{name}.lance", ignore_errors=True)
        return nbytes

    def _files(self, name: str) -> list[tuple[str, int]]:
        if self._objects is not None:
            return [(listed.name, listed.nbytes) for listed in self._objects.listing(f"{name}.lance")]
        return file_sizes(self._path() / f"{name}.lance")

    def _marker(self, name: str) -> dict[str, object]:
        try:
            if self._objects is not None:
                marker = json.loads(self._objects.read(f"{name}.volume"))
            else:
                marker = json.loads((self._path() / f"{name}.volume").read_bytes())
        except (OSError, ValueError):
            return {}
        return marker if isinstance(marker, dict) else {}

    def _path(self) -> Path:
        assert self._location.path is not None
        return self._location.path


def file_sizes(root: Path) -> list[tuple[str, int]]:
    """Files below a directory and their bytes, without those that others remove or rename meanwhile."""
    found = []
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                found.append((path, os.lstat(path).st_size))
    return found
