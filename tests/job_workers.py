"""Runs of the main job in processes of their own, which end by SIGKILL at a chosen moment."""

import multiprocessing
import os
import signal
from pathlib import Path

from numem.job.prompts import read_prompts
from numem.job.run import run_job
from numem.job.settings import Decoding


def killed_run(model: Path, home: Path, table: Path, decoding: Decoding, stage: str, done: int, more: int = 0) -> None:
    """Run the job in a spawned process that kills itself once a stage has come so far, `more` signs of progress later."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_run, args=(model, home, table, decoding, stage, done, more))
    child.start()
    child.join(300)
    if child.is_alive():
        child.kill()
        child.join()
        raise AssertionError("the run did not end")
    assert child.exitcode == -signal.SIGKILL, child.exitcode


def _run(model: Path, home: Path, table: Path, decoding: Decoding, at: str, reached: int, more: int) -> None:
    from numem import Memory, load_lm

    left = more

    def progress(stage: str, done: int, total: int, tokens: int = 0) -> None:
        nonlocal left
        if stage == at and done >= reached:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with Memory(home) as memory:
        run_job(memory, load_lm(model), read_prompts(table), decoding, model="tiny", progress=progress)
