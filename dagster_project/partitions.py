"""Adding prompt batches to an instance.

Belongs here: what touches an instance's partitions. The definition stands with the assets: `dagster_project.assets.batches`.

Dagster concept: https://docs.dagster.io/guides/build/partitions-and-backfills
"""

import itertools
from collections.abc import Iterable

import dagster as dg

from dagster_project.assets.batches import PROMPT_BATCHES_NAME

# SQLite refuses a statement with more variables than this by two orders; one call must not grow with the batches.
ADD_AT_ONCE = 500


def add_batches(instance: dg.DagsterInstance, batch_ids: Iterable[str]) -> None:
    """Make batches known to an instance as partitions; known ones are left as they are."""
    ids = iter(batch_ids)
    while some := list(itertools.islice(ids, ADD_AT_ONCE)):
        instance.add_dynamic_partitions(PROMPT_BATCHES_NAME, some)
