"""Everything Dagster knows of numem, assembled explicitly.

Belongs here: the lists. Importing this module loads neither torch nor Lance: a UI-launched run pays for what it uses.

Dagster concept: https://docs.dagster.io/guides/build/projects-and-components/organizing-dagster-projects
"""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from dagster_project.assets.checks import CHECKS
from dagster_project.assets.inference import INFERENCE
from dagster_project.assets.maintenance import MAINTENANCE, MAINTENANCE_CHECKS
from dagster_project.jobs import JOBS, SCHEDULES
from dagster_project.resources import environment as env
from dagster_project.resources.memory import MemoryResource
from dagster_project.resources.model import ModelResource
from dagster_project.resources.runtime import RuntimeResource


def default_resources() -> dict[str, Any]:
    """Resources of this deployment, by the environment variables of `dagster_project.resources.environment`."""
    return {
        "memory": MemoryResource(
            home=env.text(env.MEMORY, ""),
            node=env.text(env.NODE, "local"),
            local=env.text(env.LOCAL, ""),
            tiers=env.text(env.TIERS, ""),
        ),
        "model": ModelResource(
            key=env.text(env.MODEL, env.DEFAULT_MODEL),
            device=env.text(env.DEVICE, "cpu"),
            dtype=env.text(env.DTYPE, ""),
            quantise=env.text(env.QUANTISE, "none"),
            max_position=env.number(env.MAX_POSITION, 0),
        ),
        "runtime": RuntimeResource(),
    }


def build_defs(*, resource_overrides: Mapping[str, Any] | None = None) -> dg.Definitions:
    """A fresh `Definitions`.

    Args:
        resource_overrides: resources by key ("memory", "model", "runtime") in place of the deployment's.
    """
    return dg.Definitions(
        assets=[*INFERENCE, *MAINTENANCE],
        asset_checks=[*CHECKS, *MAINTENANCE_CHECKS],
        jobs=JOBS,
        schedules=SCHEDULES,
        resources={**default_resources(), **(resource_overrides or {})},
        executor=dg.in_process_executor,
    )


defs = build_defs()
