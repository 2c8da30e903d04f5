"""The base of policies that evict by ascending rank, leaf-first where they know the tree.

Ranks live in a heap that is put right only where it is read: the rank of a resident key never falls, so that a stale
entry stands too early, never too late, and is moved when it comes up.
"""

import heapq

from numem.policy.eviction.history import History
from numem.policy.eviction.protocol import Key, Protected, nothing
from numem.policy.eviction.resident import Resident


class Ranked(Resident):
    """Evicts the key whose `_value` was the lowest at its last use; ties go to the older use.

    Uses are counted for as long as `History` remembers a key, also while it is not resident. Unless a subclass says
    otherwise a key with resident children stays, so that no prefix loses its beginning before its end.
    """

    leaf_first = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._tick = 0
        self._history = History()
        self._uses: dict[Key, int] = {}
        self._ranks: dict[Key, tuple[float, int]] = {}
        self._parents: dict[Key, Key | None] = {}
        self._children: dict[Key, int] = {}
        self._heap: list[tuple[tuple[float, int], Key]] = []
        self._queued: dict[Key, tuple[float, int]] = {}

    def _value(self, key: Key) -> float:
        """What a resident key is worth as it is used; where that is less than at its use before, it keeps that."""
        raise NotImplementedError

    def touch(self, key: Key) -> bool:
        uses = self._history.use(key)
        if key not in self._sizes:
            return False
        self._use(key, max(uses, self._uses[key]))  # the history may have forgotten it meanwhile
        return True

    def _use(self, key: Key, uses: int) -> None:
        self._tick += 1
        self._uses[key] = uses
        value, before = self._value(key), self._ranks.get(key)
        self._ranks[key] = (value if before is None else max(value, before[0]), self._tick)

    def victims(self, need: int, protected: Protected = nothing, key: Key | None = None) -> list[Key] | None:
        over = self.used + need - self.capacity
        chosen: list[Key] = []
        taken: list[tuple[tuple[float, int], Key]] = []
        freed: dict[Key, int] = {}  # children that this plan has already chosen
        try:
            while over > 0 and self._heap:
                entry = heapq.heappop(self._heap)
                rank, candidate = entry
                if self._queued.get(candidate) != rank:
                    continue  # gone, or queued again since
                if self._children.get(candidate, 0) > freed.get(candidate, 0):
                    del self._queued[candidate]  # queued again when its last child goes
                    continue
                if self._ranks[candidate] != rank:
                    self._push(candidate)
                    continue
                taken.append(entry)
                if protected(candidate):
                    continue
                chosen.append(candidate)
                over -= self._sizes[candidate]
                parent = self._parents[candidate]
                if parent is not None:
                    freed[parent] = freed.get(parent, 0) + 1
                    if freed[parent] == self._children[parent]:
                        self._queue(parent)
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)
        return chosen if over <= 0 else None

    def admit(self, key: Key, size: int, cost: float = 1.0, parent: Key | None = None) -> None:
        self._enter(key, size, cost)
        self._use(key, self._history.uses(key) or self._history.use(key))
        self._parents[key] = parent = parent if self.leaf_first else None
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._push(key)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(rank, key) for key, rank in self._queued.items()]
            heapq.heapify(self._heap)

    def evict(self, key: Key) -> None:
        if not self._leave(key):
            return
        del self._uses[key], self._ranks[key]
        self._queued.pop(key, None)
        parent = self._parents.pop(key)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                self._queue(parent)

    def remove(self, key: Key) -> None:
        self.evict(key)
        self._history.forget(key)

    def _queue(self, key: Key) -> None:
        """Make a key that has become a leaf a candidate."""
        if key in self._sizes and key not in self._queued:
            self._push(key)

    def _push(self, key: Key) -> None:
        rank = self._queued[key] = self._ranks[key]
        heapq.heappush(self._heap, (rank, key))
