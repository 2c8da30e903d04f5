"""Leaf-first segmented LRU: keys used once go before keys used twice or more, the least recently used first in each."""

from numem.policy.eviction.protocol import Key
from numem.policy.eviction.ranked import Ranked


class LeafSLRU(Ranked):
    """Two segments; uses before an eviction count, so that a key that comes back enters the second one."""

    def _value(self, key: Key) -> float:
        return min(self._uses[key], 2)
