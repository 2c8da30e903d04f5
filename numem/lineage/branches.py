"""Branches: named heads over causal ids, with a log. A fork costs one fact; a head moves by compare-and-set.

Every move carries the generation it makes. Of two facts for one generation the first in commit order holds, so that a
race has one winner whoever reads it, and the loser finds out before it is told of success.
"""

from dataclasses import dataclass

from numem.errors import InputError, NotFoundError, StoreError
from numem.identity.digest import ID_BYTES
from numem.store.catalog.catalog import Catalog, Facts
from numem.store.catalog.facts import BranchFact

NAME_LIMIT = 255


class BranchMovedError(StoreError):
    """A compare-and-set found another head; `.head` is the one it found."""

    def __init__(self, message: str, head: bytes) -> None:
        super().__init__(message)
        self.head = head


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch as it stands: its head, how often it moved, and the branch it was forked from."""

    name: str
    head: bytes
    generation: int
    source: str


@dataclass(frozen=True, slots=True)
class Move:
    """One line of a branch's log."""

    sequence: int
    generation: int
    action: str
    previous: bytes
    head: bytes
    actor: str
    reason: str


class Branches:
    """Branches of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def all(self) -> tuple[Branch, ...]:
        """Every branch, by name."""
        logs = self._logs()
        return tuple(_standing(logs[name]) for name in sorted(logs))

    def get(self, name: str) -> Branch:
        """One branch; NotFoundError where there is none of this name."""
        return _standing(self._log(name))

    def log(self, name: str) -> tuple[Move, ...]:
        """Moves of a branch, oldest first; NotFoundError where there is none of this name."""
        return tuple(
            Move(f.sequence, f.generation, f.action, f.previous, f.head, f.actor, f.reason) for f in self._log(name)
        )

    def create(self, name: str, head: bytes, *, actor: str, reason: str, source: str | None = None) -> Branch:
        """Create a branch at a published node (or at a registered scope, for an empty one).

        Raises:
            BranchMovedError: the name is taken.
            NotFoundError: no such node, or no such source branch.
        """
        _require_name(name)
        with self._catalog.transaction():
            self._require_head(head)
            if source is not None:
                self._log(source)
            taken = self._logs().get(name)
            if taken:
                raise BranchMovedError(
                    f"branch {name!r} exists, at {taken[-1].head.hex()}; choose another name or move it", taken[-1].head
                )
            return self._append(name, 1, head, b"", "fork" if source else "create", actor, reason, source or "")

    def move(self, name: str, head: bytes, *, expected: bytes, actor: str, reason: str, action: str = "move") -> Branch:
        """Move a head if it still stands at `expected`.

        Raises:
            BranchMovedError: it stands elsewhere.
            NotFoundError: no such branch or node.
        """
        with self._catalog.transaction():
            self._require_head(head)
            last = self._log(name)[-1]
            if last.head != expected:
                raise _moved(name, last.head, expected)
            return self._append(name, last.generation + 1, head, expected, action, actor, reason, last.source)

    def _append(
        self,
        name: str,
        generation: int,
        head: bytes,
        previous: bytes,
        action: str,
        actor: str,
        reason: str,
        source: str,
    ) -> Branch:
        sequence = self._catalog.clock.next()
        fact = BranchFact(sequence, name, generation, head, previous, action, actor, reason, source)
        self._catalog.append(Facts(branches=[fact]))
        standing = self._logs()[name]
        if standing[generation - 1] != fact:
            # Only on an object store, where no lock orders the writers.
            raise _moved(name, standing[-1].head, previous)
        return _standing(standing[:generation])

    def _require_head(self, head: bytes) -> None:
        if len(head) != ID_BYTES:
            raise InputError(f"branch: a head is a causal id of {ID_BYTES} bytes, got {len(head)}")
        if head not in self._catalog.nodes and head not in self._catalog.identities():
            raise NotFoundError(f"branch: no node {head.hex()} in this memory; publish it first")

    def _log(self, name: str) -> list[BranchFact]:
        found = self._logs().get(name)
        if not found:
            raise NotFoundError(f"no branch {name!r} in this memory")
        return found

    def _logs(self) -> dict[str, list[BranchFact]]:
        logs: dict[str, list[BranchFact]] = {}
        for fact in self._catalog.branch_facts():
            log = logs.setdefault(fact.name, [])
            if fact.generation == len(log) + 1:
                log.append(fact)
        return {name: log for name, log in logs.items() if log}


def _standing(log: list[BranchFact]) -> Branch:
    last = log[-1]
    return Branch(last.name, last.head, last.generation, log[0].source)


def _moved(name: str, head: bytes, expected: bytes) -> BranchMovedError:
    return BranchMovedError(
        f"branch {name!r} stands at {head.hex()}, not at {expected.hex() or 'nothing'}; read it again and decide anew",
        head,
    )


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
        raise InputError(f"branch: a name has 1 to {NAME_LIMIT} characters")
    if not name.isprintable():
        raise InputError(f"branch: the name {name!r} holds characters that cannot be printed")
