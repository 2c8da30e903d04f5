"""No space: nothing of a publication is visible, nothing is lost, reads go on, and there is one try to evict."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from lance.fragment import write_fragments

from numem.errors import StorageFullError
from numem.store.memory import Memory
from numem.store.payload import dataset, sidecar
from numem.store.publication import spool
from tests.store_fixtures import SCOPE, assert_readable, make_chain, put, sidecars, tree


@pytest.mark.parametrize("where", ["spool", "payload", "catalog"])
def test_a_full_disk_publishes_nothing_and_a_retry_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Disk full during publication: StorageFullError, nothing visible, nothing half-applied; then there is space."""
    chain = make_chain(3)
    write_rows, write_payload = write_fragments, sidecar.SidecarWriter.write

    def refuse_rows(*args: Any, **options: Any) -> Any:
        write_rows(*args, **options)  # files are there when the disk turns out to be full
        raise OSError("LanceError(IO): Unable to write: No space left on device (os error 28)")

    def refuse_payload(self: sidecar.SidecarWriter, data: Any) -> int:
        if write_payload(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 0

    def refuse_file(file: Any, data: Any) -> None:
        file.write(data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Memory(tmp_path) as memory:
        put(memory, make_chain(1, seed=9, name="before"))
        before = tree(tmp_path / "object")
        with monkeypatch.context() as patch:
            if where == "spool":
                patch.setattr(spool, "_write_all", refuse_file)
                with pytest.raises(StorageFullError, match="no space left"):
                    memory.stage(*chain[0])
                assert memory.staged() == ()
                assert list((tmp_path / "spool").iterdir()) == []
            else:
                for node, data in chain:
                    memory.stage(node, data)
                if where == "payload":
                    patch.setattr(sidecar.SidecarWriter, "write", refuse_payload)
                else:
                    patch.setattr(dataset, "write_fragments", refuse_rows)
                with pytest.raises(StorageFullError, match="no space left"):
                    memory.publish_staged()
                assert len(memory.staged()) == 3
            assert [memory.get(node.id) for node, _ in chain] == [None] * 3
        if where == "payload":
            assert tree(tmp_path / "object") == before
        report = put(memory, chain)
        assert (report.nodes, report.missing) == (3, ())
        assert memory.staged() == ()
        assert_readable(memory, chain)
    # Pieces whose catalog commit failed were used, not written a second time.
    assert sum(path.stat().st_size for path in sidecars(tmp_path / "object")) == 4 * 73_728


def test_facts_that_find_no_space_wait_for_it_or_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision is not lost silently: flush() and close() say that it could not be written."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Memory(tmp_path) as memory:
        with monkeypatch.context() as patch:
            patch.setattr(dataset, "write_fragments", refuse)
            memory.record("decision", SCOPE, {"n": 1})
            with pytest.raises(StorageFullError):
                memory.flush()
        memory.flush()
        assert [record.body for record in memory.records()] == [{"n": 1}]
        memory.record("decision", SCOPE, {"n": 2})
        with monkeypatch.context() as patch:
            patch.setattr(dataset, "write_fragments", refuse)
            with pytest.raises(StorageFullError):
                memory.close()
            memory.close()
    with Memory(tmp_path) as memory:
        assert [record.body for record in memory.records()] == [{"n": 1}]


@pytest.mark.parametrize("room", [True, False])
def test_a_full_disk_asks_once_for_an_eviction_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """mooncake commit 3dbb8ec (#2419), lmcache#1454, lmcache#4725, lmcache#4664, DingoCache#83: ENOSPC before any cap of
    one's own is reached: evict and retry once, otherwise refuse; reads work throughout."""
    before, chain = make_chain(1, seed=9, name="before"), make_chain(3)
    write_payload = sidecar.SidecarWriter.write
    full = [True]
    asked: list[int] = []

    def refuse(self: sidecar.SidecarWriter, data: Any) -> int:
        if write_payload(self, data) and full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 0 if full[0] else self._end - len(data)

    with Memory(tmp_path) as memory:
        put(memory, before)

        def evict(nbytes: int) -> bool:
            asked.append(nbytes)
            assert_readable(memory, before)
            full[0] = not room
            return True

        monkeypatch.setattr(memory._parts.committer, "_on_full", evict)
        with monkeypatch.context() as patch:
            patch.setattr(sidecar.SidecarWriter, "write", refuse)
            for node, data in chain:
                memory.stage(node, data)
            if room:
                assert memory.publish_staged().stored == 3
            else:
                with pytest.raises(StorageFullError, match="no space left"):
                    memory.publish_staged()
                assert len(memory.staged()) == 3
        assert asked == [3 * 70_000]
        assert_readable(memory, before)
        memory.publish_staged()
        assert_readable(memory, chain)
