"""The base of policies that evict by ascending rank, leaf-first where they know the tree.

Ranks live in a heap that is put right only where it is read: the rank of a resident key never falls, so that a stale
entry stands too early, never too late, and is moved when it comes up.
"""

import heapq

from numem.policy.history import History
from numem.policy.protocol import Key, Protected, nothing
from numem.policy.resident import Resident

# A value, then the tick of the last use: ties go to the older use.
Rank = tuple[float, int]


class Ranked(Resident):
    """Evicts the key of the lowest rank.

    Attributes:
        leaf_first: a key with resident children stays, so that no prefix loses its beginning before its end.

    Uses are counted for as long as `History` remembers a key, also while it is not resident.
    """

    leaf_first = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._tick = 0
        self._last: dict[Key, int] = {}
        self._uses: dict[Key, int] = {}
        self._history = History()
        self._parents: dict[Key, Key | None] = {}
        self._children: dict[Key, int] = {}
        self._heap: list[tuple[Rank, Key]] = []
        self._queued: dict[Key, Rank] = {}

    def _rank(self, key: Key) -> Rank:
        """The rank of a resident key now; it may rise, never fall, while the key is resident."""
        raise NotImplementedError

    def touch(self, key: Key) -> bool:
        self._tick += 1
        uses = self._history.use(key)
        if key not in self._sizes:
            return False
        self._last[key] = self._tick
        self._uses[key] = max(uses, self._uses[key])  # history may have forgotten it meanwhile
        return True

    def victims(self, need: int, protected: Protected = nothing, key: Key | None = None) -> list[Key] | None:
        over = self.used + need - self.capacity
        chosen: list[Key] = []
        taken: list[tuple[Rank, Key]] = []
        freed: dict[Key, int] = {}  # children that this plan has already chosen
        while over > 0 and self._heap:
            entry = heapq.heappop(self._heap)
            rank, candidate = entry
            if self._queued.get(candidate) != rank:
                continue  # evicted, or queued again since
            if self._children.get(candidate, 0) > freed.get(candidate, 0):
                del self._queued[candidate]  # queued again when its last child goes
                continue
            if self._rank(candidate) != rank:
                self._requeue(candidate)
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
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return chosen if over <= 0 else None

    def admit(self, key: Key, size: int, cost: float = 1.0, parent: Key | None = None) -> None:
        self._enter(key, size, cost)
        self._tick += 1
        self._last[key] = self._tick
        self._uses[key] = self._history.uses(key) or self._history.use(key)
        self._parents[key] = parent = parent if self.leaf_first else None
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._queue(key)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(rank, key) for key, rank in self._queued.items()]
            heapq.heapify(self._heap)

    def evict(self, key: Key) -> None:
        if not self._leave(key):
            return
        del self._last[key], self._uses[key]
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
        if key in self._sizes and key not in self._queued:
            self._requeue(key)

    def _requeue(self, key: Key) -> None:
        rank = self._queued[key] = self._rank(key)
        heapq.heappush(self._heap, (rank, key))
