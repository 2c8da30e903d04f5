"""The protocol: who goes when room is needed. A policy keeps an account of what is resident and never does I/O."""

from collections.abc import Callable, Hashable
from typing import Protocol

Key = Hashable
Protected = Callable[[Key], bool]

# Keys of which a policy remembers more than that they once were: about 70 MiB where all of it is used.
HISTORY = 1 << 18


def nothing(key: Key) -> bool:
    """The predicate that protects no key."""
    return False


class Policy(Protocol):
    """A resident set of at most `capacity` units, and the order in which its keys leave it.

    Units are the caller's: bytes in a tier, pages in a pool, blocks in a replay. The caller holds one lock around a
    policy and goes through four steps for a key that it wants to use:

        if not policy.touch(key):
            for victim in policy.victims(size, protected, key) or ():      # None: refuse, nothing has changed
                ...                                                        # its own I/O
                policy.evict(victim)
            policy.admit(key, size, cost, parent)

    Attributes:
        capacity: units that may be resident.
        used: units that are.
        leaf_first: whether a key with resident children stays (`admit`'s `parent`).
    """

    capacity: int
    used: int
    leaf_first: bool

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...

    def touch(self, key: Key) -> bool:
        """A use of a key, resident or not; whether it is resident. Asking without using is `key in policy`."""
        ...

    def victims(self, need: int, protected: Protected = nothing, key: Key | None = None) -> list[Key] | None:
        """Keys to evict, in this order, so that `need` more units fit; None where that cannot be.

        A plan: it may age the policy's own order, but nothing becomes or ceases to be resident.

        Args:
            protected: says of a key that it must stay (pinned, leased, not yet durable, part of the running request).
                What it raises is passed on, and nothing has changed.
            key: what the room is for; a policy that remembers it may choose differently.
        """
        ...

    def admit(self, key: Key, size: int, cost: float = 1.0, parent: Key | None = None) -> None:
        """Make a key resident. It counts as used now, once, where no `touch` announced it.

        Args:
            size: its units, at least 1.
            cost: what it costs to have it again once it is gone, less what it costs to fetch from the next tier; in
                any one unit, at least 0. Only the cost-aware policy reads it.
            parent: the key that it continues. Leaf-first policies keep the parent for as long as the child is resident.

        Raises:
            CapacityError: it does not fit; evict what `victims` names first.
            InputError: a size below 1, a negative cost, or a key that is resident already.
        """
        ...

    def evict(self, key: Key) -> None:
        """A victim has left. What the policy knows of it may count when it comes back; absent keys are ignored."""
        ...

    def remove(self, key: Key) -> None:
        """A key has left for good (deleted, found damaged): all that is known of it is forgotten."""
        ...
