"""What every policy keeps: sizes of the resident keys and their sum."""

from numem.errors import CapacityError, InputError
from numem.policy.eviction.protocol import Key


class Resident:
    """The account of a resident set; policies add the order."""

    leaf_first = False

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InputError(f"policy: capacity {capacity} holds nothing; give at least 1")
        self.capacity = capacity
        self.used = 0
        self._sizes: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def _enter(self, key: Key, size: int, cost: float) -> None:
        if size < 1 or not cost >= 0:
            raise InputError(f"policy: size {size} and cost {cost}; a size is at least 1 and a cost at least 0")
        if key in self._sizes:
            raise InputError(f"policy: {key!r} is resident already; touch it instead")
        if self.used + size > self.capacity:
            raise CapacityError(
                f"policy: {size} units do not fit, {self.used} of {self.capacity} are used; evict the victims first"
            )
        self._sizes[key] = size
        self.used += size

    def _leave(self, key: Key) -> bool:
        """Take a key out of the account; False where it is not resident."""
        size = self._sizes.pop(key, 0)
        self.used -= size
        return size > 0
