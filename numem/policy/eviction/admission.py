"""Admission: whether something is worth writing at all, before it is asked what goes for it."""

from numem.policy.eviction.history import History
from numem.policy.eviction.protocol import Key


class SecondTouch:
    """Selective admission: a key is wanted from its second use on, as long as `History` remembers the first."""

    def __init__(self) -> None:
        self._history = History()

    def use(self, key: Key) -> bool:
        """Count a use; whether the key is to be admitted now."""
        return self._history.use(key) > 1

    def forget(self, key: Key) -> None:
        """A key is gone for good; its next use is the first."""
        self._history.forget(key)
