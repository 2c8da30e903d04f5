"""Fetching a model directory from the Hugging Face hub at one commit, every file verified."""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors as hub_errors

from numem.errors import FetchError
from numem.models.hub.sources import HubSource
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import Lock, publish_directory, read_json, sha256_file

TIMEOUT_S = 10.0

_SUFFIXES = (".safetensors", ".json", ".jinja")
_INDEX = "model.safetensors.index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The base of the HTTP client's own errors, whichever client the installed release uses.
_HTTP_ERROR: type[Exception] = vars(hub_errors).get("HTTPError", OSError)
_FAILURES = (OSError, ValueError, _HTTP_ERROR)


def fetch_hub(source: HubSource, out_dir: Path, *, endpoint: str | None = None) -> Path:
    """Fetch a repository's configuration, tokenizer and safetensors into `out_dir`.

    Files are listed and downloaded at one commit: the source's, or the head at first use. They gather in
    `<out_dir>.partial`, which an interrupted fetch leaves behind and the next one resumes at the same commit. Each is
    hashed in full and compared with the listing before the directory is renamed into place.

    Raises:
        FetchError: unreachable, refused, or bytes that are not what the hub listed.
        CheckpointError: a repository whose files contradict each other.
    """
    partial = out_dir.with_name(out_dir.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    marker = partial / ".revision"
    api = huggingface_hub.HfApi(endpoint=endpoint)
    revision = source.revision or (marker.read_text("utf-8") if marker.is_file() else None)
    try:
        info = api.model_info(source.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise FetchError(f"hub: {source.repo} names {commit!r} as its commit; expected 40 hex digits")
        if revision is None:
            # The listing above may be of a head that moved since: list again at the commit itself.
            info = api.model_info(source.repo, revision=commit, files_metadata=True, timeout=TIMEOUT_S)
        marker.write_text(commit, "utf-8")
        listed = {s.rfilename: s for s in info.siblings or () if _wanted(s.rfilename)}
        if "config.json" not in listed:
            raise FetchError(f"hub: {source.repo} at {commit} has no config.json; not a model repository")
        files = {}
        for name in sorted(listed, key=lambda n: (n.endswith(".safetensors"), n)):
            if name.endswith(".safetensors") and not _in_index(partial, name):
                continue
            huggingface_hub.hf_hub_download(
                source.repo, name, revision=commit, local_dir=partial, endpoint=endpoint, etag_timeout=TIMEOUT_S
            )
            files[name] = _verify(partial, name, listed[name])
    except _FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FetchError(
            f"hub: {source.repo} could not be fetched: {reason}; check the network and the repository's access, or give "
            "a local model directory"
        ) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    origin = {**source.describe(), "revision": commit}
    Lock(origin, files, Checkpoint(partial).digest().hex()).write(partial)
    marker.unlink()
    publish_directory(partial, out_dir)
    return out_dir


def _wanted(name: str) -> bool:
    return "/" not in name and "\\" not in name and not name.startswith(".") and name.endswith(_SUFFIXES)


def _in_index(directory: Path, name: str) -> bool:
    """Whether the model reads this file: everything without an index, else what the index names."""
    index = directory / _INDEX
    if not index.is_file():
        return True
    weight_map = read_json(index).get("weight_map")
    return isinstance(weight_map, dict) and name in weight_map.values()


def _verify(directory: Path, name: str, sibling: Any) -> str:
    """Compare a file with its listing (SHA-256 of a large file, git blob id of a small one); return its SHA-256."""
    path = directory / name
    sha256 = sha256_file(path)
    lfs = getattr(sibling, "lfs", None)
    if lfs is not None:
        good = sha256 == lfs.sha256
    else:
        data = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        good = sibling.blob_id is None or blob == sibling.blob_id
    if not good:
        path.unlink()
        shutil.rmtree(directory / ".cache", ignore_errors=True)
        raise FetchError(f"hub: {name} is not what the hub listed (SHA-256 {sha256}); it was discarded, fetch again")
    return sha256
