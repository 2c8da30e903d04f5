"""What differs between deployments, and where it comes from: environment variables.

Belongs here: names and defaults of the variables, and the guard that keeps run config away from them. Not here: what a
single run may choose (lanes, number of tokens): that is config of the runtime resource.

    NUMEM_MEMORY        home of the memory: directory or s3:// URL    (default: <cache>/memory)
    NUMEM_LOCAL         local directory of a remote memory            (default: chosen by the store)
    NUMEM_NODE          name of this node                             (default: local)
    NUMEM_TIERS         its tiers, see `numem.environment`            (default: object and ssd)
    NUMEM_STORAGE_OPTIONS   see `numem.environment`; never part of a resource's config, which the UI shows
    NUMEM_MODEL         registry key or directory                     (default: smollm2-135m-instruct)
    NUMEM_DEVICE        cpu, cuda, cuda:N, auto, or several GPUs: cuda:all, cuda:0,cuda:1   (default: cpu)
    NUMEM_DTYPE         float32 or bfloat16                           (default: float32 on the CPU, bfloat16 on a GPU)
    NUMEM_QUANTISE      none, q8, q4, q4a, q4k or native              (default: none)
    NUMEM_MAX_POSITION  context to load the model with, 0: its own    (default: 0)

Dagster concept: https://docs.dagster.io/guides/operate/configuration/using-environment-variables-and-secrets
"""

import os
from collections.abc import Mapping

import dagster as dg

from numem.environment import LOCAL, MEMORY, NODE, TIERS
from numem.errors import InputError

__all__ = [
    "DEFAULT_MODEL",
    "DEVICE",
    "DTYPE",
    "LOCAL",
    "MAX_POSITION",
    "MEMORY",
    "MODEL",
    "NODE",
    "QUANTISE",
    "TIERS",
    "from_deployment_only",
    "number",
    "text",
]

MODEL = "NUMEM_MODEL"
DEVICE = "NUMEM_DEVICE"
DTYPE = "NUMEM_DTYPE"
QUANTISE = "NUMEM_QUANTISE"
MAX_POSITION = "NUMEM_MAX_POSITION"

DEFAULT_MODEL = "smollm2-135m-instruct"


def text(name: str, default: str) -> str:
    """The variable by reference where it is set, so that the UI shows its name; else the default."""
    return dg.EnvVar(name) if os.environ.get(name) else default


def number(name: str, default: int) -> int:
    """Like `text`, for whole numbers."""
    return dg.EnvVar.int(name) if os.environ.get(name) else default


def from_deployment_only(context: dg.InitResourceContext, key: str) -> None:
    """Refuse a run that configures this resource: paths, URLs and models come from the deployment alone.

    Raises:
        InputError: the run's config has an entry for the resource.
    """
    run = context.run
    resources = run.run_config.get("resources") if run is not None else None
    if isinstance(resources, Mapping) and resources.get(key):
        raise InputError(
            f"run config: resources.{key} is set by the deployment (environment variables NUMEM_*); remove it from the "
            "run's config"
        )
