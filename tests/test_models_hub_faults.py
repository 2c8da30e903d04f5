"""A hub that cuts, refuses or lies; directories of modules; tokens; a full disk."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from numem.errors import FetchError
from numem.models.hub import repository
from numem.models.hub.repository import fetch_hub, is_wanted
from numem.models.hub.sources import HubSource
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME
from tests.hub_fixtures import REPO, Hub, serving
from tests.model_fixtures import tiny_model

WEIGHTS = "model.safetensors"
TOKEN = "hf_secret0123456789"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(repository, "WAITS_S", (0.0, 0.0))
    with serving(tiny_model(tmp_path / "model")) as state:
        yield state


def failure(hub: Hub, out: Path, repo: str = REPO) -> str:
    """The one line with which a fetch fails; it leaves no directory."""
    with pytest.raises(FetchError) as caught:
        fetch_hub(HubSource(repo), out, endpoint=hub.url)
    assert not out.exists() and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_download_that_was_cut_is_resumed_within_the_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed row 43: what is resumed is hashed whole."""
    hub.cut[WEIGHTS] = 50_000

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", stop)  # the first pause after the cut is where the process ends
        with pytest.raises(KeyboardInterrupt):
            fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    hub.cut.clear()
    hub.ranges.clear()
    out = fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    assert hub.ranges == [(WEIGHTS, "bytes=50000-")]
    assert Checkpoint(out).digest() == Checkpoint(tmp_path / "model").digest()
    assert not list(out.rglob("*.part"))


def test_a_part_with_other_bytes_is_found_out_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    hub.broken[WEIGHTS] = 400
    failure(hub, tmp_path / "out")
    hub.broken.clear()
    (tmp_path / "out.partial" / f"{WEIGHTS}.part").write_bytes(bytes(1000))
    assert f"hub: {WEIGHTS} is not what the hub listed" in failure(hub, tmp_path / "out")
    assert hub.ranges == [(WEIGHTS, "bytes=1000-")]
    assert Checkpoint(fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)).digest()


def test_modules_of_an_embedding_model_are_fetched_into_their_directories(hub: Hub, tmp_path: Path) -> None:
    """TEI#732: the dense modules are part of the model."""
    hub.files |= {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"dense",
        "2_Dense/pytorch_model.bin": b"pickle",
        "openvino/model.json": b"{}",
        "tokenizer.model": b"pieces",
        "vocab.txt": b"[PAD]\n",
        "merges.txt": b"a b\n",
    }
    out = fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    found = {str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()}
    wanted = {name for name in hub.files if name.endswith((".json", ".safetensors", ".txt", ".model"))}
    assert found == {LOCK_NAME, *wanted} - {"openvino/model.json", "onnx/model.safetensors"}
    assert found - {LOCK_NAME} == json.loads((out / LOCK_NAME).read_text())["files"].keys()


@pytest.mark.parametrize("name", ["2_Dense/model.safetensors", "tokenizer.model", "modules.json"])
def test_every_kind_of_file_is_verified(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.files[name] = b"{}"
    hub.replaced[name] = b"[]"
    assert f"hub: {name} is not what the hub listed" in failure(hub, tmp_path / "out")


def test_a_listing_without_digests_is_not_trusted(hub: Hub, tmp_path: Path) -> None:
    hub.listed["config.json"] = {"blobId": None}
    assert "config.json is not what the hub listed" in failure(hub, tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [
        "../config.json", "/config.json", "a/config.json", "1_Pooling/../../config.json", "1_Pooling/x.json",
        "1_Pooling\\config.json", ".hidden.json", "..", "x.bin", "x.pkl", "1_A/2_B/config.json", "a\0.json", "",
        "model.safetensors\n", "x/1_Pooling/config.json", "a\nb.json", "é.json", "a b.json", LOCK_NAME,
    ],
)  # fmt: skip
def test_other_names_are_never_fetched(name: str) -> None:
    assert not is_wanted(name)


def test_names_that_are_fetched() -> None:
    wanted = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "vocab.json", "vocab.txt"]
    wanted += ["merges.txt", "tokenizer.model", "1_Pooling/config.json", "12_Dense/model.safetensors"]
    assert all(is_wanted(name) for name in wanted)


def test_the_token_is_sent_and_never_shown(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.broken["config.json"] = 400
    assert TOKEN not in failure(hub, tmp_path / "out")
    assert hub.tokens == {f"Bearer {TOKEN}"}
    hub.broken.clear()
    out = fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert not any(TOKEN.encode() in path.read_bytes() for path in out.rglob("*") if path.is_file())

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"a message with {TOKEN}")

    monkeypatch.setattr(repository, "http_get", fail)
    assert "a message with <token>" in failure(hub, tmp_path / "other")


def test_a_redirect_to_another_host_is_followed_without_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(tmp_path / "model") as store:
        hub.moved[WEIGHTS] = f"{store.url}/{REPO}/resolve/{store.commit}/{WEIGHTS}"
        out = fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
        assert store.requests == [f"GET /{REPO}/resolve/{store.commit}/{WEIGHTS}"] and store.tokens == {None}
    assert Checkpoint(out).digest() == Checkpoint(tmp_path / "model").digest()


def test_the_token_of_a_login_is_not_shown_either(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"a message with {TOKEN}")

    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    monkeypatch.setattr(repository, "http_get", fail)
    assert "a message with <token>" in failure(hub, tmp_path / "out")


def test_nothing_is_written_through_a_link_in_what_was_left_behind(hub: Hub, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for name in (f"{WEIGHTS}.part", "config.json"):
        (partial / name).symlink_to(outside)
    out = fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url)
    assert outside.read_bytes() == b"mine" and not any(path.is_symlink() for path in out.rglob("*"))


@pytest.mark.parametrize(
    "entry", [{"size": None}, {"size": "x"}, {"size": -1}, {"lfs": 3}, {"lfs": {"sha256": None, "size": 1}}]
)
def test_a_listing_that_is_none_is_refused(hub: Hub, tmp_path: Path, entry: dict[str, Any]) -> None:
    hub.listed[WEIGHTS] = entry
    assert REPO in failure(hub, tmp_path / "out")


def test_a_listed_size_that_is_wrong_is_found_out(hub: Hub, tmp_path: Path) -> None:
    hub.listed[WEIGHTS] = {"size": 7}
    assert REPO in failure(hub, tmp_path / "out")


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_its_three_reasons(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.status = [status]
    message = failure(hub, tmp_path / "out")
    assert f"answered {status}: it does not exist, is private, or is gated" in message
    assert "HF_TOKEN" in message and f"https://huggingface.co/{REPO}" in message and hub.requests[1:] == []


def test_what_may_pass_is_tried_three_times(hub: Hub, tmp_path: Path) -> None:
    hub.status = [503, 500]
    assert fetch_hub(HubSource(REPO), tmp_path / "out", endpoint=hub.url).is_dir()
    hub.status = [503] * 3
    hub.requests.clear()
    assert "503" in failure(hub, tmp_path / "other")
    assert len(hub.requests) == 3


def test_a_full_disk_says_so(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository, "http_get", full)
        assert "is full; free some, or set NUMEM_CACHE" in failure(hub, tmp_path / "out")
    assert len(calls) == 1
    usage = shutil.disk_usage(tmp_path)._replace(free=30_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    hub.requests.clear()
    message = failure(hub, tmp_path / "out")
    assert f"needs {len(hub.files[WEIGHTS]):,} more bytes" in message and "30,000 free" in message
    assert not any(WEIGHTS in request for request in hub.requests)
