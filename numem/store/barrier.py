"""The durability barrier: what makes local files survive a power cut, and the named steps of a publication.

Lance writes through the page cache and never syncs. Every file that an acknowledgement depends on passes through
`sync_file`, every directory that gained a name through `sync_directory`; both can be observed, so that a test can
prove the order and kill the process between two steps.

States of a piece: staged (in the spool) -> written (in a volume's files) -> committed (named by a manifest)
-> durable (file, manifest, directories and catalog facts synced; only now acknowledged).
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

Observer = Callable[[str, str], None]

_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Call `observer(step, what)` at every step of this process from now on; returns a function that ends it."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def reached(step: str, what: str = "") -> None:
    """Tell the observers that a step is done: "staged", "written", "committed", "catalogued", "durable", ..."""
    for observer in tuple(_observers):
        observer(step, what)


def sync_file(path: Path) -> None:
    """Force a file's bytes and length to the disk."""
    _sync(path)
    reached("fsync file", str(path))


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    _sync(path)
    reached("fsync directory", str(path))


def sync(files: Iterable[Path], directories: Iterable[Path]) -> None:
    """Files first, then the directories that name them."""
    for path in files:
        sync_file(path)
    for path in directories:
        sync_directory(path)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, durably: every parent that gained a name is synced."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_directory(new.parent)


def write_exclusive(path: Path, data: bytes, temporary: Path) -> bool:
    """Create a small file with all its bytes or not at all; False where the name is taken already.

    Args:
        path: final name.
        data: whole content.
        temporary: a name of this process alone, on the same file system.
    """
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        sync_directory(path.parent)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
