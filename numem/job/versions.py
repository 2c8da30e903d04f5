"""Versions of what the stages leave behind: equal versions mean equal bytes, in any run and on any machine.

They are what an orchestrator shows as the version of an asset. None of them decides about reuse: that is done by causal
and content ids.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from numem.identity.chain import pack_tokens
from numem.identity.digest import framed, framed_sha256

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


class OutputsDigest:
    """SHA-256 over prompt ids and output tokens, added one prompt at a time in table order."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256(framed("numem/version/outputs/v1"))

    def add(self, id: str, tokens: Sequence[int]) -> None:
        for part in (id.encode(), pack_tokens(tokens)):
            self._sha.update(len(part).to_bytes(8, "big") + part)

    def hex(self) -> str:
        return self._sha.hexdigest()
