"""Leaf-first by the expected time of the next use, which is learnt from the uses seen.

The value of a key k, at its last use, is a time on the clock of uses:

    V(k) = now + T * g(uses of k)        g(1) = 0, g(2..7) = 1, g(u) = log2(u) from 8 on

T is the mean number of uses, of any keys, between the first and the second use of a key, over about the last thousand
keys that had a second one, resident or not. So a key used once competes by recency, and a key used again is kept as if
it had been used T later: for one typical interval more. Where the capacity is far below T this is segmented LRU, where
it is far above it is LRU, and no size of a segment has to be chosen. Between 2 and 7 uses are not told apart, because
in a growing conversation the count is but its age; keys used more often than that are worth keeping for longer.
"""

import math

from numem.policy.eviction.protocol import Key
from numem.policy.eviction.ranked import Ranked

_SAMPLES = 1000
_FREQUENT = 8


class Interval(Ranked):
    """Recency, and a learnt interval more for what was used again."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._interval = float(capacity)
        self._samples = 0

    def touch(self, key: Key) -> bool:
        if self._history.uses(key) == 1:
            self._samples += 1
            seen = self._history.idle(key) + 1
            self._interval += (seen - self._interval) / min(self._samples, _SAMPLES)
        return super().touch(key)

    def _value(self, key: Key) -> float:
        uses = self._uses[key]
        weight = math.log2(uses) if uses >= _FREQUENT else float(uses > 1)
        return self._history.tick + self._interval * weight
