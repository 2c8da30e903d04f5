"""The host tier: pieces in bounded RAM, verified, with one owner each."""

import random
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from numem.errors import InputError
from numem.identity.digest import checksum, content_id
from numem.policy import NAMES
from numem.store.reading.host import NO_ROOM, TOO_LARGE, Host

KIB = 1 << 10
MIB = 1 << 20


def piece(number: int, nbytes: int) -> tuple[bytes, bytes, bytes]:
    """Content id, bytes and checksum of a piece."""
    data = np.random.default_rng(number).bytes(nbytes)
    return content_id(data), data, checksum(data)


def read(host: Host, content: bytes, nbytes: int) -> bytes | None:
    buffer = bytearray(nbytes)
    return bytes(buffer) if host.get_into(content, memoryview(buffer)) else None


@pytest.mark.parametrize("nbytes", [1, 100, 64 * KIB, 64 * KIB + 1, 3 * MIB])
def test_what_is_put_is_read(nbytes: int) -> None:
    host = Host(4 * MIB)
    content, data, xxh3 = piece(1, nbytes)
    assert content not in host and read(host, content, nbytes) is None
    assert host.put(content, data, xxh3) and content in host
    assert read(host, content, nbytes) == data
    with host.lease(content) as view:
        assert view is not None and view.readonly and bytes(view) == data
    stats = host.stats()
    assert (stats.used, stats.pieces, stats.stored, stats.hits, stats.misses) == (nbytes, 1, 1, 2, 1)
    # The tier owns its bytes: what the caller does to its own afterwards does not matter.
    mutable = bytearray(data)
    other = content_id(b"other")
    assert host.put(other, mutable, xxh3) or nbytes > 2 * MIB
    mutable[0] ^= 1
    if other in host:
        assert read(host, other, nbytes) == data


def test_put_again_keeps_one_copy() -> None:
    host = Host(MIB)
    content, data, xxh3 = piece(1, 100 * KIB)
    assert host.put(content, data, xxh3) and host.put(content, data, xxh3)
    assert (host.stats().used, host.stats().stored) == (100 * KIB, 1)


def test_a_piece_larger_than_the_tier_is_refused_before_a_byte_is_copied() -> None:
    """llama.cpp#26216, llama.cpp#20509: the cap holds, the reason is counted, and what is there stays."""
    host = Host(100)
    small, large = piece(1, 60), piece(2, 101)
    assert host.put(*small)
    assert not host.put(*large)
    assert host.stats().refused == {TOO_LARGE: 1}
    assert read(host, small[0], 60) == small[1] and host.stats().evicted == 0


def test_the_system_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp#27725: an allocation that fails is a refusal, and leaves no reservation."""

    def fail(nbytes: int) -> None:
        raise MemoryError

    host = Host(1000)
    monkeypatch.setattr("numem.store.reading.host._allocate", fail)
    content, data, xxh3 = piece(1, 600)
    assert not host.put(content, data, xxh3)
    assert (host.stats().used, host.stats().pieces) == (0, 0) and sum(host.stats().refused.values()) == 1
    monkeypatch.undo()
    assert host.put(content, data, xxh3)


def test_the_length_of_an_earlier_piece_is_not_kept() -> None:
    """mooncake#2466, mooncake#2447: a large piece after a small one in the same room, and no read after a discard."""
    host = Host(MIB)
    small, large = piece(1, 64 * KIB), piece(2, MIB)
    assert host.put(*small) and host.put(*large)
    assert small[0] not in host and read(host, large[0], MIB) == large[1]
    assert host.put(*small) and read(host, small[0], 64 * KIB) == small[1]
    assert host.discard(small[0]) and not host.discard(small[0])
    assert read(host, small[0], 64 * KIB) is None and small[0] not in host
    assert host.stats().used == 0


@pytest.mark.parametrize("length", [0, 99, 101])
def test_a_buffer_of_another_size_is_refused(length: int) -> None:
    host = Host(1000)
    content, data, xxh3 = piece(1, 100)
    host.put(content, data, xxh3)
    with pytest.raises(InputError, match=f"has 100 bytes, its buffer {length}"):
        host.get_into(content, memoryview(bytearray(length)))
    with pytest.raises(InputError, match="read-only"):
        host.get_into(content, memoryview(bytes(100)))
    assert host.discard(content) and host.stats().used == 0  # no hold was left behind


def test_damaged_bytes_are_dropped_and_never_served() -> None:
    host = Host(1000)
    content, data, xxh3 = piece(1, 100)
    for attempt in range(2):
        host.put(content, bytes(100), xxh3)
        if attempt:
            with host.lease(content) as view:
                assert view is None
        else:
            assert read(host, content, 100) is None
        assert content not in host and host.stats().used == 0
    assert (host.stats().damaged, host.stats().hits, host.stats().misses) == (2, 0, 2)
    assert host.put(content, data, xxh3) and read(host, content, 100) == data


@pytest.mark.parametrize("policy", NAMES)
def test_probes_keep_nothing(policy: str) -> None:
    """mooncake#2187: eviction goes on while somebody keeps asking for what is there."""
    host = Host(1000, policy)
    pieces = [piece(number, 100) for number in range(40)]
    for content, data, xxh3 in pieces:
        assert host.put(content, data, xxh3)
        assert all(other[0] in host for other in pieces if other[0] in host)
    assert host.stats().evicted == 30 and host.stats().used == 1000


@pytest.mark.parametrize("policy", NAMES)
def test_the_newest_piece_is_not_the_first_victim(policy: str) -> None:
    """mooncake#3101: a piece that was just published survives the next one."""
    host = Host(1000, policy)
    pieces = [piece(number, 100) for number in range(12)]
    for content, data, xxh3 in pieces[:11]:
        host.put(content, data, xxh3)
    host.put(*pieces[11])
    assert pieces[10][0] in host and pieces[11][0] in host and host.stats().evicted == 2


def test_what_is_protected_stays() -> None:
    pinned: set[object] = set()
    host = Host(300, "lru", protected=pinned.__contains__)
    pieces = [piece(number, 100) for number in range(5)]
    for one in pieces[:3]:
        host.put(*one)
    pinned.update(one[0] for one in pieces[:3])
    assert not host.put(*pieces[3]) and host.stats().refused == {NO_ROOM: 1} and host.stats().evicted == 0
    pinned.discard(pieces[1][0])
    assert host.put(*pieces[3])
    assert [one[0] in host for one in pieces] == [True, False, True, True, False]


def test_leaf_first_keeps_the_beginning() -> None:
    """Pieces of a chain leave from its end."""
    host = Host(300, "slru")
    pieces = [piece(number, 100) for number in range(4)]
    for before, one in zip([None, *pieces], pieces[:3], strict=False):
        host.put(*one, parent=before and before[0])
    host.put(*pieces[3])
    assert [one[0] in host for one in pieces] == [True, True, False, True]


def test_a_leased_piece_stays_and_is_freed_once() -> None:
    """sglang#13483: eviction, discard and the end of a read free a piece once between them."""
    host = Host(200, "lru")
    first, second, third = (piece(number, 100) for number in range(3))
    host.put(*first)
    host.put(*second)
    with host.lease(first[0]) as view, host.lease(second[0]):
        assert not host.put(*third) and host.stats().refused == {NO_ROOM: 1}
        assert host.discard(first[0]) and first[0] not in host
        # Still read, so still counted: no room yet.
        assert host.stats().used == 200 and not host.put(*third)
        assert view is not None and bytes(view) == first[1]
        host.clear()
        assert host.stats().used == 200 and host.stats().pieces == 0
    assert host.stats().used == 0
    for one in (first, second):
        assert host.put(*one)
    assert host.stats().used == 200 and host.stats().pieces == 2


def test_clear() -> None:
    host = Host(MIB, protected=lambda content: True)
    pieces = [piece(number, 70 * KIB) for number in range(5)]
    for one in pieces:
        host.put(*one)
    host.clear()
    assert (host.stats().used, host.stats().pieces) == (0, 0)
    assert not any(one[0] in host for one in pieces) and host.put(*pieces[0])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_bounded_over_ten_thousand_chunks() -> None:
    """sglang#21624: views that outlive their lease keep their own piece alive, and memory follows the capacity."""
    host = Host(16 * MIB)
    data = np.random.default_rng(0).bytes(256 * KIB)
    views = []
    before = 0
    for number in range(10_000):
        chunk = memoryview(data)[: 128 * KIB + (number * 7919) % (128 * KIB)]
        content = number.to_bytes(32, "big")
        assert host.put(content, chunk, checksum(chunk))
        if number % 1000 == 0:
            with host.lease(content) as view:
                views.append((view, chunk))
        if number == 500:
            before = resident_bytes()
    assert host.stats().used <= 16 * MIB and host.stats().pieces > 60
    assert resident_bytes() - before < 32 * MIB
    assert all(view == chunk for view, chunk in views)


def test_threads_that_put_read_probe_and_discard() -> None:
    """mooncake#2486, llm-d-kv-cache#393: 8 threads neither deadlock nor read a wrong byte, and the account holds."""
    sizes = [2 * KIB, 70 * KIB, 200 * KIB]
    pieces = [piece(number, sizes[number % 3]) for number in range(40)]
    host = Host(MIB, protected=lambda content: content == pieces[0][0])
    end = time.monotonic() + 2.0
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            content, data, xxh3 = rng.choice(pieces)
            what = rng.random()
            if what < 0.4:
                host.put(content, data, xxh3)
            elif what < 0.8:
                found = read(host, content, len(data))
                if found is not None and found != data:
                    wrong.append(content)
            elif what < 0.95:
                with host.lease(content) as view:
                    if view is not None and bytes(view) != data:
                        wrong.append(content)
            elif what < 0.995:
                host.discard(content)
            else:
                host.clear()
            if host.stats().used > MIB:
                wrong.append("over capacity")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not wrong
    stats = host.stats()
    held = [one for one in pieces if one[0] in host]
    assert stats.pieces == len(held) and stats.used == sum(len(one[1]) for one in held) and stats.damaged == 0
    host.clear()
    assert host.stats().used == 0


def test_page_locked_only_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda at, nbytes, flags: locked.update({at: nbytes}) or 0,
        cudaHostUnregister=locked.pop,
    )
    used = [False]
    cuda = SimpleNamespace(is_initialized=lambda: used[0], cudart=lambda: runtime)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    host = Host(300 * KIB, "lru")
    pieces = [piece(number, 100 * KIB) for number in range(4)]
    host.put(*pieces[0])
    assert not locked and host.stats().pinned_bytes == 0
    used[0] = True
    for one in pieces[1:]:
        host.put(*one)
    host.put(*piece(9, 100))  # small pieces share their pages with others
    assert sorted(locked.values()) == [100 * KIB] * 2 and host.stats().pinned_bytes == 200 * KIB
    assert read(host, pieces[3][0], 100 * KIB) == pieces[3][1]
    host.clear()
    assert not locked and host.stats().pinned_bytes == 0
