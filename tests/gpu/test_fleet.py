"""Two runtimes behind one front, each on a GPU of its own where there are two: outputs are those of one alone.

Both decode ahead from their own threads while other threads send chunks to pages of the same devices, as a loader does.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import Random, config_of, descriptor_of, weights_of
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.models.device_transformer import DeviceTransformer
from numem.runtime.continuation import Session
from numem.runtime.device.fleet import Fleet
from numem.runtime.device.form import TokenMajor
from numem.runtime.engine import Engine
from numem.runtime.front import Runtime
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.pages import PageStorage
from numem.runtime.request import Request, Token
from numem.runtime.sampling import Sampler

LIMIT, PAGES, LANES = 512, 96, 3


@pytest.fixture(scope="module")
def devices(device: torch.device) -> list[torch.device]:
    if device.type == "cpu":
        return [device, device]
    last = torch.cuda.device_count() - 1
    return [torch.device("cuda", 0), torch.device("cuda", min(1, last))]


def _decoder(device: torch.device, big: bool) -> DeviceTransformer:
    """The same weights wherever they lie."""
    d = descriptor_of(config_of("0.6b", dry=True) | ({} if big else {"num_hidden_layers": 1, "intermediate_size": 128}))
    dtype = "bfloat16" if big else "float32"
    torch.manual_seed(17)
    weights = weights_of(d, Random("bf16", getattr(torch, dtype), device), LIMIT)
    return DeviceTransformer(d, weights, dtype=dtype, max_position=LIMIT, device=device)


def _runtime(decoder: DeviceTransformer) -> Runtime:
    def scheduler(on_token: Callable[[Token], None]) -> Scheduler:
        engine = Engine(decoder, pages=PAGES, vocab=decoder.vocab)
        if decoder.device.type == "cpu":  # the form that device kernels read
            form = TokenMajor(decoder.device)
            engine.storage = PageStorage(decoder.spec, decoder.kv_heads, decoder.head_dim, PAGES, form=form)
            engine.ahead = decoder.ahead(engine.storage, engine.vocab)
        identity = Identity({"model": "random"}, NumericPolicy("test", bytes(32)), "test")
        return Scheduler(Session(engine, identity), LANES, on_token=on_token)

    return Runtime(scheduler)


def _loader(decoder: DeviceTransformer, stop: threading.Event, failed: list[str]) -> None:
    """Sends chunks to pages and reads them back until told to stop."""
    torch.set_grad_enabled(False)
    storage = PageStorage(
        decoder.spec, decoder.kv_heads, decoder.head_dim, 40, device=decoder.device,
        form=TokenMajor(decoder.device, ring_bytes=1),
    )  # fmt: skip
    rows = torch.zeros((2, storage.k.shape[0], 300, decoder.kv_heads * decoder.head_dim), dtype=storage.dtype)
    table = list(range(39, 9, -1))
    count = 0
    while not stop.is_set() or not count:
        count += 1
        rows.random_(-8, 8)
        storage.load(rows, table, 5)
        if not torch.equal(storage.save(table, 5, 300), rows):
            failed.append(f"{decoder.device}: chunk {count}")


@pytest.fixture
def one_kernel_at_a_time(big: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps the number of a program in one place for all threads."""
    if big:
        return
    from triton.runtime.interpreter import GridExecutor

    plain, lock = GridExecutor.__call__, threading.Lock()

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return plain(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


@pytest.mark.usefixtures("one_kernel_at_a_time")
def test_outputs_are_those_of_one_runtime(devices: list[torch.device], big: bool) -> None:
    decoders = [_decoder(each, big) for each in devices]
    count, new, length = (24, 60, 150) if big else (4, 3, 20)
    rng = np.random.default_rng(3)
    shared = tuple(int(t) for t in rng.integers(0, 256, length))
    requests = [
        Request(str(i), (*shared[: length - i], 3 + i), new, Sampler(0.5 * (i % 3), 0, 1.0, i)) for i in range(count)
    ]
    with _runtime(decoders[0]) as one:
        alone = [one.run(replace(request, id=f"alone {request.id}"))[0].generated for request in requests]
    stop, failed = threading.Event(), list[str]()
    with ThreadPoolExecutor(count + 2) as pool:
        loading = [pool.submit(_loader, each, stop, failed) for each in (decoders if big else decoders[:1])]
        try:
            with Fleet([_runtime(each) for each in decoders], lanes=LANES, tokens=LIMIT) as fleet:
                outcomes = list(pool.map(lambda request: fleet.run(request)[0], requests))
                used = fleet.call(lambda scheduler: scheduler.decode_tokens)
        finally:
            stop.set()
        for each in loading:
            each.result()
    assert [outcome.generated for outcome in outcomes] == alone
    assert not any(outcome.error for outcome in outcomes) and len(used) == 2 and all(used)
    assert not failed
