"""Eviction and admission: one protocol with its implementations, for the tiers of a store and the pages of a pool.

    policy = make("arc", capacity)

A policy accounts in units of its caller and never does I/O; see `Policy`.
"""

from collections.abc import Callable

from numem.errors import InputError
from numem.policy.eviction.arc import ARC
from numem.policy.eviction.cost import Cost
from numem.policy.eviction.interval import Interval
from numem.policy.eviction.lfu import LFU
from numem.policy.eviction.lru import LRU
from numem.policy.eviction.protocol import Key, Policy, Protected
from numem.policy.eviction.s3fifo import S3FIFO
from numem.policy.eviction.slru import LeafSLRU

__all__ = ["DEFAULT", "NAMES", "Key", "Policy", "Protected", "make"]

_POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "slru": LeafSLRU,
    "cost": Cost,
    "interval": Interval,
}
NAMES = tuple(_POLICIES)
# Never more than 0.01 below the best of the others on the request traces of docs/benchmarks.md, at any capacity.
DEFAULT = "interval"


def make(name: str, capacity: int) -> Policy:
    """A policy over an empty resident set of at most `capacity` units.

    Raises:
        InputError: no such policy, or a capacity below 1.
    """
    policy = _POLICIES.get(name)
    if policy is None:
        raise InputError(f"policy {name!r}: unknown; known: {', '.join(NAMES)}")
    return policy(capacity)
