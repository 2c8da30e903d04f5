"""Reads: verified before they return; a bad replica is quarantined with its reason and the next one is tried."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem.errors import InputError, IntegrityError, NotFoundError
from numem.state.node import Node
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import State
from numem.store.memory import Memory
from numem.store.payload import sidecar, volume
from numem.store.reading import runs
from tests.store_fixtures import assert_readable, flip, make_chain, make_node, payload, put, read_back, sidecars

Chain = list[tuple[Node, list[bytes]]]


def test_many_pieces_are_all_right(tmp_path: Path) -> None:
    """lmcache#5151: 1, 64, 127, 128, 129 and 300 chunks, compared as bytes."""
    chain = make_chain(300, nbytes=66_000)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        for count in (1, 64, 127, 128, 129, 300):
            buffers = np.zeros((count, 66_000), np.uint8)
            order = list(range(count))[::-1]
            report = memory.read([(chain[n][0].pieces[0], buffers[n]) for n in order])
            assert (report.bytes, report.by_tier, report.quarantined) == (
                count * 66_000,
                {"object": count * 66_000},
                (),
            )
            assert all(buffers[n].tobytes() == chain[n][1][0] for n in range(count))


def test_small_pieces_of_one_bundle_are_read_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lance#8831: the number of requests is bounded; neighbours are read by one call."""
    data = [payload(500 + n, n) for n in range(200)]
    node = make_node(data)
    with Memory(tmp_path) as memory:
        put(memory, [(node, data)])
        read_back(memory, node, [len(d) for d in data])
        calls: list[int] = []
        original = sidecar.SidecarFiles.read_into

        def counted(self: sidecar.SidecarFiles, path: Path, offset: int, buffers: Sequence[Any]) -> int:
            calls.append(len(buffers))
            return original(self, path, offset, buffers)

        monkeypatch.setattr(sidecar.SidecarFiles, "read_into", counted)
        assert read_back(memory, node, [len(d) for d in data]) == data
        assert calls == [200]


def test_buffers_of_torch_and_numpy_are_filled_in_place(tmp_path: Path) -> None:
    """Straight into the caller's memory; anything that cannot take exactly the piece's bytes is refused."""
    data = payload(4 * 1024, 1)
    node = make_node([data])
    (content,) = node.pieces
    with Memory(tmp_path) as memory:
        put(memory, [(node, [data])])
        tensor = torch.zeros(2, 512, dtype=torch.float32)
        memory.read([(content, tensor.numpy())])
        assert tensor.numpy().tobytes() == data
        half = torch.zeros(2048, dtype=torch.bfloat16)
        memory.read([(content, half.view(torch.uint8).numpy().data)])
        assert half.view(torch.uint8).numpy().tobytes() == data
        for wrong in (bytearray(4095), bytearray(4097), bytes(4096), np.zeros(8192, np.uint8)[::2]):
            with pytest.raises(InputError):
                memory.read([(content, wrong)])


def _one(memory: Memory, chain: Chain, number: int) -> bytes:
    (data,) = read_back(memory, chain[number][0], [70_000])
    return data


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path, 73_728 + 1234, 3),
    "truncated": lambda path: os.truncate(path, 73_728 + 4096),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "zero-filled": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_payload_file_is_a_miss_and_is_repaired_by_publishing_again(tmp_path: Path, damage: str) -> None:
    """vllm#49176, lmcache#2420, lmcache#1981, mooncake#3465, vmlx-swift#217, seed cases 33 and 34: never served, never
    a crash, reported unavailable afterwards, written anew when it is recomputed."""
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    (path,) = sidecars(tmp_path / "object")
    DAMAGE[damage](path)
    with Memory(tmp_path) as memory:
        assert memory.available(chain[1][0].id)
        with pytest.raises(IntegrityError, match=chain[1][0].pieces[0].hex()):
            _one(memory, chain, 1)
        assert not memory.available(chain[1][0].id)
        with pytest.raises(IntegrityError, match="no good replica"):
            _one(memory, chain, 1)
        good = [number for number in (0, 2) if damage == "flipped" or (damage, number) == ("truncated", 0)]
        for number in (0, 2):
            if number in good:
                assert _one(memory, chain, number) == chain[number][1][0]
            else:
                with pytest.raises(IntegrityError):
                    _one(memory, chain, number)
    with Memory(tmp_path) as memory:
        # The verdict is a fact: it outlives the process, with its reason.
        assert not memory.available(chain[1][0].id)
        with pytest.raises(IntegrityError, match="recompute it"):
            _one(memory, chain, 1)
        report = memory.verify()
        assert not report.ok
        assert set(report.missing) == {chain[n][0].id for n in range(3) if n not in good}
        assert put(memory, chain).stored == 3 - len(good)
        assert_readable(memory, chain)
        assert memory.verify().ok
    with Memory(tmp_path) as memory:
        assert_readable(memory, chain)


def test_short_reads_of_the_file_system_are_completed_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mooncake commit a16e042 (#3066, #3073): a short read is never taken for a full one."""
    chain = make_chain(3)
    original = os.preadv
    with Memory(tmp_path) as memory:
        put(memory, chain)
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at, *flags: original(fd, [buffers[0][:777]], at, *flags))
        assert_readable(memory, chain)
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at, *flags: 0)
        with pytest.raises(IntegrityError, match="too early"):
            _one(memory, chain, 0)


def test_where_positioned_reads_disagree_lance_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar's path is an internal of Lance: were it to change, reads go through Lance's own reader, verified."""
    chain = make_chain(3)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        assert read_back(memory, chain[0][0], [70_000]) == chain[0][1]
    monkeypatch.setattr(volume, "sidecar_name", lambda file, blob: f"data/{file}.elsewhere")
    with Memory(tmp_path) as memory:
        buffers = np.zeros((3, 70_000), np.uint8)
        report = memory.read([(node.pieces[0], buffers[n]) for n, (node, _) in enumerate(chain)])
        assert report.fallbacks == 3
        assert [row.tobytes() for row in buffers] == [data for _, (data,) in chain]
        assert report.quarantined == ()


def test_promotion_copies_verified_bytes_to_the_nodes_own_tier(tmp_path: Path) -> None:
    """Promotion: ssd before object, repeated promotion satisfied, multi-piece nodes included."""
    data = [payload(70_000, 1), payload(500, 2), payload(90_000, 3)]
    chain = [(make_node(data), data)]
    with Memory(tmp_path, node="a") as memory:
        put(memory, chain)
        ids = [chain[0][0].id]
        report = memory.promote(ids)
        assert (report.promoted, report.satisfied, report.bytes, report.failed) == (3, 0, 160_500, {})
        again = memory.promote(ids)
        assert (again.promoted, again.satisfied) == (0, 3)
        assert [place.tier for place in memory.placements(chain[0][0].pieces[0])] == ["ssd", "object"]
        assert memory.available(ids[0], "ssd")
        assert_readable(memory, chain, tier="ssd")
        buffers = [bytearray(len(d)) for d in data]
        report_read = memory.read(list(zip(chain[0][0].pieces, buffers, strict=True)))
        assert report_read.by_tier == {"ssd": 160_500}
        assert memory.usage() == {"object": 160_500, "ssd": 160_500}
    with Memory(tmp_path, node="b") as memory:
        # Another node shares the home tier, not the ssd of node a.
        assert [place.tier for place in memory.placements(chain[0][0].pieces[0])] == ["object"]
        assert not memory.available(ids[0], "ssd")
        assert memory.promote(ids).promoted == 3
        assert_readable(memory, chain, tier="ssd")


def test_a_bad_nearest_replica_is_replaced_by_the_next(tmp_path: Path) -> None:
    """seed case 59, vllm#49176: quarantine with the reason, then the next replica; promotion mends the tier."""
    chain = make_chain(3)
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote(ids)
    (path,) = sidecars(tmp_path / "nodes")
    flip(path, 100)
    with Memory(tmp_path) as memory:
        buffers = np.zeros((3, 70_000), np.uint8)
        report = memory.read([(node.pieces[0], buffers[n]) for n, (node, _) in enumerate(chain)])
        assert report.by_tier == {"ssd": 140_000, "object": 70_000}
        (bad,) = report.quarantined
        assert (bad.content, bad.tier) == (chain[0][0].pieces[0], "ssd")
        assert bad.reason == "bytes differ from their xxh3-128"
        assert [row.tobytes() for row in buffers] == [data for _, (data,) in chain]
        assert memory.read([(chain[0][0].pieces[0], bytearray(70_000))]).quarantined == ()
        assert memory.promote(ids).promoted == 1
        assert_readable(memory, chain, tier="ssd")


def test_promotion_from_a_bad_source_fails_with_a_reason(tmp_path: Path) -> None:
    """seed case 59: failed, nothing ready, the error names what did not verify; a later success clears it."""
    chain = make_chain(3)
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path) as memory:
        put(memory, chain)
    (path,) = sidecars(tmp_path / "object")
    flip(path, 100)
    with Memory(tmp_path) as memory:
        report = memory.promote(ids)
        assert report.promoted == 2
        assert list(report.failed) == [chain[0][0].pieces[0].hex()]
        assert "xxh3" in report.failed[chain[0][0].pieces[0].hex()]
        assert not memory.available(ids[0])
        assert memory.available(ids[1], "ssd")
        assert put(memory, chain).stored == 1
        assert memory.promote(ids).promoted == 1
        assert_readable(memory, chain, tier="ssd")


def test_bytes_that_are_not_their_content_id_are_caught_at_promotion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum that agrees is not enough where bytes cross a tier: BLAKE3 decides."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        (path,) = sidecars(tmp_path / "object")
        flip(path, 100)
        wanted = memory.placements(chain[0][0].pieces[0])[0].xxh3
        monkeypatch.setattr(runs, "checksum", lambda view: wanted if len(view) == 70_000 else b"")
        report = memory.promote([chain[0][0].id])
        assert "content id" in report.failed[chain[0][0].pieces[0].hex()]


def test_a_tier_that_is_not_mounted_condemns_nothing(tmp_path: Path) -> None:
    """A missing directory is an outage, not damage: nothing is quarantined, and it works again when it is back."""
    chain = make_chain(2)
    tiers = {"object": str(tmp_path / "far"), "ssd": str(tmp_path / "near")}
    with Memory(tmp_path / "home", tiers=tiers) as memory:
        put(memory, chain)
    (tmp_path / "far").rename(tmp_path / "unmounted")
    with Memory(tmp_path / "home", tiers=tiers) as memory:
        with pytest.raises(IntegrityError):
            _one(memory, chain, 0)
        shutil.move(tmp_path / "unmounted", tmp_path / "far")
        assert_readable(memory, chain)


def test_deleting_a_volume_is_a_miss(tmp_path: Path) -> None:
    """pegaflow commits 21ca2a6 (#188), 33af1d5 (#181): the catalog says present, the files are gone: bounded, typed."""
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id])
    for directory in (tmp_path / "object").glob("*.lance"):
        shutil.rmtree(directory)
    with Memory(tmp_path) as memory:
        assert _one(memory, chain, 0) == chain[0][1][0]  # from ssd
        with pytest.raises(IntegrityError):
            _one(memory, chain, 1)
        assert [memory.available(node.id) for node, _ in chain] == [True, False]
        assert put(memory, chain).stored == 2
        assert_readable(memory, chain, tier="object")


def test_verify_tells_what_is_wrong(tmp_path: Path) -> None:
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote([chain[0][0].id])
        report = memory.verify()
        assert report.ok
        assert (report.nodes, report.pieces, report.placements, report.bytes) == (4, 4, 5, 350_000)
        (path,) = sidecars(tmp_path / "object")
        flip(path, 10)
        flip(path, 73_728 * 2)
        shallow = memory.verify(deep=False)
        assert shallow.ok and shallow.bytes == 0
        report = memory.verify()
        assert not report.ok
        assert {bad.content for bad in report.bad} == {chain[0][0].pieces[0], chain[2][0].pieces[0]}
        # Node 0 has its copy on ssd.
        assert report.missing == {chain[2][0].id: chain[2][0].pieces}
        assert memory.verify([chain[0][0].id]).ok


def test_the_match_ends_at_the_first_hole(tmp_path: Path) -> None:
    """InfiniStore get_match_last_index, seed case 60: chunk 3 of 8 is gone, so 3 chunks match, whatever lies behind."""
    chain = make_chain(8)
    with Memory(tmp_path) as memory:
        put(memory, chain[:3])
        put(memory, chain[3:4])
        put(memory, chain[4:])
        sidecars(tmp_path / "object")[1].unlink()
        with pytest.raises(IntegrityError):
            _one(memory, chain, 3)
        assert [memory.available(node.id) for node, _ in chain] == [True] * 3 + [False] + [True] * 4
        for length in range(3, 9):
            held = 0
            while held < length and memory.available(chain[held][0].id):
                held += 1
            assert held == 3


def test_a_piece_that_never_existed_is_not_found(tmp_path: Path) -> None:
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        put(memory, chain[:1])
        buffer = bytearray(b"\x55" * 70_000)
        with pytest.raises(NotFoundError):
            memory.read([(chain[0][0].pieces[0], buffer), (chain[1][0].pieces[0], bytearray(70_000))])
        assert bytes(buffer) == b"\x55" * 70_000  # found out before anything was read
        with pytest.raises(NotFoundError, match="in tier 'ssd'"):
            memory.read([(chain[0][0].pieces[0], buffer)], tier="ssd")


def test_promotion_heals_every_lost_copy_in_one_run(tmp_path: Path) -> None:
    """Copies whose file is gone are taken out of use at once, whether or not a source is left to copy from."""
    chain = make_chain(3)
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path) as memory:
        put(memory, chain)
        memory.promote(ids)
        (near,), (far,) = sidecars(tmp_path / "nodes"), sidecars(tmp_path / "object")
        near.unlink()
        assert memory.promote(ids).promoted == 3
        assert_readable(memory, chain, tier="ssd")
        assert all(len(memory.placements(node.pieces[0])) == 2 for node, _ in chain)
        (near,) = sidecars(tmp_path / "nodes")
    near.unlink()
    far.unlink()
    with Memory(tmp_path) as memory:
        report = memory.promote(ids)
        assert (report.promoted, report.satisfied, len(report.failed)) == (0, 0, 3)
        assert [memory.available(id) for id in ids] == [False] * 3
        assert put(memory, chain).stored == 3
        assert memory.promote(ids).promoted == 3


def test_one_read_finds_every_lost_copy(tmp_path: Path) -> None:
    """A read that fails for one piece has condemned all the others that it found missing."""
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        put(memory, chain[:1])
        put(memory, chain[1:])
        sidecars(tmp_path / "object")[1].unlink()
        with pytest.raises(IntegrityError):
            memory.read([(node.pieces[0], bytearray(70_000)) for node, _ in chain])
        assert [memory.available(node.id) for node, _ in chain] == [True, False, False, False]
        assert put(memory, chain).stored == 3
        assert_readable(memory, chain)


@pytest.mark.parametrize("file", ["../../secret.lance", "/etc/passwd", "", "a/b.lance", "ab.lance\n", "ab", "XY.lance"])
def test_a_data_file_named_by_an_altered_catalog_never_becomes_a_path(tmp_path: Path, file: str) -> None:
    """A placement's file name is checked before it is part of a path; the copy is refused like any damaged one."""
    with pytest.raises(IntegrityError, match="not the name of a data file"):
        sidecar.sidecar_name(file, 1)
    chain = make_chain(1)
    (content,) = chain[0][0].pieces
    with Memory(tmp_path) as memory:
        put(memory, chain)
        (good,) = memory.placements(content)
        bad = replace(good, file=file, sequence=memory._parts.clock.next())
        gone = good.turned(memory._parts.clock.next(), State.QUARANTINED, "test")
        memory._parts.catalog.append(Facts(placements=[bad, gone]))
        assert not memory.durable(chain[0][0].id)
        with pytest.raises(IntegrityError, match=content.hex()):
            _one(memory, chain, 0)
        assert not memory.available(chain[0][0].id)
        assert put(memory, chain).stored == 1
        assert_readable(memory, chain)
