"""The doctor of a memory: volumes, sidecars, work that was cut short, foreign files, object stores."""

import os
import shutil
from pathlib import Path

import pytest

from numem.store.catalog import catalog
from numem.store.config import TierSpec
from numem.store.memory import Memory
from numem.store.payload.manifests import manifest_path, manifest_versions
from numem.store.upkeep import recovery
from numem.store.upkeep.doctor import DoctorReport, Severity, diagnose, repair
from tests.doctor_fixtures import (
    CHAINS,
    HEAD,
    assert_mended,
    copy_of,
    serves_nothing_wrong,
    template,
    zero_out,
)
from tests.s3_fixtures import Place
from tests.store_fixtures import (
    assert_readable,
    die_at,
    flip,
    make_chain,
    put,
    run_children,
    sidecars,
)

__all__ = ["template"]


def test_a_volume_whose_manifests_are_all_gone(template: Path, tmp_path: Path) -> None:
    """It is made anew from the ledger; without a ledger its pieces are copied to another volume."""
    for with_ledger in (True, False):
        home = copy_of(template, tmp_path / str(with_ledger))
        (root,) = (home / "object").glob("*.lance")
        for version in manifest_versions(root):
            zero_out(manifest_path(root, version))
        if not with_ledger:
            shutil.rmtree(home / "ledger")
        assert diagnose(home).of("repairable")
        mended = repair(home)
        assert mended.ok, mended
        assert_mended(home)
        for table in ("nodes", "placements"):  # the volumes hold everything still
            shutil.rmtree(home / "catalog" / f"{table}.lance")
        with Memory(home) as memory:
            for chain in CHAINS:
                assert_readable(memory, chain)


def test_sidecars_that_are_gone(template: Path, tmp_path: Path) -> None:
    """lance#52-like zero-length and short objects: a copy elsewhere mends it, without one the nodes are named."""
    home = copy_of(template, tmp_path)
    near = sidecars(home / "nodes")
    os.truncate(near[0], 100)
    (finding,) = diagnose(home).findings
    assert (finding.severity, finding.place.split("/")[0]) == (Severity.REPAIRABLE, "ssd@local")
    assert repair(home).ok
    assert_mended(home)
    sidecars(home / "object")[1].unlink()  # the second commit
    report = diagnose(home)
    lost = {f.place for f in report.of("loss")}
    assert lost >= {f"node {node.id.hex()}" for node, _ in CHAINS[1]}
    mended = repair(home)
    assert not mended.ok and len(mended.lost) == 2
    assert {f.place for f in mended.after.findings} == {f"node {node.id.hex()}" for node, _ in CHAINS[1]}
    serves_nothing_wrong(home, CHAINS)
    with Memory(home) as memory:
        put(memory, CHAINS[1])
    assert_mended(home)


def test_what_an_archive_holds_is_not_lost(tmp_path: Path) -> None:
    """A home tier that was wiped is made anew from the archive; a healthy archived memory has no findings."""
    tiers: dict[str, str | TierSpec] = {
        "object": str(tmp_path / "object"),
        "tape": TierSpec(str(tmp_path / "tape"), write="archive"),
    }
    home = tmp_path / "home"
    with Memory(home, tiers=tiers) as memory:
        put(memory, CHAINS[0])
        memory.care.archive("tape", close=True)
    assert diagnose(home, tiers=tiers).findings == ()
    shutil.rmtree(tmp_path / "object")
    report = diagnose(home, tiers=tiers)
    assert [f.severity for f in report.findings] == ["repairable"], report.findings
    mended = repair(home, tiers=tiers)
    assert mended.ok, mended
    shutil.rmtree(tmp_path / "tape")
    with Memory(home, tiers=tiers) as memory:
        assert_readable(memory, CHAINS[0], tier="object")


def test_a_deletion_that_was_cut_short_is_ended(template: Path, tmp_path: Path) -> None:
    """Killed between the facts and the files: nothing of it is visible, the doctor knows, repair takes it from the files."""
    home = copy_of(template, tmp_path)
    run_children(_forget_until, [(str(home), "committed catalog/placements")])
    assert "were to be forgotten" in diagnose(home).of("repairable")[0].what
    mended = repair(home)
    assert mended.ok and "2 forgotten nodes" in {entry.detail for entry in mended.done}
    with Memory(home) as memory:
        assert {node.id for node in memory.nodes()} == {node.id for chain in CHAINS[1:] for node, _ in chain}
        assert memory.branches() == () and memory.verify().ok
    secret = CHAINS[0][0][1][0][:64]
    assert not [path for path in home.rglob("*") if path.is_file() and secret in path.read_bytes()]


def _forget_until(home: str, step: str) -> None:
    memory = Memory(home)
    die_at(step)
    memory.care.forget(ids=[HEAD], actor="test", reason="test")


def test_a_flipped_bit_of_payload_is_scrubbed(template: Path, tmp_path: Path) -> None:
    """Diagnosis reads no payload; repair does, and makes the copy anew from the other tier."""
    home = copy_of(template, tmp_path)
    flip(sidecars(home / "nodes")[0], 5000)
    assert diagnose(home).ok
    mended = repair(home)
    assert mended.ok and mended.done[-1].detail == "1 bad copies quarantined, 1 made anew"
    assert_mended(home)


def _publish_until(home: str, step: str) -> None:
    memory = Memory(home)
    die_at(step)
    put(memory, make_chain(2, seed=7, name="cut"))


def test_commits_that_the_catalog_does_not_know(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lance#8942, lance#7207: uncatalogued commits are adopted, files of none are swept after the grace, not before."""
    home = copy_of(template, tmp_path)
    run_children(_publish_until, [(str(home), "payload durable")])
    assert [f.what[:9] for f in diagnose(home).of("repairable")] == ["1 commits"]
    mended = repair(home)
    assert mended.ok and "adopted" in {entry.kind for entry in mended.done}
    with Memory(home) as memory:
        assert_readable(memory, make_chain(2, seed=7, name="cut"))
    assert_mended(home)
    other = copy_of(template, tmp_path / "other")
    run_children(_publish_until, [(str(other), "written object")])
    report = diagnose(other)
    assert report.ok and "commits under way" in report.findings[0].what
    assert not [entry for entry in repair(other).done if entry.kind == "swept"]
    monkeypatch.setattr(recovery, "ORPHAN_GRACE_S", 0.0)
    assert "never happened" in diagnose(other).of("repairable")[0].what
    assert [entry.kind for entry in repair(other).done] == ["swept"]
    assert_mended(other)


def test_spool_ledger_foreign_files_and_claims(template: Path, tmp_path: Path) -> None:
    """lance#5294: what is not numem's is reported and left alone."""
    home = copy_of(template, tmp_path)
    with Memory(home) as memory:
        for node, data in make_chain(3, seed=4, name="staged"):
            memory.stage(node, data)
        memory.residency.pin([HEAD], owner="brief", ttl_s=1e-6)
    staged = sorted((home / "spool").glob("*.stage"))
    os.truncate(staged[0], 30)
    (home / "spool" / ".0123.tmp").write_bytes(b"half")
    (home / "spool" / "notes.txt").write_bytes(b"mine")
    (home / "catalog" / "mine.txt").write_bytes(b"mine")
    (home / "object" / "mine.txt").write_bytes(b"mine")
    (volume,) = (home / "object").glob("*.lance")
    (volume / "data" / "holiday.jpg").write_bytes(b"jpg")
    with open(next((home / "ledger").iterdir()), "ab") as file:
        file.write(b'\n0123456789abcdef {"dataset":"catal')
    report = diagnose(home)
    assert [f.place for f in report.findings if f.severity != "note"] == [f"spool/{staged[0].stem}"]
    notes = [(f.place.split("/")[0], f.what) for f in report.of("note")]
    assert ("catalog", "1 pins ended") in notes
    assert sum("not numem's" in what for _, what in notes) == 4
    assert sum("torn" in what for _, what in notes) == 1
    assert (report.staged, report.ok) == (2, False)
    mended = repair(home)
    assert mended.after.ok and len(mended.lost) == 1 and staged[0].stem in mended.lost[0]
    assert len(list((home / "quarantine").glob(f"{staged[0].name}.*"))) == 1
    for path in (home / "catalog" / "mine.txt", home / "object" / "mine.txt", volume / "data" / "holiday.jpg"):
        assert path.exists()


def test_rows_that_stand_twice_and_versions_that_were_not_acknowledged(template: Path, tmp_path: Path) -> None:
    """lance#8949: readers do not care, the doctor says so, and maintenance drops them."""
    home = copy_of(template, tmp_path)
    with Memory(home) as memory:
        memory._parts.catalog.append(catalog.Facts(nodes=[CHAINS[0][0][0]]))
    report = diagnose(home)
    assert [f.what.split(":")[0] for f in report.findings] == ["1 causal ids stand there twice"]
    with Memory(home) as memory:
        assert len(memory.nodes()) == 6
        memory.care.maintain(grace_s=0, keep_versions_s=0, least=2)
    assert diagnose(home).findings == ()
    run_children(_publish_until, [(str(home), "committed catalog/nodes")])
    (finding,) = diagnose(home).findings
    assert (finding.severity, finding.place) == ("note", "catalog/nodes") and "not in the ledger" in finding.what
    with Memory(home) as memory:
        assert_readable(memory, make_chain(2, seed=7, name="cut"))


def _newest(place: Place, table: str) -> str:
    return min(name for name in place.names() if f"/{table}.lance/_versions/" in name and name.endswith(".manifest"))


@pytest.mark.s3
def test_a_memory_on_s3(s3: Place) -> None:
    """A damaged newest manifest there is a RecoveryError that names the doctor, never garbage or a silent older state;
    repair steps back, says which commit that cost, and takes the facts from the volumes."""
    from numem.errors import RecoveryError

    def examine() -> DoctorReport:
        return diagnose(s3.url, node="n1", local=s3.local / "n1", storage_options=s3.options)

    with s3.open() as memory:
        for chain in CHAINS[:2]:
            put(memory, chain)
        memory.record("note", HEAD, {"n": 1})
    assert examine().findings == ()
    objects = s3.objects()
    for table in ("nodes", "placements"):
        name = _newest(s3, table)
        whole = objects.read(name)
        for bad in (b"", bytes(len(whole)), whole[: len(whole) // 2], b"x" * len(whole)):
            objects.replace(name, bad, objects.fetch(name).mark)
            with pytest.raises(RecoveryError, match="doctor"):
                s3.open()
        assert [f.place for f in examine().of("repairable")][:1] == [f"catalog/{table}"]
        mended = repair(s3.url, node="n1", local=s3.local / "n1", storage_options=s3.options)
        assert mended.after.ok, mended.after.findings
        assert len(mended.lost) == 1 and mended.lost[0].startswith(f"catalog/{table}")
        assert list((s3.local / "n1" / "quarantine").glob(f"catalog-{table}.*"))
        with s3.open() as memory:
            for chain in CHAINS[:2]:
                assert_readable(memory, chain)
    blob = next(name for name in s3.names() if name.endswith(".blob"))
    objects.delete([blob])
    assert len([f for f in examine().of("loss") if f.place.startswith("node ")]) == 2
