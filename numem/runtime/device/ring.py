"""A bounded ring of page-locked host slots, each used again only when the copy from or to it is done.

free ──acquire──> held ──release──────────────────> free       its bytes were not needed
                   └─────retire(event)──> in flight ──event──> free
"""

from collections import deque
from threading import Condition
from typing import Protocol

from torch import Tensor

from numem.runtime.device.streams import Event, Streams


class Source(Protocol):
    """Who owns host memory that a copy reads."""

    def release(self) -> None:
        """Nobody reads it any more; releasing twice is harmless."""
        ...


class Slot:
    """Host memory that one chunk uses at a time.

    Attributes:
        buffer: uint8 [slot_bytes].
    """

    __slots__ = ("_held", "_ring", "buffer")

    def __init__(self, ring: "Ring", buffer: Tensor) -> None:
        self.buffer = buffer
        self._ring = ring
        self._held = False

    def release(self) -> None:
        """Give the slot back; no copy from or to it is under way."""
        self._ring.give_back(self)


class Ring:
    """Slots of one size; safe to share between threads.

    Slots are allocated when they are first needed, since locking memory takes time (about 5 ms for 32 MiB).

    Args:
        slot_bytes: size of a slot.
        slots: how many there may be.
    """

    def __init__(self, streams: Streams, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._streams = streams
        self._free: list[Slot] = []
        self._made = 0
        self._flights: deque[tuple[Event, Source]] = deque()
        self._changed = Condition()

    @property
    def idle(self) -> int:
        """Slots that nobody holds and no copy uses."""
        with self._changed:
            self._reap()
            return len(self._free) + self.slots - self._made

    def at_once(self) -> Slot | None:
        """A slot, or None where all are in use."""
        with self._changed:
            self._reap()
            return self._take()

    def acquire(self) -> Slot:
        """A slot, after waiting for one where all are in use.

        A thread that holds slots itself may wait only where others give theirs back without it.
        """
        while True:
            with self._changed:
                self._reap()
                slot = self._take()
                if slot is not None:
                    return slot
                if not self._flights:
                    self._changed.wait()
                    continue
                event = self._flights[0][0]
            event.synchronize()

    def retire(self, event: Event, source: Source) -> None:
        """A copy that is done at the event is the last to use a slot, or other memory on its way."""
        with self._changed:
            self._reap()
            self._flights.append((event, source))
            self._changed.notify_all()

    def give_back(self, slot: Slot) -> None:
        """See `Slot.release`."""
        with self._changed:
            if slot._held:
                slot._held = False
                self._free.append(slot)
                self._changed.notify_all()

    def _take(self) -> Slot | None:
        if self._free:
            slot = self._free.pop()
        elif self._made < self.slots:
            slot = Slot(self, self._streams.host_buffer(self.slot_bytes))
            self._made += 1
        else:
            return None
        slot._held = True
        return slot

    def _reap(self) -> None:
        """Release what copies that are done have used."""
        for _ in range(len(self._flights)):
            event, source = self._flights.popleft()
            if event.query():
                source.release()
            else:
                self._flights.append((event, source))
