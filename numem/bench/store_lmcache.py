"""Batch restores against LMCache's local-disk backend, on the same payloads. LMCache is no dependency of numem.

It installs without a GPU as `pip install --no-deps lmcache` beside its pure requirements: as a whole it asks for cupy,
cuda-python and cufile, none of which this backend imports.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from numem.bench.nodes import piece_node
from numem.bench.pairs import figure, interleaved, median_ms, ratios
from numem.store.memory import Memory

COUNT = 16
NBYTES = 4 << 20
PAIRS = 21


def against_lmcache(pairs: int = PAIRS, count: int = COUNT, nbytes: int = NBYTES) -> dict[str, Any]:
    """`restore_vs_lmcache`: speed of `Memory.read`, verified, as a ratio to `LocalDiskBackend.batched_get_blocking`.

    The page cache is warm for both. LMCache returns staging buffers that it allocated and verifies nothing; its index
    is in RAM alone. Where it cannot be imported, the figure says why instead.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="numem-bench-") as place, _backend(Path(place) / "lmcache") as peer:
            return {"restore_vs_lmcache": _measure(peer, Path(place), pairs, count, nbytes)}
    except ImportError as error:
        return {"restore_vs_lmcache": {"skipped": f"lmcache cannot be imported: {error}"}}


def _measure(peer: Any, place: Path, pairs: int, count: int, nbytes: int) -> dict[str, Any]:
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryFormat

    rng = np.random.default_rng(3)
    pieces = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(count)]
    keys = [CacheEngineKey("bench", 1, 0, number + 1, torch.uint8) for number in range(count)]
    for key, piece in zip(keys, pieces, strict=True):
        held = peer.local_cpu_backend.allocate(torch.Size([nbytes]), torch.uint8, MemoryFormat.BINARY)
        held.tensor.copy_(torch.from_numpy(piece))
        peer.submit_put_task(key, held)
    while not all(peer.contains(key) for key in keys):
        pass
    node = piece_node(pieces)
    buffers = [np.zeros(nbytes, np.uint8) for _ in pieces]
    requests = [(content, buffer.data) for content, buffer in zip(node.pieces, buffers, strict=True)]

    def theirs() -> None:
        got.extend(peer.batched_get_blocking(keys))

    def release() -> None:
        for held in got:
            held.ref_count_down()
        got.clear()

    got: list[Any] = []
    with Memory(place / "memory") as memory:
        memory.stage(node, pieces)
        memory.publish_staged([node.id])
        theirs()
        assert all(np.array_equal(held.tensor.numpy(), piece) for held, piece in zip(got, pieces, strict=True))
        seconds = interleaved({"peer": theirs, "mine": lambda: memory.read(requests)}, pairs, release)
        release()
    assert all(np.array_equal(piece, buffer) for piece, buffer in zip(pieces, buffers, strict=True))
    return dict(
        figure(
            ratios(seconds["peer"], seconds["mine"]),
            ms=median_ms(seconds["mine"]),
            peer_ms=median_ms(seconds["peer"]),
            bytes=count * nbytes,
        )
    )


@contextmanager
def _backend(path: Path) -> Iterator[Any]:
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    config = LMCacheEngineConfig.from_defaults(local_cpu=False, local_disk=str(path), max_local_disk_size=8.0)
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    staging = LocalCPUBackend(config, dst_device="cpu", memory_allocator=AdHocMemoryAllocator("cpu"))
    backend = LocalDiskBackend(config, loop, staging, dst_device="cpu")
    try:
        yield backend
    finally:
        backend.disk_worker.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
