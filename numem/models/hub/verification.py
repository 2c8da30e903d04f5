"""Hashing a model directory again and comparing it with what was recorded when it was fetched or imported."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath

from numem.errors import CheckpointError, ModelError
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME, read_lock


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification found.

    Attributes:
        directory: the model directory.
        files: recorded files that were hashed.
        problems: one line for each thing that is not as it was recorded; empty where all is well.
    """

    directory: Path
    files: int
    problems: tuple[str, ...]


def verify_directory(directory: str | PathLike[str]) -> Verification:
    """Hash every file that the lock file records, and the weights as a load would.

    Raises:
        CheckpointError: no lock file, or one that cannot be read: there is nothing to compare with.
    """
    directory = Path(directory)
    lock = read_lock(directory)
    if lock is None:
        raise CheckpointError(f"{directory}: no {LOCK_NAME}; only what numem fetched or imported was recorded")
    problems = []
    for name in sorted(lock.files):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            problems.append(f"{directory / LOCK_NAME}: records {name!r}, which is no file of the directory")
            continue
        try:
            lock.check_file(directory, name)
        except ModelError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{directory / name}: cannot be read: {error.strerror}")
    if not problems:
        # Files that no digest covers may have come since; they show in what a load would read.
        try:
            Checkpoint(directory).digest()
        except ModelError as error:
            problems.append(str(error))
    return Verification(directory, len(lock.files), tuple(problems))
