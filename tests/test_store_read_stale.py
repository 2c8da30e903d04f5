"""Reads while others remove, rewrite and damage what is read: typed, bounded, never wrong bytes."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numem.errors import DeadlineError, IntegrityError, NotFoundError
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import State
from numem.store.memory import Memory
from numem.store.payload.objects import REQUEST_BYTES
from numem.store.reading import fetch
from tests.fault_proxy import Fault, FaultProxy
from tests.s3_fixtures import Place
from tests.store_fixtures import assert_readable, make_chain, make_node, payload, put, read_back, sidecars

SIZE = 70_000


def evict(memory: Memory, content: bytes, tier: str) -> None:
    """What an eviction records; the file is removed by the caller."""
    parts = memory._parts
    facts = [
        place.turned(parts.clock.next(), State.EVICTED, "test")
        for place in memory.placements(content)
        if place.tier == tier
    ]
    parts.catalog.append(Facts(placements=facts))


class Meanwhile:
    """Calls a function between the planning of the next read and its first byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, do: Any) -> None:
        original, left = fetch.Fetcher.fetch, [do]

        def late(self: fetch.Fetcher, *arguments: Any) -> bool:
            if left:
                left.pop()()
            return original(self, *arguments)

        monkeypatch.setattr(fetch.Fetcher, "fetch", late)


def test_what_is_evicted_while_it_is_read_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmcache#1981, lance#6607: removed on purpose by another handle; the next copy serves, and no verdict is left."""
    chain = make_chain(2)
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path) as memory, Memory(tmp_path) as other:
        put(memory, chain)
        memory.promote(ids)
        other.refresh()

        def meanwhile() -> None:
            evict(other, chain[0][0].pieces[0], "ssd")
            evict(other, chain[1][0].pieces[0], "ssd")
            sidecars(tmp_path / "nodes")[0].unlink()

        Meanwhile(monkeypatch, meanwhile)
        buffers = [bytearray(SIZE), bytearray(SIZE)]
        report = memory.read([(node.pieces[0], buffer) for (node, _), buffer in zip(chain, buffers, strict=True)])
        assert (report.by_tier, report.quarantined) == ({"object": 2 * SIZE}, ())
        assert [bytes(buffer) for buffer in buffers] == [data for _, (data,) in chain]
        assert memory.stats().get("quarantined", 0) == 0
        assert memory.promote(ids).promoted == 2
        assert_readable(memory, chain, tier="ssd")


def test_what_is_rewritten_while_it_is_read_is_read_from_its_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(1)
    (content,) = chain[0][0].pieces
    with Memory(tmp_path) as memory, Memory(tmp_path) as other:
        put(memory, chain)
        memory.promote([chain[0][0].id])
        other.refresh()
        (old,) = sidecars(tmp_path / "object")

        def meanwhile() -> None:
            evict(other, content, "object")
            assert put(other, chain).stored == 1
            old.unlink()

        Meanwhile(monkeypatch, meanwhile)
        assert read_back(memory, chain[0][0], [SIZE], tier="object") == chain[0][1]
        assert memory.stats().get("quarantined", 0) == 0


def test_what_is_evicted_everywhere_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1)
    with Memory(tmp_path) as memory, Memory(tmp_path) as other:
        put(memory, chain)

        def meanwhile() -> None:
            evict(other, chain[0][0].pieces[0], "object")
            sidecars(tmp_path / "object")[0].unlink()

        Meanwhile(monkeypatch, meanwhile)
        with pytest.raises(NotFoundError, match="no replica"):
            memory.read([(chain[0][0].pieces[0], bytearray(SIZE))])


@pytest.mark.parametrize("keep", [0, 4096, SIZE - 1])
def test_a_file_cut_short_in_place_under_an_open_descriptor(tmp_path: Path, keep: int) -> None:
    """vmlx-swift#217, ComfyUI#14989, insitubatch#51: no zeros, no signal; a typed error, and the other copy serves."""
    chain = make_chain(1, nbytes=SIZE)
    with Memory(tmp_path) as memory:
        put(memory, chain)
        assert_readable(memory, chain)
        os.truncate(sidecars(tmp_path / "object")[0], keep)
        buffer = bytearray(SIZE)
        with pytest.raises(IntegrityError, match="too early"):
            memory.read([(chain[0][0].pieces[0], buffer)])
        assert not memory.available(chain[0][0].id)


def test_large_batches_cut_short_and_damaged_on_both_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mooncake commit a16e042, vllm#49250: resident and cold paths alike, whatever the kernel's counts are."""
    nbytes, count = 1 << 20, 24
    data = [payload(nbytes, n) for n in range(count)]
    node = make_node(data)
    buffers = np.zeros((count, nbytes), np.uint8)
    requests = [(content, buffers[n]) for n, content in enumerate(node.pieces)]
    original = os.preadv

    def resident_only_part(fd: int, views: Sequence[Any], at: int, flags: int = 0) -> int:
        """Every other question about the page cache is answered by half."""
        if flags and (at >> 22) % 2:
            return original(fd, [views[0][:777]], at)
        return original(fd, views, at, flags)

    def never_resident(fd: int, views: Sequence[Any], at: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError(11, "not in the page cache")
        return original(fd, [views[0][:300_000]], at)

    with Memory(tmp_path) as memory:
        put(memory, [(node, data)])
        for preadv in (original, resident_only_part, never_resident):
            monkeypatch.setattr(os, "preadv", preadv)
            buffers[:] = 0
            report = memory.read(requests)
            assert report.bytes == count * nbytes and report.quarantined == ()
            assert all(buffers[n].tobytes() == piece for n, piece in enumerate(data))
        os.truncate(sidecars(tmp_path / "object")[0], 20 * nbytes + 5)
        for preadv in (original, never_resident):
            monkeypatch.setattr(os, "preadv", preadv)
            with pytest.raises(IntegrityError):
                memory.read(requests)
        assert memory.stats()["quarantined"] == 4
        assert memory.read(requests[:20]).bytes == 20 * nbytes


def test_readers_of_one_handle_at_once(tmp_path: Path) -> None:
    """fsspec#2075: eight threads, the same and other pieces; no reader gets a partial one."""
    nbytes, count = 1 << 20, 8
    data = [payload(nbytes, n) for n in range(count)]
    node = make_node(data)
    wrong: list[int] = []
    with Memory(tmp_path) as memory:
        put(memory, [(node, data)])

        def work(first: int) -> None:
            buffers = np.zeros((count, nbytes), np.uint8)
            for _ in range(3):
                order = [(first + n) % count for n in range(count)]
                memory.read([(node.pieces[n], buffers[n]) for n in order])
                wrong.extend(n for n in range(count) if buffers[n].tobytes() != data[n])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_deadline_that_passed_stops_local_reads_between_runs(tmp_path: Path) -> None:
    chain = make_chain(2)
    with Memory(tmp_path, read_deadline_s=-1.0) as memory:
        put(memory, chain)
        with pytest.raises(DeadlineError, match="0 of 70000 bytes") as caught:
            memory.read([(chain[0][0].pieces[0], bytearray(SIZE))])
        assert caught.value.nbytes == 0
        assert memory.stats().get("quarantined", 0) == 0
        assert memory.read([(chain[0][0].pieces[0], bytearray(SIZE))], deadline_s=60.0).bytes == SIZE


@pytest.mark.s3
def test_requests_are_few_and_counted(faulty: Place, proxy: FaultProxy) -> None:
    """lance#8831, lance#7861, lance#6352: 16 chunks of one pack, at most bytes / request size + 1 requests."""
    nbytes, count = 1 << 20, 16
    data = [payload(nbytes, n) for n in range(count)]
    node = make_node(data)
    with faulty.open() as memory:
        put(memory, [(node, data)])
        buffers = np.zeros((count, nbytes), np.uint8)
        proxy.clear()
        memory.read([(content, buffers[n]) for n, content in enumerate(node.pieces)])
        assert [row.tobytes() for row in buffers] == data
        bound = count * nbytes // REQUEST_BYTES + 1
        assert 1 <= proxy.count("GET", r"\.blob") <= memory.stats()["remote_requests"] <= bound


@pytest.mark.s3
def test_a_deadline_bounds_the_wait_and_later_reads_work(faulty: Place, proxy: FaultProxy) -> None:
    """lmcache#79, lmcache#4945, lance#3080: a store that answers late; the caller recomputes, nothing is blamed."""
    chain = make_chain(1)
    with faulty.open() as memory:
        put(memory, chain)
        fault = proxy.add(Fault("delay", "GET", r"\.blob", seconds=2.0))
        buffer = bytearray(b"\x55" * SIZE)
        with pytest.raises(DeadlineError, match="0 of 70000 bytes"):
            memory.read([(chain[0][0].pieces[0], buffer)], deadline_s=0.3)
        assert fault.hits == 1
        assert memory.available(chain[0][0].id)
        assert_readable(memory, chain)
        time.sleep(2.5)  # what came too late went nowhere
        assert bytes(buffer) == b"\x55" * SIZE


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["503", "reset", "short", "cut"])
def test_faults_in_passing_cost_a_repetition(faulty: Place, proxy: FaultProxy, kind: Any) -> None:
    """lance#3080: never partial bytes, nothing quarantined."""
    chain = make_chain(2)
    with faulty.open() as memory:
        put(memory, chain)
        fault = proxy.add(Fault(kind, "GET", r"\.blob"))
        assert_readable(memory, chain)
        assert fault.hits == 1
        assert memory.stats().get("quarantined", 0) == 0


@pytest.mark.s3
def test_an_object_deleted_out_of_band_is_a_miss_both_times(s3: Place) -> None:
    """lmcache#4745, lmcache#2420: as a lifecycle rule would; a reader whose catalog says ready asks again, then blames."""
    chain = make_chain(2)
    with s3.open() as memory:
        put(memory, chain)
        objects = s3.objects("object")
        objects.delete([listed.name for listed in objects.listing() if listed.name.endswith(".blob")])
        for _ in range(2):
            for node, _data in chain:
                with pytest.raises(IntegrityError, match="is gone"):
                    memory.read([(node.pieces[0], bytearray(SIZE))])
        assert not any(memory.available(node.id) for node, _ in chain)
        assert put(memory, chain).stored == 2
        assert_readable(memory, chain)


@pytest.mark.s3
def test_a_stale_catalog_on_s3_is_asked_anew_before_anything_is_blamed(s3: Place) -> None:
    """A handle asks an object store for news once a second; within that second others may move what it reads."""
    chain = make_chain(1)
    (content,) = chain[0][0].pieces
    with s3.open("n1") as memory, s3.open("n2") as other:
        put(memory, chain)
        other.refresh()
        (old,) = (listed.name for listed in s3.objects("object").listing() if listed.name.endswith(".blob"))
        memory.refresh()
        evict(other, content, "object")
        assert put(other, chain).stored == 1
        s3.objects("object").delete([old])
        assert read_back(memory, chain[0][0], [SIZE]) == chain[0][1]
        assert memory.stats().get("quarantined", 0) == 0
