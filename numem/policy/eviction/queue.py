"""Keys in an order, with the sum of their sizes."""

from collections import OrderedDict
from collections.abc import Iterator

from numem.policy.eviction.protocol import Key


class Queue:
    """Keys with sizes, oldest first.

    Attributes:
        used: the sum of the sizes.
    """

    __slots__ = ("_sizes", "used")

    def __init__(self) -> None:
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self.used = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sizes)

    def size(self, key: Key) -> int:
        """The size of a key that is there."""
        return self._sizes[key]

    def append(self, key: Key, size: int) -> None:
        """Put a key that is not there at the young end."""
        self._sizes[key] = size
        self.used += size

    def renew(self, key: Key) -> None:
        """Move a key to the young end."""
        self._sizes.move_to_end(key)

    def remove(self, key: Key) -> int:
        """Take a key out; its size, 0 where it is not there."""
        size = self._sizes.pop(key, 0)
        self.used -= size
        return size

    def popleft(self) -> tuple[Key, int]:
        """Take the oldest key out, with its size."""
        key, size = self._sizes.popitem(last=False)
        self.used -= size
        return key, size

    def restore(self, key: Key, size: int) -> None:
        """Put a key that is not there at the old end."""
        self._sizes[key] = size
        self._sizes.move_to_end(key, last=False)
        self.used += size
