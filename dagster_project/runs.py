"""Executing the main job in this process, on the instance beside the memory.

Belongs here: what stands between a table of prompts and the summary of its Dagster run. Stages: `numem.job`.

Dagster concept: https://docs.dagster.io/guides/build/jobs/job-execution
"""

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_project.definitions import build_defs
from dagster_project.deployment import Deployment
from dagster_project.instance import open_instance
from dagster_project.jobs import CONTINUE_PROMPTS
from dagster_project.partitions import add_batches
from dagster_project.resources.process import dagster_thread
from dagster_project.resources.runtime import Progress, watch
from numem.errors import InputError, NumemError, StorageFullError
from numem.job.batch import make_batch
from numem.job.prompts import read_prompts
from numem.job.reports import Summary
from numem.job.summary import summarise

# What an empty history of runs needs to grow by.
_NO_SPACE = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run chooses; see `dagster_project.resources.runtime`."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    lanes: int = 4
    ignore_eos: bool = False
    arrivals: str = "measured"
    cache_mib: int = 256
    proof: bool = True
    again: bool = False
    previews: bool = False

    def run_config(self, path: str) -> dict[str, Any]:
        """Config of a run of the job over a table of prompts."""
        runtime = asdict(self)
        previews = runtime.pop("previews")
        return {
            "ops": {
                "prompts": {"config": {"path": path, "previews": previews}},
                "decoded_continuations": {"config": {"previews": previews}},
            },
            "resources": {"runtime": {"config": runtime}},
            # Errors are told once, by whoever started the run.
            "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
        }


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended: its summary, its Dagster id and the directory of its instance."""

    summary: Summary
    run_id: str
    instance: Path


def continue_prompts(
    deployment: Deployment, path: Path, settings: Settings, *, out: Path | None = None, progress: Progress
) -> Finished:
    """Run the job over a table of prompts.

    The table is read and encoded before the memory is opened: a fault in it changes nothing.

    Args:
        out: directory that gets a copy of this run's completions; they stand below the memory in any case.

    Raises:
        NumemError: whatever a stage raised, unwrapped.
        KeyboardInterrupt: interrupted; what was staged or published and the prompts finished by then are kept.
    """
    prompts = read_prompts(path)
    if out is not None:
        _require_writable(out)
    model, memories = deployment.model_resource(), deployment.memory_resource()
    progress("model", 0, 1)
    lm = model.load()
    progress("model", 1, 1)
    batch = make_batch(lm, prompts, model=model.key)
    job = build_defs(resource_overrides={"memory": memories, "model": model}).resolve_job_def(CONTINUE_PROMPTS)
    with (
        dagster_thread(),
        memories.opened() as memory,
        _full_disk(memory.local),
        open_instance(memory.local) as instance,
        watch(progress),
    ):
        add_batches(instance, [batch.id])
        home = Path(instance.root_directory)
        deployment.remember(home)
        result = _execute(job, instance, batch.id, settings.run_config(str(path.resolve())))
        summary = summarise(memory, batch, result.run_id)
    failed = [
        f"check {check.check_name} on {check.asset_key.to_user_string()}: {check.description}"
        for check in result.get_asset_check_evaluations()
        if not check.passed
    ]
    summary = replace(summary, warnings=(*summary.warnings, *failed))
    if out is not None:
        summary = replace(summary, outputs=str(_copy(Path(summary.outputs), out)))
    return Finished(summary, result.run_id, home)


def _execute(
    job: dg.JobDefinition, instance: dg.DagsterInstance, partition: str, config: dict[str, Any]
) -> dg.ExecuteInProcessResult:
    try:
        return job.execute_in_process(instance=instance, partition_key=partition, run_config=config)
    except dg.DagsterExecutionInterruptedError as error:
        raise KeyboardInterrupt from error
    except Exception as error:
        cause = next((e for e in _causes(error) if isinstance(e, NumemError)), None)
        if cause is None or cause is error:
            raise
        raise cause from error


@contextmanager
def _full_disk(local: Path) -> Iterator[None]:
    """StorageFullError in place of what Dagster lets through when its history has no space left."""
    try:
        yield
    except NumemError:
        raise
    except Exception as error:
        if not any(_is_full(cause, local) for cause in _causes(error)):
            raise
        raise StorageFullError(
            f"{local / 'dagster'}: no space left for the history of runs; free some and run again"
        ) from error


def _is_full(error: BaseException, local: Path) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        # Where it cannot grow the files beside its log, SQLite speaks of an "I/O error" instead.
        cramped = "disk I/O error" in str(error) and shutil.disk_usage(local).free < _NO_SPACE
        return cramped or "disk is full" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it wraps (Dagster's `user_exception`) and what it was raised from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [getattr(one, "user_exception", None), one.__cause__, one.__context__]


def _require_writable(out: Path) -> None:
    """Refuse a directory of outputs before the run instead of after it; nothing is created."""
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{out}: {there} is no directory that this process can write to; choose another for --out")


def _copy(outputs: Path, out: Path) -> Path:
    """Copy a run's completions into a user's directory, whole or not at all, whoever else copies there."""
    out.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=out, prefix=f".{outputs.name}-")
    try:
        with os.fdopen(handle, "wb") as target, outputs.open("rb") as source:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        Path(partial).chmod(0o644)
        return Path(partial).replace(out.resolve() / outputs.name)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
