"""Publication: staged, written, committed, durable; deduplication; what is damaged is never published."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numem.errors import InputError, IntegrityError, NotFoundError, StoreError
from numem.store.memory import Memory
from numem.store.payload import sidecar
from tests.store_fixtures import (
    SCOPE,
    assert_readable,
    make_chain,
    make_node,
    payload,
    put,
    read_back,
    run_children,
    sidecars,
    tree,
)


def test_published_nodes_are_read_back_as_bytes_after_reopening(tmp_path: Path) -> None:
    """vllm-style restart, lmcache#1175, lmcache#2734, lmcache#4778: the index is rebuilt from the durable store."""
    chain = make_chain(5)
    with Memory(tmp_path) as memory:
        report = put(memory, chain)
        assert (report.nodes, report.stored, report.reused, report.missing) == (5, 5, 0, ())
        assert report.stored_bytes == report.logical_bytes == 5 * 70_000
        assert memory.staged() == ()
        assert_readable(memory, chain)
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)
        assert memory.chain(chain[-1][0].id) == tuple(node for node, _ in chain)
        assert memory.manifest(chain[-1][0].id).content_ids == tuple(node.pieces[0] for node, _ in chain)
        assert memory.children(SCOPE) == (chain[0][0],)
        assert memory.children(chain[0][0].id) == (chain[1][0],)
        assert memory.children(chain[-1][0].id) == ()
        assert memory.find(chain[2][0].id.hex()[:11]) == (chain[2][0],)
        assert memory.nodes("rows") == tuple(node for node, _ in chain)
        assert memory.nodes("other") == ()


def test_publishing_again_stores_nothing(tmp_path: Path) -> None:
    """mooncake#180, mooncake#2967, mooncake commit 36cb450 (#3479): deduplication is success, three times over."""
    chain = make_chain(4)
    with Memory(tmp_path) as memory:
        put(memory, chain)
    with Memory(tmp_path) as memory:
        before = tree(tmp_path / "object"), tree(tmp_path / "catalog")
        for _ in range(3):
            assert [memory.stage(node, data) for node, data in chain] == [False] * 4
            report = memory.publish_staged([node.id for node, _ in chain])
            assert (report.nodes, report.stored, report.reused, report.stored_bytes) == (4, 0, 4, 0)
        ticket = memory.publish(*chain[0])
        assert not ticket.accepted
        assert ticket.published.result().reused == 1
    assert (tree(tmp_path / "object"), tree(tmp_path / "catalog")) == before


def test_nodes_share_pieces_of_equal_content(tmp_path: Path) -> None:
    """seed case 40: content is shared by digest, whoever names it."""
    shared, own = payload(70_000, 1), payload(70_000, 2)
    first, second = make_node([shared], name="a"), make_node([shared, own, shared], name="b")
    with Memory(tmp_path) as memory:
        assert put(memory, [(first, [shared])]).stored == 1
        report = put(memory, [(second, [shared, own, shared])])
        assert (report.stored, report.reused, report.stored_bytes) == (1, 2, 70_000)
        assert report.logical_bytes == 210_000
        assert read_back(memory, second, [70_000] * 3) == [shared, own, shared]
        assert memory.usage() == {"object": 140_000, "ssd": 0}


def test_large_pieces_are_aligned_and_small_ones_bundled(tmp_path: Path) -> None:
    """The volume of one commit: pieces of 64 KiB and more at multiples of 4 KiB, the others back to back behind."""
    sizes = [65_537, 1, 65_536, 300, 4_096, 65_535]
    data = [payload(size, number) for number, size in enumerate(sizes)]
    node = make_node(data)
    with Memory(tmp_path) as memory:
        report = put(memory, [(node, data)])
        assert report.stored == 6
        places = {size: memory.placements(content)[0] for size, content in zip(sizes, node.pieces, strict=True)}
        assert [places[size].offset for size in (65_537, 65_536)] == [0, 69_632]
        assert [places[size].offset for size in (1, 300, 4_096, 65_535)] == [135_168, 135_169, 135_469, 139_565]
        assert len({place.blob for place in places.values()}) == 1
        assert read_back(memory, node, sizes) == data
    assert [path.stat().st_size for path in sidecars(tmp_path / "object")] == [135_168 + 1 + 300 + 4_096 + 65_535]


def test_a_group_of_small_nodes_is_one_commit(tmp_path: Path) -> None:
    """Group commit: 100 nodes of 256 bytes make one payload commit, not 100."""
    nodes = [(make_node([payload(256, n)], name=str(n)), [payload(256, n)]) for n in range(100)]
    with Memory(tmp_path) as memory:
        assert put(memory, nodes).stored == 100
        assert memory.stats()["group_commits"] == 1
        assert_readable(memory, nodes)
    assert len(sidecars(tmp_path / "object")) == 1


def test_staged_bytes_are_checked_before_they_are_published(tmp_path: Path) -> None:
    """LMCache#207, lmcache#4991: nothing torn or foreign is published; it is reported and set aside."""
    chain = make_chain(6)
    with Memory(tmp_path) as memory:
        for node, data in chain:
            memory.stage(node, data)
        files = [tmp_path / "spool" / f"{node.id.hex()}.stage" for node, _ in chain]
        with open(files[0], "r+b") as file:
            file.truncate(files[0].stat().st_size - 1)
        damaged = bytearray(files[1].read_bytes())
        damaged[-1] ^= 1
        files[1].write_bytes(damaged)
        files[2].write_bytes(b"")
        files[3].unlink()
        damaged = bytearray(files[4].read_bytes())
        damaged[40] ^= 1  # in the header
        files[4].write_bytes(damaged)
        report = memory.publish_staged([node.id for node, _ in chain])
        assert set(report.missing) == {node.id for node, _ in chain[:5]}
        assert (report.nodes, report.stored) == (1, 1)
        assert [memory.get(node.id) is None for node, _ in chain] == [True] * 5 + [False]
        assert memory.staged() == ()
        assert memory.publish_staged().missing == ()
        # Recomputed and staged again, they are published like any other.
        assert put(memory, chain).stored == 5
        assert_readable(memory, chain)
    assert len(list((tmp_path / "quarantine").iterdir())) == 4


def test_payloads_must_be_what_the_node_says(tmp_path: Path) -> None:
    """mooncake#3465 (a key with an empty value), and bytes that are not their content id."""
    good = payload(100, 1)
    node = make_node([good])
    with Memory(tmp_path) as memory:
        with pytest.raises(IntegrityError, match="content id"):
            memory.stage(node, [payload(100, 2)])
        with pytest.raises(IntegrityError, match="empty"):
            memory.stage(node, [b""])
        with pytest.raises(InputError, match="2 payloads for 1 pieces"):
            memory.stage(node, [good, good])
        with pytest.raises(InputError, match="not contiguous"):
            memory.stage(node, [np.frombuffer(good * 2, np.uint8)[::2]])
        with pytest.raises(IntegrityError, match="content id"):
            memory.publish(node, [payload(100, 2)])
        assert memory.staged() == ()
        assert memory.publish_staged([node.id]).missing == (node.id,)


def test_one_causal_id_with_other_content_is_an_event_and_the_first_wins(tmp_path: Path) -> None:
    """seed case 41, and design: a second content id for one causal id is recorded, never overwritten."""
    first, other = payload(70_000, 1), payload(70_000, 2)
    node, rival = make_node([first]), make_node([other])
    assert node.id == rival.id
    with Memory(tmp_path) as memory:
        assert memory.stage(node, [first])
        assert not memory.stage(rival, [other])  # against the spool
        memory.publish_staged()
        assert not memory.stage(rival, [other])  # against the catalog: known already
        receipt = memory.publish(rival, [other]).published.result(timeout=30)
        assert receipt.conflict and not receipt.stored
        (event,) = memory.events
        assert (event.kind, event.subject) == ("non-determinism", node.id)
        assert event.body == {"held": [node.pieces[0].hex()], "offered": [rival.pieces[0].hex()]}
        assert_readable(memory, [(node, [first])])
    with Memory(tmp_path) as memory:
        assert len(memory.events) == 1
        assert memory.get(node.id) == node
        assert memory.verify().conflicts == (node.id,)


def test_records_must_be_plain_json(tmp_path: Path) -> None:
    with Memory(tmp_path) as memory:
        for body in ({"a": object()}, {"a": float("nan")}, {"a": b"x"}):
            with pytest.raises(InputError, match="plain JSON"):
                memory.record("k", SCOPE, body)
        first, second = memory.record("k", SCOPE, {}), memory.record("k", SCOPE, {})
        assert first < second
        assert [record.sequence for record in memory.records()] == [first, second]


def test_unknown_ids_are_named(tmp_path: Path) -> None:
    with Memory(tmp_path) as memory:
        assert memory.get(SCOPE) is None
        assert not memory.available(SCOPE)
        assert memory.placements(SCOPE) == ()
        for call in (
            lambda: memory.chain(SCOPE),
            lambda: memory.manifest(SCOPE),
            lambda: memory.promote([SCOPE]),
            lambda: memory.verify([SCOPE]),
            lambda: memory.read([(SCOPE, bytearray(1))]),
        ):
            with pytest.raises(NotFoundError, match=SCOPE.hex()):
                call()
        with pytest.raises(InputError, match="hex digits"):
            memory.find("../x")
        with pytest.raises(NotFoundError, match="no tier 'moon'"):
            memory.read([], tier="moon")


@pytest.mark.parametrize("how", ["staged", "direct"])
def test_what_is_only_on_ssd_is_not_durable_and_is_written_home_again(tmp_path: Path, how: str) -> None:
    """The home tier's files deleted while the ssd copies survive: readable, not durable, and published anew."""
    chain = make_chain(3)
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path) as memory:
        assert not memory.durable(ids[0])
        put(memory, chain)
        memory.promote(ids)
        assert all(memory.durable(id) for id in ids)
        (path,) = sidecars(tmp_path / "object")
        os.truncate(path, 73_728 + 70_000)
        assert [memory.durable(id) for id in ids] == [True, True, False]
        path.unlink()
        assert [memory.durable(id) for id in ids] == [False] * 3
        assert all(memory.available(id) for id in ids)
        assert memory.publish_staged(ids).missing == tuple(ids)
        if how == "staged":
            assert [memory.stage(node, data) for node, data in chain] == [True] * 3
            assert memory.publish_staged().stored == 3
        else:
            assert [memory.publish(node, data).published.result().stored for node, data in chain] == [1] * 3
        assert all(memory.durable(id) for id in ids)
        assert_readable(memory, chain, tier="object")


def test_pieces_that_another_writer_made_durable_meanwhile_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers with the same new pieces: both write, one copy is catalogued, the later one counts as reused."""
    chain = make_chain(3)
    ids = [node.id for node, _ in chain]
    with Memory(tmp_path) as first, Memory(tmp_path, local=tmp_path / "other") as second:
        for node, data in chain:
            first.stage(node, data)
        write = first._parts.publisher._write
        reports = []

        def overtaken(*args: Any) -> Any:
            damaged = write(*args)
            reports.append(put(second, chain))
            return damaged

        monkeypatch.setattr(first._parts.publisher, "_write", overtaken)
        report = first.publish_staged()
        assert (report.nodes, report.stored, report.reused, report.missing) == (3, 0, 3, ())
        assert [report.stored for report in reports] == [3]
        assert first.stats()["pieces_stored"] == 0
        for memory in (first, second):
            memory.refresh()
            assert [len(memory.placements(node.pieces[0])) for node, _ in chain] == [1] * 3
            assert memory.usage()["object"] == 3 * 70_000
    with Memory(tmp_path) as memory:
        assert memory.recovered == ()
        assert all(memory.durable(id) for id in ids)
        assert [len(memory.placements(node.pieces[0])) for node, _ in chain] == [1] * 3
        assert_readable(memory, chain)
        assert memory.verify().ok


def _publish_with_errors(home: str, fail: bool) -> None:
    write = sidecar.SidecarWriter.write

    def broken(self: sidecar.SidecarWriter, data: Any) -> int:
        if write(self, data):
            raise OSError(5, "Input/output error")
        return 0

    if fail:
        sidecar.SidecarWriter.write = broken  # type: ignore[method-assign]  # in a process of its own
    with Memory(home) as memory:
        for ticket in [memory.publish(*entry) for entry in make_chain(8)]:
            error = ticket.published.exception(timeout=30)
            assert error is None or fail and isinstance(error, StoreError)


def test_an_error_in_one_of_two_writers_of_a_chunk_harms_neither(tmp_path: Path) -> None:
    """lmcache#4991: two processes, the same chunks, EIO in the middle of one of them."""
    assert run_children(_publish_with_errors, [(str(tmp_path), fail) for fail in (True, False)]) == [0, 0]
    with Memory(tmp_path) as memory:
        assert_readable(memory, make_chain(8))
        assert memory.verify().ok
        assert all(len(memory.placements(node.pieces[0])) == 1 for node, _ in make_chain(8))
