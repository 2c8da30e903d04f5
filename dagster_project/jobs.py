"""The jobs of this code location, and their schedule.

Belongs here: which assets run together, in which executor, and when. What they do: `dagster_project.assets`.

Dagster concept: https://docs.dagster.io/guides/build/jobs/asset-jobs
"""

import dagster as dg

from dagster_project.assets.batches import PROMPT_BATCHES
from dagster_project.assets.inference import INFERENCE
from dagster_project.assets.maintenance import compacted_store, reconciled_replicas, store_intact

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

maintain_store = dg.define_asset_job(
    "maintain_store",
    selection=dg.AssetSelection.assets(compacted_store),
    executor_def=dg.in_process_executor,
    description="One round of maintenance and its checks. Skipped where another process maintains the memory.",
)

scrub_store = dg.define_asset_job(
    "scrub_store",
    selection=dg.AssetSelection.checks(store_intact),
    executor_def=dg.in_process_executor,
    config={"ops": {store_intact.node_def.name: {"config": {"budget_bytes": 0}}}},
    description="Every copy read and compared with its content id; bad ones made anew from good ones.",
)

reconcile_replicas = dg.define_asset_job(
    "reconcile_replicas",
    selection=dg.AssetSelection.assets(reconciled_replicas),
    executor_def=dg.in_process_executor,
    description="The copies that demands want in tiers of this node.",
)

# Running from the start: by default it takes only what nothing references, keeps every published state and is safe
# beside running work, while a store that nobody maintains grows with every change. It ticks while `numem ui` (or another
# Dagster daemon) runs on this memory's instance, and may be stopped there.
maintain_daily = dg.ScheduleDefinition(
    name="maintain_daily",
    job=maintain_store,
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Maintenance every night at 3:00.",
)

JOBS = [continue_prompts, continue_prompts_multiprocess, maintain_store, scrub_store, reconcile_replicas]
SCHEDULES = [maintain_daily]
