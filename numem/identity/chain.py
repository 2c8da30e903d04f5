"""The prefix chain: page ids, boundary ids and the chunk plan of a token sequence.

    [0, 16)  [16, 32)  ...  [256, 272)  ...      pages: hashed finely
    [------- 0, 256 -------)[--- 256, 300 ---)   chunks: stored coarsely, the last may be short
                                            ^ pending token, evaluated at position 300, outside the chain

    page id     = SHA-256("numem/kv/page/v1" | parent | u64be n | i64be token * n | u32be k | extra digest * k)
    parent      = scope for the first page, else the id of the page before
    boundary id = id of the last, possibly short, page before the boundary

Everything is length-prefixed and big-endian; no digest is ever truncated.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from numem.errors import InputError, OutOfPlanError
from numem.identity.digest import ID_BYTES, framed

PAGE_TOKENS = 16
CHUNK_TOKENS = 256
TOKEN_BYTES = 8
PAGE_DOMAIN = "numem/kv/page/v1"

_DOMAIN = framed(PAGE_DOMAIN) + struct.pack(">Q", ID_BYTES)
_NO_EXTRAS = struct.pack(">I", 0)


def pack_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Tokens as big-endian signed 64-bit integers, 8 bytes each.

    Raises:
        InputError: a token is not an integer of 64 bits (nothing is rounded or wrapped).
    """
    values = np.asarray(tokens)
    if values.ndim != 1 or (values.size and not np.can_cast(values.dtype, np.int64)) or values.dtype.kind == "b":
        raise InputError(f"tokens: ids must be integers of 64 bits, got values of type {values.dtype}")
    return values.astype(">i8").tobytes()


def unpack_tokens(applied: bytes) -> list[int]:
    """Inverse of `pack_tokens`."""
    return [int(t) for t in np.frombuffer(applied, dtype=">i8")]


def page_id(parent: bytes, applied: bytes, extras: Sequence[bytes] = ()) -> bytes:
    """Id of the page that applies packed tokens to a parent.

    Args:
        parent: 32 bytes, the scope for a first page.
        applied: `pack_tokens` of the page's tokens.
        extras: 32-byte digests of non-token inputs at these positions (images, audio), in position order.

    Raises:
        InputError: for a parent or an extra of another size, or an empty page. A malformed extra makes the input
            uncacheable; it never falls back to the id of plain text.
    """
    if len(parent) != ID_BYTES:
        raise InputError(f"page id: the parent has {len(parent)} bytes, not {ID_BYTES}")
    if not applied or len(applied) % TOKEN_BYTES:
        raise InputError(f"page id: {len(applied)} bytes of tokens are not a positive multiple of {TOKEN_BYTES}")
    for extra in extras:
        if not isinstance(extra, bytes) or len(extra) != ID_BYTES:
            raise InputError(f"page id: an extra digest must be {ID_BYTES} bytes, got {extra!r}")
    return hashlib.sha256(
        b"".join(
            (
                _DOMAIN,
                parent,
                struct.pack(">Q", len(applied) // TOKEN_BYTES),
                applied,
                struct.pack(">I", len(extras)),
                *extras,
            )
        )
    ).digest()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One durable chunk of a plan: tokens [start, start + count) applied to the boundary `parent`.

    Attributes:
        index: position in the plan.
        start, count: token range.
        applied: packed tokens, 8 bytes each.
        parent: boundary id before the chunk (the scope for the first).
        id: boundary id after it.
        pages: ids of its pages, the last possibly short; `pages[-1] == id`.
    """

    index: int
    start: int
    count: int
    applied: bytes
    parent: bytes
    id: bytes
    pages: tuple[bytes, ...]

    @property
    def end(self) -> int:
        return self.start + self.count


def page_ids(
    parent: bytes,
    applied: bytes,
    page_tokens: int = PAGE_TOKENS,
    extras: Mapping[int, Sequence[bytes]] | None = None,
    first_page: int = 0,
) -> tuple[bytes, ...]:
    """Ids of the consecutive pages that packed tokens make under a parent; `extras` is keyed by page number."""
    if len(parent) != ID_BYTES:
        raise InputError(f"page ids: the parent has {len(parent)} bytes, not {ID_BYTES}")
    step = page_tokens * TOKEN_BYTES
    ids = []
    if extras:
        for number, digests in extras.items():
            # Extras that a page would overlook must not leave it with the id of plain text.
            if type(number) is not int or number < 0 or not isinstance(digests, list | tuple):
                raise InputError(f"page ids: extras must map page numbers to lists of digests, got {number!r}")
        for number, offset in enumerate(range(0, len(applied), step), start=first_page):
            parent = page_id(parent, applied[offset : offset + step], extras.get(number, ()))
            ids.append(parent)
        return tuple(ids)
    # The common case, once per page of every lookup: the same bytes without per-page checks.
    full, tail = divmod(len(applied), step)
    middle = struct.pack(">Q", page_tokens)
    sha256 = hashlib.sha256
    for offset in range(0, full * step, step):
        parent = sha256(_DOMAIN + parent + middle + applied[offset : offset + step] + _NO_EXTRAS).digest()
        ids.append(parent)
    if tail:
        ids.append(page_id(parent, applied[full * step :]))
    return tuple(ids)


def plan(
    scope: bytes,
    tokens: Sequence[int] | np.ndarray,
    processed: int | None = None,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    page_tokens: int = PAGE_TOKENS,
    extras: Mapping[int, Sequence[bytes]] | None = None,
) -> tuple[Chunk, ...]:
    """Cut the first `processed` tokens (all but the pending one by default) into chunks at absolute multiples.

    Raises:
        InputError: chunk size not a positive multiple of the page size.
        OutOfPlanError: `processed` outside [0, len(tokens)].
    """
    if page_tokens <= 0 or chunk_tokens <= 0 or chunk_tokens % page_tokens:
        raise InputError(f"chunk plan: chunk {chunk_tokens} must be a positive multiple of page {page_tokens}")
    if processed is None:
        processed = max(0, len(tokens) - 1)
    if not 0 <= processed <= len(tokens):
        raise OutOfPlanError(f"chunk plan: boundary {processed} lies outside [0, {len(tokens)}]")
    packed = pack_tokens(tokens[:processed])
    chunks = []
    parent = scope
    for index, start in enumerate(range(0, processed, chunk_tokens)):
        end = min(start + chunk_tokens, processed)
        applied = packed[start * TOKEN_BYTES : end * TOKEN_BYTES]
        pages = page_ids(parent, applied, page_tokens, extras, start // page_tokens)
        chunks.append(Chunk(index, start, end - start, applied, parent, pages[-1], pages))
        parent = pages[-1]
    return tuple(chunks)


def boundary_id(scope: bytes, tokens: Sequence[int] | np.ndarray, processed: int | None = None) -> bytes:
    """Id of the boundary after `processed` tokens; the scope itself for an empty prefix."""
    chunks = plan(scope, tokens, processed)
    return chunks[-1].id if chunks else scope


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading packed tokens that two sequences share."""
    n = min(len(a), len(b)) // TOKEN_BYTES
    if a[: n * TOKEN_BYTES] == b[: n * TOKEN_BYTES]:
        return n
    left = np.frombuffer(a, dtype=">i8", count=n)
    right = np.frombuffer(b, dtype=">i8", count=n)
    return int(np.argmax(left != right))
