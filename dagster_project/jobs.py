"""The jobs of this code location.

Belongs here: which assets run together, and in which executor. What they do: `dagster_project.assets`.

Dagster concept: https://docs.dagster.io/guides/build/jobs/asset-jobs
"""

import dagster as dg

from dagster_project.assets.batches import PROMPT_BATCHES
from dagster_project.assets.inference import INFERENCE

CONTINUE_PROMPTS = "continue_prompts"
CONTINUE_PROMPTS_MULTIPROCESS = "continue_prompts_multiprocess"

# Children come from a server process that was started anew and holds neither threads nor a model; two at once, because
# a check may run beside the next stage and no two stages ever do.
MULTIPROCESS = dg.multiprocess_executor.configured(
    {"max_concurrent": 2, "start_method": {"forkserver": {"preload_modules": ["dagster_project.definitions"]}}}
)

continue_prompts = dg.define_asset_job(
    CONTINUE_PROMPTS,
    selection=dg.AssetSelection.assets(*INFERENCE),
    partitions_def=PROMPT_BATCHES,
    executor_def=dg.in_process_executor,
    description="Prompts in, completions out, every stage in one process: the model is loaded once.",
)

continue_prompts_multiprocess = dg.define_asset_job(
    CONTINUE_PROMPTS_MULTIPROCESS,
    selection=dg.AssetSelection.assets(*INFERENCE),
    partitions_def=PROMPT_BATCHES,
    executor_def=MULTIPROCESS,
    description="The same with a process for each stage, which loads the model again; tokens are computed once all the same.",
)

JOBS = [continue_prompts, continue_prompts_multiprocess]
