"""Archives: whole closed volumes on any fsspec filesystem, read by ranges, and the source of repairs."""

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from numem.errors import IntegrityError, NotFoundError, SchemeError, StoreError
from numem.store import barrier
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import State
from numem.store.memory import Memory, TierSpec
from numem.store.upkeep.archive import s3_options
from tests.s3_fixtures import Place
from tests.store_fixtures import assert_readable, die_at, flip, make_chain, put, run_children, sidecars

SIZE = 70_000


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The place of an archive."""
    if request.param == "file":
        yield str(tmp_path / "tape")
        return
    name = f"numem-{secrets.token_hex(8)}"
    yield f"memory://{name}"
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def open_with(home: Path, url: str, **more: Any) -> Memory:
    tiers: dict[str, str | TierSpec] = {
        "object": str(home / "object"),
        "archive": TierSpec(url, write="archive", **more),
    }
    return Memory(home, tiers=tiers)


def test_everything_is_read_from_the_archive_and_repaired_from_it(tmp_path: Path, url: str) -> None:
    """Archive, wipe the home tier, read everything, scrub, read everything from home; in a process of its own each."""
    chain = make_chain(5)
    home = tmp_path / "home"
    with open_with(home, url) as memory:
        put(memory, chain[:3])
        assert memory.care.archive().volumes == ()  # open volumes are never copied
        report = memory.care.archive(close=True)
        assert (report.volumes, report.held, report.failed) == (("local.w000.000001",), 0, {})
        put(memory, chain[3:])
        assert memory.care.archive(close=True).volumes == ("local.w000.000002",)
        again = memory.care.archive(close=True)
        assert (again.volumes, again.held) == ((), 2)
        assert [held.volume for held in memory.care.archived()] == ["local.w000.000001", "local.w000.000002"]
        assert memory.usage() == {"object": 5 * SIZE, "archive": 5 * SIZE}
        assert [place.tier for place in memory.placements(chain[0][0].pieces[0])] == ["object", "archive"]
        assert_readable(memory, chain, tier="archive")
    for volume in (home / "object").glob("*.lance"):
        shutil.rmtree(volume)
    with open_with(home, url) as memory:
        buffers = [bytearray(SIZE) for _ in chain]
        read = memory.read([(node.pieces[0], buffer) for (node, _), buffer in zip(chain, buffers, strict=True)])
        assert read.by_tier == {"archive": 5 * SIZE}
        assert [bytes(buffer) for buffer in buffers] == [data for _, (data,) in chain]
        assert not any(memory.durable(node.id) for node, _ in chain)
        scrubbed = memory.care.scrub()
        assert (scrubbed.repaired, scrubbed.unrepairable) == (5, {})
        assert all(memory.durable(node.id) for node, _ in chain)
        assert_readable(memory, chain, tier="object")
    with open_with(home, url) as memory:
        assert memory.care.scrub().ok
        assert_readable(memory, chain)


def test_a_volume_is_brought_back_file_by_file(tmp_path: Path, url: str) -> None:
    chain = make_chain(4)
    home = tmp_path / "home"
    with open_with(home, url) as memory:
        put(memory, chain)
        (volume,) = memory.care.archive(close=True).volumes
        before = {p.relative_to(home): p.read_bytes() for p in sidecars(home)}
        shutil.rmtree(home / "object" / f"{volume}.lance")
        (home / "object" / f"{volume}.volume").unlink()
    with open_with(home, url) as memory:
        assert_readable(memory, chain)
        assert memory.care.restore_volume(volume) == memory.care.archived()[0].nbytes
        assert_readable(memory, chain, tier="object")
        assert {p.relative_to(home): p.read_bytes() for p in sidecars(home)} == before
        with pytest.raises(NotFoundError, match="no volume local.w009"):
            memory.care.restore_volume("local.w009.000001")
    with open_with(home, url) as memory:
        # Nobody goes on with it: what is published next goes elsewhere.
        more = make_chain(1, seed=7, name="more")
        put(memory, more)
        assert memory.placements(more[0][0].pieces[0])[0].volume != volume
        assert {p.relative_to(home): p.read_bytes() for p in sidecars(home) if volume in str(p)} == before
        assert memory.verify().ok


def test_a_closed_volume_stays_closed_in_the_next_process(tmp_path: Path) -> None:
    """An archived volume is never appended to, though it is small and nothing was published since."""
    chain = make_chain(4)
    with open_with(tmp_path, str(tmp_path / "tape")) as memory:
        put(memory, chain[:2])
        (volume,) = memory.care.archive(close=True).volumes
        assert memory.care.close_volumes() == ()  # the next one is empty
    with open_with(tmp_path, str(tmp_path / "tape")) as memory:
        put(memory, chain[2:])
        assert memory.placements(chain[0][0].pieces[0])[0].volume == volume
        assert memory.placements(chain[3][0].pieces[0])[0].volume > volume


def _files(root: Path, suffix: str = "") -> list[Path]:
    return sorted(path for path in root.rglob(f"*{suffix}") if path.is_file())


def test_a_bad_copy_in_the_archive_is_found_and_made_anew(tmp_path: Path) -> None:
    chain = make_chain(3)
    home, tape = tmp_path / "home", tmp_path / "tape"
    with open_with(home, str(tape)) as memory:
        put(memory, chain)
        (volume,) = memory.care.archive(close=True).volumes
        (path,) = _files(tape, ".blob")
        flip(path, 100)
        with pytest.raises(IntegrityError):
            memory.care.restore_volume(volume)
        report = memory.care.scrub(tier="archive")
        assert [(bad.tier, bad.content) for bad in report.bad] == [("archive", chain[0][0].pieces[0])]
        assert "archive it again" in report.unrepairable[chain[0][0].pieces[0]]
        assert [place.tier for place in memory.placements(chain[0][0].pieces[0])] == ["object"]
        assert memory.care.archive().volumes == (volume,)
        assert [place.tier for place in memory.placements(chain[0][0].pieces[0])] == ["object", "archive"]
        assert memory.care.scrub(tier="archive").ok
        assert_readable(memory, chain, tier="archive")


def test_an_archive_that_lost_everything_gives_typed_errors(tmp_path: Path) -> None:
    """lmcache#4745: deleted out of band; a miss both times, the second without a wrong hit."""
    chain = make_chain(2)
    home, tape = tmp_path / "home", tmp_path / "tape"
    with open_with(home, str(tape)) as memory:
        put(memory, chain)
        memory.care.archive(close=True)
        shutil.rmtree(tape)
        for path in sidecars(home / "object"):
            path.unlink()
        for _ in range(2):
            for node, _data in chain:
                with pytest.raises(IntegrityError, match=node.pieces[0].hex()):
                    memory.read([(node.pieces[0], bytearray(SIZE))])
        assert not any(memory.available(node.id) for node, _ in chain)


def _archive_and_die(home: Path, tape: Path, nth: int) -> None:
    die_at("archived file", nth)
    with open_with(home, str(tape)) as memory:
        memory.care.archive(close=True)


@pytest.mark.crash
def test_a_crashed_copy_is_completed(tmp_path: Path) -> None:
    """No record, no archive: what the dead process copied is compared and kept, the rest is made."""
    chain = make_chain(3)
    home, tape = tmp_path / "home", tmp_path / "tape"
    with open_with(home, str(tape)) as memory:
        put(memory, chain)
    assert run_children(_archive_and_die, [(home, tape, 2)]) == [-9]
    copied = _files(tape)
    assert copied and not _files(tape, ".manifest")
    flip(copied[0], 0)  # and a torn file is made anew
    kept = {path: path.stat().st_mtime_ns for path in copied[1:]}
    with open_with(home, str(tape)) as memory:
        assert memory.care.archived() == ()
        assert len(memory.care.archive().volumes) == 1
        assert_readable(memory, chain, tier="archive")
    assert {path: path.stat().st_mtime_ns for path in copied[1:]} == kept
    assert not _files(tape, ".tmp")


def test_the_manifest_is_copied_last(tmp_path: Path) -> None:
    chain = make_chain(2)
    order: list[str] = []
    with open_with(tmp_path / "home", str(tmp_path / "tape")) as memory:
        put(memory, chain[:1])
        put(memory, chain[1:])
        stop = barrier.observe(lambda step, what: order.append(what) if step == "archived file" else None)
        memory.care.archive(close=True)
        stop()
    assert len(order) == 5 and [".manifest" in name for name in order] == [False] * 4 + [True]
    # fsspec and Lance read the same volume.
    identity = json.loads((tmp_path / "home" / "numem.json").read_text())["id"]
    assert all(f"/{identity}/object/local.w000.000001.lance/" in name for name in order)


@pytest.mark.parametrize(
    "bad",
    [
        "http://host/x",
        "simplecache::s3://b/x",
        "s3://key:secret@bucket/x",
        "memory://a?x=1",
        "hf://datasets/x",
        "s3://",
        "",
    ],
)
def test_archives_lie_on_allowed_schemes_only(tmp_path: Path, bad: str) -> None:
    """fsspec#639: no chaining, no cache in between, no credentials in a URL; nothing was written."""
    with pytest.raises(SchemeError):
        open_with(tmp_path / "home", bad)
    assert not (tmp_path / "home").exists()


def test_an_archive_lies_apart_from_the_tiers(tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="lies inside"):
        open_with(tmp_path, str(tmp_path / "object" / "tape"))
    with Memory(tmp_path) as memory, pytest.raises(NotFoundError, match="no archive 'archive'"):
        memory.care.archive()


def test_options_of_lance_serve_for_s3fs() -> None:
    options = {
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_endpoint": "http://127.0.0.1:1",
        "allow_http": "true",
        "aws_region": "r",
        "aws_virtual_hosted_style_request": "false",
    }
    assert s3_options(options) == {
        "key": "k",
        "secret": "s",
        "endpoint_url": "http://127.0.0.1:1",
        "client_kwargs": {"region_name": "r"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }


@pytest.mark.s3
def test_an_archive_on_s3_from_a_local_home_and_from_a_home_on_s3(s3: Place) -> None:
    """Replicate by s3fs, wipe the home tier, read from S3, compare; then from a home on S3 to a local archive."""
    chain = make_chain(3)
    home = s3.local / "home"
    with open_with(home, f"{s3.url}/tape", options=s3.options) as memory:
        put(memory, chain)
        assert memory.care.archive(close=True).failed == {}
        for volume in (home / "object").glob("*.lance"):
            shutil.rmtree(volume)
        buffer = bytearray(SIZE)
        assert memory.read([(chain[0][0].pieces[0], buffer)]).by_tier == {"archive": SIZE}
        assert bytes(buffer) == chain[0][1][0]
        assert memory.care.scrub().repaired == 3
        assert_readable(memory, chain, tier="object")
    tiers = {"object": f"{s3.url}/object", "archive": TierSpec(s3.local / "tape", write="archive")}
    with s3.open(tiers=tiers) as memory:
        put(memory, chain)
        report = memory.care.archive(close=True)
        assert report.failed == {} and len(report.volumes) == 1
        assert_readable(memory, chain, tier="archive")
        objects = s3.objects("object")
        objects.delete([listed.name for listed in objects.listing() if listed.name.endswith(".blob")])
        for _ in range(2):
            assert_readable(memory, chain)  # 404 out of band: from the archive, both times
        assert memory.care.restore_volume(report.volumes[0]) > 0
        assert_readable(memory, chain, tier="object")


def test_a_volume_with_evicted_pieces_is_not_brought_back(tmp_path: Path) -> None:
    """What was let go of on purpose stays gone."""
    chain = make_chain(2)
    with open_with(tmp_path / "home", str(tmp_path / "tape")) as memory:
        put(memory, chain)
        (volume,) = memory.care.archive(close=True).volumes
        place = memory.placements(chain[0][0].pieces[0])[0]
        parts = memory._parts
        parts.catalog.append(Facts(placements=[place.turned(parts.clock.next(), State.EVICTED, "test")]))
        assert [p.tier for p in memory.placements(chain[0][0].pieces[0])] == ["archive"]
        assert_readable(memory, chain)
        with pytest.raises(StoreError, match="let go of"):
            memory.care.restore_volume(volume)


def test_forgetting_names_the_archived_volumes(tmp_path: Path) -> None:
    """An archive is never changed: the report says where the bytes still are, and no read or scrub brings them back."""
    chain = make_chain(2)
    with open_with(tmp_path / "home", str(tmp_path / "tape")) as memory:
        put(memory, chain)
        (volume,) = memory.care.archive(close=True).volumes
        report = memory.care.forget(ids=[chain[1][0].id], actor="test", reason="test")
        assert [line for line in report.unreached if volume in line] == [
            f"archive/{volume}: an archived volume holds it; delete it there"
        ]
        with pytest.raises(NotFoundError):
            memory.read([(chain[1][0].pieces[0], bytearray(SIZE))])
        assert memory.care.scrub().unrepairable == {}
        with pytest.raises(StoreError):
            memory.care.restore_volume(volume)
        assert_readable(memory, chain[:1])
