"""`Memory.care`: what keeps a memory small, whole and true over the years."""

from numem.store.session import Session


class Care:
    """Maintenance, repair and deletion of one open memory."""

    def __init__(self, parts: Session) -> None:
        self._parts = parts
