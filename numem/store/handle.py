"""What every part of an open memory's interface stands on: opening and closing, its places, and its history of facts."""

import atexit
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numem.errors import ClosedError, InputError, NotFoundError
from numem.lineage.branches import Branch, Branches, Move
from numem.store import workspace
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Event, Record, to_json
from numem.store.catalog.index import NodeIndex
from numem.store.config import TierSpec
from numem.store.payload.tier import Tier
from numem.store.publication.capture import PublicationLimits
from numem.store.reading.lookups import KIND as LOOKUPS
from numem.store.session import Session
from numem.store.upkeep.unread import Unread, unread


class Handle:
    """An open memory, without publication, lookup and reading; see `numem.store.memory.Memory`."""

    def __init__(
        self,
        home: str | PathLike[str],
        *,
        tiers: Mapping[str, str | PathLike[str] | TierSpec] | None = None,
        node: str = "local",
        local: str | PathLike[str] | None = None,
        storage_options: Mapping[str, str] | None = None,
        limits: PublicationLimits | None = None,
        read_deadline_s: float | None = None,
        read_only: bool = False,
    ) -> None:
        self._pid = os.getpid()
        self._closed = False
        work = workspace.plan(home, tiers, node, local)
        self._read_deadline_s = read_deadline_s
        self._parts = Session(work, storage_options, limits or PublicationLimits(), read_only)
        self._branches = Branches(self._parts.catalog)
        self._at_exit = _close_at_exit(weakref.ref(self))
        atexit.register(self._at_exit)

    # places

    @property
    def home(self) -> str:
        """The home as a directory or URL."""
        return self._parts.work.home.url

    @property
    def local(self) -> Path:
        """The local directory of this node's part; whatever a run writes beside the store lies below it."""
        return self._parts.work.local

    # decisions, events, branches

    def record(self, kind: str, subject: bytes, body: Mapping[str, Any]) -> int:
        """Append a decision or observation (plain JSON) and return its sequence; durable after `flush` or `close`."""
        parts = self._open().require_writes()
        try:
            f"{kind}{to_json(body)}".encode()  # half of a surrogate pair is JSON, and no text
        except (TypeError, ValueError) as error:
            raise InputError(f"record {kind!r}: the body is not plain JSON ({error})") from error
        record = Record(parts.clock.next(), kind, bytes(subject), dict(body))
        parts.committer.submit_facts(Facts(records=[record]))
        return record.sequence

    def note(self, kind: str, subject: bytes, body: dict[str, Any]) -> int:
        """Append a record that nobody waits for: cheap, durable some seconds later or after `flush` or `close`, lost
        (and counted as `notes_lost`) where it cannot be written, here and in a memory that is closed or only read.

        Args:
            body: plain JSON; it is the memory's from here on, see `amend`.

        Returns:
            What `amend` asks for.
        """
        return self._parts.note(kind, subject, body)

    def amend(self, note: int, change: Callable[[], None]) -> bool:
        """Call `change`, which may add to the body of a note; False, without calling it, where that is on its way."""
        return bool(note) and self._parts.committer.amend(note, change)

    def records(self, kind: str | None = None, subject: bytes | None = None) -> tuple[Record, ...]:
        """Records in commit order, of a kind (one that ends with "/": of all kinds that begin so), about a subject."""
        parts = self._open()
        if parts.committer.pending:
            parts.committer.flush()
        return tuple(parts.catalog.records(kind, subject))

    @property
    def read_only(self) -> bool:
        """Whether it was opened for reading alone."""
        return self._parts.read_only

    def looked(self, scope: bytes, rows: int) -> None:
        """Count a lookup of a prefix under a scope, which found so many rows; see `unread`."""
        self._parts.lookups.looked(scope, rows)

    def unread(self) -> tuple[Unread, ...]:
        """What was written and never found, though it was looked for, maybe under another identity: an alarm."""
        parts = self._settled()
        scopes = Counter(node.scope for node in self._nodes().of_kind(None))
        written = ((record.subject, record.body) for record in self.records(LOOKUPS))
        return unread(scopes, parts.lookups.counts(written), parts.catalog.identities())

    @property
    def events(self) -> tuple[Event, ...]:
        """What must not be lost though nothing stopped: one causal id with two content ids, and the like."""
        return tuple(self._settled().catalog.events())

    def branches(self) -> tuple[Branch, ...]:
        """Every branch, by name."""
        self._settled()
        return self._branches.all()

    def branch(self, name: str) -> Branch:
        """One branch; NotFoundError where there is none."""
        self._settled()
        return self._branches.get(name)

    def create_branch(self, name: str, head: bytes, *, actor: str, reason: str, source: str | None = None) -> Branch:
        """Name a published node; `source` is the branch it forks from. BranchMovedError where the name is taken."""
        self._settled()
        return self._branches.create(name, head, actor=actor, reason=reason, source=source)

    def move_branch(
        self, name: str, head: bytes, *, expected: bytes, actor: str, reason: str, action: str = "move"
    ) -> Branch:
        """Compare-and-set a head; BranchMovedError where it does not stand at `expected`."""
        self._settled()
        return self._branches.move(name, head, expected=expected, actor=actor, reason=reason, action=action)

    def log(self, name: str) -> tuple[Move, ...]:
        """Moves of a branch, oldest first."""
        self._settled()
        return self._branches.log(name)

    def close(self) -> None:
        """Publish what is queued and let go. Idempotent; in a forked child it only marks the handle."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:
            atexit.unregister(self._at_exit)
            self._parts.close()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Session:
        if self._closed:
            raise ClosedError("memory: closed; open it again")
        if os.getpid() != self._pid:
            raise ClosedError("memory: this handle was inherited by fork; open the memory again in the child process")
        return self._parts

    def _settled(self) -> Session:
        """The parts, with this process's own queued facts in the catalog."""
        parts = self._open()
        if parts.committer.pending_facts:
            parts.committer.flush()
        return parts

    def _nodes(self) -> NodeIndex:
        parts = self._open()
        parts.catalog.refresh("nodes")
        return parts.catalog.nodes

    def _tier(self, name: str) -> Tier:
        tier = self._parts.tiers.get(name)
        if tier is None:
            raise NotFoundError(f"no tier {name!r} in this memory; it has {', '.join(self._parts.tiers)}")
        return tier


def _close_at_exit(handle: "weakref.ref[Handle]") -> Callable[[], None]:
    def close() -> None:
        alive = handle()
        if alive is not None:
            alive.close()

    return close
