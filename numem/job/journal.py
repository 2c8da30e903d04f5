"""The journal of a decode stage: each finished prompt is one line, and a run that was killed goes on behind the last.

    {"check":"8f03a1c2","settings":"77ab...","index":3,"id":"q3","tokens":[...],"text":"...","finish":"length",...}

A line counts where its CRC-32 is right and its settings are those of the journal. A line that was cut short by a kill is
taken off the end; any other that does not count is passed over, and its prompt is decoded again. In memory is one offset
per prompt.
"""

import errno
import fcntl
import json
import os
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numem.errors import ClosedError, IntegrityError, LeaseHeldError, NotFoundError, StorageFullError, StoreError
from numem.store.barrier import sync_directory

# A finished prompt is in the kernel's hands at once, so that a kill loses none; how many a power cut may lose.
SYNC_ENTRIES = 32
SYNC_S = 1.0
_HEAD = b'{"check":"%08x",'
_HEAD_BYTES = len(_HEAD % 0)


@dataclass(frozen=True, slots=True)
class Witness:
    """What a proof compares: BLAKE3-256 (hex) of the final cache bytes and of each step's logits, and how many bytes."""

    kv: str
    logits: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished prompt.

    Attributes:
        index, id: which of the table. run: the run that decoded it.
        prompt_tokens: its length = computed + shared + restored.
        tokens, text: the output; the text ends before an end-of-sequence token.
        finish: see `numem.runtime.request.Finish`.
        computed, shared, restored: its prompt tokens, each under the costliest thing its run did for it.
        restored_bytes: read from the durable plane for it.
        source: "recomputed" where its run computed the prompt's rows, "restored" where the durable plane gave them,
            "shared" where resident pages did.
        preempted, again: how often it lost its lane, and the rows brought back after that.
        queue_ms: submission to admission. ttft_ms: admission to first token; for "recomputed" it holds the prefill.
        restored_ttft_ms: the same without the prefill, where anything was restored. step_ms: its later steps.
        failures: chunks that could not be used, and what became of their rows.
        witness: of a prompt that the proof compares.
    """

    index: int
    id: str
    run: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish: str
    computed: int
    shared: int
    restored: int
    restored_bytes: int
    source: str
    preempted: int
    again: int
    queue_ms: float
    ttft_ms: float
    restored_ttft_ms: float | None
    step_ms: float
    failures: tuple[str, ...] = ()
    witness: Witness | None = None


class Journal:
    """An open journal; a context manager. One process holds it at a time: the kernel lets go when that one dies.

    Args:
        path: of the file, created where there is none.
        settings: digest of what decides the outputs; lines of another one do not count.
        prompts: size of the table.
        again: forget what it holds.

    Attributes:
        dropped: lines that did not count.
        damaged: of them those that no kill explains: all but one that was cut short.

    Raises:
        LeaseHeldError: another run holds it.
        StoreError: its filesystem has no locks.
    """

    def __init__(self, path: Path, settings: str, prompts: int, *, again: bool = False) -> None:
        self.path = path
        self.settings = settings
        self.dropped = self.damaged = 0
        self._offsets = array("q", [-1]) * prompts
        self._finished = 0
        self._unsynced = 0
        self._synced_at = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreError(
                    f"{path}: cannot be locked ({error.strerror}); give the memory a local directory (NUMEM_LOCAL) on a "
                    "filesystem with locks"
                ) from error
            raise LeaseHeldError(
                f"{path}: another run is decoding this batch under the same settings; wait for it and run again: what "
                "it finished is not decoded twice"
            ) from error
        if again:
            self._file.truncate(0)
        self._reader = path.open("rb")
        self._end = self._scan()
        if fresh:
            sync_directory(path.parent)

    def __contains__(self, index: int) -> bool:
        """Whether a prompt is finished."""
        return self._offsets[index] >= 0

    def __len__(self) -> int:
        """Finished prompts."""
        return self._finished

    def read(self, index: int) -> Entry:
        """The entry of a prompt.

        Raises:
            NotFoundError: it is not finished.
            IntegrityError: the line changed since the journal was opened.
        """
        if index not in self:
            raise NotFoundError(f"{self.path}: prompt {index} is not finished; run again")
        self._reader.seek(self._offsets[index])
        entry = _parse(self._reader.readline(), self.settings)
        if entry is None or entry.index != index:
            raise IntegrityError(f"{self.path}: the line of prompt {index} was changed while in use; run again")
        return entry

    def entries(self) -> Iterator[Entry]:
        """Entries of all prompts in table order, one at a time."""
        return (self.read(index) for index in range(len(self._offsets)))

    def append(self, entry: Entry) -> None:
        """Add a finished prompt.

        Raises:
            IntegrityError: it was finished before, with other tokens.
            StorageFullError: no space; the journal is as it was.
        """
        if entry.index in self and self.read(entry.index).tokens != entry.tokens:
            raise IntegrityError(
                f"prompt {entry.id}: decoded again under the same settings it has other tokens than in {self.path}; run "
                "with --again, and `numem verify`"
            )
        line = _line(entry, self.settings)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # What of the line was written goes, so that the next one starts on a line of its own.
            with suppress(OSError):
                self._file.truncate(self._end)
            raise _failed(self.path, error) from error
        self._note(entry.index, self._end)
        self._end += len(line)
        self._unsynced += 1
        self.tick()

    def tick(self) -> None:
        """Make what was appended survive a power cut, where that is due."""
        due = self._unsynced >= SYNC_ENTRIES or time.monotonic() - self._synced_at >= SYNC_S
        if self._unsynced and due:
            self.sync()

    def sync(self) -> None:
        """Make everything appended survive a power cut."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed(self.path, error) from error
        self._unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Sync and let go of the file; closing twice is harmless."""
        if self._file.closed:
            return
        try:
            if self._unsynced:
                self.sync()
        finally:
            self._reader.close()
            self._file.close()

    def __enter__(self) -> Self:
        if self._file.closed:
            raise ClosedError(f"{self.path}: the journal is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, index: int, offset: int) -> None:
        self._finished += self._offsets[index] < 0
        self._offsets[index] = offset

    def _scan(self) -> int:
        """Take up what the file holds; its length, without a line that was cut short."""
        at = 0
        for line in self._reader:
            if not line.endswith(b"\n"):
                self.dropped += 1
                self._file.truncate(at)
                break
            entry = _parse(line, self.settings)
            if entry is None or not 0 <= entry.index < len(self._offsets):
                self.dropped += 1
                self.damaged += 1
            else:
                self._note(entry.index, at)
            at += len(line)
        return at


def _line(entry: Entry, settings: str) -> bytes:
    body = json.dumps({"settings": settings, **asdict(entry)}, ensure_ascii=False, separators=(",", ":")).encode()
    return _HEAD % zlib.crc32(body) + body[1:] + b"\n"


def _parse(line: bytes, settings: str) -> Entry | None:
    """The entry of a whole line; None where it is damaged or of other settings."""
    body = b"{" + line[_HEAD_BYTES:-1]
    if line[:_HEAD_BYTES] != _HEAD % zlib.crc32(body):
        return None
    try:
        tree: dict[str, Any] = json.loads(body)
        if tree.pop("settings") != settings:
            return None
        seen = tree["witness"]
        tree["witness"] = seen and Witness(seen["kv"], tuple(seen["logits"]), seen["nbytes"])
        tree["tokens"], tree["failures"] = tuple(tree["tokens"]), tuple(tree["failures"])
        return Entry(**tree)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # of another version of this program


def _failed(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{path}: no space left for the journal of finished prompts; free some and run again")
    return StoreError(f"{path}: the journal of finished prompts cannot be written ({error.strerror}); run again")
