"""Scrubbing: every copy is compared with its content id, bad ones are quarantined and made anew from good ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from numem.errors import IntegrityError, NotFoundError
from numem.store.memory import Memory, Placement
from numem.store.reading import runs
from numem.store.reading.reader import Reader
from numem.store.upkeep import scrub
from tests.store_fixtures import assert_readable, flip, make_chain, make_node, payload, put, read_back, sidecars

SIZE = 70_000
PADDED = 73_728

DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path, 1234, 5),
    "truncated": lambda path: os.truncate(path, 4096),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "zero-filled": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("where", ["object", "nodes"])
def test_a_damaged_copy_is_made_anew_from_the_other_tier(tmp_path: Path, damage: str, where: str) -> None:
    """vllm#49176, mooncake#3465, lmcache#4745: home from ssd, and ssd from home; afterwards every copy is good."""
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain])
    (path,) = sidecars(tmp_path / where)
    DAMAGE[damage](path)
    with Memory(tmp_path) as memory:
        report = memory.care.scrub()
        bad = 1 if damage == "flipped" else 3
        tier = "object" if where == "object" else "ssd"
        assert (report.checked, report.bytes, report.repaired, report.whole) == (6, 6 * SIZE, bad, True)
        assert [found.tier for found in report.bad] == [tier] * bad
        assert (report.unrepairable, report.damaged, report.ok) == ({}, {}, True)
        assert_readable(memory, chain, tier="object")
        assert_readable(memory, chain, tier="ssd")
        again = memory.care.scrub()
        assert (again.checked, again.bad, again.repaired) == (6, (), 0)
    with Memory(tmp_path) as memory:
        assert memory.verify().ok
        assert all(memory.durable(node.id) for node, _ in chain)


def test_what_has_no_good_copy_is_named(tmp_path: Path) -> None:
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        (path,) = sidecars(tmp_path / "object")
        flip(path, PADDED + 10)
        report = memory.care.scrub()
        assert [found.content for found in report.bad] == list(chain[1][0].pieces)
        assert list(report.unrepairable) == list(chain[1][0].pieces)
        assert "recompute" in report.unrepairable[chain[1][0].pieces[0]]
        assert not report.ok
        with pytest.raises(IntegrityError):
            read_back(memory, chain[1][0], [SIZE])
        assert put(memory, chain).stored == 1
        assert memory.care.scrub().ok
        assert_readable(memory, chain)


def test_what_a_read_found_bad_is_mended_by_the_next_scrub(tmp_path: Path) -> None:
    """lmcache#4945: quarantined by a read that fell back; the scrub mends it without finding it again."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain])
        (path,) = sidecars(tmp_path / "nodes")
        flip(path, 10)
        buffer = bytearray(SIZE)
        assert memory.read([(chain[0][0].pieces[0], buffer)]).by_tier == {"object": SIZE}
        report = memory.care.scrub(repair=False)
        assert (report.checked, report.bad, report.repaired) == (3, (), 0)
        report = memory.care.scrub(tier="ssd")
        assert (report.checked, report.bad, report.repaired) == (1, (), 1)
        assert_readable(memory, chain, tier="ssd")


def test_a_budget_goes_on_where_the_last_scrub_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest verdict is renewed first, across calls and processes."""
    chain = make_chain(6)
    seen: list[bytes] = []
    original = Reader.read_replica

    def watched(self: Reader, placement: Placement, view: memoryview) -> str:
        seen.append(placement.content)
        return original(self, placement, view)

    monkeypatch.setattr(Reader, "read_replica", watched)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    order = [node.pieces[0] for node, _ in chain]
    for calls in (2, 3):
        with Memory(tmp_path) as memory:
            for _ in range(calls):
                report = memory.care.scrub(tier="object", budget_bytes=2 * SIZE)
                assert (report.checked, report.bytes, report.whole) == (2, 2 * SIZE, False)
    assert seen == order + order[:4]
    with Memory(tmp_path) as memory:
        # A budget below one piece still looks at one; no time looks at none.
        assert memory.care.scrub(tier="object", budget_bytes=1).checked == 1
        assert memory.care.scrub(tier="object", budget_s=0.0).checked == 0
        assert memory.care.scrub(tier="object").whole


def test_blake3_decides_where_the_checksum_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain])
        (path,) = sidecars(tmp_path / "nodes")
        flip(path, 10)
        wanted = memory.placements(chain[0][0].pieces[0])[0].xxh3
        monkeypatch.setattr(runs, "checksum", lambda view: wanted)
        report = memory.care.scrub(tier="ssd", repair=False)
        assert chain[0][0].pieces[0] in {found.content for found in report.bad if found.reason == scrub.WRONG}


def test_a_bit_flipped_anywhere_in_a_volume_is_never_served(tmp_path: Path) -> None:
    """Every file of the home tier, at its start, middle and end, through a read, promotion and scrub."""
    data = [payload(SIZE, 1), payload(300, 2), payload(500, 3), payload(66_000, 4)]
    node = make_node(data)
    with Memory(tmp_path) as memory:
        put(memory, [(node, data)])
    files = sorted(path for path in (tmp_path / "object").rglob("*") if path.is_file())
    assert {path.suffix for path in files} >= {".blob", ".lance", ".manifest", ".volume"}
    for path in files:
        whole = path.read_bytes()
        for offset in sorted({0, len(whole) // 2, len(whole) - 1}):
            flip(path, offset, 2)
            with Memory(tmp_path, read_only=True) as memory:
                for content, expected in zip(node.pieces, data, strict=True):
                    buffer = bytearray(len(expected))
                    try:
                        memory.read([(content, buffer)])
                    except IntegrityError:
                        continue
                    assert bytes(buffer) == expected
            path.write_bytes(whole)
    with Memory(tmp_path) as memory:
        assert memory.care.scrub().bad == ()


def test_a_volume_that_lance_cannot_open_is_named(tmp_path: Path) -> None:
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id])
        for path in (tmp_path / "nodes").rglob("*.manifest"):
            path.write_bytes(b"")
        report = memory.care.scrub()
        (name,) = report.damaged
        assert name.startswith("ssd@local/local.w000.")
        assert report.bad == () and not report.ok  # its sidecars are good all the same
        with pytest.raises(NotFoundError, match="no tier 'tape'"):
            memory.care.scrub(tier="tape")


@pytest.mark.parametrize("maintained", [False, True])
def test_a_tier_that_was_away_is_whole_again_once_it_is_back(tmp_path: Path, maintained: bool) -> None:
    """The disk was not mounted: verification and a scrub found every copy missing; maintenance must not make that true."""
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    (tmp_path / "object").rename(tmp_path / "away")
    (tmp_path / "object").mkdir()
    with Memory(tmp_path) as memory:
        assert not memory.verify().ok
        report = memory.care.scrub()
        assert not report.ok
        if maintained:
            memory.care.maintain(grace_s=0, keep_versions_s=0)
    (tmp_path / "object").rmdir()
    (tmp_path / "away").rename(tmp_path / "object")
    with Memory(tmp_path) as memory:
        memory.care.maintain(grace_s=0, keep_versions_s=0, least=1)
        report = memory.care.scrub()
        assert report.repaired == (0 if maintained else 4)  # compaction forgot them, so that opening adopted them
        assert report.ok
        assert_readable(memory, chain)
        assert memory.verify().ok
        assert memory.care.scrub().repaired == 0
    with Memory(tmp_path) as memory:
        assert_readable(memory, chain)
