"""The `host` tier: whole pieces in a bounded amount of RAM, by content id.

Each piece lies in a buffer of its own, of exactly its length and with one owner, so that no length of an earlier piece
is left behind and no view keeps more than its piece alive. Room is reserved before a byte is copied, and what is being
read or written is never evicted.

Buffers of 64 KiB and more are mappings of their own: their memory goes back to the system at once. They are page-locked
where this process uses CUDA already, so that a copy to the device may start from them.
"""

import mmap
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from numem.errors import InputError
from numem.identity.digest import Buffer, checksum
from numem.policy import DEFAULT, Protected, make
from numem.policy.eviction.protocol import Key, nothing
from numem.store.payload.pieces import SMALL

# Why a piece was not taken.
TOO_LARGE = "larger than the tier"
NO_ROOM = "everything else is in use or pinned"
NO_MEMORY = "the system has no memory"
CLEARED = "cleared while it was copied"

_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class HostStats:
    """A tier at one moment, and what it has done since it was made.

    Attributes:
        capacity, used: bytes; `used` includes pieces that were discarded while they were read.
        pieces: pieces that can be read.
        pinned_bytes: bytes that are page-locked.
        hits, misses: of `get_into` and `lease`; a damaged piece is a miss.
        stored, evicted, damaged: pieces, since the tier was made.
        refused: pieces that `put` did not take, by reason.
    """

    capacity: int
    used: int
    pieces: int
    pinned_bytes: int
    hits: int
    misses: int
    stored: int
    evicted: int
    damaged: int
    refused: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Piece:
    """Changed under the tier's lock only, except that the putter alone fills `buffer` before `ready`.

    Attributes:
        holders: readers at this moment, and the writer until it is ready.
        resident: whether the index names it; what is not resident is freed by its last holder.
    """

    content: bytes
    xxh3: bytes
    nbytes: int
    buffer: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    pinned: bool = False
    holders: int = 1
    ready: bool = False
    resident: bool = True


class Borrowed:
    """A piece where it lies in RAM, verified; it stays until it is released.

    Attributes:
        data: its bytes, not to be written.
    """

    __slots__ = ("_host", "_piece", "data")

    def __init__(self, host: "Host", piece: _Piece) -> None:
        self.data = piece.buffer
        self._host = host
        self._piece: _Piece | None = piece

    def release(self) -> None:
        """Nobody reads it any more; releasing twice is harmless."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._host.give_back(piece)


class Host:
    """Pieces in RAM; safe to share between threads.

    Args:
        capacity: bytes of payload that may be held; each piece takes about 1 KiB of bookkeeping besides (measured).
        policy: a name of `numem.policy`; it decides what goes for a new piece.
        protected: says of a content id that it must stay (a pin). It is asked under this tier's lock, the innermost of
            all locks: it must not call the tier, nor wait for a lock whose holder may call it.

    Raises:
        InputError: no such policy, or a capacity below 1.
    """

    def __init__(self, capacity: int, policy: str = DEFAULT, protected: Protected = nothing) -> None:
        self._policy = make(policy, capacity)
        self._protected = protected
        self._lock = Lock()
        self._pieces: dict[bytes, _Piece] = {}
        self._lingering = 0  # bytes of pieces that are not resident any more and still held
        self._pinned_bytes = 0
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def __contains__(self, content: bytes) -> bool:
        """Whether a piece can be read. A question is no use: it keeps nothing from being evicted."""
        with self._lock:
            piece = self._pieces.get(content)
            return piece is not None and piece.ready

    def put(self, content: bytes, data: Buffer, xxh3: bytes, *, cost: float = 1.0, parent: bytes | None = None) -> bool:
        """Keep a copy of a piece; whether it is held, now or already.

        Args:
            data: its bytes, contiguous.
            xxh3: their checksum, against which every read is compared; the caller has verified them.
            cost, parent: see `numem.policy.Policy.admit`; the parent is a content id.

        Returns:
            False where it cannot be held; the reason is counted in `stats().refused`.
        """
        source = np.frombuffer(data, np.uint8)
        piece = _Piece(content, xxh3, source.nbytes)
        with self._lock:
            if content in self._pieces:
                self._policy.touch(content)
                return True
            reason = self._reserve(piece, cost, parent)
            if reason:
                self._refused[reason] += 1
                return False
        np.copyto(piece.buffer, source)
        with self._lock:
            piece.ready = True
            kept = piece.resident
            self._counts["stored"] += kept
            self._refused[CLEARED] += not kept
            self._release(piece)
        return kept

    def get_into(self, content: bytes, view: memoryview) -> bool:
        """Copy a piece into a buffer of exactly its size, verified; False where it is not held.

        A piece that differs from its checksum is dropped and counted as damaged, and the answer is False; the buffer
        then holds unspecified bytes.

        Raises:
            InputError: the buffer has another size, or cannot be written.
        """
        piece = self._acquire(content)
        if piece is None:
            return False
        try:
            target = np.frombuffer(view, np.uint8)
            if target.nbytes != piece.nbytes or view.readonly:
                raise InputError(
                    f"host: piece {content.hex()} has {piece.nbytes} bytes, its buffer {target.nbytes}"
                    f"{' and is read-only' if view.readonly else ''}; pass a writable buffer of exactly its size"
                )
            np.copyto(target, piece.buffer)
            good = checksum(target) == piece.xxh3
            with self._lock:
                self._judge(piece, good)
            return good
        finally:
            with self._lock:
                self._release(piece)

    @contextmanager
    def lease(self, content: bytes) -> Iterator[memoryview | None]:
        """The bytes of a piece where they lie, verified and read-only; it stays until the block ends.

        Yields None where it is not held or differs from its checksum. The view is not to be used after the block.
        """
        piece = self._acquire(content)
        if piece is None:
            yield None
            return
        try:
            good = checksum(piece.buffer) == piece.xxh3
            with self._lock:
                self._judge(piece, good)
            yield piece.buffer.data.toreadonly() if good else None
        finally:
            with self._lock:
                self._release(piece)

    def borrow(self, content: bytes, *, page_locked: bool) -> Borrowed | None:
        """As `lease`, for a piece that is read after the caller returns, as by a copy to a device.

        Args:
            page_locked: only where its memory is.
        """
        with self._lock:
            known = self._pieces.get(content)
            if known is None or (page_locked and not known.pinned):
                return None
        piece = self._acquire(content)
        if piece is None:
            return None
        good = checksum(piece.buffer) == piece.xxh3
        with self._lock:
            self._judge(piece, good)
            if not good:
                self._release(piece)
        return Borrowed(self, piece) if good else None

    def give_back(self, piece: _Piece) -> None:
        """See `Borrowed.release`."""
        with self._lock:
            self._release(piece)

    def discard(self, content: bytes) -> bool:
        """Drop a piece; whether it was held. Reads that have begun end well, later ones miss."""
        with self._lock:
            piece = self._pieces.get(content)
            if piece is not None:
                self._policy.remove(content)
                self._drop(piece)
            return piece is not None

    def clear(self) -> None:
        """Drop everything, pinned or not."""
        with self._lock:
            for piece in list(self._pieces.values()):
                self._policy.remove(piece.content)
                self._drop(piece)

    def stats(self) -> HostStats:
        """What is held, and what was counted."""
        with self._lock:
            counts = self._counts
            return HostStats(
                capacity=self._policy.capacity,
                used=self._policy.used + self._lingering,
                pieces=sum(piece.ready for piece in self._pieces.values()),
                pinned_bytes=self._pinned_bytes,
                hits=counts["hits"],
                misses=counts["misses"],
                stored=counts["stored"],
                evicted=counts["evicted"],
                damaged=counts["damaged"],
                refused={reason: count for reason, count in self._refused.items() if count},
            )

    # Below: under the lock, except _acquire.

    def _acquire(self, content: bytes) -> _Piece | None:
        with self._lock:
            self._policy.touch(content)
            piece = self._pieces.get(content)
            if piece is None or not piece.ready:
                self._counts["misses"] += 1
                return None
            piece.holders += 1
            return piece

    def _judge(self, piece: _Piece, good: bool) -> None:
        self._counts["hits" if good else "misses"] += 1
        if not good and piece.resident:
            self._counts["damaged"] += 1
            self._policy.remove(piece.content)
            self._drop(piece)

    def _reserve(self, piece: _Piece, cost: float, parent: bytes | None) -> str:
        """Make room, allocate and enter a piece; why that failed, or an empty string."""
        if piece.nbytes > self._policy.capacity:
            return TOO_LARGE
        victims = self._policy.victims(piece.nbytes + self._lingering, self._must_stay, piece.content)
        if victims is None:
            return NO_ROOM
        for key in victims:
            assert isinstance(key, bytes)
            self._policy.evict(key)
            self._drop(self._pieces[key])
            self._counts["evicted"] += 1
        try:
            piece.buffer = _allocate(piece.nbytes)
        except (MemoryError, OSError):
            return NO_MEMORY
        self._policy.admit(piece.content, piece.nbytes, cost, parent)
        self._pieces[piece.content] = piece
        piece.pinned = _pin(piece.buffer)
        self._pinned_bytes += piece.nbytes * piece.pinned
        return ""

    def _must_stay(self, key: Key) -> bool:
        assert isinstance(key, bytes)
        return self._pieces[key].holders > 0 or self._protected(key)

    def _drop(self, piece: _Piece) -> None:
        """Take a piece, which the policy has let go, out of the index; its last holder frees it."""
        del self._pieces[piece.content]
        piece.resident = False
        if piece.holders:
            self._lingering += piece.nbytes
        else:
            self._free(piece)

    def _release(self, piece: _Piece) -> None:
        piece.holders -= 1
        if not piece.holders and not piece.resident:
            self._lingering -= piece.nbytes
            self._free(piece)

    def _free(self, piece: _Piece) -> None:
        if piece.pinned:
            _unpin(piece.buffer)
            self._pinned_bytes -= piece.nbytes
        piece.buffer = np.empty(0, np.uint8)


def _allocate(nbytes: int) -> NDArray[np.uint8]:
    if nbytes < SMALL:
        return np.empty(nbytes, np.uint8)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE:
        # A quarter of the time of the first copy into it. EINVAL where the kernel has no huge pages: it works without.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _pin(buffer: NDArray[np.uint8]) -> bool:
    """Page-lock a mapping where this process uses CUDA; whether it is. CUDA is not initialised for it."""
    torch = sys.modules.get("torch")
    if torch is None or buffer.nbytes < SMALL or not torch.cuda.is_initialized():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)) == 0


def _unpin(buffer: NDArray[np.uint8]) -> None:
    sys.modules["torch"].cuda.cudart().cudaHostUnregister(buffer.ctypes.data)
