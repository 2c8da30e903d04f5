"""The partitions of every inference asset: one per batch of prompts, whatever its prompts, chunks or tokens.

Belongs here: the definition. Adding keys to an instance: `dagster_project.partitions`.

Dagster concept: https://docs.dagster.io/guides/build/partitions-and-backfills
"""

import dagster as dg

PROMPT_BATCHES_NAME = "prompt_batches"
PROMPT_BATCHES = dg.DynamicPartitionsDefinition(name=PROMPT_BATCHES_NAME)
