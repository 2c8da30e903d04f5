"""Rows between host memory and pages on a device: exact bytes, bounded memory, and order between streams."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numem.errors import InputError, IntegrityError
from numem.runtime.device.form import TokenMajor
from numem.runtime.device.ring import Ring
from numem.runtime.device.streams import OneStream
from numem.runtime.device.transfer import Transfers, Wanted, places
from numem.runtime.paging.pages import PageStorage, kv_spec
from numem.state.spec import StateSpec

WINDOWS = (0, 64, 0)


def storage_on(device: torch.device, dtype: str, windows: tuple[int, ...] = (), **guard: bool) -> PageStorage:
    spec = kv_spec(3, 2, 16, dtype, windows)
    return PageStorage(spec, 2, 16, 40, device=device, form=TokenMajor(device, ring_bytes=1), **guard)


def moving(storage: PageStorage) -> Transfers:
    assert storage.transfers is not None
    return storage.transfers


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    made.view(-1)[::97] = float("nan")  # bytes, not numbers
    return made


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def table(pages: int, seed: int) -> list[int]:
    return torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:pages].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_skipped_rows_and_short_chunks(device: torch.device, dtype: str) -> None:
    """A chunk in a slot, of two groups, of which rows [skip, count) are wanted: the other rows stay as they were."""
    storage = storage_on(device, dtype, WINDOWS)
    twin = PageStorage(storage.spec, 2, 16, 40)
    move = moving(storage)
    groups = storage.spec.retained
    for seed, (start, rows, skip, count) in enumerate([(0, 256, 0, 256), (256, 40, 7, 33), (16, 256, 250, 251)]):
        pages = table(30, seed)
        parts = [
            numbers((2, len(storage.layers_of(g) or range(3)), rows, 32), storage.dtype, 10 * seed + i)
            for i, g in enumerate(groups)
        ]
        before = storage.save(pages, 0, 400)
        taken = move.slot([part.nbytes for part in parts], wait=True)
        assert taken is not None
        slot, room = taken
        lent = [at.view(part.dtype).view(part.shape).copy_(part) for at, part in zip(room, parts, strict=True)]
        layers = [storage.layers_of(g) for g in groups]
        move.join(move.upload(lent, slot, pages, start, layers, after=move.fence(), skip=skip, count=count))
        twin.load(before, pages, 0)
        for group, part in zip(groups, parts, strict=True):
            twin.load(part[:, :, skip:count].contiguous(), pages, start + skip, group)
        assert same(storage.save(pages, 0, 400), twin.save(pages, 0, 400))
        for group in groups:
            assert same(storage.save(pages, 3, 390, group), twin.save(pages, 3, 390, group))


def test_a_payload_larger_than_a_slot_and_ordinary_memory(device: torch.device) -> None:
    storage = storage_on(device, "float32")
    payload = numbers((2, 3, 600, 32), torch.float32, 1)
    storage.load(payload, table(38, 2), 5)
    assert same(storage.save(table(38, 2), 5, 600), payload)
    storage.copy(table(38, 2)[0], 39 if 39 not in table(38, 2) else table(40, 2)[-1])
    assert moving(storage).ring.idle == moving(storage).ring.slots
    with pytest.raises(InputError, match="outside"):
        storage.load(payload, table(38, 2), 16)
    with pytest.raises(InputError, match="ask for fewer"):
        moving(storage).download(Wanted(table(38, 2), 0, 600, [None]), after=moving(storage).fence())


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_order_of_moves_equals_the_form_of_the_host(device: torch.device, data: st.DataObject) -> None:
    storage, twin = storage_on(device, "float32"), PageStorage(kv_spec(3, 2, 16, "float32"), 2, 16, 40)
    for step in range(data.draw(st.integers(1, 6))):
        pages = data.draw(st.permutations(range(40)))[: data.draw(st.integers(1, 20))]
        start = data.draw(st.integers(0, len(pages) * 16 - 1))
        count = data.draw(st.integers(1, len(pages) * 16 - start))
        what = data.draw(st.sampled_from(["load", "save", "copy"]))
        if what == "load":
            payload = numbers((2, 3, count, 32), torch.float32, step)
            storage.load(payload, pages, start)
            twin.load(payload, pages, start)
        elif what == "copy":
            storage.copy(pages[0], pages[-1])
            twin.copy(pages[0], pages[-1])
        else:
            assert same(storage.save(pages, start, count), twin.save(pages, start, count))
    assert same(storage.save(range(40), 0, 640), twin.save(range(40), 0, 640))


@dataclass
class Late:
    """An event that happens when the test says so."""

    happened: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(20)


def test_a_slot_is_used_again_only_after_its_event() -> None:
    """Back-pressure: who wants a slot waits for the slow copy, and gets none at once."""
    ring = Ring(OneStream(torch.device("cpu")), 64, 2)
    first, second = ring.acquire(), ring.acquire()
    event = Late()
    ring.retire(event, first)
    assert ring.at_once() is None and ring.idle == 0
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire()))
    waiter.start()
    waiter.join(0.05)
    assert not got
    event.happened.set()
    waiter.join(20)
    assert got == [first]
    second.release()
    second.release()
    assert ring.idle == 1 and ring.at_once() is second and ring.at_once() is None


def test_an_error_gives_the_slot_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmcache#1034's kind: whatever a copy raises, nothing stays held."""
    storage = storage_on(device, "float32")
    move = moving(storage)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("copy failed")

    monkeypatch.setattr("numem.runtime.device.transfer.moves.scatter_rows", fails)
    monkeypatch.setattr("numem.runtime.device.transfer.moves.gather_rows", fails)
    for _ in range(8):
        taken = move.slot([64], wait=True)
        assert taken is not None
        part = taken[1][0].view(torch.float32).view(2, 1, 8, 1)
        with pytest.raises(RuntimeError, match="copy failed"):
            move.upload([part], taken[0], [0], 0, [None], after=move.fence())
        with pytest.raises(RuntimeError, match="copy failed"):
            storage.save([0], 0, 4)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert move.ring.idle == move.ring.slots and move._down_ring.idle == move._down_ring.slots


def test_poison_and_seals(device: torch.device) -> None:
    storage = storage_on(device, "bfloat16", (), poison=True, canary=True)
    guard = storage.guard
    assert guard is not None and bool(storage.k.isnan().all()) and bool(storage.v.isnan().all())
    guard.taken([3, 4])
    storage.load(numbers((2, 3, 32, 32), torch.bfloat16, 5), [3, 4], 0)
    guard.filled([3, 4])
    storage.save([3, 4], 0, 32)
    storage.v[2, 4, 1, 15, 3] += 1
    with pytest.raises(IntegrityError, match="page 4"):
        storage.save([3, 4], 0, 32)
    storage.save([3], 0, 16)
    guard.freed([3, 4])
    guard.taken([3, 4])
    storage.k[0, 3, 0, 0, 0] = 0.0
    with pytest.raises(IntegrityError, match="page 3"):
        guard.taken([3])


def test_uploads_beside_computing(device: torch.device, big: bool) -> None:
    """1Cat-vLLM#598: rows land after earlier work on their pages, and before later work that joined them."""
    storage = storage_on(device, "float32")
    move = moving(storage)
    busy = torch.randn(2048 if big else 16, 2048 if big else 16, device=device)
    for seed in range(20 if big else 2):
        pages = table(16, seed)
        payload = numbers((2, 3, 256, 32), torch.float32, seed)
        for _ in range(8):
            busy = (busy @ busy).clamp(-1, 1)
        storage.k[:, pages] = 7.0  # earlier work: what lands replaces it
        after = move.fence()
        taken = move.slot([payload.nbytes], wait=True)
        assert taken is not None
        lent = taken[1][0].view(torch.float32).view(payload.shape).copy_(payload)
        done = move.upload([lent], taken[0], pages, 0, [None], after=after)
        move.join(done)
        read = storage.k[:, pages].clone()
        pending = move.download(Wanted(pages, 0, 256, [None]), after=move.fence())
        (back,) = pending.result()
        assert same(back, payload)
        keys = payload[0].view(3, 16, 16, 2, 16).permute(0, 1, 3, 2, 4)
        assert same(read.cpu(), keys)


def test_parts_are_aligned() -> None:
    assert places([1, 256, 257]) == ([0, 256, 512], 1024)
    assert isinstance(kv_spec(1, 1, 16, "float32"), StateSpec)
