"""The UI on a memory's instance: runs of the command line in it, and runs launched from it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_project.runs import Finished, Settings, continue_prompts
from numem.job.record import silent
from tests.dagster_fixtures import deployment, model_directory, table

pytestmark = pytest.mark.ui

ROOT = Path(__file__).parents[1]
SETTINGS = Settings(max_new_tokens=4, lanes=2, ignore_eos=True)


@dataclass
class Server:
    """A running UI and the run that was made before it started."""

    url: str
    first: Finished

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        body = json.dumps({"query": text, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            tree: dict[str, Any] = json.load(answer)
        assert "errors" not in tree, tree
        data: dict[str, Any] = tree["data"]
        return data


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`numem ui` on the memory of a run, told nothing but the memory."""
    root = tmp_path_factory.mktemp("ui")
    where = deployment(root, model_directory(root))
    first = continue_prompts(where, table(root / "prompts.jsonl"), SETTINGS, progress=silent)
    port = free_port()
    command = [sys.executable, "-m", "dagster_project.cli", "ui", "--memory", where.memory, "--port", str(port)]
    with (root / "ui.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("NUMEM_")},
        )  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/server_info", process, root / "ui.log")
            yield Server(f"http://127.0.0.1:{port}", first)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)


def test_runs_and_checks_of_the_command_line_are_there(server: Server) -> None:
    runs = server.query("{ runsOrError { ... on Runs { results { runId status jobName } } } }")["runsOrError"][
        "results"
    ]
    assert {"runId": server.first.run_id, "status": "SUCCESS", "jobName": "continue_prompts"} in runs
    for asset, check in (("published_chunks", "chunks_intact"), ("decoded_continuations", "restored_bit_exact")):
        found = server.query(
            "query($a: AssetKeyInput!, $c: String!) { assetCheckExecutions(assetKey: $a, checkName: $c, limit: 5)"
            " { runId evaluation { success description } } }",
            a={"path": [asset]},
            c=check,
        )["assetCheckExecutions"]
        (mine,) = [e for e in found if e["runId"] == server.first.run_id]
        assert mine["evaluation"]["success"] and server.first.summary.batch in mine["evaluation"]["description"]


def test_graph_and_exact_lineage_are_served(server: Server) -> None:
    nodes = server.query("{ assetNodes { assetKey { path } dependencyKeys { path } groupName } }")["assetNodes"]
    edges = {n["assetKey"]["path"][0]: [d["path"][0] for d in n["dependencyKeys"]] for n in nodes}
    assert edges["decoded_continuations"] == ["restored_prefixes"]
    tags = {t["key"]: t["value"] for t in events(server, "published_chunks")[-1]["tags"]}
    parent = {t["key"]: t["value"] for t in events(server, "prefill")[-1]["tags"]}
    assert tags["dagster/input_data_version/prefill"] == parent["dagster/data_version"]


def test_nothing_is_stale_after_a_run(server: Server) -> None:
    """dagster#26162, #22553: the exact parents do not make the UI call a partition stale that is not."""
    for asset in ("prefill", "published_chunks", "decoded_continuations"):
        answer = server.query(
            "query($a: AssetKeyInput!, $p: String!) { assetNodeOrError(assetKey: $a) { ... on AssetNode {"
            " staleCauses(partition: $p) { category reason } } } }",
            a={"path": [asset]},
            p=server.first.summary.batch,
        )["assetNodeOrError"]
        # Sources edited while the test runs change the code version, rightly; data and parents must be in step.
        assert [cause for cause in answer["staleCauses"] if cause["category"] != "CODE"] == []


def test_run_launched_from_the_ui_restores_instead_of_recomputing(server: Server) -> None:
    """dagster#28596, #26194: it is a fresh process, and what it finds in the memory it does not compute again."""
    location = server.query(
        "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"
    )
    (repository,) = location["repositoriesOrError"]["nodes"]
    launched = server.query(
        "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename ... on LaunchRunSuccess"
        " { run { runId } } ... on PythonError { message } ... on RunConfigValidationInvalid { errors { message } } } }",
        p={
            "selector": {
                "repositoryName": repository["name"],
                "repositoryLocationName": repository["location"]["name"],
                "jobName": "continue_prompts",
            },
            "runConfigData": {
                "resources": {
                    "runtime": {
                        "config": {"max_new_tokens": 4, "ignore_eos": True, "arrivals": "restore", "again": True}
                    }
                }
            },
            "executionMetadata": {"tags": [{"key": "dagster/partition", "value": server.first.summary.batch}]},
        },
    )["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run = launched["run"]["runId"]
    assert finished(server, run) == "SUCCESS"
    prefill = numbers(next(e for e in events(server, "prefill") if e["runId"] == run))
    decoded = numbers(next(e for e in events(server, "decoded_continuations") if e["runId"] == run))
    stored = numbers(next(e for e in events(server, "published_chunks") if e["runId"] == run))
    assert prefill["tokens_computed"] == 0
    assert stored["stored_bytes"] == 0
    assert decoded["tokens_restored"] > 0
    assert decoded["tokens_computed"] == 2 * (21 + 22 + 23)
    ours, theirs = (versions(server, run_id) for run_id in (server.first.run_id, run))
    assert ours == theirs


def events(server: Server, asset: str) -> list[dict[str, Any]]:
    """Materialisations of the batch, newest first."""
    answer = server.query(
        "query($a: AssetKeyInput!, $p: [String!]) { assetOrError(assetKey: $a) { ... on Asset {"
        " assetMaterializations(partitions: $p, limit: 5) { runId tags { key value } metadataEntries { label"
        " ... on IntMetadataEntry { intValue } } } } } }",
        a={"path": [asset]},
        p=[server.first.summary.batch],
    )
    found: list[dict[str, Any]] = answer["assetOrError"]["assetMaterializations"]
    return found


def numbers(event: dict[str, Any]) -> dict[str, int]:
    return {m["label"]: m["intValue"] for m in event["metadataEntries"] if m.get("intValue") is not None}


def versions(server: Server, run: str) -> str:
    (event,) = [e for e in events(server, "decoded_continuations") if e["runId"] == run]
    return next(str(t["value"]) for t in event["tags"] if t["key"] == "dagster/data_version")


def finished(server: Server, run: str) -> str:
    deadline = time.monotonic() + 120
    while True:
        answer = server.query("query($r: ID!) { runOrError(runId: $r) { ... on Run { status } } }", r=run)
        status = str(answer["runOrError"]["status"])
        if status in ("SUCCESS", "FAILURE", "CANCELED"):
            return status
        assert time.monotonic() < deadline, f"run {run} is still {status}"
        time.sleep(0.3)


def test_pages_render(server: Server, tmp_path: Path) -> None:
    """A picture of the last asset's page is not blank. What it says is asserted over GraphQL above."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        reason = "chromium is not installed: apt-get install chromium fonts-dejavu-core (as .ci/run does)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from matplotlib.image import imread

    picture = tmp_path / "asset.png"
    subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1500,1400",
            "--virtual-time-budget=20000", f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}",
            f"{server.url}/assets/decoded_continuations?partition={server.first.summary.batch}",
        ],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    pixels = imread(picture)
    assert pixels.shape[:2] == (1400, 1500)
    assert pixels.std() > 0.02
