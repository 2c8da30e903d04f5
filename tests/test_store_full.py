"""A file system that is really full, wherever in a publication that happens."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from numem.errors import StorageFullError
from numem.store.memory import Memory
from tests.store_fixtures import assert_readable, make_chain, put


def _mount(path: Path, *options: str) -> bool:
    tool = shutil.which("mount")
    if tool is None or os.geteuid() != 0:
        return False
    return subprocess.run([tool, *options, str(path)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if not _mount(tmp_path, "-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        pytest.skip("mounting a tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("spare", [0, 300, 1004, 1012, 1024, 1036, 1044, 1056, 1064])
def test_no_space_at_any_point_publishes_nothing_and_a_retry_works(small_disk: Path, spare: int) -> None:
    """Disk full during publication, found out by the kernel: in the sidecar, in the data file, in the manifest or in the
    catalog. `spare` KiB are left after 14 pieces of 72 KiB were staged; Lance itself can swallow the failed write and
    report a short file, which counts as full too."""
    chain = make_chain(14)
    before = make_chain(2, seed=5, name="before")
    with Memory(small_disk) as memory:
        put(memory, before)
        for node, data in chain:
            memory.stage(node, data)
        used = 64 * 1024 - shutil.disk_usage(small_disk).free // 1024
        assert _mount(small_disk, "-o", f"remount,size={used + spare}k")
        try:
            published = memory.publish_staged().nodes
        except StorageFullError as error:
            assert "no space left" in str(error) and "\n" not in str(error)
            published = 0
        assert published in (0, 14)
        if not published:
            assert len(memory.staged()) == 14
            assert [memory.get(node.id) for node, _ in chain] == [None] * 14
            assert_readable(memory, before)
        assert _mount(small_disk, "-o", "remount,size=64m")
        report = put(memory, chain)
        assert (report.nodes, report.missing) == (14, ())
        assert_readable(memory, [*before, *chain])
    with Memory(small_disk) as memory:
        assert [entry.kind for entry in memory.recovered if entry.kind == "lost"] == []
        assert_readable(memory, [*before, *chain])
        assert memory.verify().ok
