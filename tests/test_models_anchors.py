"""Fetching anchors: pinned, verified, failing by name, and weights under terms only where these were accepted."""

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from numem.errors import FetchError, UnknownModelError
from numem.models.hub import anchors
from numem.models.hub.anchors import TEXTS, Text, fetch_anchors, main, text_file
from numem.models.hub.entry import Entry
from numem.models.hub.registry import resolve
from numem.models.text.tokenizer import Tokenizer

MEMBER = "package/data.txt"


def archive(path: Path, data: bytes, member: str = MEMBER) -> None:
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(member)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """npm that writes an archive with `data`, or fails with `error`; the one text is what `pinned` hashes to."""
    state: dict[str, Any] = {"data": b"Call me Ishmael.", "member": MEMBER, "error": "", "calls": 0}

    def run(command: list[str], *, cwd: Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        state["calls"] += 1
        assert command[:3] == ["npm", "pack", "@a/b@1.0.0"] and "--ignore-scripts" in command
        if state["error"]:
            return subprocess.CompletedProcess(command, 1, "", f"npm error {state['error']}\nmore\n")
        archive(Path(cwd) / "a-b-1.0.0.tgz", state["data"], state["member"])
        return subprocess.CompletedProcess(command, 0, "a-b-1.0.0.tgz\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    pinned = hashlib.sha256(b"Call me Ishmael.").hexdigest()
    monkeypatch.setattr(anchors, "TEXTS", {"whale": Text("@a/b", "1.0.0", MEMBER, pinned, "a text")})
    return state


def test_a_text_is_fetched_once_and_verified(npm: dict[str, Any], tmp_path: Path) -> None:
    path = text_file("whale", cache=tmp_path)
    assert path.read_bytes() == b"Call me Ishmael." and path.parent == tmp_path / "texts"
    assert text_file("whale", cache=tmp_path, offline=True) == path and npm["calls"] == 1
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(b"Call me Ahab.")
    assert text_file("whale", cache=tmp_path).read_bytes() == b"Call me Ishmael." and npm["calls"] == 2


def test_a_text_that_cannot_be_had_is_an_error(
    npm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownModelError, match="known: whale"):
        text_file("shark", cache=tmp_path)
    with pytest.raises(FetchError, match="fetching is off"):
        text_file("whale", cache=tmp_path, offline=True)
    npm["data"] = b"Call me Ahab."
    with pytest.raises(FetchError, match="not the pinned"):
        text_file("whale", cache=tmp_path)
    npm["member"] = "package/other.txt"
    with pytest.raises(FetchError, match=r"does not carry package/data\.txt"):
        text_file("whale", cache=tmp_path)
    npm["error"] = "code E404"
    with pytest.raises(FetchError, match="npm error code E404; check the network") as caught:
        text_file("whale", cache=tmp_path)
    assert "\n" not in str(caught.value)

    def absent(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(subprocess, "run", absent)
    with pytest.raises(FetchError, match="install npm"):
        text_file("whale", cache=tmp_path)
    assert list((tmp_path / "texts").iterdir()) == []


def test_every_anchor_is_reported_and_a_missing_one_fails(
    npm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has no licence to be fetched is named, never fetched."""
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path))
    monkeypatch.delenv("NUMEM_ACCEPT_GEMMA_TERMS", raising=False)
    asked: list[str] = []

    def fetched(entry: Entry) -> Path:
        asked.append(entry.key)
        if entry.key == "all-minilm-l6-v2":
            raise FetchError("the index is gone")
        return tmp_path / entry.key

    monkeypatch.setattr(anchors, "fetch", fetched)
    lines: list[str] = []
    assert fetch_anchors(lines.append) == ("all-minilm-l6-v2",)
    assert asked == ["all-minilm-l6-v2", "smollm2-135m-instruct"]
    assert lines[0] == "all-minilm-l6-v2: FAILED: the index is gone"
    assert lines[1].startswith("gemma-3-270m: not asked for") and "NUMEM_ACCEPT_GEMMA_TERMS=1" in lines[1]
    assert main() == 1 and "error: all-minilm-l6-v2 cannot be had" in capsys.readouterr().err
    monkeypatch.setenv("NUMEM_ACCEPT_GEMMA_TERMS", "1")
    fetch_anchors(lines.append)
    assert "gemma-3-270m" in asked


@pytest.mark.anchors
@pytest.mark.slow
def test_the_real_text_has_its_reference_length_in_tokens() -> None:
    """Counts of the packaged tokenizer."""
    text = text_file("moby-dick").read_text(encoding="utf-8")
    assert text.startswith("CHAPTER 1. Loomings.") and len(text.encode()) == 1_204_997
    ids = Tokenizer(resolve("smollm2-135m-instruct")).encode(text)
    assert len(ids) == 312_006 and ids[:5] == [5229, 41958, 216, 33, 30]
    assert TEXTS["moby-dick"].sha256.startswith("fe282a57")
