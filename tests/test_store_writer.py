"""The sidecar writer: bytes, offsets and errors are the same past the page cache and through it."""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from numem.store.payload.pieces import ALIGNMENT, aligned
from numem.store.payload.sidecar import SidecarWriter, sidecar_name
from tests.store_fixtures import payload

FILE = f"{'0' * 32}.lance"
SIZES = [3 * ALIGNMENT, 70_000, ALIGNMENT, 300, 5, ALIGNMENT]


def _buffers() -> list[memoryview]:
    """Padded buffers for all but the small sizes."""
    buffers = []
    for number, size in enumerate(SIZES):
        buffer = aligned(size) if size >= ALIGNMENT else memoryview(bytearray(size))
        buffer[:size] = payload(size, number)
        buffers.append(buffer)
    return buffers


def test_buffers_for_pieces_are_aligned_and_padded_with_zeros() -> None:
    for size in (1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1):
        buffer = aligned(size)
        assert len(buffer) == -(-size // ALIGNMENT) * ALIGNMENT
        assert bytes(buffer[size:]) == bytes(len(buffer) - size)


@pytest.mark.parametrize("how", ["as it comes", "no direct", "refused at the write", "in parts"])
def test_what_was_written_is_there_at_its_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    write, set_flags = os.pwritev, fcntl.fcntl
    direct = [True]

    def flags(descriptor: int, command: int, value: int = 0) -> int:
        direct[0] = bool(value & os.O_DIRECT)
        if how == "no direct" and direct[0]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, value)

    def pwritev(descriptor: int, views: Sequence[memoryview], at: int) -> int:
        if how == "refused at the write" and direct[0]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, [views[0][:5000]] if how == "in parts" and not direct[0] else views, at)

    monkeypatch.setattr(fcntl, "fcntl", flags)
    monkeypatch.setattr(os, "pwritev", pwritev)
    buffers = _buffers()
    with SidecarWriter(tmp_path, FILE, 1) as writer:
        starts = [writer.write(buffer) for buffer in buffers]
    ends = [start + len(buffer) for start, buffer in zip(starts, buffers, strict=True)]
    assert starts == [0, *ends[:-1]]
    assert (tmp_path / sidecar_name(FILE, 1)).read_bytes() == b"".join(buffers)


def test_the_last_error_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails behind the caller's back is raised at the latest when the writer ends, and nothing is open."""

    def full(descriptor: int, views: Sequence[memoryview], at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"), SidecarWriter(tmp_path, FILE, 1) as writer:
        writer.write(aligned(ALIGNMENT))
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unused_writer_makes_no_file(tmp_path: Path) -> None:
    with SidecarWriter(tmp_path, FILE, 1):
        pass
    assert list(tmp_path.iterdir()) == []
