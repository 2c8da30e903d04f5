"""Uses of keys, resident or not, of which the least recently used are forgotten first."""

from collections import OrderedDict

from numem.policy.protocol import HISTORY, Key


class History:
    """How often each of the `limit` keys that were used last has been used."""

    def __init__(self, limit: int = HISTORY) -> None:
        self._limit = limit
        self._uses: OrderedDict[Key, int] = OrderedDict()

    def use(self, key: Key) -> int:
        """Count a use; how many there are now."""
        uses = self._uses.get(key, 0) + 1
        self._uses[key] = uses
        if uses > 1:
            self._uses.move_to_end(key)
        elif len(self._uses) > self._limit:
            self._uses.popitem(last=False)
        return uses

    def uses(self, key: Key) -> int:
        """Uses that are remembered."""
        return self._uses.get(key, 0)

    def forget(self, key: Key) -> None:
        """Remember nothing of a key."""
        self._uses.pop(key, None)
