"""The doctor: every bad shape of every file is found without a change, mended or said to be lost, and never served."""

from pathlib import Path

import pytest

from numem.errors import NotFoundError
from numem.store.memory import Memory
from numem.store.payload.manifests import manifest_path, manifest_versions
from numem.store.upkeep.doctor import diagnose, repair
from tests.doctor_fixtures import (
    CHAINS,
    EXTRA,
    SHAPES,
    assert_mended,
    copy_of,
    newest_data_file,
    newest_manifest,
    place_and_shape,
    serves_nothing_wrong,
    template,
    zero_out,
)
from tests.store_fixtures import (
    make_chain,
    put,
    tree,
)

__all__ = ["template"]


def test_a_healthy_memory_has_no_findings_and_is_not_changed(template: Path, tmp_path: Path) -> None:
    home = copy_of(template, tmp_path)
    before = tree(home)
    report = diagnose(home)
    assert report.findings == () and report.ok
    assert (report.tables, report.volumes, report.nodes, report.copies) == (8, 2, 6, 8)
    assert tree(home) == before
    with Memory(home) as memory:
        put(memory, make_chain(1, seed=5, name="live"))
        assert diagnose(home).findings == ()  # beside a process that has it open
    mended = repair(home)
    assert (mended.ok, mended.done, mended.lost) == (True, (), ())
    with pytest.raises(NotFoundError):
        diagnose(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(("place", "shape"), place_and_shape(list(SHAPES)))
def test_a_bad_newest_manifest(template: Path, tmp_path: Path, place: str, shape: str) -> None:
    """tenequm/pond#110, lance PR#9267, storage candidate check 3, for every table and the payload volume: found, and
    mended without loss, since the ledger knows the commit."""
    home = copy_of(template, tmp_path)
    (root,) = home.glob(place)
    SHAPES[shape](newest_manifest(root))
    before = tree(home)
    report = diagnose(home)
    assert tree(home) == before
    name = place.removesuffix(".lance").removesuffix("/*")
    assert [f for f in report.of("repairable") if f.place.startswith(name) and "manifest" in f.what]
    assert not report.of("loss")
    mended = repair(home)
    assert mended.ok and mended.done, mended
    assert_mended(home)
    with Memory(home) as memory:
        assert len(memory.records("note")) == len([e for e in memory.events if e.kind == "thing"]) == 3
        assert len(memory.branches()) == 3 and len(memory.residency.pins()) == 3
        assert memory.get(EXTRA[0][0].id) is None


@pytest.mark.parametrize(("place", "shape"), place_and_shape([shape for shape in SHAPES if shape != "empty"]))
def test_a_bad_data_file(template: Path, tmp_path: Path, place: str, shape: str) -> None:
    """What the volumes hold is taken from there; what only the catalog held is named as lost; the file is kept."""
    home = copy_of(template, tmp_path)
    (root,) = home.glob(place)
    SHAPES[shape](newest_data_file(root))
    report = diagnose(home)
    name = place.removesuffix(".lance").removesuffix("/*")
    found = [f for f in report.findings if f.place.startswith(name) and f.severity != "note"]
    assert found
    only = place.removeprefix("catalog/").removesuffix(".lance") in (
        "records",
        "events",
        "branches",
        "claims",
        "retired",
    )
    assert bool(report.of("loss")) == only
    serves_nothing_wrong(home, CHAINS)
    mended = repair(home)
    assert mended.after.ok, mended.after.findings
    assert bool(mended.lost) == only, mended.lost
    assert all(name in line and "row" in line for line in mended.lost)
    assert_mended(home, retired_lost=place == "catalog/retired.lance")
    if place.startswith("catalog") and shape != "missing":
        assert list((home / "quarantine").glob(f"catalog-{place.split('/')[1].removesuffix('.lance')}.*"))


def test_a_manifest_and_its_data_are_both_gone(template: Path, tmp_path: Path) -> None:
    """What was acknowledged last and only the catalog held is named; the rest is there."""
    home = copy_of(template, tmp_path)
    root = home / "catalog" / "records.lance"
    newest = max((root / "data").glob("*.lance"), key=lambda path: path.stat().st_mtime_ns)
    zero_out(newest)
    zero_out(newest_manifest(root))
    report = diagnose(home)
    assert [f.place for f in report.of("loss")] == ["catalog/records"]
    mended = repair(home)
    assert mended.after.ok and len(mended.lost) == 1 and newest.name in mended.lost[0]
    with Memory(home) as memory:
        assert [record.body["n"] for record in memory.records("note")] == [0, 1, 2]
        assert memory.records("decision/promote") == ()
    assert_mended(home)


@pytest.mark.parametrize("table", ["nodes", "records"])
def test_a_compaction_and_its_data_are_both_gone(template: Path, tmp_path: Path, table: str) -> None:
    """What it replaced was cleaned up, and left the ledger: that is said, and never taken for an empty table."""
    home = copy_of(template, tmp_path)
    with Memory(home) as memory:
        memory.care.maintain(grace_s=0, keep_versions_s=0, least=2)
        memory.care.maintain(grace_s=0, keep_versions_s=0, least=2)
    root = home / "catalog" / f"{table}.lance"
    for file in (root / "data").glob("*.lance"):
        zero_out(file)
    for version in manifest_versions(root):
        zero_out(manifest_path(root, version))
    found = diagnose(home)
    assert bool(found.of("loss")) == (table == "records"), found.findings
    assert [f for f in found.findings if f.place == f"catalog/{table}" and ".lance: bytes differ" in f.what]
    with Memory(home) as memory:
        assert {"rebuilt", "lost"} <= {entry.kind for entry in memory.recovered}
    mended = repair(home)
    assert mended.after.ok
    with Memory(home) as memory:
        assert len(memory.records("note")) == (0 if table == "records" else 3)
    assert_mended(home)
