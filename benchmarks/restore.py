"""Restore: pinned host memory and files into pages, to the first token, beside computing anew; and a fork."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Bench, Ceilings, Stat, release, settle, wall
from benchmarks.models import Made
from benchmarks.peer_transformers import Peer
from benchmarks.shapes import TITLES
from numem.identity.chain import CHUNK_TOKENS, PAGE_TOKENS
from numem.runtime.device.transfer import Transfers
from numem.runtime.engine import Engine

TOKENS = 16384
FORK_TOKENS = 32768
READERS = 4


class Kept:
    """Host memory that outlives every copy from it."""

    def release(self) -> None:
        return None


@dataclass(slots=True)
class Chunks:
    """Payloads [2, layers, 256, width] of a sequence, one beside the other in pinned memory."""

    parts: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def run(bench: Bench, ceilings: Ceilings) -> None:
    """The 8B shape, or the last of --shapes."""
    bench.warm += [
        "weights, pages and pinned payloads resident, page-locked memory made before; every chunk is verified elsewhere",
        "files: written and synced by this run; 'warm' from the page cache, 'dropped' after its pages were let go",
        "peer: weights resident, one call, dynamic cache",
    ]
    shape = bench.args.shapes.split(",")[-1]
    name = TITLES[shape]
    count = bench.size(TOKENS, CHUNK_TOKENS)
    _own(bench, ceilings, name, shape, count)
    release()
    if bench.args.peer != "none":
        bench.attempt(f"transformers, {name}", lambda: _peer(bench, name, shape, count))
        release()
    bench.attempt("fork", lambda: _fork(bench, shape))


def _own(bench: Bench, ceilings: Ceilings, name: str, shape: str, count: int) -> None:
    made = Made.of(bench, shape, "bf16", lanes=1, context=count + CHUNK_TOKENS)
    transfers, chunks = made.transfers, random_chunks(bench, made, count)
    bench.attempt(f"pinned, {name}", lambda: _pinned(bench, ceilings, name, made, transfers, chunks))
    bench.attempt(f"file, {name}", lambda: _file(bench, name, made, transfers, chunks))
    bench.attempt(f"recompute, {name}", lambda: _recompute(bench, name, made, count))


def random_chunks(bench: Bench, made: Made, count: int) -> Chunks:
    """Payloads of `count` tokens of ordinary numbers."""
    d = made.descriptor
    shape = (2, d.layers, CHUNK_TOKENS, d.kv_heads * d.head_dim)
    parts = []
    for _ in range(count // CHUNK_TOKENS):
        part = torch.empty(shape, dtype=made.storage.k.dtype, pin_memory=not bench.dry)
        part.copy_(torch.empty(shape, dtype=part.dtype, device=bench.device).normal_(std=0.5))
        parts.append(part)
    return Chunks(parts)


def upload(made: Made, transfers: Transfers, chunks: Chunks) -> None:
    """Bring all chunks to lane 0; computing waits for the last of them."""
    table, after = made.tables[0].tolist(), transfers.fence()
    done = None
    for at, part in enumerate(chunks.parts):
        done = transfers.upload([part], Kept(), table, at * CHUNK_TOKENS, [None], after=after)
        transfers.join(done)


def _pinned(
    bench: Bench, ceilings: Ceilings, name: str, made: Made, transfers: Transfers, chunks: Chunks
) -> None:  # fmt: skip
    repeats = bench.size(7, 1)
    count, gb = len(chunks.parts) * CHUNK_TOKENS, chunks.nbytes / 1e9
    moved = Stat.of([us / 1e3 for us in wall(lambda: upload(made, transfers, chunks), repeats)])
    last = made.tables[0][count // PAGE_TOKENS - 1]
    tail = made.storage.k[0, int(last), 0, -1].cpu()
    wanted = chunks.parts[-1][0, 0, -1].view(made.descriptor.kv_heads, -1)[0]
    bench.add(
        f"pinned host to pages, {count} tokens, {name}", ms=moved, gb=gb, gbs=gb / moved.median * 1e3,
        share_of_h2d=gb / moved.median * 1e3 / ceilings.h2d, equal=torch.equal(tail, wanted),
    )  # fmt: skip

    def first() -> None:
        upload(made, transfers, chunks)
        made.decode(count, 1)

    step = Stat.of([us / 1e3 for us in wall(lambda: made.decode(count, 1), bench.size(10, 1), warm=2)])
    ttft = Stat.of([us / 1e3 for us in wall(first, repeats)])
    floor = gb / ceilings.h2d * 1e3
    bench.add(
        f"pinned host to first token, {count} tokens, {name}", ms=ttft, floor_ms=floor, step_ms=step,
        over_floor=(ttft.median - step.median) / floor,
    )  # fmt: skip


def _file(bench: Bench, name: str, made: Made, transfers: Transfers, chunks: Chunks) -> None:
    path = Path(bench.args.dir) / f"numem-restore-{os.getpid()}.bin"
    size = chunks.parts[0].nbytes
    try:
        with path.open("wb", buffering=0) as file:
            for part in chunks.parts:
                file.write(memoryview(part.view(torch.uint8).view(-1).numpy()))
            os.fdatasync(file.fileno())
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _read_and_restore(bench, name, made, transfers, descriptor, len(chunks.parts), size)
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)


def _read_and_restore(
    bench: Bench, name: str, made: Made, transfers: Transfers, descriptor: int, count: int, size: int
) -> None:  # fmt: skip
    d = made.descriptor
    shape, dtype = (2, d.layers, CHUNK_TOKENS, d.kv_heads * d.head_dim), made.storage.k.dtype
    table, gb = made.tables[0].tolist(), count * size / 1e9
    scratch = [transfers.streams.host_buffer(size) for _ in range(READERS)]
    for buffer in scratch:
        buffer.fill_(1)

    def fill(at: int, memory: Tensor) -> None:
        view, done = memoryview(memory.numpy()), 0
        while done < size:
            got = os.preadv(descriptor, [view[done:size]], at * size + done)
            if not got:
                raise OSError(f"file ends at {at * size + done}")
            done += got

    def read_only(pool: ThreadPoolExecutor) -> None:
        list(pool.map(lambda n: [fill(at, scratch[n]) for at in range(n, count, READERS)], range(READERS)))

    def one(at: int) -> tuple[int, Any, Tensor]:
        found = transfers.slot([size], wait=True)
        assert found is not None
        slot, (memory,) = found
        fill(at, memory)
        return at, slot, memory

    def restore(pool: ThreadPoolExecutor) -> None:
        after = transfers.fence()
        # one more than readers, so that none idles while a chunk is sent; fewer than slots, so that none waits for a slot
        # that a later chunk holds
        ahead = READERS + 1
        waiting = [pool.submit(one, at) for at in range(min(ahead, count))]
        for turn in range(count):
            at, slot, memory = waiting[turn].result()
            rows = memory.view(dtype).view(shape)
            done = transfers.upload([rows], slot, table, at * CHUNK_TOKENS, [None], after=after)
            transfers.join(done)
            if turn + ahead < count:
                waiting.append(pool.submit(one, turn + ahead))

    with ThreadPoolExecutor(READERS) as pool:
        for state in ("warm", "dropped"):

            def timed(call: Any, state: str = state) -> Stat:
                out = []
                for _ in range(bench.size(4, 1)):
                    if state == "dropped":
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    settle()
                    began = time.perf_counter()
                    call(pool)
                    settle()
                    out.append((time.perf_counter() - began) * 1e3)
                return Stat.of(out[1:] or out)

            reading, restoring = timed(read_only), timed(restore)
            bench.add(
                f"file ({state}) to pages, {count * CHUNK_TOKENS} tokens, {name}", ms=restoring, gb=gb,
                gbs=gb / restoring.median * 1e3, read_gbs=gb / reading.median * 1e3,
                share_of_read=reading.median / restoring.median,
            )  # fmt: skip


def _recompute(bench: Bench, name: str, made: Made, count: int) -> None:
    tokens = made.tokens(count)

    def first() -> None:
        made.prefill(tokens)
        made.decode(count, 1)

    stat = Stat.of([us / 1e3 for us in wall(first, bench.size(3, 1))])
    bench.add(f"own recompute to first token, {count} tokens, {name}", ms=stat)


def _peer(bench: Bench, name: str, shape: str, count: int) -> None:
    peer = Peer(bench, shape)
    tokens = torch.randint(0, peer.config.vocab_size, (1, count), device=bench.device)
    stat = Stat.of([us / 1e3 for us in wall(lambda: peer.prefill(tokens).argmax().item(), bench.size(3, 1))])
    bench.add(f"transformers SDPA recompute to first token, {count} tokens, {name}", ms=stat)


def _fork(bench: Bench, shape: str) -> None:
    """A fork of a long sequence, with the copy that its first token needs."""
    count = bench.size(FORK_TOKENS, 600) + 5  # a partial last page
    made = Made.of(bench, shape, "bf16", lanes=1, context=count + 4 * PAGE_TOKENS)
    engine = Engine(made.decoder, pages=made.storage.k.shape[1] + 64)
    route = engine.pool.allocate()
    engine.pool.commit([engine.reserve(route, count)])
    copied = []

    def fork() -> None:
        before = engine.page_copies
        child = engine.pool.fork(route)
        engine.pool.commit([engine.reserve(child, 1)])
        settle()
        copied.append(engine.page_copies - before)
        engine.release(child)

    stat = Stat.of([us / 1e3 for us in wall(fork, bench.size(30, 2), warm=3)])
    bench.add(f"fork of {count} tokens and room for one more, {TITLES[shape]}", ms=stat, pages_copied=max(copied))
