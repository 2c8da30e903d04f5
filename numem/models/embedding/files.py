"""The small files of a model directory, each compared with what was recorded beside the model before it is read."""

import json
from pathlib import Path
from typing import Any

from numem.errors import CheckpointError
from numem.models.weights.lockfile import read_json, read_lock
from numem.models.weights.safetensors_file import SafetensorsFile


class ModelFiles:
    """Files of a model directory, by their names relative to it.

    Raises:
        CheckpointError: a file that is not what the lock file beside the model says, or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = read_lock(directory)

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.directory / name).is_file()

    def checked(self, name: str) -> Path:
        """The path of a file, once its digest was compared."""
        if self._lock is not None:
            self._lock.check_file(self.directory, name)
        return self.directory / name

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return read_json(self.checked(name))

    def optional(self, name: str) -> dict[str, Any]:
        """A JSON object, empty where there is no such file and none was recorded."""
        path = self.checked(name)
        return read_json(path) if path.is_file() else {}

    def json_list(self, name: str) -> list[dict[str, Any]]:
        """A JSON array of objects."""
        path = self.checked(name)
        try:
            value = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise CheckpointError(f"{path}: not a JSON array of objects")
        return value

    def weights(self, name: str) -> SafetensorsFile:
        """A safetensors file."""
        return SafetensorsFile(self.checked(name))
