"""Cost-aware and leaf-first: what is cheap to have again, large and seldom used goes first.

Greedy-Dual-Size-Frequency: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy", HP Laboratories, HPL-98-69R1, 1998. The value of a key k is

    H(k) = L + F(k) * C(k) / S(k)

with F its uses, C its cost (`admit`), S its size in units, and L the highest value evicted so far, as it stood at the
last use of k. L only rises: a key that was valuable once and is used no more is overtaken.
"""

from numem.policy.eviction.protocol import Key
from numem.policy.eviction.ranked import Ranked


class Cost(Ranked):
    """Greedy-Dual-Size-Frequency over the leaves."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._age = 0.0
        self._costs: dict[Key, float] = {}

    def _value(self, key: Key) -> float:
        return self._age + self._uses[key] * self._costs[key] / self._sizes[key]

    def evict(self, key: Key) -> None:
        if key in self:
            self._age = max(self._age, self._ranks[key][0])
        super().evict(key)

    def _enter(self, key: Key, size: int, cost: float) -> None:
        super()._enter(key, size, cost)
        self._costs[key] = cost

    def _leave(self, key: Key) -> bool:
        self._costs.pop(key, None)
        return super()._leave(key)
