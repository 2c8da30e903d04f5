"""A memory on a real S3 server: end to end, among several processes, and behind a proxy that breaks requests."""

import multiprocessing
import time
from typing import Any

import pytest

from numem.errors import NumemError, StoreError
from numem.store.memory import Memory
from numem.store.payload.objects import REQUEST_BYTES
from tests.fault_proxy import Fault, FaultProxy
from tests.s3_fixtures import Place
from tests.store_fixtures import assert_readable, make_chain, make_node, payload, put, read_back, run_children

pytestmark = pytest.mark.s3
# What a test waits for Lance's own retries.
HASTY = {"client_max_retries": "3", "client_retry_timeout": "4"}


def hasty(place: Place) -> Place:
    return Place(place.url, {**place.options, **HASTY}, place.local)


def ids_in_catalog(memory: Memory) -> list[bytes]:
    """Causal ids of all rows of the node table, duplicates too."""
    table = memory._parts.catalog.tables["nodes"].dataset
    table.refresh()
    return [bytes(row) for row in table.lance.to_table(columns=["id"]).column("id").to_pylist()]


def test_a_memory_on_s3_end_to_end(s3: Place) -> None:
    chain = make_chain(4, nbytes=200_000) + make_chain(3, nbytes=512, name="small")
    ids = [node.id for node, _ in chain]
    with s3.open() as memory:
        assert put(memory, chain).stored == 7
        assert_readable(memory, chain)
        memory.create_branch("main", ids[0], actor="t", reason="r")
    with s3.open("n2") as memory:  # another node, with nothing of its own
        assert memory.recovered == ()
        assert_readable(memory, chain)
        assert put(memory, chain).reused == 7
        memory.move_branch("main", ids[3], expected=ids[0], actor="t", reason="r")
        assert not memory.available(ids[3], "ssd")
        memory.promote(ids)
        assert all(memory.available(id, "ssd") for id in ids)
        assert_readable(memory, chain, "ssd")
        assert_readable(memory, chain, "object")
        assert memory.verify().ok
    with s3.open() as memory:
        assert memory.branches()[0].head == ids[3]
        assert sorted(node.id for node in memory.nodes()) == sorted(ids_in_catalog(memory)) == sorted(ids)
        assert memory.chain(ids[3]) == tuple(node for node, _ in chain[:4])


def _publish_same(url: str, options: dict[str, str], local: str, start: float, node: str) -> None:
    while time.time() < start:
        time.sleep(0.001)
    with Memory(url, node=node, local=local, storage_options=options) as memory:
        chain = make_chain(12)
        report = put(memory, chain)
        assert not report.missing and not report.conflicts
        assert_readable(memory, chain)


def test_nodes_that_create_one_memory_and_publish_the_same_pieces(s3: Place) -> None:
    """lance#2403, lance#4451, lance#8949: first creation and publication race on S3; one visible row per causal id."""
    start = time.time() + 3
    jobs = [(s3.url, s3.options, str(s3.local / f"r{n}"), start, f"r{n}") for n in range(3)]
    assert run_children(_publish_same, jobs, 120) == [0] * 3
    with s3.open() as memory:
        chain = make_chain(12)
        assert memory.nodes() == tuple(node for node, _ in chain)
        assert_readable(memory, chain)
        assert len({bytes(id) for id in ids_in_catalog(memory)}) == 12
        assert memory.verify().ok


def _publish_on_demand(url: str, options: dict[str, str], local: str, asked: Any, told: Any) -> None:
    with Memory(url, node="b", local=local, storage_options=options) as memory:
        told.put(-1)
        while (number := asked.get(timeout=60)) >= 0:
            put(memory, [_single(number)])
            told.put(number)


def _single(number: int) -> tuple[Any, list[bytes]]:
    data = [payload(70_000, number)]
    return make_node(data, name=f"round{number}"), data


def test_what_was_missed_is_found_once_another_process_published_it(s3: Place) -> None:
    """s3fs#851, s3fs#879, s3fs#424: no stale miss, 20 rounds of look up, publish elsewhere, look up and restore."""
    context = multiprocessing.get_context("spawn")
    asked, told = context.Queue(), context.Queue()
    with s3.open("a") as memory:
        child = context.Process(target=_publish_on_demand, args=(s3.url, s3.options, str(s3.local / "b"), asked, told))
        child.start()
        try:
            assert told.get(timeout=60) == -1
            for number in range(20):
                node, data = _single(number)
                assert memory.get(node.id) is None
                asked.put(number)
                assert told.get(timeout=60) == number
                memory.refresh()
                assert memory.get(node.id) == node
                assert read_back(memory, node, [len(data[0])]) == data
            asked.put(-1)
            child.join(60)
            assert child.exitcode == 0
        finally:
            child.kill()
            child.join()


def test_a_restore_takes_few_requests(s3: Place, faulty: Place, proxy: FaultProxy) -> None:
    """lance#8831, lance#7861, lance#6352: pieces of one pack come in ceil(bytes / request size) requests and a few."""
    data = [payload(1 << 20, number) for number in range(16)]
    node = make_node(data)
    with s3.open() as memory:
        put(memory, [(node, data)])
    with faulty.open("n2") as memory:
        assert memory.get(node.id) == node
        proxy.clear()
        assert read_back(memory, node, [1 << 20] * 16, "object") == data
        assert proxy.count("GET", r"\.blob") <= (16 << 20) // REQUEST_BYTES + 2
        assert proxy.count("GET") <= (16 << 20) // REQUEST_BYTES + 12


@pytest.mark.parametrize("kind", ["503", "lost", "delay"])
@pytest.mark.parametrize(
    "path", [r"\.blob", r"object/.*\.manifest", r"catalog/.*\.manifest", r"\.volume", r"numem\.json"]
)
def test_a_write_that_fails_in_passing_is_acknowledged_and_there_once(
    s3: Place, faulty: Place, proxy: FaultProxy, kind: str, path: str
) -> None:
    """icechunk#2099, ClickHouse#112081, lmcache#79: a 503, a slow reply, a reply lost after the object was stored."""
    chain = make_chain(2)
    fault = proxy.add(Fault(kind, "PUT", path, times=1, seconds=0.3))  # type: ignore[arg-type]
    with faulty.open() as memory:
        assert put(memory, chain).stored == 2
    assert fault.hits == 1
    with s3.open("n2") as memory:
        assert ids_in_catalog(memory) == [node.id for node, _ in chain]
        assert [len(memory.placements(node.pieces[0])) for node, _ in chain] == [1, 1]
        assert_readable(memory, chain)
        assert memory.verify().ok


@pytest.mark.parametrize("path", [r"object/.*/data/", r"object/.*\.manifest", r"catalog/.*\.manifest"])
def test_a_write_that_never_gets_a_reply_is_there_once_or_an_error_and_can_be_repeated(
    s3: Place, faulty: Place, proxy: FaultProxy, path: str
) -> None:
    """ClickHouse#112081: an end in bounded time; what was stored is not deleted; exactly one row after a later try."""
    chain = make_chain(2)
    with hasty(faulty).open() as memory:
        proxy.clear()
        lost = proxy.add(Fault("lost", "PUT", path, times=-1))
        started = time.monotonic()
        acknowledged = True
        try:
            put(memory, chain)
        except NumemError:
            acknowledged = False
        assert lost.hits > 1 and time.monotonic() - started < 100
        assert proxy.count("DELETE") == proxy.count("POST", "delete") == 0
        with s3.open("n2") as other:
            assert len(ids_in_catalog(other)) == 2 or not acknowledged
        proxy.clear()
        memory.publish_staged()
        assert_readable(memory, chain)
    with s3.open("n3") as memory:
        assert ids_in_catalog(memory) == [node.id for node, _ in chain]
        assert [len(memory.placements(node.pieces[0])) for node, _ in chain] == [1, 1]
        assert_readable(memory, chain)


@pytest.mark.parametrize("kind", ["delay", "503", "reset", "short", "cut"])
def test_no_wrong_byte_is_read_and_a_broken_reply_condemns_no_replica(
    s3: Place, faulty: Place, proxy: FaultProxy, kind: str
) -> None:
    """lmcache#79, lmcache#4945, lance#3080: a fault in passing goes unnoticed, one that stays is an error in bounded
    time, and the same read works afterwards."""
    chain = make_chain(2)
    with s3.open() as memory:
        put(memory, chain)
    with faulty.open("n2") as memory:
        proxy.add(Fault(kind, "GET", r"\.blob", times=1, seconds=0.3))  # type: ignore[arg-type]
        assert_readable(memory, chain, "object")
        if kind != "delay":
            always = proxy.add(Fault(kind, "GET", r"\.blob", times=-1))  # type: ignore[arg-type]
            started = time.monotonic()
            with pytest.raises(StoreError):
                read_back(memory, chain[0][0], [len(chain[0][1][0])], "object")
            assert time.monotonic() - started < 60 and always.hits
        proxy.clear()
        assert_readable(memory, chain, "object")
        assert memory.stats().get("quarantined", 0) == 0


def test_an_object_deleted_by_others_is_a_miss_each_time(s3: Place) -> None:
    """lmcache#4745: no size cache goes on to say hit; publishing it again makes it whole."""
    chain = make_chain(1)
    node, data = chain[0]
    with s3.open() as memory:
        put(memory, chain)
        s3.objects().delete([name for name in s3.names() if name.endswith(".blob")])
        for _ in range(2):
            with pytest.raises(StoreError, match="recompute"):
                read_back(memory, node, [len(data[0])])
        assert not memory.available(node.id) and not memory.durable(node.id)
        put(memory, chain)
        assert_readable(memory, chain)


@pytest.mark.parametrize("path", [r"catalog/", r"catalog/nodes"])
def test_a_creation_that_fails_can_be_repeated_by_anybody(
    s3: Place, faulty: Place, proxy: FaultProxy, path: str
) -> None:
    """lance#2403: no claim is left behind, and tables that exist already are taken up."""
    proxy.add(Fault("503", "PUT", path, times=-1))
    with pytest.raises(NumemError):
        hasty(faulty).open()
    proxy.clear()
    with s3.open("n2") as memory:
        put(memory, make_chain(1))
        assert_readable(memory, make_chain(1))


def test_a_reopened_memory_appends_to_the_volume_it_left(s3: Place) -> None:
    chains = [make_chain(2, name=f"c{number}", seed=number) for number in range(3)]
    for chain in chains:
        with s3.open() as memory:
            assert memory.recovered == ()
            put(memory, chain)
    with s3.open("n2") as memory:
        for chain in chains:
            assert_readable(memory, chain)
        assert len({memory.placements(node.pieces[0])[0].volume for chain in chains for node, _ in chain}) == 1
