"""A deployment as a value: which memory and model the runs of a process use, and how another process gets the same.

Belongs here: from command-line options to resources and environment variables. The variables themselves:
`dagster_project.resources.environment`.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from dagster_project.resources import environment as env
from dagster_project.resources.memory import MemoryResource
from dagster_project.resources.model import ModelResource
from numem.errors import InputError

# Beside the instance: the model of its last run, for the UI that is opened on it later.
FILE = "deployment.json"
REMEMBERED = ("model", "device", "dtype", "quantise", "max_position")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Fields as the variables of `dagster_project.resources.environment`; empty or zero means the default."""

    memory: str = ""
    local: str = ""
    node: str = "local"
    tiers: str = ""
    model: str = env.DEFAULT_MODEL
    device: str = "cpu"
    dtype: str = ""
    quantise: str = "none"
    max_position: int = 0

    @classmethod
    def here(
        cls,
        *,
        memory: str | None = None,
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        quantise: str | None = None,
        max_position: int | None = None,
    ) -> Self:
        """Options where given, else this process's environment, else defaults. Directories become absolute."""
        get = os.environ.get
        position = get(env.MAX_POSITION) or "0"
        if not position.isdecimal():
            raise InputError(f"{env.MAX_POSITION}: {position!r} is not a number of positions")
        key = model or get(env.MODEL) or env.DEFAULT_MODEL
        return cls(
            memory=_absolute(memory or get(env.MEMORY) or ""),
            local=_absolute(get(env.LOCAL) or ""),
            node=get(env.NODE) or "local",
            tiers=get(env.TIERS) or "",
            model=_absolute(key) if Path(key).is_dir() else key,
            device=device or get(env.DEVICE) or "cpu",
            dtype=dtype or get(env.DTYPE) or "",
            quantise=quantise or get(env.QUANTISE) or "none",
            max_position=int(position) if max_position is None else max_position,
        )

    def memory_resource(self) -> MemoryResource:
        return MemoryResource(home=self.memory, node=self.node, local=self.local, tiers=self.tiers)

    def model_resource(self) -> ModelResource:
        return ModelResource(
            key=self.model, device=self.device, dtype=self.dtype, quantise=self.quantise, max_position=self.max_position
        )

    def environment(self) -> dict[str, str]:
        """Variables that give another process this deployment."""
        values = {
            env.MEMORY: self.memory_resource().resolved_home,
            env.LOCAL: self.local,
            env.NODE: self.node,
            env.TIERS: self.tiers,
            env.MODEL: self.model,
            env.DEVICE: self.device,
            env.DTYPE: self.dtype,
            env.QUANTISE: self.quantise,
            env.MAX_POSITION: str(self.max_position),
        }
        return {name: value for name, value in values.items() if value}

    def remember(self, home: Path) -> None:
        """Leave model, device, dtype, quantisation and context beside the instance, for a UI opened on it."""
        partial = home / f".{FILE}.{os.getpid()}"
        partial.write_text(json.dumps({name: asdict(self)[name] for name in REMEMBERED}))
        partial.replace(home / FILE)


def remembered(home: Path) -> dict[str, Any]:
    """Model, device, dtype, quantisation and context of the last run of an instance; empty where none ran.

    Raises:
        InputError: the file is damaged.
    """
    path = home / FILE
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text())
        return {
            "model": str(tree["model"]),
            "device": str(tree.get("device", "cpu")),  # earlier releases left neither this nor the formats
            "dtype": str(tree["dtype"]),
            "quantise": str(tree.get("quantise", "none")),
            "max_position": int(tree["max_position"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}); delete it and name the model with --model") from error


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path and "://" not in path else path
