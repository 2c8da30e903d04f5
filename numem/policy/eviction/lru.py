"""LRU: the least recently used key goes first."""

from collections import OrderedDict

from numem.policy.eviction.protocol import Key, Protected, nothing
from numem.policy.eviction.resident import Resident


class LRU(Resident):
    """One recency list."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def touch(self, key: Key) -> bool:
        if key not in self._order:
            return False
        self._order.move_to_end(key)
        return True

    def victims(self, need: int, protected: Protected = nothing, key: Key | None = None) -> list[Key] | None:
        over = self.used + need - self.capacity
        chosen: list[Key] = []
        for candidate in self._order if over > 0 else ():
            if not protected(candidate):
                chosen.append(candidate)
                over -= self._sizes[candidate]
                if over <= 0:
                    break
        return chosen if over <= 0 else None

    def admit(self, key: Key, size: int, cost: float = 1.0, parent: Key | None = None) -> None:
        self._enter(key, size, cost)
        self._order[key] = None

    def evict(self, key: Key) -> None:
        if self._leave(key):
            del self._order[key]

    def remove(self, key: Key) -> None:
        self.evict(key)
