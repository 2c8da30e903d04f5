"""Two workers with their own `ssd` tiers and one home on an object store, without a model.

worker a   publishes 4 tokens as 2 chunks of 2 tokens, and ends
worker b   promotes both into its own tier, reads them there and closes; opens the memory again and is killed
worker b'  the same place in a new process: finds all 4 tokens, and reads them without the object store

Each worker is a process of its own that shares nothing with the others but the home. The report has the names that the
first system's demo gave them; `mmap` in a name is how it read, numem reads by position.
"""

import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from numem.errors import InputError, IntegrityError, NumemError, StoreError
from numem.identity.chain import Chunk, plan
from numem.identity.digest import content_id
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.runtime.restore.chunks import chunk_node
from numem.runtime.restore.prefix import lookup
from numem.state.spec import Slab, StateSpec
from numem.store.memory import Memory
from numem.store.payload.objects import Objects
from numem.store.urls import locate

CHUNK = 2
# The last token of each is pending: it is never in the cache.
PROMPT = (1, 2, 3, 4, 5)
PARTED = (1, 2, 3, 4, 99, 100)
# 1 layer, 1 head of 2: 8 elements for the keys and values of 2 tokens.
SPEC = StateSpec((Slab("key", 1, 2), Slab("value", 1, 2)), "float32")
DTYPE = np.dtype("<f4")
_WAIT_S = 120.0

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker finds the memory: the shared home with its storage options, its own directory and name."""

    home: str
    options: Mapping[str, str]
    local: Path
    node: str

    def open(self) -> Memory:
        return Memory(self.home, node=self.node, local=self.local, storage_options=self.options)


def run_two_workers(home: str, options: Mapping[str, str], directory: Path) -> Report:
    """Run the demo in a fresh home and return what was measured, as plain JSON values.

    Args:
        home: URL of a prefix that holds no memory yet.
        directory: gets the local directories of the workers.

    Raises:
        StoreError: a worker failed; says which and why.
        IntegrityError: a worker read other bytes than were published.
    """
    a, b = (Place(home, dict(options), directory / node, node) for node in ("worker-a", "worker-b"))
    published = _run(checkpoint, a)
    promoted = _run(promote, b, kill=True)
    restarted = _run(restart, b)
    return {
        "chunks": published["chunks"],
        "ready-replicas": promoted["ready-replicas"],
        "mmap-element-counts": promoted["mmap-element-counts"],
        "timing-ms": promoted["timing-ms"],
        "source-cache-stats": published["source-cache-stats"],
        "restart": restarted["restart"],
        "partial-hit": restarted["partial-hit"],
    }


def on_server(endpoint: str, directory: Path) -> Report:
    """Run the demo on an S3 server that is there, and remove from it what the demo made.

    Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; the bucket "numem" is created unless it exists.

    Raises:
        InputError: no credentials, or no server that answers.
    """
    from numem.bench.s3server import BUCKET, make_bucket, storage_options

    keys = [os.environ.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    if not all(keys):
        raise InputError(f"--s3-endpoint {endpoint}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    options = storage_options(endpoint, *keys)
    try:
        make_bucket(options, BUCKET)
    except OSError as error:
        raise InputError(f"--s3-endpoint {endpoint}: bucket {BUCKET!r} cannot be made there ({error})") from error
    home = f"s3://{BUCKET}/two-workers-{secrets.token_hex(8)}"
    try:
        return run_two_workers(home, options, directory)
    finally:
        made = Objects(locate("home", home), options)
        made.delete([listed.name for listed in made.listing()])


def checkpoint(place: Place) -> Report:
    """Worker a: publish the chunks."""
    subject = identity()
    with place.open() as memory:
        memory.register(subject)
        chunks = _chunks(subject)
        for chunk in chunks:
            payload = payload_of(chunk)
            node = chunk_node(chunk, subject.scope, SPEC, [content_id(payload)], {"numpy": np.__version__}, CHUNK)
            memory.publish(node, [payload]).published.result()
        return {"chunks": len(chunks), "source-cache-stats": memory.stats()}


def promote(place: Place) -> Report:
    """Worker b: copy the chunks into its own tier and read them there."""
    subject = identity()
    began = time.perf_counter()
    with place.open() as memory:
        opened = time.perf_counter()
        ids = [chunk.id for chunk in _chunks(subject)]
        report = memory.promote(ids, "ssd")
        promoted = time.perf_counter()
        if report.failed:
            raise StoreError(f"promotion failed: {'; '.join(report.failed.values())}")
        ready = sum(memory.available(id, "ssd") for id in ids)
        counts = _read(memory, _chunks(subject))
    times = {"backend+catalog": _ms(opened - began), "promotion": _ms(promoted - opened)}
    return {"ready-replicas": ready, "mmap-element-counts": counts, "timing-ms": times}


def restart(place: Place) -> Report:
    """Worker b again: find what it promoted before it was killed, and read it."""
    subject = identity()
    with place.open() as memory:
        with lookup(memory, subject.scope, PROMPT, tier="ssd") as match:
            began = time.perf_counter()
            counts = _read(memory, _chunks(subject)[: len(match.hits)])
            found = {
                "cached-token-count": match.tokens,
                "matched-chunks": len(match.hits),
                "warm-mmap-element-counts": counts,
                "warm-mmap-ms": _ms(time.perf_counter() - began),
            }
        with lookup(memory, subject.scope, PARTED, tier="ssd") as match:
            parted = {
                "requested-token-count": len(PARTED) - 1,
                "cached-token-count": match.tokens,
                "matched-chunks": len(match.hits),
            }
    return {"restart": found, "partial-hit": parted}


def identity() -> Identity:
    """Identity of these numbers; its self-test is their first chunk."""
    (first, *_) = plan(bytes(32), PROMPT, chunk_tokens=CHUNK, page_tokens=CHUNK)
    policy = NumericPolicy("exact-ramp-v1", content_id(payload_of(first)))
    return Identity({"program": "numem/two-workers/v1", "kv": SPEC.describe(), "chunk_tokens": CHUNK}, policy, "any")


def payload_of(chunk: Chunk) -> np.ndarray:
    """Values [members, tokens, width] of a chunk: small whole numbers, the same bits everywhere."""
    member, position, column = np.indices((SPEC.members, chunk.count, SPEC.width))
    values: np.ndarray = (100 * member + 10 * (position + chunk.start) + column).astype(DTYPE)
    return values


def _chunks(subject: Identity) -> tuple[Chunk, ...]:
    return plan(subject.scope, PROMPT, chunk_tokens=CHUNK, page_tokens=CHUNK)


def _read(memory: Memory, chunks: tuple[Chunk, ...]) -> list[int]:
    """Read chunks from the worker's own tier, verified and compared; their elements."""
    counts = []
    for chunk in chunks:
        node = memory.get(chunk.id)
        if node is None:
            raise StoreError(f"chunk [{chunk.start}, {chunk.end}) is not in the memory")
        buffer = np.empty(chunk.count * SPEC.row_bytes, np.uint8)
        memory.read([(node.pieces[0], buffer)], tier="ssd")
        if buffer.tobytes() != payload_of(chunk).tobytes():
            raise IntegrityError(f"two workers: chunk [{chunk.start}, {chunk.end}) is not what was published")
        counts.append(buffer.view(DTYPE).size)
    return counts


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def _run(work: Callable[[Place], Report], place: Place, *, kill: bool = False) -> Report:
    """Run a worker's part in a process of its own; with `kill` it opens the memory once more and is killed then."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, place, theirs, kill), name=place.node)
    child.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(_WAIT_S) else "no answer in time"
    except EOFError:
        answer = "ended without an answer"
    finally:
        if not kill:
            child.join(_WAIT_S)
        child.kill()  # SIGKILL, of which one that ended notices nothing
        child.join()
        ours.close()
    if isinstance(answer, str):
        raise StoreError(f"{place.node}: {answer}")
    report: Report = answer
    return report


def _child(work: Callable[[Place], Report], place: Place, answers: Connection, stay: bool) -> None:
    try:
        report = work(place)
        with place.open() if stay else nullcontext():
            answers.send(report)
            if stay:
                time.sleep(_WAIT_S)
    except NumemError as error:
        answers.send(f"{type(error).__name__}: {error}")
