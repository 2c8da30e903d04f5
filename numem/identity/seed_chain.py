"""The chain of the system numem grew from, kept so that its published golden values stay a permanent test.

Nothing is stored under these ids: they are 16 bytes and know neither model nor numeric policy.
"""

import hashlib
import struct
import uuid
from collections.abc import Sequence


def _uuid_shaped(digest: bytes) -> uuid.UUID:
    head = bytearray(digest[:16])
    head[6] = 0x50 | (head[6] & 0x0F)
    head[8] = 0x80 | (head[8] & 0x3F)
    return uuid.UUID(bytes=bytes(head))


def _int64s(values: Sequence[int]) -> bytes:
    return b"".join(struct.pack(">q", v) for v in values)


def chunk_hash(parent: uuid.UUID | None, tokens: Sequence[int]) -> uuid.UUID:
    """Hash of a token block under a parent block (None for the root)."""
    parent_bytes = parent.bytes if parent else bytes(16)
    body = b"pretrained-rstr/kv-prefix-chain/v1" + parent_bytes + struct.pack(">q", len(tokens)) + _int64s(tokens)
    return _uuid_shaped(hashlib.sha256(body).digest())


def node_id(fingerprint: str, prefix: uuid.UUID) -> uuid.UUID:
    """Catalog id of a prefix under a model fingerprint."""
    return _uuid_shaped(
        hashlib.sha256(b"pretrained-rstr/kv-catalog-node/v1" + fingerprint.encode() + prefix.bytes).digest()
    )


def token_prefix_hash(tokens: Sequence[int]) -> uuid.UUID:
    """Hash of a bare token sequence: no domain, length or parent."""
    return _uuid_shaped(hashlib.sha256(_int64s(tokens)).digest())
