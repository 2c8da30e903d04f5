"""Fetching a model directory from the Hugging Face hub at one commit, every file verified."""

import errno
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import huggingface_hub.errors as hub_errors
from huggingface_hub.file_download import http_get

from numem.errors import FetchError
from numem.models.hub.sources import HubSource
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME, Lock, publish_directory, read_json, sha256_file

TIMEOUT_S = 10.0
# Pauses before the second and the third attempt at what may pass by itself.
WAITS_S = (0.5, 2.0)

# What a model directory may hold: its own files, and those of the modules of an embedding model (`1_Pooling`,
# `2_Dense`). No other directory is entered, and nothing that is unpickled is fetched.
_TOP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json|jinja)|tokenizer\.model|merges\.txt|vocab\.txt")
_MODULE = re.compile(r"[0-9]{1,2}_[A-Za-z]+/(config\.json|model\.safetensors)")
PART = ".part"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
# The base of the HTTP client's own errors, whichever client the installed release uses.
_HTTP_ERROR: type[Exception] = vars(hub_errors).get("HTTPError", OSError)
_FAILURES = (OSError, ValueError, _HTTP_ERROR)

T = TypeVar("T")


def fetch_hub(source: HubSource, out_dir: Path, *, endpoint: str | None = None) -> Path:
    """Fetch a repository's configuration, tokenizer and safetensors into `out_dir`.

    Files are listed and downloaded at one commit: the source's, or the head at first use. They gather in
    `<out_dir>.partial`, which an interrupted fetch leaves behind and the next one resumes at the same commit, within a
    file too. Each is hashed in full and compared with the listing before the directory is renamed into place. The hub
    library sends the token of HF_TOKEN, or of its own login.

    Raises:
        FetchError: unreachable, refused, no room, or bytes that are not what the hub listed.
        CheckpointError: a repository whose files contradict each other.
    """
    partial = out_dir.with_name(out_dir.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    for path in partial.rglob("*"):
        if path.is_symlink():  # not ours: nothing is written through it
            path.unlink()
    try:
        commit, listed = _listing(source, partial, endpoint)
        if "config.json" not in listed:
            raise FetchError(f"hub: {source.repo} at {commit} has no config.json; not a model repository")
        files = {}
        small = sorted(name for name in listed if not name.endswith(".safetensors"))
        for name in small:
            files[name] = _download(source.repo, name, commit, partial, listed[name], endpoint)
        # The index among the small files says which of the large ones the model reads.
        large = [name for name in sorted(listed.keys() - small) if _is_read(partial, name, listed)]
        _check_room(source.repo, partial, [listed[name] for name in large])
        for name in large:
            files[name] = _download(source.repo, name, commit, partial, listed[name], endpoint)
    except _FAILURES as error:
        raise FetchError(_explain(source.repo, partial, error)) from error
    origin = {**source.describe(), "revision": commit}
    Lock(origin, files, Checkpoint(partial).digest().hex()).write(partial)
    (partial / ".revision").unlink()
    publish_directory(partial, out_dir)
    return out_dir


def _listing(source: HubSource, partial: Path, endpoint: str | None) -> tuple[str, dict[str, Any]]:
    """The commit, and the entry of every wanted file in its listing."""
    marker = partial / ".revision"
    api = huggingface_hub.HfApi(endpoint=endpoint)
    revision = source.revision or (marker.read_text("utf-8") if marker.is_file() else None)

    def info(at: str | None) -> Any:
        try:
            return _retried(lambda: api.model_info(source.repo, revision=at, files_metadata=True, timeout=TIMEOUT_S))
        except (TypeError, LookupError, AttributeError) as error:
            raise FetchError(f"hub: {source.repo}: the listing lacks what a listing has: {error!r}") from error

    found = info(revision)
    commit = str(found.sha)
    if not _COMMIT.fullmatch(commit):
        raise FetchError(f"hub: {source.repo} names {commit!r} as its commit; expected 40 hex digits")
    if revision is None:
        # The listing above may be of a head that moved since: list again at the commit itself.
        found = info(commit)
    marker.write_text(commit, "utf-8")
    wanted = {sibling.rfilename: sibling for sibling in found.siblings or () if is_wanted(sibling.rfilename)}
    for name, sibling in wanted.items():
        if not isinstance(sibling.size, int) or sibling.size < 0:
            raise FetchError(f"hub: {source.repo} lists {name} with size {sibling.size!r}, which is none")
    return commit, wanted


def is_wanted(name: str) -> bool:
    """Whether a file of a repository is fetched; such a name stays inside the directory that it is joined to."""
    return name != LOCK_NAME and bool(_TOP.fullmatch(name) or _MODULE.fullmatch(name))


def _is_read(directory: Path, name: str, listed: Mapping[str, Any]) -> bool:
    """Whether the model reads this file of weights: what the index names, else model.safetensors, else all."""
    if "/" in name:
        return True
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        return isinstance(weight_map, dict) and name in weight_map.values()
    return name == _WEIGHTS or _WEIGHTS not in listed


def _download(repo: str, name: str, commit: str, partial: Path, sibling: Any, endpoint: str | None) -> str:
    """Fetch one file, resuming what is there of a large one, and return its SHA-256."""
    target = partial / name
    if not target.is_file():
        target.parent.mkdir(exist_ok=True)
        part = target.with_name(target.name + PART)
        # A small file may come compressed, so that an offset into it would mean nothing.
        if part.exists() and (sibling.lfs is None or part.stat().st_size > sibling.size):
            part.unlink()
        url = huggingface_hub.hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
        _retried(lambda: _append(url, part, sibling.size))
        part.rename(target)
    return _verify(partial, name, sibling)


def _append(url: str, part: Path, size: int | None) -> None:
    token = huggingface_hub.get_token()
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with part.open("ab") as file:
        if file.tell() != size:
            http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)


def _verify(directory: Path, name: str, sibling: Any) -> str:
    """Compare a file with its listing (SHA-256 of a large file, git blob id of a small one); return its SHA-256."""
    path = directory / name
    sha256 = sha256_file(path)
    lfs = getattr(sibling, "lfs", None)
    if lfs is not None:
        good = sha256 == lfs.sha256
    else:
        data = path.read_bytes()
        good = sibling.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    if not good:
        path.unlink()
        raise FetchError(f"hub: {name} is not what the hub listed (SHA-256 {sha256}); it was discarded, fetch again")
    return sha256


def _check_room(repo: str, partial: Path, siblings: list[Any]) -> None:
    there = sum(path.stat().st_size for path in partial.rglob("*.safetensors*"))
    need = sum(sibling.size for sibling in siblings) - there
    free = shutil.disk_usage(partial).free
    if need > free:
        raise FetchError(
            f"hub: {repo} needs {need:,} more bytes, but {partial.parent} has {free:,} free; free some, or set "
            "NUMEM_CACHE to another place"
        )


def _retried(call: Callable[[], T]) -> T:
    """Call until it succeeds, three times at most; only what may pass by itself is tried again."""
    for wait in WAITS_S:
        try:
            return call()
        except _FAILURES as error:
            if not _may_pass(error):
                raise
            time.sleep(wait)
    return call()


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUS
    # An error number is the operating system's: a full disk stays full.
    return not (isinstance(error, OSError) and error.errno) or isinstance(error, ConnectionError | TimeoutError)


def _status(error: Exception) -> int | None:
    """The HTTP status behind an error, or behind what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        cause = cause.__cause__
    return None


def _explain(repo: str, partial: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"hub: {repo}: the disk of {partial.parent} is full; free some, or set NUMEM_CACHE to another place"
    status = _status(error)
    if status in (401, 403):
        return (
            f"hub: {repo} answered {status}: it does not exist, is private, or is gated; check its name, set HF_TOKEN to "
            f"a token that may read it, and accept its terms at https://huggingface.co/{repo}"
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    token = huggingface_hub.get_token()
    if token:
        reason = reason.replace(token, "<token>")
    return (
        f"hub: {repo} could not be fetched: {reason}; check the network and the repository's access, or give a local "
        "model directory"
    )
