"""The maintenance lane: one at a time, fenced, and a memory that stays small however long it is used."""

from pathlib import Path

import pytest

from numem.errors import LeaseHeldError, LeaseLostError
from numem.store import barrier
from numem.store.memory import Memory
from numem.store.upkeep.maintain import lane
from tests.store_fixtures import assert_readable, make_chain, payload, put, read_back, run_children


def test_one_maintainer_at_a_time(tmp_path: Path) -> None:
    """lance#7207: the lane cannot race with itself; epochs rise with each holder."""
    with Memory(tmp_path) as one, Memory(tmp_path) as two:
        put(one, make_chain(2))
        with lane(one._parts) as (first, fence):
            with pytest.raises(LeaseHeldError, match="another process maintains"):
                two.care.maintain()
            fence()
        second = two.care.maintain().epoch
        assert second == first + 1
        with pytest.raises(LeaseLostError):
            fence()


def test_a_lease_that_is_lost_stops_the_next_destructive_step(tmp_path: Path) -> None:
    """A newer epoch appears while this maintainer works: it changes nothing more, and nothing is lost."""
    chain = make_chain(6)
    with Memory(tmp_path) as memory:
        for entry in chain:
            put(memory, [entry])

        def take_over(step: str, what: str) -> None:
            if step == "committed" and what == "catalog/placements":
                (tmp_path / "locks" / "lease-maintenance.epoch").write_text("99 another\n")

        stop = barrier.observe(take_over)
        with pytest.raises(LeaseLostError):
            memory.care.compact(least=2, keep_versions_s=0)
        stop()
        versions = list((tmp_path / "catalog" / "nodes.lance" / "_versions").glob("*.manifest"))
        assert len(versions) == 7  # the nodes came later and were let be
        assert_readable(memory, chain)
        assert memory.care.maintain(least=2, keep_versions_s=0).epoch == 100
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)


def test_a_round_reports_what_it_gave_back(tmp_path: Path) -> None:
    """Bytes before and after, of the catalog and of the volumes; the ledger and the spool are kept small too."""
    kept, loose = make_chain(3, name="kept"), make_chain(9, seed=1, name="loose")
    with Memory(tmp_path) as memory:
        for entry in (*kept, *loose):
            put(memory, [entry])
        memory.create_branch("main", kept[-1][0].id, actor="test", reason="test")
    ledger = sum(path.stat().st_size for path in (tmp_path / "ledger").iterdir())
    with Memory(tmp_path) as memory:
        memory.promote([kept[0][0].id], "ssd")
        report = memory.care.maintain(retain_s=0, grace_s=0, keep_versions_s=0, least=2)
        assert report.collected.retired == 9
        assert report.collected.rewritten == 1
        assert report.payload_after < report.payload_before / 2
        assert report.catalog_after < report.catalog_before / 2
        assert report.ledger_saved > ledger / 2
        assert_readable(memory, kept)
        assert_readable(memory, kept[:1], "ssd")
        again = memory.care.maintain(retain_s=0, grace_s=0, keep_versions_s=0, least=2)
        assert (again.collected.retired, again.collected.removed, again.compacted.fragments) == (0, 0, {})
        assert again.payload_after == again.payload_before
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, kept)
        assert memory.verify().ok


def test_manifests_stay_bounded_over_many_commits(tmp_path: Path) -> None:
    """lance#7941, lance#5194, lance#6752, lance#3718: each commit rewrites the manifest, which compaction keeps short;
    a handle that slept through many versions and their clean-up still commits, and is seen."""
    sizes = []
    note = make_chain(1)
    with Memory(tmp_path) as memory, Memory(tmp_path) as sleeper:
        put(sleeper, note)
        for round_ in range(3):
            for number in range(40):
                memory.record("note", note[0][0].id, {"n": number + 40 * round_})
                memory.flush()
            versions = (tmp_path / "catalog" / "records.lance" / "_versions").glob("*.manifest")
            sizes.append(max(path.stat().st_size for path in versions))
            memory.care.maintain(keep_versions_s=0, least=16)
        assert max(sizes) < 1.5 * min(sizes)
        assert len(list((tmp_path / "catalog" / "records.lance" / "_versions").glob("*.manifest"))) == 1
        sleeper.record("note", note[0][0].id, {"n": -1})
        sleeper.flush()
        assert sorted(record.body["n"] for record in memory.records("note")) == list(range(-1, 120))


def test_a_handle_that_knows_only_the_old_place_of_a_piece_finds_the_new_one(tmp_path: Path) -> None:
    """lance#6607: a rewritten volume is gone under an open reader; it looks again before it blames anybody."""
    kept, loose = make_chain(2, name="kept"), make_chain(8, seed=1, name="loose")
    with Memory(tmp_path) as memory:
        put(memory, [*kept, *loose])
        memory.create_branch("main", kept[-1][0].id, actor="test", reason="test")
    with Memory(tmp_path) as reader, Memory(tmp_path) as memory:
        assert read_back(reader, kept[0][0], [70_000]) == kept[0][1]
        report = memory.care.maintain(retain_s=0, grace_s=0, keep_versions_s=0)
        assert report.collected.rewritten == 1
        for node, data in kept:
            assert read_back(reader, node, [70_000]) == data
        assert reader.stats().get("quarantined", 0) == 0
        assert reader.verify().ok


def _work(home: str, number: int) -> None:
    with Memory(home) as memory:
        for round_ in range(6):
            chain = make_chain(2, seed=10 * number + round_, name=f"{number}/{round_}")
            put(memory, chain)
            assert_readable(memory, chain)
            if number == 0:
                try:
                    memory.care.maintain(keep_versions_s=0, least=2, grace_s=0, dead_fraction=0.1)
                except LeaseHeldError:
                    continue


def test_maintenance_beside_running_writers(tmp_path: Path) -> None:
    """lance#7207: writers publish and read back while another compacts, collects and cleans up without any grace."""
    Memory(tmp_path).close()
    assert run_children(_work, [(str(tmp_path), number) for number in range(3)]) == [0, 0, 0]
    with Memory(tmp_path) as memory:
        for number in range(3):
            for round_ in range(6):
                assert_readable(memory, make_chain(2, seed=10 * number + round_, name=f"{number}/{round_}"))
        assert len(memory.nodes()) == 36
        assert memory.verify().ok
        assert memory.care.maintain(grace_s=0).collected.evicted == 0


def test_disk_overhead_of_dead_bytes_is_bounded(tmp_path: Path) -> None:
    """lance#7207: churn does not grow the store; bytes on disk stay near what is alive."""
    live = make_chain(1, nbytes=400_000, name="live")
    with Memory(tmp_path) as memory:
        put(memory, live)
        memory.create_branch("main", live[0][0].id, actor="test", reason="test")
        for round_ in range(4):
            put(memory, make_chain(4, nbytes=200_000, seed=round_, name=str(round_)))
            memory._parts.home.close_volume()
            report = memory.care.maintain(retain_s=0, grace_s=0, keep_versions_s=0)
            assert report.payload_after < 1.5 * len(payload(400_000, 0)) + 100_000
        assert_readable(memory, live)
