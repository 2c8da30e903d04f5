"""Small objects and ranged reads on S3: pages, ranges, conditions, and what happens when replies are lost or broken."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from numem.errors import StoreError, UnknownOutcomeError
from numem.store.payload.objects import REQUEST_BYTES, plan_requests
from tests.fault_proxy import Fault, FaultProxy
from tests.s3_fixtures import Place
from tests.store_fixtures import payload

pytestmark = pytest.mark.s3


def test_listing_of_2500_objects_is_whole(s3: Place, faulty: Place, proxy: FaultProxy) -> None:
    """mooncake commit 454c349: more than one page of 1,000."""
    objects = s3.objects()
    names = [f"n{number:04d}" for number in range(2500)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(objects.create, names, [b"x"] * len(names)))
    assert sorted(faulty.objects().names("n")) == names
    assert proxy.count("GET", "list-type") >= 3
    assert [listed.name for listed in objects.listing()] == names
    assert objects.names("n249") == names[2490:]
    objects.delete(names[1:])
    assert objects.names("") == ["n0000"]


def test_create_replace_delete_and_look_up(s3: Place) -> None:
    objects = s3.objects()
    assert objects.create("a/b", b"1") and not objects.create("a/b", b"2")
    first = objects.fetch("a/b")
    second = objects.replace("a/b", b"3", first.mark)
    assert second is not None and objects.fetch("a/b").mark == second
    assert objects.replace("a/b", b"4", first.mark) is None
    assert objects.replace("none", b"4", first.mark) is None
    assert objects.read("a/b") == b"3" and objects.size("a/b") == 1
    assert [(listed.name, listed.nbytes) for listed in objects.listing("a")] == [("a/b", 1)]
    objects.delete(["a/b", "none"])
    objects.delete(["a/b"])
    assert objects.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        objects.read("a/b")
    with pytest.raises(FileNotFoundError):
        objects.read_ranges("a/b", [0], [1])


def test_ranges_are_read_in_few_requests(faulty: Place, proxy: FaultProxy) -> None:
    """lance#8831: 16 pieces of one pack cost at most ceil(bytes / request size) + 1 requests."""
    piece = 1 << 20
    pack = payload(16 * piece, 1)
    objects = faulty.objects()
    objects.create("pack", pack)
    proxy.clear()
    offsets = list(range(0, len(pack), piece))
    random.Random(1).shuffle(offsets)
    got = objects.read_ranges("pack", offsets, [piece] * 16)
    assert [bytes(data) for data in got] == [pack[at : at + piece] for at in offsets]
    assert proxy.count("GET") <= len(pack) // REQUEST_BYTES + 1
    proxy.clear()
    # Neighbours share one request, a piece far away has its own, equal and overlapping ranges none.
    got = objects.read_ranges("pack", [0, 200, 10 << 20, 100, 0], [100, 50, 7, 100, 150])
    assert [bytes(data) for data in got] == [
        pack[a : a + n] for a, n in [(0, 100), (200, 50), (10 << 20, 7), (100, 100), (0, 150)]
    ]
    assert proxy.count("GET") == 2
    end = len(pack)
    assert [bytes(data) for data in objects.read_ranges("pack", [0, end - 3, end + REQUEST_BYTES], [2, 9, 9])] == [
        pack[:2],
        pack[-3:],
        b"",
    ]
    assert objects.read_ranges("pack", [], []) == []


def test_requests_are_planned_in_order() -> None:
    assert plan_requests([5, 0], [5, 5]) == ([0], [10], [0, 0])
    assert plan_requests([0, REQUEST_BYTES], [REQUEST_BYTES, 1]) == (
        [0, REQUEST_BYTES],
        [REQUEST_BYTES, REQUEST_BYTES + 1],
        [0, 1],
    )
    assert plan_requests([0, 10], [3 * REQUEST_BYTES, 5]) == ([0], [3 * REQUEST_BYTES], [0, 0])


@pytest.mark.parametrize("times", [1, 3])
def test_a_write_whose_reply_is_lost_is_known_as_its_own(faulty: Place, proxy: FaultProxy, times: int) -> None:
    """icechunk#2099, ClickHouse#112081: the retry's 412 is not a conflict with oneself."""
    objects = faulty.objects()
    lost = proxy.add(Fault("lost", "PUT", times=times))
    assert objects.create("claim", b"mine")
    assert lost.hits == 1  # the read-back settles it
    proxy.clear()
    mark = objects.fetch("claim").mark
    proxy.add(Fault("lost", "PUT", times=times))
    assert objects.replace("claim", b"again", mark) is not None
    assert objects.read("claim") == b"again"
    assert proxy.count("DELETE") == proxy.count("POST") == 0


def test_a_lost_reply_does_not_make_a_rivals_object_ones_own(s3: Place, faulty: Place, proxy: FaultProxy) -> None:
    """icechunk#2099: another id read back is a conflict, and the rival's object stays."""
    assert s3.objects().create("claim", b"same bytes")
    proxy.add(Fault("lost", "PUT"))
    assert not faulty.objects().create("claim", b"same bytes")
    proxy.add(Fault("503", "PUT"))
    assert not faulty.objects().create("claim", b"same bytes")
    assert s3.objects().read("claim") == b"same bytes"


def test_an_outcome_that_stays_unknown_is_said_to_be_so(s3: Place, faulty: Place, proxy: FaultProxy) -> None:
    """icechunk#2099: no answer means unknown and nothing is deleted; a later try finds out."""
    objects = faulty.objects(deadline_s=1.0)
    proxy.add(Fault("lost", times=-1))
    started = time.monotonic()
    with pytest.raises(UnknownOutcomeError, match="not known.*nothing was deleted"):
        objects.create("claim", b"mine")
    assert time.monotonic() - started < 30
    assert s3.objects().read("claim") == b"mine"


@pytest.mark.parametrize("kind", ["503", "reset", "cut", "lost", "short"])
def test_a_read_that_fails_in_passing_is_repeated(faulty: Place, proxy: FaultProxy, kind: str) -> None:
    """lmcache#79, lmcache#4945: 503, reset in mid-body, truncated bodies: right bytes in the end, or an error."""
    objects = faulty.objects()
    data = payload(300_000, 2)
    objects.create("data", data)
    proxy.add(Fault(kind, "GET", "/data", times=2))  # type: ignore[arg-type]
    assert [bytes(part) for part in objects.read_ranges("data", [0, 200_000], [1000, 100_000])] == [
        data[:1000],
        data[200_000:],
    ]
    proxy.clear()
    always = proxy.add(Fault(kind, "GET", "/data", times=-1))  # type: ignore[arg-type]
    hasty = faulty.objects(deadline_s=1.0)
    started = time.monotonic()
    with pytest.raises(StoreError):
        hasty.read_ranges("data", [0, 200_000], [1000, 100_000])
    assert time.monotonic() - started < 30 and always.hits > 1
    proxy.clear()
    assert bytes(objects.read_ranges("data", [5], [5])[0]) == data[5:10]


def test_a_server_that_is_slow_is_waited_for_up_to_the_deadline(faulty: Place, proxy: FaultProxy) -> None:
    """lmcache#79: a delay is a bounded wait, then an error; later the same call works."""
    objects = faulty.objects()
    objects.create("data", b"0123456789")
    proxy.add(Fault("delay", "GET", times=-1, seconds=2.0))
    started = time.monotonic()
    with pytest.raises(StoreError):
        faulty.objects(deadline_s=0.5).read("data")
    assert time.monotonic() - started < 30
    proxy.clear()
    proxy.add(Fault("delay", "GET", times=1, seconds=0.2))
    assert objects.read("data") == b"0123456789"
