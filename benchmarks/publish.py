"""What publication beside decoding costs: the library's stages over a file sink.

Stages of one chunk of 256 tokens: gather from the pages, one copy to pinned memory, BLAKE3, write to a file, fdatasync.
The catalogue is not in it.
"""

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Bench, Ceilings, Stat, release, wall
from benchmarks.models import Made
from benchmarks.shapes import TITLES
from numem.identity.chain import CHUNK_TOKENS
from numem.identity.digest import content_id
from numem.runtime.device.streams import Event
from numem.runtime.device.transfer import Wanted

STEPS = 64
CONTEXT = 2048


def run(bench: Bench, ceilings: Ceilings) -> None:
    """One lane and 32 lanes of the last of --shapes: no publication, at the pace of decoding, and flat out."""
    bench.warm += [
        f"weights and pages resident; context {CONTEXT}; {STEPS} steps a sample; two threads publish a lane's chunks",
        "'paced': as many bytes a second as decoding makes; 'flat out': one chunk after another without a pause",
        "library stages over a file sink (gather, copy to the host, BLAKE3, write, fdatasync), without the catalogue",
    ]
    shape = bench.args.shapes.split(",")[-1]
    for lanes in map(int, bench.args.lanes.split(",")):
        name = f"{TITLES[shape]} bf16, {lanes} lanes"
        bench.attempt(name, lambda s=shape, n=lanes, w=name: _measure(bench, w, s, n))
        release()


class Sink:
    """Publishes the chunks of lane 0 until it is stopped, in two stages with a bounded queue between them, as a memory does:
    one thread fetches and hashes, one writes and syncs.

    Args:
        after: behind which the rows are written: they are older than the steps that run meanwhile.
        rate: bytes a second at most, 0 for no limit.

    Attributes:
        nbytes, seconds: made durable, and in how long.
        parts: seconds spent in copying, hashing, writing and syncing; stages overlap.
    """

    def __init__(self, made: Made, after: Event, path: Path, rate: float) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self.parts = dict.fromkeys(("copy", "hash", "write", "sync"), 0.0)
        self._made, self._after, self._path, self._rate = made, after, path, rate
        self._stop, self._captured = threading.Event(), threading.Event()
        self._queue: queue.Queue[np.ndarray | None] = queue.Queue(2)
        self._threads = ThreadPoolExecutor(2)
        self._stages = [self._threads.submit(self._capture), self._threads.submit(self._write)]

    def close(self) -> None:
        """Stop after the chunks that are under way; raises what failed."""
        self._stop.set()
        self._threads.shutdown()
        for stage in self._stages:
            stage.result()

    def _chunks(self) -> Iterator[Wanted]:
        """Chunks of the lane, again and again, at the pace."""
        table, last = self._made.tables[0].tolist(), CONTEXT // CHUNK_TOKENS
        d = self._made.descriptor
        size = 2 * d.layers * d.kv_heads * d.head_dim * self._made.storage.k.element_size() * CHUNK_TOKENS
        began = time.perf_counter()
        for at in itertools.count():
            if self._rate:
                marked = time.perf_counter()
                self._stop.wait(max(0.0, began + at * size / self._rate - marked))
                self.parts["copy"] -= time.perf_counter() - marked  # which counts the time between chunks
            if self._stop.is_set():
                return
            yield Wanted(table, at % last * CHUNK_TOKENS, CHUNK_TOKENS, [None])

    def _capture(self) -> None:
        try:
            marked = time.perf_counter()
            for (rows,) in self._made.transfers.downloads(self._chunks(), after=self._after):
                marked = self._spent("copy", marked)
                raw = rows.view(-1).view(torch.uint8).numpy()
                content_id(raw)
                marked = self._spent("hash", marked)
                self._queue.put(raw)
                marked = time.perf_counter()
        finally:
            self._captured.set()
            self._queue.put(None)

    def _write(self) -> None:
        began = time.perf_counter()
        try:
            with self._path.open("wb", buffering=0) as file:
                for at in itertools.count():
                    raw = self._queue.get()
                    if raw is None:
                        return
                    marked = time.perf_counter()
                    if at % 32 == 0:
                        file.seek(0)  # a file of 1 GiB, written again and again
                    file.write(memoryview(raw))
                    marked = self._spent("write", marked)
                    os.fdatasync(file.fileno())
                    self._spent("sync", marked)
                    self.nbytes += raw.nbytes
                    self.seconds = time.perf_counter() - began
        finally:
            self._path.unlink(missing_ok=True)
            while not self._captured.is_set():  # where writing failed: let the other stage end
                with contextlib.suppress(queue.Empty):
                    self._queue.get(timeout=0.1)

    def _spent(self, part: str, since: float) -> float:
        now = time.perf_counter()
        self.parts[part] += now - since
        return now


def _measure(bench: Bench, name: str, shape: str, lanes: int) -> None:
    context, steps = bench.size(CONTEXT, CHUNK_TOKENS), bench.size(STEPS, 2)
    lanes = min(lanes, bench.size(lanes, 2))
    made = Made.of(bench, shape, "bf16", lanes=lanes, context=max(context, CONTEXT) + steps)
    made.fill()
    repeats = bench.size(16, 1)
    d = made.descriptor
    row = 2 * d.layers * d.kv_heads * d.head_dim * made.storage.k.element_size()

    def decode() -> Stat:
        return Stat.of([us / steps for us in wall(lambda: made.decode(context, steps), repeats, warm=2)])

    before = decode()
    pace = lanes * row / before.median * 1e6
    for label, rate in (("paced", pace), ("flat out", 0.0)):
        path = Path(bench.args.dir) / f"numem-publish-{os.getpid()}.bin"
        with closing(Sink(made, made.transfers.fence(), path, rate)) as sink:
            busy = decode()
        after = decode()
        calm = (before.median + after.median) / 2
        total = max(sum(sink.parts.values()), 1e-9)
        bench.add(
            f"decode beside publication ({label}), {name}", us_a_step=busy, alone_before=before.median,
            alone_after=after.median, costs=busy.median / calm - 1, decoding_makes_gbs=pace / 1e9,
            published_gbs=sink.nbytes / 1e9 / max(sink.seconds, 1e-9),
            **{f"share_{part}": spent / total for part, spent in sink.parts.items()},
        )  # fmt: skip
        before = after
