"""The durability barrier: what is synced, in which order, before anything is acknowledged."""

import os
from pathlib import Path

import pytest

from numem.store import barrier
from numem.store.memory import Memory
from tests.store_fixtures import make_chain, make_node, payload, put


def _record(events: list[tuple[str, str]], root: Path) -> None:
    barrier.observe(lambda step, what: events.append((step, what.replace(f"{root}/", ""))))


@pytest.fixture
def events(tmp_path: Path) -> list[tuple[str, str]]:
    return []


def test_payload_is_synced_before_the_catalog_and_both_before_the_acknowledgement(tmp_path: Path) -> None:
    """tenequm/pond#110, lance PR#9267, arrow-rs-object-store PR#643, s2 PR#670, mooncake#2818: Lance itself syncs
    nothing, so every file and directory of a commit must pass through the barrier, payload first."""
    events: list[tuple[str, str]] = []
    with Memory(tmp_path) as memory:
        put(memory, make_chain(1, name="first"))  # opens the volume
        end = barrier.observe(lambda step, what: events.append((step, what)))
        try:
            report = put(memory, make_chain(2, seed=1))
        finally:
            end()
    assert report.stored == 2
    steps = [step for step, _ in events]
    committed = [n for n, (step, _) in enumerate(events) if step == "committed"]
    assert [events[n][1].split("/")[0] for n in committed] == ["object", "catalog", "catalog"]
    assert [events[n][1] for n in committed[1:]] == ["catalog/placements", "catalog/nodes"]
    before = 0
    for number, place in enumerate(committed):
        written = events[before:place]
        files = [Path(what) for step, what in written if step == "fsync file"]
        directories = [Path(what) for step, what in written if step == "fsync directory"]
        data = [path for path in files if path.suffix == ".lance"]
        assert len(data) == 1
        assert data[0].parent in directories
        if not number:
            (blob,) = [path for path in files if path.suffix == ".blob"]
            assert blob.parent in directories and blob.parent.parent in directories
        # After the commit: its manifest, then the directory of manifests.
        manifest, versions = events[place + 1], events[place + 2]
        assert manifest[0] == "fsync file" and manifest[1].endswith(".manifest")
        assert versions == ("fsync directory", str(Path(manifest[1]).parent))
        before = place + 3
    assert steps[-2:] == ["fsync ledger", "durable"]
    assert steps.index("payload durable") < committed[1]
    assert steps.count("staged") == 2 and steps.index("staged") == 0


def test_a_new_memory_syncs_every_directory_it_makes(tmp_path: Path) -> None:
    """New parents too: the names that lead to the first commit survive a power cut."""
    synced: set[str] = set()
    made: set[str] = set()
    end = barrier.observe(lambda step, what: synced.add(what) if step.startswith("fsync") else None)
    try:
        with Memory(tmp_path / "deep" / "er" / "home") as memory:
            put(memory, make_chain(1))
            memory.record("k", bytes(32), {})
    finally:
        end()
    home = tmp_path / "deep" / "er" / "home"
    for path in (home / "catalog", home / "object"):
        made.update(str(at) for at in path.rglob("*"))
    exempt = ("_transactions", "latest_version_hint.json")
    unsynced = {
        path for path in made - synced if not any(part in path for part in exempt) and not path.endswith(".volume")
    }
    # Directories are exempt only where nothing durable was ever put into them.
    assert {path for path in unsynced if any(Path(path).iterdir() if Path(path).is_dir() else [1])} == set()
    for parent in (tmp_path, tmp_path / "deep", tmp_path / "deep" / "er", home):
        assert str(parent) in synced


def test_nothing_is_visible_before_it_is_durable(tmp_path: Path) -> None:
    """icechunk- and mooncake#2818-like: at every step before the last, this process's own lookups miss."""
    data = [payload(70_000, 1)]
    node = make_node(data)
    seen: list[tuple[str, bool]] = []
    with Memory(tmp_path) as memory:
        put(memory, make_chain(1, name="first"))

        def look(step: str, what: str) -> None:
            if step in ("written", "committed", "payload durable"):
                seen.append((step, node.id in memory._parts.catalog.nodes))

        end = barrier.observe(look)
        try:
            memory.publish(node, data).published.result(timeout=30)
        finally:
            end()
        assert memory.get(node.id) == node
    assert [visible for _, visible in seen] == [False] * len(seen) and len(seen) == 7


def test_exclusive_creation_keeps_the_first(tmp_path: Path) -> None:
    path = tmp_path / "marker"
    assert barrier.write_exclusive(path, b"one", tmp_path / "a.tmp")
    assert not barrier.write_exclusive(path, b"two", tmp_path / "b.tmp")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["marker"]
