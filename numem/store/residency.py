"""`Memory.residency`: which copies of a node are wanted, kept and let go of, beyond the process that says so."""

from numem.store.session import Session


class Residency:
    """Demands, pins and eviction of one open memory."""

    def __init__(self, parts: Session) -> None:
        self._parts = parts
