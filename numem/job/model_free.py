"""The durable path without a model: numbers in, chunks out, the same bytes back from a reopened memory.

512 tokens of attention state of a decoder that does not exist (2 layers, 2 kv heads of 4, float32) take the way of real
ones: planned, published, deduplicated on repeat, found by prefix, read back and verified.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from numem.errors import IntegrityError
from numem.identity.chain import CHUNK_TOKENS, Chunk, plan
from numem.identity.digest import content_id
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.runtime.restore.chunks import chunk_node
from numem.runtime.restore.prefix import Match, lookup
from numem.state.node import Node
from numem.state.spec import Slab, StateSpec
from numem.store.memory import Memory

TOKENS = 512
SPEC = StateSpec((Slab("key", 2, 8), Slab("value", 2, 8)), "float32")
DTYPE = np.dtype("<f4")


def payload_of(chunk: Chunk) -> np.ndarray:
    """Values [members, tokens, width] of a chunk: exact in float32, so that every platform has the same bits."""
    member, position, column = np.indices((SPEC.members, chunk.count, SPEC.width))
    values: np.ndarray = ((1000 * member + 7 * (position + chunk.start) + column) % 997 / 8).astype(DTYPE)
    return values


def identity() -> Identity:
    """Identity of these numbers; its self-test is their first chunk."""
    (first, *_) = plan(bytes(32), range(CHUNK_TOKENS), CHUNK_TOKENS)
    policy = NumericPolicy("exact-ramp-v1", content_id(payload_of(first)))
    semantic = {"program": "numem/model-free/v1", "kv": SPEC.describe(), "chunk_tokens": CHUNK_TOKENS}
    return Identity(semantic, policy, "any")


def run_model_free(directory: Path | None = None) -> dict[str, Any]:
    """Run the demo and return what was measured, as plain JSON values.

    Args:
        directory: a memory that is kept; a temporary one, removed at the end, by default.
    """
    if directory is not None:
        return {**_run(Path(directory)), "directory": str(directory)}
    with tempfile.TemporaryDirectory(prefix="numem-model-free-") as temporary:
        return _run(Path(temporary))


def _run(home: Path) -> dict[str, Any]:
    # The last token is pending, so that TOKENS of them are in the cache.
    tokens, subject, metrics = list(range(TOKENS + 1)), identity(), Counter[str]()
    with Memory(home) as memory:
        memory.register(subject)
        _publish(memory, subject, tokens, metrics)
        stored, before = metrics["chunks-stored"], _files(home)
        _publish(memory, subject, tokens, metrics)
        repeated = metrics["chunks-stored"] - stored == 0 and _files(home) == before
    with Memory(home) as memory, lookup(memory, subject.scope, tokens) as match:
        _count(match, len(tokens) - 1, metrics)
        payload = _restore(memory, match, metrics)
        (field,) = memory.manifest(match.hits[-1].node.id).fields
        return {
            "processed-tokens": field.value.shape[1],
            "chunk-size": field.chunk_shape[1],
            "stored-chunks": len(memory.chain(match.hits[-1].node.id)),
            "deduplicated-on-repeat": repeated,
            "catalog-matches": len(match.hits),
            "cached-tokens": match.tokens,
            "stored-bytes": sum(size for size, _ in before.values()),
            "mmap-payload": {
                "element-type": field.value.dtype,
                "element-count": int(payload.size),
                "byte-order": f"{field.chunks[0].storage.byte_order}-endian",
            },
            "cache-metrics": dict(sorted(metrics.items())),
        }


def _publish(memory: Memory, subject: Identity, tokens: list[int], metrics: Counter[str]) -> None:
    for chunk in plan(subject.scope, tokens):
        payload = payload_of(chunk)
        ticket = memory.publish(node_of(chunk, subject.scope, payload), [payload])
        receipt = ticket.published.result()
        metrics["chunks-planned"] += 1
        metrics["capture-accepted"] += ticket.accepted
        metrics["capture-rejected"] += 0
        metrics["chunks-stored"] += receipt.stored
        metrics["chunks-reused"] += receipt.stored == 0


def node_of(chunk: Chunk, scope: bytes, payload: np.ndarray) -> Node:
    """The node of a chunk whose payload is `payload`."""
    return chunk_node(chunk, scope, SPEC, [content_id(payload)], {"numpy": np.__version__})


def _count(match: Match, requested: int, metrics: Counter[str]) -> None:
    metrics["prefix-lookups"] += 1
    metrics["requested-tokens"] += requested
    metrics["cached-tokens"] += match.tokens
    metrics["full-hits"] += match.tokens == requested
    metrics["partial-hits"] += 0 < match.tokens < requested
    metrics["misses"] += match.tokens == 0 < requested


def _restore(memory: Memory, match: Match, metrics: Counter[str]) -> np.ndarray:
    """Read every matched chunk, compare it with what was published, and return the last one's elements."""
    elements = np.empty(0, DTYPE)
    for hit, chunk in zip(match.hits, plan(match.hits[0].node.scope, range(match.tokens), match.tokens), strict=True):
        buffer = np.empty(hit.node.count * SPEC.row_bytes, np.uint8)
        report = memory.read([(hit.node.pieces[0], buffer)])
        elements = buffer.view(DTYPE)
        if elements.tobytes() != payload_of(chunk).tobytes():
            raise IntegrityError(f"model-free: chunk [{chunk.start}, {chunk.end}) is not what was published")
        metrics["restored-chunks"] += 1
        metrics["restored-bytes"] += report.bytes
    return elements


def _files(home: Path) -> dict[Path, tuple[int, int]]:
    """Files of the payload tier with their size in bytes and modification time: a repeat may touch none."""
    stats = {path: path.stat() for path in sorted((home / "object").rglob("*")) if path.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}
