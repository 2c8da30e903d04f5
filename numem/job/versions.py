"""Versions of what the stages leave behind: equal versions mean equal bytes, in any run and on any machine.

They are what an orchestrator shows as the version of an asset. None of them decides about reuse: that is done by causal
and content ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from numem.identity.chain import pack_tokens
from numem.identity.digest import framed_sha256

if TYPE_CHECKING:
    from numem.job.batch import Batch
    from numem.store.memory import Memory


def chunks_version(memory: "Memory", batch: "Batch", tier: str | None = None) -> str:
    """SHA-256 over (causal id, content ids) of the batch's chunks, hex.

    Staged chunks count like durable ones, so that staging and publishing the same bytes have one version. A chunk whose
    bytes are nowhere (or not in `tier`, where one is given) counts with its causal id alone.
    """
    ids = batch.chunk_ids()
    staged = {} if tier else {node.id: node for node in memory.staged(ids)}
    parts: list[bytes] = []
    for chunk in ids:
        node = memory.get(chunk) if memory.available(chunk, tier) else staged.get(chunk)
        parts += [chunk, b"".join(node.pieces) if node else b""]
    return framed_sha256("numem/version/chunks/v1", *parts).hex()


def rows_version(digests: Iterable[str]) -> str:
    """SHA-256 over the digests of restored rows, prefix by prefix, hex."""
    return framed_sha256("numem/version/rows/v1", *(digest.encode() for digest in digests)).hex()


def outputs_digest(batch: "Batch", generated: Mapping[int, Sequence[int]]) -> str:
    """SHA-256 over prompt ids and output tokens in table order, hex."""
    parts: list[bytes] = []
    for index, item in enumerate(batch.items):
        parts += [item.id.encode(), pack_tokens(generated[index])]
    return framed_sha256("numem/version/outputs/v1", *parts).hex()
