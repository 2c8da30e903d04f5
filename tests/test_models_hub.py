"""Fetching from a hub: a local server stands in for it, listing and serving one small repository."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from numem.errors import FetchError
from numem.models.hub import repository
from numem.models.hub.repository import fetch_hub
from numem.models.hub.sources import HubSource
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME
from tests.hub_fixtures import COMMIT, REPO, Hub, serving
from tests.model_fixtures import tiny_model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(repository, "WAITS_S", (0.0, 0.0))
    with serving(tiny_model(tmp_path / "model", shard="60KB")) as state:
        yield state


def test_a_repository_is_fetched_at_one_commit_and_verified(hub: Hub, tmp_path: Path) -> None:
    """Seed row 45: files are listed and taken at the same commit, though the head may move between."""
    out = fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    expected = {n for n in hub.files if "/" not in n and n.endswith((".json", ".safetensors"))}
    assert {item.name for item in out.iterdir()} == expected | {LOCK_NAME}
    assert all((out / name).read_bytes() == hub.files[name] for name in expected)
    lock = json.loads((out / LOCK_NAME).read_text())
    assert lock["source"] == {"kind": "hub", "repo": REPO, "revision": COMMIT}
    assert Checkpoint(out).digest() == Checkpoint(tmp_path / "model").digest()
    assert not (tmp_path / "out.partial").exists()
    downloads = [r for r in hub.requests if "/resolve/" in r]
    assert downloads and all(COMMIT in r for r in downloads)


def test_files_that_the_index_does_not_name_are_not_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files["consolidated.safetensors"] = b"the same weights once more"
    out = fetch_hub(HubSource(REPO, COMMIT), tmp_path / "out", endpoint=hub.url)
    assert not (out / "consolidated.safetensors").exists()


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00010.safetensors"])
def test_bytes_that_are_not_what_was_listed_are_discarded(hub: Hub, tmp_path: Path, name: str) -> None:
    """Seed rows 43, 44: every file is hashed whole, whatever its size says, also after a resumed download."""
    name = name if name in hub.files else sorted(n for n in hub.files if n.endswith(".safetensors"))[1]
    data = bytearray(hub.files[name])
    data[-2] ^= 1
    hub.replaced[name] = bytes(data)
    with pytest.raises(FetchError, match=f"hub: {name} is not what the hub listed"):
        fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    assert not (tmp_path / "out").exists()
    hub.replaced.clear()
    assert Checkpoint(fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)).digest()


def test_an_interrupted_fetch_resumes_at_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    last = max(n for n in hub.files if n.startswith("model-"))
    hub.broken[last] = 400
    with pytest.raises(FetchError, match=r"someone/tiny could not be fetched") as caught:
        fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    hub.broken.clear()
    hub.commit = COMMIT  # the server still answers for the recorded commit only
    hub.requests.clear()
    out = fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    assert Checkpoint(out).digest() == Checkpoint(tmp_path / "model").digest()
    assert f"GET /api/models/{REPO}/revision/{COMMIT}" in hub.requests
    assert f"GET /api/models/{REPO}" not in hub.requests
    fetched = [r for r in hub.requests if r.startswith(f"GET /{REPO}/resolve/")]
    assert fetched == [f"GET /{REPO}/resolve/{COMMIT}/{last}"]


def test_a_repository_that_is_no_model_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files["config.json"]
    with pytest.raises(FetchError, match=r"no config\.json"):
        fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    with pytest.raises(FetchError, match="someone/other"):
        fetch_hub(HubSource("someone/other"), tmp_path / "other", endpoint=hub.url)


def test_an_unreachable_hub_is_a_clear_error_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(FetchError, match="check the network") as caught:
        fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=f"http://127.0.0.1:{port}")
    assert time.monotonic() - started < 15
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
