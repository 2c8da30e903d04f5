"""The model as a Dagster resource: loaded at first use, kept for later runs of the same process.

Belongs here: config and caching. Loading: `numem.models.lm`. Nothing is loaded, and torch is not imported, at import or
when a run sets its resources up: only a step that computes pays for the model.

Dagster concept: https://docs.dagster.io/guides/build/external-resources
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dagster_project.resources.environment import DEFAULT_MODEL, from_deployment_only

if TYPE_CHECKING:
    from numem.models.lm import LM


class ModelResource(dg.ConfigurableResource[Any]):
    """The language model of this deployment."""

    key: str = Field(default=DEFAULT_MODEL, description="Registry key, or directory of safetensors.")
    device: str = Field(
        default="cpu", description="cpu, cuda, cuda:N, auto, or several GPUs of this host: cuda:all, cuda:0,cuda:1."
    )
    dtype: str = Field(
        default="",
        description="float32 or bfloat16, of weights and cache; empty: float32 on the CPU, bfloat16 on a GPU.",
    )
    quantise: str = Field(default="none", description="none, q8, q4, q4a, q4k or native; see `numem.load_lm`.")
    max_position: int = Field(default=0, description="Positions that may be evaluated; 0: min(8192, the model's own).")

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Check that the run did not choose the model."""
        from_deployment_only(context, "model")

    def load(self) -> "LM":
        """The model; the same object for every run of this process under an equal config.

        Raises:
            ModelError, InputError: see `numem.models.lm.load_lm`.
        """
        quantise = None if self.quantise == "none" else self.quantise
        return _load(self.key, self.device, self.dtype or None, quantise, self.max_position or None)


@lru_cache(maxsize=1)
def _load(key: str, device: str, dtype: str | None, quantise: str | None, max_position: int | None) -> "LM":
    from numem.models.lm import load_lm

    return load_lm(key, device=device, dtype=dtype, quantise=quantise, max_position=max_position)
