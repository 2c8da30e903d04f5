"""Positioned reads and writes of Lance's packed blob sidecars.

The only module that knows their path: `data/<stem of the data file>/<blob id, 32 binary digits, reversed>.blob`, a raw
concatenation of payloads. That is an internal of Lance, so it is compared with Lance's own reader whenever a volume
is first used, and `volume.py` falls back to that reader where they disagree.
"""

import errno
import fcntl
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from numem.errors import IntegrityError
from numem.identity.digest import Buffer
from numem.store.payload.pieces import ALIGNMENT

# preadv takes at most IOV_MAX buffers and returns at most 2 GiB - 4 KiB.
_IOV_MAX = 1024
_CALL_BYTES = 1 << 30
_OPEN_FILES = 128
# Bytes that wait for the write under way; then the caller waits too.
_AHEAD_BYTES = 8 << 20
# numem names data files by 32 hex digits, Lance's writer by binary digits and hex digits.
_DATA_FILE = re.compile(r"[0-9a-f]+\.lance")


def sidecar_name(file: str, blob: int) -> str:
    """Path of a packed blob below a dataset's root; `file` is the data file's name.

    Raises:
        IntegrityError: a name of another form than numem and Lance give; it comes from the catalog and becomes a path.
    """
    if not _DATA_FILE.fullmatch(file):
        raise IntegrityError(f"{file[:80]!r} is not the name of a data file; the catalog was altered, run numem verify")
    return f"data/{file.removesuffix('.lance')}/{f'{blob:032b}'[::-1]}.blob"


class SidecarFiles:
    """Open sidecars of local volumes: descriptors are kept and shared between threads, the oldest closed first."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: OrderedDict[Path, _Descriptor] = OrderedDict()

    def read_into(self, path: Path, offset: int, buffers: Sequence[Buffer]) -> int:
        """Fill consecutive buffers from `offset`; returns the bytes read, fewer only at the end of the file.

        Raises:
            OSError: the file is missing or unreadable.
        """
        descriptor = self._descriptor(path)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        total = 0
        at, skip = 0, 0
        while at < len(views):
            window, size = [], 0
            for index in range(at, min(at + _IOV_MAX, len(views))):
                view = views[index][skip:] if index == at else views[index]
                window.append(view[: max(0, _CALL_BYTES - size)])
                size += len(window[-1])
                if size >= _CALL_BYTES:
                    break
            got = os.preadv(descriptor.number, window, offset + total)
            if got == 0 and size:
                return total
            total += got
            while at < len(views) and got >= len(views[at]) - skip:
                got -= len(views[at]) - skip
                at, skip = at + 1, 0
            skip += got
        return total

    def read_resident(self, path: Path, offset: int, buffers: Sequence[Buffer]) -> bool:
        """Fill consecutive buffers from the page cache alone, by one call; False where not all of it is there.

        Raises:
            OSError: the file is missing or unreadable.
        """
        try:
            got = os.preadv(self._descriptor(path).number, list(buffers[:_IOV_MAX]), offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                return False
            raise
        return got == sum(len(buffer) for buffer in buffers)

    def forget(self, path: Path) -> None:
        """Close a sidecar, so that the next read sees the file that has the name now."""
        with self._lock:
            self._open.pop(path, None)

    def drop_removed(self) -> None:
        """Close sidecars whose volume was removed, by this or another process: their space comes back then."""
        with self._lock:
            self._drop_removed()

    def _drop_removed(self) -> None:
        for path in [path for path, held in self._open.items() if not os.fstat(held.number).st_nlink]:
            del self._open[path]

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _descriptor(self, path: Path) -> "_Descriptor":
        with self._lock:
            found = self._open.get(path)
            if found is None:
                self._drop_removed()
                found = self._open[path] = _Descriptor(path)
                if len(self._open) > _OPEN_FILES:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(path)
            return found


class SidecarWriter:
    """Writes the sidecar of one data file, from front to back. A context manager: all is written when it ends.

    A thread writes while the caller loads and digests what comes next; what has come meanwhile goes out in one call.
    Padded bytes go past the page cache where the file system allows it: the sync that follows finds little to do, and
    the cache keeps what restores need. (Pages of a cache that still has to grow cost several times the write.)

    Args:
        root: of a local dataset.
        file: the data file's name; new, so that nobody else writes here.
        blob: the sidecar's blob id.
    """

    def __init__(self, root: Path, file: str, blob: int) -> None:
        self._path = root / sidecar_name(file, blob)
        self._descriptor = -1
        self._direct = False
        self._end = 0
        self._coming: list[memoryview] = []
        self._pending = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="numem-write")
        self._writing: Future[None] | None = None

    def write(self, data: Buffer) -> int:
        """Append bytes, which are left alone from now on; returns where they start, a multiple of 4 KiB for as long as
        all lengths are.

        Raises:
            OSError: of this write or of an earlier one.
        """
        if self._descriptor < 0:
            self._open()
        view = memoryview(data).cast("B")
        start = self._end
        self._end += len(view)
        self._coming.append(view)
        self._pending += len(view)
        if self._writing is None or self._writing.done() or self._pending >= _AHEAD_BYTES:
            self._send()
        return start

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            self._direct = True

    def _send(self) -> None:
        if self._writing is not None:
            self._writing.result()
        views, self._coming = self._coming, []
        self._writing = self._worker.submit(self._write_out, views, self._end - self._pending)
        self._pending = 0

    def _write_out(self, views: list[memoryview], at: int) -> None:
        if self._direct and any(len(view) % ALIGNMENT for view in views):
            self._through_cache()
        while views:
            try:
                done = os.pwritev(self._descriptor, [view[:_CALL_BYTES] for view in views[:_IOV_MAX]], at)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_cache()  # a device with larger blocks, or a file system that promised too much
                continue
            at += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]

    def _through_cache(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
        self._direct = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._writing is not None:
                self._send()
                self._writing.result()
        finally:
            self._worker.shutdown()
            if self._descriptor >= 0:
                os.close(self._descriptor)


class _Descriptor:
    """A file descriptor closed when the last reader lets go of it."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        number = getattr(self, "number", -1)
        if number >= 0:
            os.close(number)
