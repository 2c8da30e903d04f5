"""The tier in RAM of a memory: consulted first, filled by its way of writing or by promotion, verified at every read."""

from pathlib import Path
from typing import Any

import pytest

from numem.errors import InputError, IntegrityError, NotFoundError
from numem.store.memory import Memory, TierSpec
from numem.store.reading.hosting import NO_ROOM
from tests.store_fixtures import assert_readable, make_chain, make_node, payload, put, read_back, sidecars

SIZE = 70_000


def open_with(home: Path, *, capacity: int | None = 1 << 20, **more: Any) -> Memory:
    tiers: dict[str, str | TierSpec] = {
        "host": TierSpec("host", capacity=capacity, **more),
        "object": str(home / "object"),
    }
    return Memory(home, tiers=tiers)


def tiers_of(memory: Memory, content: bytes) -> list[str]:
    return [place.tier for place in memory.placements(content)]


def read_one(memory: Memory, content: bytes, size: int = SIZE) -> tuple[bytes, dict[str, int]]:
    buffer = bytearray(size)
    return bytes(buffer), dict(memory.read([(content, buffer)]).by_tier)


def test_promotion_fills_it_and_reads_come_from_it(tmp_path: Path) -> None:
    """Before any tier on disk, with the same bytes; nothing of it outlives the process."""
    data = [payload(SIZE, 1), payload(500, 2), payload(90_000, 3)]
    node = make_node(data)
    with open_with(tmp_path) as memory:
        put(memory, [(node, data)])
        assert tiers_of(memory, node.pieces[0]) == ["object"]
        report = memory.promote([node.id], "host")
        assert (report.promoted, report.satisfied, report.bytes, report.failed) == (3, 0, 160_500, {})
        again = memory.promote([node.id], "host")
        assert (again.promoted, again.satisfied) == (0, 3)
        assert tiers_of(memory, node.pieces[0]) == ["host", "object"]
        assert memory.available(node.id, "host")
        assert memory.usage() == {"host": 160_500, "object": 160_500}
        assert read_back(memory, node, [len(d) for d in data], tier="host") == data
        for path in sidecars(tmp_path):
            path.unlink()
        assert read_back(memory, node, [len(d) for d in data]) == data
        assert not memory.durable(node.id)
    with open_with(tmp_path) as memory:
        assert not memory.available(node.id, "host")
        with pytest.raises(NotFoundError):
            memory.read([(node.pieces[0], bytearray(SIZE))], tier="host")


def test_damaged_memory_is_never_served(tmp_path: Path) -> None:
    """A bit flipped in RAM: dropped, and the next replica is read; nothing is quarantined."""
    chain = make_chain(2)
    with open_with(tmp_path) as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain], "host")
        host = memory._parts.hosts["host"]
        host._pieces[chain[0][0].pieces[0]].buffer[77] ^= 4
        buffers = [bytearray(SIZE), bytearray(SIZE)]
        report = memory.read([(node.pieces[0], buffer) for (node, _), buffer in zip(chain, buffers, strict=True)])
        assert report.by_tier == {"host": SIZE, "object": SIZE}
        assert report.quarantined == ()
        assert [bytes(buffer) for buffer in buffers] == [data for _, (data,) in chain]
        assert host.stats().damaged == 1
        assert tiers_of(memory, chain[0][0].pieces[0]) == ["object"]


def test_written_through_at_publication(tmp_path: Path) -> None:
    chain = make_chain(3)
    with open_with(tmp_path, write="through") as memory:
        put(memory, chain[:2])
        memory.publish(*chain[2]).published.result(30)
        assert [tiers_of(memory, node.pieces[0]) for node, _ in chain] == [["host", "object"]] * 3
        assert_readable(memory, chain, tier="host")
        # What was durable before is not written again, and is held all the same once it is published again.
        memory._parts.hosts["host"].clear()
        assert put(memory, chain).stored == 0


def test_selective_keeps_from_the_second_touch_on(tmp_path: Path) -> None:
    chain = make_chain(2)
    with open_with(tmp_path, write="selective") as memory:
        put(memory, chain)
        first, second = (node.pieces[0] for node, _ in chain)
        assert read_one(memory, first)[1] == {"object": SIZE}
        assert tiers_of(memory, first) == ["object"]
        assert read_one(memory, first)[1] == {"object": SIZE}
        assert tiers_of(memory, first) == ["host", "object"]
        assert read_one(memory, first)[1] == {"host": SIZE}
        assert tiers_of(memory, second) == ["object"]
        assert_readable(memory, chain)


def test_it_holds_its_capacity_and_no_more(tmp_path: Path) -> None:
    chain = make_chain(6)
    with open_with(tmp_path, capacity=3 * SIZE) as memory:
        put(memory, chain)
        assert memory.promote([node.id for node, _ in chain], "host").promoted == 6
        assert memory.usage()["host"] == 3 * SIZE
        assert_readable(memory, chain)
        big = make_node([payload(4 * SIZE, 9)], name="big")
        put(memory, [(big, [payload(4 * SIZE, 9)])])
        assert memory.promote([big.id], "host").failed == {big.pieces[0].hex(): NO_ROOM}
    with pytest.raises(InputError, match="needs a capacity"):
        open_with(tmp_path, capacity=None)
    for way in ("back", "archive"):
        with pytest.raises(InputError, match="does not last"):
            open_with(tmp_path, write=way)


def test_promotion_compares_with_the_content_id(tmp_path: Path) -> None:
    chain = make_chain(1)
    with open_with(tmp_path) as memory:
        put(memory, chain)
        (path,) = sidecars(tmp_path)
        path.write_bytes(bytes(path.stat().st_size))
        report = memory.promote([chain[0][0].id], "host")
        assert list(report.failed) == [chain[0][0].pieces[0].hex()]
        assert not memory.available(chain[0][0].id)
        with pytest.raises(IntegrityError):
            memory.read([(chain[0][0].pieces[0], bytearray(SIZE))])
        with pytest.raises(NotFoundError):
            memory.promote([bytes(32)], "host")
