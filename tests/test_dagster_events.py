"""What the history of runs holds of a big batch: one event for each asset, however many chunks or prompts there are."""

import json
from pathlib import Path
from typing import Any, cast

import dagster as dg
import numpy as np

from dagster_project.assets.metadata import MAX_VALUE_BYTES
from dagster_project.definitions import build_defs
from dagster_project.deployment import Deployment
from dagster_project.instance import open_instance
from dagster_project.jobs import CONTINUE_PROMPTS
from dagster_project.partitions import add_batches
from dagster_project.runs import Settings, continue_prompts
from numem.identity.digest import content_id
from numem.job.batch import Batch, Item, save_batch
from numem.job.model_free import DTYPE, SPEC, identity
from numem.job.record import silent
from numem.job.sharing import Prefix
from numem.runtime.restore.chunks import chunk_node
from tests.dagster_fixtures import deployment, materialisation, metadata, model_directory, table


def staged_batch(where: Deployment, prompts: int, seed: int) -> Batch:
    """A batch of prompts of 5 tokens that share nothing, their prefixes staged as one chunk each."""
    subject = identity()
    items = tuple(Item(f"q{i}", (seed, i, 1, 2, 3)) for i in range(prompts))
    prefixes = tuple(Prefix(item.tokens[:4], (i,)) for i, item in enumerate(items))
    batch = Batch(f"{seed:032x}", subject.scope.hex(), "none", items, prefixes)
    with where.memory_resource().opened() as memory:
        memory.register(subject)
        save_batch(memory, batch)
        for number, (chunk,) in enumerate(batch.chunks()):
            payload = np.full((SPEC.members, chunk.count, SPEC.width), seed * 10_000 + number, DTYPE)
            memory.stage(chunk_node(chunk, subject.scope, SPEC, [content_id(payload)], {}), [payload])
    return batch


def published(where: Deployment, batch: Batch) -> tuple[int, int, float]:
    """Publish a batch as a run: events of the run, bytes of their values, ms of the publication itself."""
    overrides = {"memory": where.memory_resource(), "model": where.model_resource()}
    with where.memory_resource().opened() as memory, open_instance(memory.local) as instance:
        add_batches(instance, [batch.id])
        job = build_defs(resource_overrides=overrides).resolve_job_def(CONTINUE_PROMPTS)
        done = job.execute_in_process(
            instance=instance,
            partition_key=batch.id,
            asset_selection=[dg.AssetKey("published_chunks")],
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        )
        assert all(check.passed for check in done.get_asset_check_evaluations())
        record = materialisation(instance, "published_chunks", batch.id)
        shown = metadata(record)
        assert (shown["chunks"], shown["chunks_stored"]) == (len(batch.items), len(batch.items))
        events = instance.all_logs(done.run_id)
        return len(events), sum(len(dg.serialize_value(event)) for event in events), shown["time_ms"]


def test_events_are_proportional_to_batches(tmp_path: Path) -> None:
    """dagster#18789, dagster#19618: 2,000 chunks in one run have as many events as 200, and cost no more each."""
    where = deployment(tmp_path, tmp_path)
    few = published(where, staged_batch(where, 200, seed=1))
    many = published(where, staged_batch(where, 2000, seed=2))
    assert few[0] == many[0]
    assert many[1] < few[1] + 10_000
    # An order of magnitude, no more: 2,000 beside 200 more in the memory already.
    assert many[2] / 2000 < 10 * few[2] / 200


def test_a_table_of_hundreds_stays_small_in_the_history(tmp_path: Path) -> None:
    """dagster#18789: reports of a run have totals and the first prompts; no event or record grows with the table."""
    where = deployment(tmp_path, model_directory(tmp_path))
    settings = Settings(max_new_tokens=1, lanes=4, arrivals="restore", proof=False)
    sizes = []
    for count in (80, 240):
        prompts = table(tmp_path / f"{count}.jsonl", passages=count // 2, questions=2, length=30, seed=count)
        done = continue_prompts(where, prompts, settings, progress=silent)
        with where.memory_resource().opened() as memory, open_instance(memory.local) as instance:
            record = materialisation(instance, "decoded_continuations", done.summary.batch)
            events = instance.all_logs(done.run_id)
            records = memory.records(subject=bytes.fromhex(done.summary.batch))
            assert record.asset_materialization is not None
            for entry in record.asset_materialization.metadata.values():
                assert len(dg.serialize_value(cast(Any, entry))) <= MAX_VALUE_BYTES
            shown = metadata(record)
            assert (shown["dagster/row_count"], shown["prompts_shown"]) == (count, f"20 of {count}")
            assert Path(str(shown["journal"])).read_bytes().count(b"\n") == count
            sizes.append(
                (
                    len(events),
                    sum(len(dg.serialize_value(event)) for event in events),
                    len(json.dumps([r.body for r in records])),
                )
            )
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] < 1.2 * sizes[0][1]
    assert sizes[1][2] < 1.5 * sizes[0][2]
