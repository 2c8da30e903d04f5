"""The persistent Dagster instance beside a memory: <memory>/dagster.

Belongs here: where it is, how it comes into being, how a process opens it. It holds the history that the UI shows and
nothing that numem needs: it may be deleted at any time.

Dagster concept: https://docs.dagster.io/deployment/oss/dagster-yaml
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import dagster as dg

HOME = "DAGSTER_HOME"


def prepare(local: Path) -> Path:
    """The instance's directory below a memory's local directory, with the shipped dagster.yaml where it has none."""
    home = local.resolve() / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    config = home / "dagster.yaml"
    if not config.exists():
        partial = home / f".dagster.yaml.{os.getpid()}"
        partial.write_bytes((files("dagster_project") / "dagster.yaml").read_bytes())
        partial.replace(config)
    return home


@contextmanager
def open_instance(local: Path) -> Iterator[dg.DagsterInstance]:
    """The instance of a memory, with DAGSTER_HOME naming it for as long as it is open."""
    before = os.environ.get(HOME)
    os.environ[HOME] = str(prepare(local))
    try:
        with dg.DagsterInstance.get() as instance:
            yield instance
    finally:
        if before is None:
            del os.environ[HOME]
        else:
            os.environ[HOME] = before
