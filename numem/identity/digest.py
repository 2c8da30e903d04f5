"""Digests, and the framing under which numem hashes: every field length-prefixed, every domain separated."""

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

ID_BYTES = 32

# Anything that offers a C-contiguous buffer (bytes, memoryview, numpy arrays).
Buffer = Any


def framed(domain: str, *fields: bytes) -> bytes:
    """Concatenate a domain and fields, each behind its length (u64, big-endian)."""
    parts: list[bytes] = []
    for field in (domain.encode(), *fields):
        parts.append(struct.pack(">Q", len(field)))
        parts.append(field)
    return b"".join(parts)


def framed_sha256(domain: str, *fields: bytes) -> bytes:
    """SHA-256 of `framed(domain, *fields)`, 32 bytes."""
    return hashlib.sha256(framed(domain, *fields)).digest()


def content_id(payload: Buffer, key: bytes | None = None) -> bytes:
    """BLAKE3-256 of a payload, 32 bytes; keyed under a tenant's salt where one is given (32 bytes)."""
    from blake3 import blake3

    view = memoryview(payload).cast("B")
    return bytes(blake3(view, key=key).digest() if key else blake3(view).digest())


def blake3_of(parts: Iterable[Buffer]) -> bytes:
    """BLAKE3-256 over a sequence of buffers, each behind its length (u64, big-endian)."""
    from blake3 import blake3

    hasher = blake3()
    for part in parts:
        view = memoryview(part).cast("B")
        hasher.update(struct.pack(">Q", len(view)))
        hasher.update(view)
    return bytes(hasher.digest())


def checksum(payload: Buffer) -> bytes:
    """XXH3-128 of a payload, 16 bytes: the check of every restore, not an identity."""
    import xxhash

    return xxhash.xxh3_128(memoryview(payload).cast("B")).digest()
