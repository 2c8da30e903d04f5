"""Kills and damaged catalogs: what was acknowledged is there, what is wrong is never served."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from numem.store.memory import Memory
from numem.store.payload.manifests import manifest_path, manifest_versions
from numem.store.upkeep import recovery
from tests.store_fixtures import assert_readable, die_at, flip, make_chain, put, run_children, sidecars, tree

pytestmark = pytest.mark.crash

STEPS = [
    "staged",
    "written object",
    "committed object",
    "payload durable",
    "committed catalog/placements",
    "written catalog/nodes",
    "committed catalog/nodes",
    "durable",
]


def _publish_until_killed(home: str, step: str, round_: int) -> None:
    memory = Memory(home)
    die_at(step, nth=2 if step != "staged" else 3)
    for number in range(3):
        chain = make_chain(2, seed=round_ * 10 + number, name=f"{round_}/{number}")
        for node, data in chain:
            memory.stage(node, data)
        memory.publish_staged([node.id for node, _ in chain])
        with open(Path(home) / "acknowledged", "a") as acknowledged:
            acknowledged.write(f"{round_} {number}\n")


@pytest.mark.parametrize("step", STEPS)
def test_a_process_killed_at_a_step_loses_nothing_it_acknowledged(tmp_path: Path, step: str) -> None:
    """mooncake#2818, lmcache#4991, zarr-python#3411, iohub#442, lance#8942: SIGKILL at every named step, the memory
    always reopens, acknowledged nodes are there with their bytes, the rest is absent or right, and publishing again
    completes it."""
    assert run_children(_publish_until_killed, [(str(tmp_path), step, 0)]) == [-signal.SIGKILL]
    assert (tmp_path / "acknowledged").read_text() == "0 0\n"
    chains = [make_chain(2, seed=number, name=f"0/{number}") for number in range(3)]
    everything = [entry for chain in chains for entry in chain]
    with Memory(tmp_path) as memory:
        assert_readable(memory, chains[0])
        visible = [entry for entry in everything if memory.get(entry[0].id) is not None]
        assert_readable(memory, visible)
        assert memory.verify().ok
        put(memory, everything)
        assert_readable(memory, everything)
        assert memory.staged() == ()
    # At most the commit that never happened is lying about; the sweep takes it after its grace.
    assert sum(path.stat().st_size for path in sidecars(tmp_path / "object")) <= (6 + 2) * 73_728
    with Memory(tmp_path) as memory:
        assert_readable(memory, everything)
        assert memory.verify().ok


def _create_until_killed(home: str, nth: int) -> None:
    die_at("fsync", nth=nth)
    with Memory(home) as memory:
        put(memory, make_chain(2))


def test_a_creation_that_was_killed_is_completed_by_the_next_process(tmp_path: Path) -> None:
    """lance#2403, lance#4451: killed at one sync after another while the memory and its first volume are made."""
    chain = make_chain(2)
    moments = (1, 4, 9, 21, 32, 37)
    codes = run_children(_create_until_killed, [(str(tmp_path / str(nth)), nth) for nth in moments])
    assert codes == [-signal.SIGKILL] * len(moments)
    for nth in moments:
        with Memory(tmp_path / str(nth)) as memory:
            put(memory, chain)
            assert_readable(memory, chain)
        with Memory(tmp_path / str(nth)) as memory:
            assert memory.recovered == ()
            assert_readable(memory, chain)
            assert memory.verify().ok


def _publish_once(home: str, step: str) -> None:
    memory = Memory(home)
    die_at(step)
    put(memory, make_chain(3))


def test_payload_without_its_catalog_facts_is_adopted(tmp_path: Path) -> None:
    """Crash table: after the payload commit and before the catalog commit, the pieces are adopted at open."""
    assert run_children(_publish_once, [(str(tmp_path), "payload durable")]) == [-signal.SIGKILL]
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        (adopted,) = memory.recovered
        assert (adopted.kind, adopted.dataset) == ("adopted", "object/local.w000.000001")
        assert adopted.detail.startswith("3 pieces and 3 nodes")
        assert_readable(memory, chain)
        before = tree(tmp_path / "object")
        assert put(memory, chain).stored == 0
        assert tree(tmp_path / "object") == before
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()


@pytest.mark.parametrize("torn", [False, True])
def test_files_of_a_commit_that_never_happened_are_swept_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    """lance#8942, PR#8945: before the grace nothing is removed, after it the orphans are, and nothing else."""
    with Memory(tmp_path) as memory:
        put(memory, make_chain(1, seed=7, name="before"))
    assert run_children(_publish_once, [(str(tmp_path), "written object")]) == [-signal.SIGKILL]
    orphan = sidecars(tmp_path / "object")[1]
    if torn:  # killed before the data file was there
        orphan.parent.with_suffix(".lance").unlink()
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
    assert len(sidecars(tmp_path / "object")) == 2
    monkeypatch.setattr(recovery, "ORPHAN_GRACE_S", 0.0)
    with Memory(tmp_path) as memory:
        (swept,) = memory.recovered
        assert swept.kind == "swept"
        assert int(re.findall(r"(\d+) bytes", swept.detail)[0]) >= 3 * 73_728
        assert_readable(memory, make_chain(1, seed=7, name="before"))
        assert put(memory, make_chain(3)).nodes == 3
    assert len(sidecars(tmp_path / "object")) == 2


def test_foreign_files_under_a_dataset_are_reported_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lance#5294: a sweep removes what a writer can have left, nothing else."""
    with Memory(tmp_path) as memory:
        put(memory, make_chain(1))
    monkeypatch.setattr(recovery, "ORPHAN_GRACE_S", 0.0)
    (volume,) = (tmp_path / "object").glob("*.lance")
    for place in (volume / "data", tmp_path / "catalog" / "nodes.lance" / "data"):
        (place / "holiday.jpg").write_bytes(b"jpg")
        (place / "pack").mkdir()
        (place / "pack" / "x.bin").write_bytes(b"x")
        (place / "stray.lance").write_bytes(b"never committed")
    with Memory(tmp_path) as memory:
        assert sorted(entry.kind for entry in memory.recovered) == ["foreign", "foreign", "swept", "swept"]
        assert_readable(memory, make_chain(1))
    for place in (volume / "data", tmp_path / "catalog" / "nodes.lance" / "data"):
        assert (place / "holiday.jpg").exists() and (place / "pack" / "x.bin").exists()
        assert not (place / "stray.lance").exists()


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


SHAPES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: os.truncate(path, 0),
    "zero-filled": _zero,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": lambda path: path.unlink(),
    "flipped early": lambda path: flip(path, 40, 2),
    "flipped late": lambda path: flip(path, path.stat().st_size - 30, 5),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dataset", ["catalog/nodes.lance", "catalog/placements.lance", "object/*.lance"])
def test_a_bad_newest_manifest_is_stepped_over_and_its_commit_kept(tmp_path: Path, dataset: str, shape: str) -> None:
    """tenequm/pond#110, lance PR#9267, storage candidate check 3: the last good version opens, the bad manifest is
    quarantined and reported, and since its data files are intact the acknowledged commit is committed again."""
    first, second = make_chain(2, name="a"), make_chain(2, seed=3, name="b")
    with Memory(tmp_path) as memory:
        put(memory, first)
        put(memory, second)
    (root,) = tmp_path.glob(dataset)
    version = manifest_versions(root)[0]
    SHAPES[shape](manifest_path(root, version))
    with Memory(tmp_path) as memory:
        kinds = [entry.kind for entry in memory.recovered]
        assert kinds == (["replayed"] if shape == "missing" else ["quarantined", "replayed"])
        assert_readable(memory, [*first, *second])
        assert memory.verify().ok
        assert put(memory, make_chain(1, seed=9, name="after")).stored == 1
    # The number of the lost version names nothing else.
    assert manifest_versions(root)[0] > version
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, [*first, *second, *make_chain(1, seed=9, name="after")])
    assert len(list((tmp_path / "quarantine").glob("*.manifest.*"))) == (shape != "missing")


def test_two_bad_manifests_in_a_row(tmp_path: Path) -> None:
    chains = [make_chain(1, seed=n, name=str(n)) for n in range(4)]
    with Memory(tmp_path) as memory:
        for chain in chains:
            put(memory, chain)
    root = tmp_path / "catalog" / "nodes.lance"
    newest, before = manifest_versions(root)[:2]
    _zero(manifest_path(root, newest))
    manifest_path(root, before).unlink()
    with Memory(tmp_path) as memory:
        assert [entry.kind for entry in memory.recovered] == ["quarantined", "replayed"]
        for chain in chains:
            assert_readable(memory, chain)


@pytest.mark.parametrize("table", ["nodes", "placements"])
@pytest.mark.parametrize("damage", ["flipped", "zero-filled", "removed"])
def test_damaged_catalog_data_is_not_believed_and_is_rebuilt_from_payload(
    tmp_path: Path, table: str, damage: str
) -> None:
    """A flipped bit in a catalog file can change an answer without an error in Lance; digests of acknowledged files
    catch it, and the facts are taken from the payload volumes again."""
    chains = [make_chain(3, seed=n, name=str(n)) for n in range(3)]
    with Memory(tmp_path) as memory:
        for chain in chains:
            put(memory, chain)
    files = sorted((tmp_path / "catalog" / f"{table}.lance" / "data").iterdir(), key=lambda path: path.stat().st_mtime)
    path = files[1]
    if damage == "flipped":
        flip(path, path.stat().st_size // 3)
    elif damage == "zero-filled":
        _zero(path)
    else:
        path.unlink()
    with Memory(tmp_path) as memory:
        kinds = [entry.kind for entry in memory.recovered]
        assert kinds == ["lost", "adopted"]
        for chain in chains:
            assert_readable(memory, chain)
        assert not memory.verify().ok  # the damaged file stays named until it is mended
    with Memory(tmp_path) as memory:
        for chain in chains:
            assert_readable(memory, chain)


def test_random_bits_of_the_newest_manifest_never_change_an_answer(tmp_path: Path) -> None:
    """300 random flips: 7 gave wrong rows without an error in Lance alone; here none does."""
    chains = [make_chain(1, seed=n, name=str(n)) for n in range(3)]
    with Memory(tmp_path / "whole") as memory:
        for chain in chains:
            put(memory, chain)
    for trial in range(12):
        home = tmp_path / f"trial-{trial}"
        shutil.copytree(tmp_path / "whole", home)
        root = home / "catalog" / ("nodes.lance" if trial % 2 else "placements.lance")
        path = manifest_path(root, manifest_versions(root)[0])
        flip(path, (trial * 7919) % path.stat().st_size, trial % 8)
        with Memory(home) as memory:
            for chain in chains:
                assert_readable(memory, chain)
        shutil.rmtree(home)


def test_a_ledger_that_is_lost_or_torn_costs_nothing(tmp_path: Path) -> None:
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    (path,) = (tmp_path / "ledger").iterdir()
    with open(path, "ab") as file:
        file.write(b'\n0123456789abcdef {"dataset":"catal')
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)
        put(memory, make_chain(1, seed=5, name="x"))
    path.unlink()
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)


@pytest.mark.slow
def test_random_kills(tmp_path: Path) -> None:
    """25 SIGKILLs at random moments: always reopens, 0 acknowledged lost, 0 wrong bytes (storage candidate check 2)."""
    import multiprocessing
    import random

    rng = random.Random(7)
    context = multiprocessing.get_context("spawn")
    for round_ in range(25):
        child = context.Process(target=_publish_until_killed, args=(str(tmp_path), "never", round_))
        child.start()
        time.sleep(0.9 + rng.random() * 0.6)
        child.kill()
        child.join()
    lines = (tmp_path / "acknowledged").read_text().split()
    pairs = list(zip(map(int, lines[::2]), map(int, lines[1::2]), strict=True))
    assert pairs
    with Memory(tmp_path) as memory:
        for round_, number in pairs:
            assert_readable(memory, make_chain(2, seed=round_ * 10 + number, name=f"{round_}/{number}"))
        assert memory.verify().ok
