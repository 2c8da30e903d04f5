"""What publication beside decoding costs: the library's stages over a file sink.

Stages of one chunk of 256 tokens: gather from the pages, one copy to pinned memory, BLAKE3, write to a file, fdatasync.
The catalogue is not in it.
"""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.common import Bench, Ceilings, Stat, release, wall
from benchmarks.models import Made
from benchmarks.shapes import TITLES
from numem.identity.chain import CHUNK_TOKENS
from numem.identity.digest import content_id
from numem.runtime.device.transfer import Transfers, Wanted

STEPS = 64
CONTEXT = 2048


def run(bench: Bench, ceilings: Ceilings) -> None:
    """One lane and 32 lanes of the last of --shapes: no publication, at the pace of decoding, and flat out."""
    bench.warm += [
        f"weights and pages resident; context {CONTEXT}; {STEPS} steps a sample; another thread publishes a lane's chunks",
        "'paced': as many bytes a second as decoding makes; 'flat out': one chunk after another without a pause",
        "library stages over a file sink (gather, copy to the host, BLAKE3, write, fdatasync), without the catalogue",
    ]
    shape = bench.args.shapes.split(",")[-1]
    for lanes in map(int, bench.args.lanes.split(",")):
        name = f"{TITLES[shape]} bf16, {lanes} lanes"
        bench.attempt(name, lambda s=shape, n=lanes, w=name: _measure(bench, w, s, n))
        release()


@dataclass(slots=True)
class Sink:
    """Publishes the chunks of lane 0 until it is told to stop.

    Attributes:
        rate: bytes a second at most, 0 for no limit.
        parts: seconds spent in copying, hashing, writing and syncing.
    """

    made: Made
    transfers: Transfers
    path: Path
    rate: float
    stop: threading.Event = field(default_factory=threading.Event)
    nbytes: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("copy", "hash", "write", "sync"), 0.0))
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            self.error = error

    def _run(self) -> None:
        table = self.made.tables[0].tolist()
        began, at, last = time.perf_counter(), 0, CONTEXT // CHUNK_TOKENS
        with self.path.open("wb", buffering=0) as file:
            while not self.stop.is_set():
                start = at % last * CHUNK_TOKENS
                job = Wanted(table, start, CHUNK_TOKENS, [None])
                marks = [time.perf_counter()]
                (rows,) = self.transfers.download(job, after=self.transfers.fence()).result()
                marks.append(time.perf_counter())
                raw = rows.view(-1).view(torch.uint8).numpy()
                content_id(raw)
                marks.append(time.perf_counter())
                if at % 32 == 0:
                    file.seek(0)  # a file of 1 GiB, written again and again
                file.write(memoryview(raw))
                marks.append(time.perf_counter())
                os.fdatasync(file.fileno())
                marks.append(time.perf_counter())
                for name, a, b in zip(self.parts, marks, marks[1:], strict=False):
                    self.parts[name] += b - a
                at += 1
                self.nbytes += raw.nbytes
                self.seconds = time.perf_counter() - began
                if self.rate:
                    self.stop.wait(max(0.0, self.nbytes / self.rate - self.seconds))


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
        transfers = made.transfers
        path = Path(bench.args.dir) / f"numem-publish-{os.getpid()}.bin"
        sink = Sink(made, transfers, path, rate)
        thread = threading.Thread(target=sink.run)
        thread.start()
        try:
            busy = decode()
        finally:
            sink.stop.set()
            thread.join()
            path.unlink(missing_ok=True)
        if sink.error is not None:
            raise RuntimeError(f"publishing failed: {sink.error}")
        after = decode()
        calm = (before.median + after.median) / 2
        total = max(sum(sink.parts.values()), 1e-9)
        bench.add(
            f"decode beside publication ({label}), {name}", us_a_step=busy, alone_before=before.median,
            alone_after=after.median, costs=busy.median / calm - 1, published_gbs=sink.nbytes / 1e9 / max(sink.seconds, 1e-9),
            **{f"share_{part}": spent / total for part, spent in sink.parts.items()},
        )  # fmt: skip
        before = after
