"""Memories that are only read: nothing is created, locked or changed, and every change is refused by name."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numem.errors import NotFoundError, ReadOnlyError, RecoveryError
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.store.memory import Memory
from tests.store_fixtures import assert_readable, flip, make_chain, payload, put, run_children, sidecars, tree

SIZE = 70_000
NOBODY = 65534


def test_everything_can_be_read_and_nothing_changes(tmp_path: Path) -> None:
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id])
        memory.create_branch("main", chain[1][0].id, actor="test", reason="test")
        memory.record("note", b"subject", {"a": 1})
    before = tree(tmp_path)
    with Memory(tmp_path, read_only=True) as memory:
        assert_readable(memory, chain)
        assert memory.branch("main").head == chain[1][0].id
        assert [record.body for record in memory.records("note")] == [{"a": 1}]
        assert memory.chain(chain[3][0].id) == tuple(node for node, _ in chain)
        assert memory.verify().ok
        assert memory.usage()["object"] == 4 * SIZE
        assert memory.residency.pins() == ()
        memory.flush()
    assert tree(tmp_path) == before


WRITES: dict[str, Callable[[Memory, Any], object]] = {
    "stage": lambda memory, node: memory.stage(node, [payload(SIZE, 1)]),
    "publish": lambda memory, node: memory.publish(node, [payload(SIZE, 1)]),
    "publish_staged": lambda memory, node: memory.publish_staged(),
    "promote": lambda memory, node: memory.promote([node.id]),
    "record": lambda memory, node: memory.record("note", b"", {}),
    "create_branch": lambda memory, node: memory.create_branch("b", node.id, actor="a", reason="r"),
    "pin": lambda memory, node: memory.residency.pin([node.id], owner="a"),
    "demand": lambda memory, node: memory.residency.demand([node.id], "ssd", owner="a"),
    "evict": lambda memory, node: memory.residency.evict("ssd", 1),
    "care": lambda memory, node: memory.care.scrub(),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_change_is_refused_and_the_remedy_named(tmp_path: Path, write: str) -> None:
    chain = make_chain(1)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    before = tree(tmp_path)
    with Memory(tmp_path, read_only=True) as memory:
        with pytest.raises(ReadOnlyError, match="open it without"):
            WRITES[write](memory, chain[0][0])
        assert_readable(memory, chain)
    assert tree(tmp_path) == before


def test_a_bad_copy_is_not_served_and_the_verdict_stays_in_this_process(tmp_path: Path) -> None:
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain])
    flip(sidecars(tmp_path / "nodes")[0], 5)
    before = tree(tmp_path)
    with Memory(tmp_path, read_only=True) as memory:
        report = memory.read([(chain[0][0].pieces[0], bytearray(SIZE))])
        assert report.by_tier == {"object": SIZE} and len(report.quarantined) == 1
        assert memory.read([(chain[0][0].pieces[0], bytearray(SIZE))]).quarantined == ()
    assert tree(tmp_path) == before


def test_it_follows_a_live_writer(tmp_path: Path) -> None:
    chain = make_chain(3)
    with Memory(tmp_path) as writer:
        put(writer, chain[:1])
        with Memory(tmp_path, read_only=True) as memory:
            assert_readable(memory, chain[:1])
            put(writer, chain[1:])
            assert_readable(memory, chain)
            identity = Identity({"model": "test"}, NumericPolicy("cpu-fma-v1", bytes(32)), "cpu-x86_64", b"salt")
            memory.register(identity)  # a tenant's salt is needed for reading, and stays in this process
            assert memory.identity(identity.scope) is None


def test_nothing_is_made_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no memory there"):
        Memory(tmp_path / "none", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_what_would_have_to_be_recovered_is_refused(tmp_path: Path) -> None:
    chain = make_chain(1)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    newest = min((tmp_path / "catalog" / "nodes.lance" / "_versions").glob("*.manifest"))
    whole = newest.read_bytes()
    newest.write_bytes(b"")
    with pytest.raises(RecoveryError, match="without read_only to recover"):
        Memory(tmp_path, read_only=True)
    newest.write_bytes(whole)
    with Memory(tmp_path, read_only=True) as memory:
        assert_readable(memory, chain)


def _as_nobody(home: Path) -> None:
    """In a process of its own, without the rights of root."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with pytest.raises(ReadOnlyError, match="read_only=True"):
        Memory(home)
    with pytest.raises(ReadOnlyError, match="read_only=True"):
        Memory(home / "new")
    with Memory(home, read_only=True) as memory:
        assert_readable(memory, make_chain(3))
        with pytest.raises(ReadOnlyError):
            memory.stage(make_chain(1)[0][0], [b"x"])


def _others_may_enter(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in (path, *path.parents))


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
@pytest.mark.skipif(not _others_may_enter(Path(sys.prefix).resolve()), reason="others may not import from here")
def test_a_directory_of_another_user_is_read_and_refused_for_writing() -> None:
    """The children's imports and the memory must be readable for all, so it lies outside pytest's private directory."""
    root = Path(tempfile.mkdtemp(prefix="numem-read-only-"))
    try:
        home = root / "home"
        with Memory(home) as memory:
            put(memory, make_chain(3))
        root.chmod(0o755)
        before = tree(home)
        assert run_children(_as_nobody, [(home,)]) == [0]
        assert tree(home) == before
    finally:
        shutil.rmtree(root)


def test_a_directory_without_write_permission(tmp_path: Path) -> None:
    """For a user other than root the mode bits decide; for root they do not, and everything goes on working."""
    chain = make_chain(2)
    home = tmp_path / "home"
    with Memory(home) as memory:
        put(memory, chain)
    paths = [path for path in (home, *home.rglob("*")) if path.is_dir()]
    for path in paths:
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        if os.getuid() != 0:
            with pytest.raises(ReadOnlyError, match="read_only=True"):
                Memory(home)
        with Memory(home, read_only=True) as memory:
            assert_readable(memory, chain)
    finally:
        for path in paths:
            path.chmod(stat.S_IRWXU)
