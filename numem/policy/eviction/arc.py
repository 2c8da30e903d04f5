"""ARC: N. Megiddo and D. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003; in units.

T1 holds keys used once, T2 keys used again, B1 and B2 the keys that were evicted from them. A use of a key in B1 says
that T1 is too small, one in B2 that T2 is: the target p of T1 moves by the ratio of the two lists, times the size.
"""

from numem.policy.eviction.protocol import Key, Protected, nothing
from numem.policy.eviction.queue import Queue
from numem.policy.eviction.resident import Resident


class ARC(Resident):
    """Two resident lists and two of ghosts."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._target = 0.0
        self._once, self._again = Queue(), Queue()
        self._once_ghosts, self._again_ghosts = Queue(), Queue()

    def touch(self, key: Key) -> bool:
        if key in self._again:
            self._again.renew(key)
        elif key in self._once:
            self._again.append(key, self._once.remove(key))
        else:
            self._learn(key)
            return False
        return True

    def _learn(self, key: Key) -> None:
        first, second = self._once_ghosts, self._again_ghosts
        if key in first:
            self._target = min(self.capacity, self._target + max(second.used // first.used, 1) * first.size(key))
        elif key in second:
            self._target = max(0.0, self._target - max(first.used // second.used, 1) * second.size(key))

    def victims(self, need: int, protected: Protected = nothing, key: Key | None = None) -> list[Key] | None:
        over = self.used + need - self.capacity
        chosen: list[Key] = []
        once_used = self._once.used
        once = (k for k in self._once if not protected(k))
        again = (k for k in self._again if not protected(k))
        back = key in self._again_ghosts
        while over > 0:
            from_once = once_used > self._target or (back and 0 < once_used == self._target)
            candidate = next(once if from_once else again, None)
            if candidate is None:
                candidate = next(again if from_once else once, None)
            if candidate is None:
                return None
            chosen.append(candidate)
            over -= self._sizes[candidate]
            if candidate in self._once:
                once_used -= self._sizes[candidate]
        return chosen

    def admit(self, key: Key, size: int, cost: float = 1.0, parent: Key | None = None) -> None:
        self._enter(key, size, cost)
        if self._once_ghosts.remove(key) or self._again_ghosts.remove(key):
            self._again.append(key, size)
            return
        self._once.append(key, size)
        # T1 with its ghosts is at most one capacity, all four lists at most two.
        while len(self._once_ghosts) and self._once.used + self._once_ghosts.used > self.capacity:
            self._once_ghosts.popleft()
        while len(self._again_ghosts) and self._remembered() > 2 * self.capacity:
            self._again_ghosts.popleft()

    def _remembered(self) -> int:
        return self.used + self._once_ghosts.used + self._again_ghosts.used

    def evict(self, key: Key) -> None:
        if not self._leave(key):
            return
        if key in self._once:
            self._once_ghosts.append(key, self._once.remove(key))
        else:
            self._again_ghosts.append(key, self._again.remove(key))

    def remove(self, key: Key) -> None:
        self.evict(key)
        self._once_ghosts.remove(key)
        self._again_ghosts.remove(key)
