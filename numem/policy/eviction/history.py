"""Uses of keys, resident or not, of which the least recently used are forgotten first."""

from collections import OrderedDict

from numem.policy.eviction.protocol import HISTORY, Key


class History:
    """How often each of the `limit` keys that were used last has been used, and when.

    Attributes:
        tick: uses of all keys so far: the clock of a policy.
    """

    def __init__(self, limit: int = HISTORY) -> None:
        self._limit = limit
        self._known: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        self.tick = 0

    def use(self, key: Key) -> int:
        """Count a use; how many of this key there are now."""
        self.tick += 1
        uses = self.uses(key) + 1
        self._known[key] = (uses, self.tick)
        if uses > 1:
            self._known.move_to_end(key)
        elif len(self._known) > self._limit:
            self._known.popitem(last=False)
        return uses

    def uses(self, key: Key) -> int:
        """Uses that are remembered."""
        known = self._known.get(key)
        return known[0] if known else 0

    def idle(self, key: Key) -> int:
        """Uses of any keys since the last use of a key, which is remembered."""
        return self.tick - self._known[key][1]

    def forget(self, key: Key) -> None:
        """Remember nothing of a key."""
        self._known.pop(key, None)
