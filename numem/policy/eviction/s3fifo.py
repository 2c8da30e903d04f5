"""S3-FIFO: J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.

A small queue of a tenth of the capacity takes what is new, a main queue what was used again there or came back soon
after an eviction (a ghost queue of one capacity remembers). A use only raises a counter, capped at 3; what comes up
in the main queue with uses left goes round again with one less.
"""

from numem.policy.eviction.protocol import Key, Protected, nothing
from numem.policy.eviction.queue import Queue
from numem.policy.eviction.resident import Resident

_CAP = 3


class S3FIFO(Resident):
    """Three queues, oldest first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[Key, int] = {}
        self._small = Queue()
        self._main = Queue()
        self._ghosts = Queue()

    def touch(self, key: Key) -> bool:
        uses = self._uses.get(key)
        if uses is None:
            return False
        if uses < _CAP:
            self._uses[key] = uses + 1
        return True

    def victims(self, need: int, protected: Protected = nothing, key: Key | None = None) -> list[Key] | None:
        over = self.used + need - self.capacity
        chosen: list[Key] = []
        # Victims and protected keys keep their places at the heads of the queues.
        small: list[tuple[Key, int]] = []
        main: list[tuple[Key, int]] = []
        try:
            while over > 0 and (len(self._small) or len(self._main)):
                if len(self._small) and (10 * self._small.used >= self.capacity or not len(self._main)):
                    candidate, size = self._small.popleft()
                    if self._uses[candidate]:
                        self._uses[candidate] = 0
                        self._main.append(candidate, size)
                        continue
                    small.append((candidate, size))
                    stays = protected(candidate)
                else:
                    candidate, size = self._main.popleft()
                    main.append((candidate, size))
                    stays = protected(candidate)
                    if self._uses[candidate] and not stays:
                        self._uses[candidate] -= 1
                        self._main.append(*main.pop())
                        continue
                if not stays:
                    chosen.append(candidate)
                    over -= size
        finally:
            for queue, kept in ((self._small, small), (self._main, main)):
                for candidate, size in reversed(kept):
                    queue.restore(candidate, size)
        return chosen if over <= 0 else None

    def admit(self, key: Key, size: int, cost: float = 1.0, parent: Key | None = None) -> None:
        self._enter(key, size, cost)
        self._uses[key] = 0
        (self._main if self._ghosts.remove(key) else self._small).append(key, size)

    def evict(self, key: Key) -> None:
        if not self._leave(key):
            return
        del self._uses[key]
        if not self._main.remove(key):
            self._ghosts.append(key, self._small.remove(key))
            while self._ghosts.used > self.capacity:
                self._ghosts.popleft()

    def remove(self, key: Key) -> None:
        self.evict(key)
        self._ghosts.remove(key)
