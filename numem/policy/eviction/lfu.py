"""LFU: the key with the fewest uses goes first, ties to the older use; uses before an eviction count."""

from numem.policy.eviction.protocol import Key
from numem.policy.eviction.ranked import Ranked


class LFU(Ranked):
    """Single keys by their number of uses."""

    leaf_first = False

    def _value(self, key: Key) -> float:
        return self._uses[key]
