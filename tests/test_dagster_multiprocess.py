"""The job under the multiprocess executor: a process for every stage, and no token computed twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg

from dagster_project.instance import HOME, open_instance
from dagster_project.jobs import CONTINUE_PROMPTS_MULTIPROCESS
from dagster_project.partitions import add_batches
from dagster_project.runs import Settings
from numem.job.batch import Batch, make_batch
from numem.job.prompts import read_prompts
from numem.job.summary import summarise
from tests.dagster_fixtures import deployment, materialisation, metadata, model_directory, table

ROOT = Path(__file__).parents[1]
SETTINGS = Settings(max_new_tokens=4, lanes=2, ignore_eos=True, arrivals="restore")


def execute(instance: dg.DagsterInstance, batch: Batch, prompts: Path, environment: dict[str, str]) -> None:
    """Run the job as its own process, as a UI would; every step is a further one."""
    config = prompts.with_suffix(".yaml")
    config.write_text(json.dumps(SETTINGS.run_config(str(prompts))))
    tags = json.dumps({"dagster/partition": batch.id})
    job = ["-m", "dagster_project.definitions", "-j", CONTINUE_PROMPTS_MULTIPROCESS]
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "job", "execute", *job, "--tags", tags, "-c", str(config)],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, "\n".join(errors(instance)) or done.stderr[-4000:]


def errors(instance: dg.DagsterInstance) -> list[str]:
    """What went wrong in the steps of all runs; the console of a run says nothing."""
    found = []
    for run in instance.get_runs():
        for entry in instance.all_logs(run.run_id):
            error = getattr(entry.dagster_event and entry.dagster_event.event_specific_data, "error", None)
            if error is not None:
                found.append(str(error.to_string())[-3000:])
    return found


def test_each_token_is_computed_once_across_processes(tmp_path: Path) -> None:
    """pudl#4662, dagster#28492, #4041: stages in processes of their own hand over through the memory alone."""
    where = deployment(tmp_path, model_directory(tmp_path))
    prompts = table(tmp_path / "prompts.jsonl")
    batch = make_batch(where.model_resource().load(), read_prompts(prompts), model=where.model)
    with open_instance(tmp_path / "memory") as instance:
        add_batches(instance, [batch.id])
        execute(instance, batch, prompts, {**where.environment(), HOME: str(tmp_path / "memory/dagster")})
        record = materialisation(instance, "decoded_continuations", batch.id)
        run = record.run_id
        steps = {
            event.dagster_event.step_key: event.dagster_event.event_specific_data
            for event in instance.all_logs(run)
            if event.dagster_event and event.dagster_event.event_type_value == "STEP_WORKER_STARTED"
        }
        shown = metadata(record)
    assert len(steps) >= 6
    with where.memory_resource().opened() as memory:
        summary = summarise(memory, batch, run)
    distinct = len({item.tokens[:n] for item in batch.items for n in range(1, len(item.tokens) + 1)})
    assert summary.computed_tokens == shown["tokens_computed"] == distinct
    assert summary.computed_tokens + summary.shared_tokens + summary.restored_tokens == batch.tokens
    assert (summary.chunks_stored, summary.exact) == (6, True)
    assert summary.warnings == ()
