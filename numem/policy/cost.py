"""Cost-aware and leaf-first: what is cheap to have again, large and seldom used goes first.

Greedy-Dual-Size-Frequency: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy", HP Laboratories, HPL-98-69R1, 1998. The value of a key k is

    H(k) = L + F(k) * C(k) / S(k)

with F its uses, C its cost (`admit`), S its size in units, and L the highest value evicted so far, as it stood at the
last use of k. L only rises: a key that was valuable once and is used no more is overtaken.
"""

from numem.policy.protocol import Key
from numem.policy.ranked import Rank, Ranked


class Cost(Ranked):
    """Greedy-Dual-Size-Frequency over the leaves."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._age = 0.0
        self._costs: dict[Key, float] = {}
        self._values: dict[Key, float] = {}

    def _rank(self, key: Key) -> Rank:
        return (self._values[key], self._last[key])

    def touch(self, key: Key) -> bool:
        resident = super().touch(key)
        if resident:
            self._values[key] = self._value(key)
        return resident

    def _value(self, key: Key) -> float:
        return self._age + self._uses[key] * self._costs[key] / self._sizes[key]

    def _enter(self, key: Key, size: int, cost: float) -> None:
        super()._enter(key, size, cost)
        self._costs[key] = cost
        self._values[key] = 0.0
