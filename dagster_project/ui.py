"""Opening Dagster's UI on a memory's instance.

Belongs here: the command line and environment of `dagster dev`, and the port. It works from a checkout and from an
installed package alike: the code location is named by module, not by file.

Dagster concept: https://docs.dagster.io/guides/operate/webserver
"""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

from dagster_project.deployment import Deployment, remembered
from dagster_project.instance import HOME, prepare
from numem.errors import InputError

HOST = "127.0.0.1"
DEFINITIONS = "dagster_project.definitions"


def local_directory(deployment: Deployment) -> Path:
    """Where a memory keeps its local files, without opening it."""
    from numem.environment import parse_tiers
    from numem.store.workspace import plan

    home = deployment.memory_resource().resolved_home
    return plan(home, parse_tiers(deployment.tiers), deployment.node, deployment.local or None).local


def command(port: int) -> list[str]:
    """`dagster dev` on this host only."""
    root = str(Path(__file__).resolve().parents[1])
    where = ["-m", DEFINITIONS, "-d", root, "-h", HOST, "-p", str(port)]
    # Dagster announces that `dg dev` will replace this command; that is no news for whoever opens a UI.
    return [sys.executable, "-W", "ignore", "-m", "dagster", "dev", *where]


def environment(deployment: Deployment, *, chosen: bool) -> dict[str, str]:
    """Variables of the UI's processes: the instance beside the memory, and the deployment its runs had.

    Args:
        chosen: the user named a model; else the instance's last run decides.
    """
    home = prepare(local_directory(deployment))
    if not chosen:
        deployment = replace(deployment, **remembered(home))
    return {**os.environ, **deployment.environment(), HOME: str(home)}


def require_free(port: int) -> None:
    """InputError where the port is taken, before anything is started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InputError(f"port {port} on {HOST}: {error.strerror}; choose another with --port") from error
