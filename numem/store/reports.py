"""What the operations of a memory report."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from numem.errors import ClosedError, RejectedError

Id = bytes


@dataclass(frozen=True, slots=True)
class PublishReceipt:
    """Outcome of publishing one node.

    Attributes:
        id: causal id.
        stored, reused: pieces written now, and pieces that were durable already.
        stored_bytes, logical_bytes: bytes of the pieces written, and of all pieces.
        missing: why it could not be published (staged bytes damaged or gone), empty if it was.
        conflict: the memory holds this causal id with other content, which stays; an event was recorded.
    """

    id: bytes
    stored: int = 0
    reused: int = 0
    stored_bytes: int = 0
    logical_bytes: int = 0
    missing: str = ""
    conflict: bool = False


def _too_late() -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A publication under way. It holds no payload, nor do its results.

    Attributes:
        accepted: whether it entered the first stage; False for a node that is published already, and where it was
            refused (`rejection` tells them apart).
        captured: done when the store has its own, digested copy: the caller's buffers are free again. Carries the
            error where that failed.
        published: done when the node is durable and visible. Carries the error where it failed; it cannot be
            cancelled by whoever waits for it (see `cancel`).
        estimated_bytes: bytes of payload that count against the staging budget.
        timings: ms per phase, filled in as phases end: "capture" (copy and digest), "queue", "write" (payload, with
            whatever else the group waited for), "barrier" (sync, commit, sync), "catalog", "total".
        replicated: where publication ends in a tier that is written back: done when the home tier has the node too.
    """

    accepted: bool
    captured: "Future[None]"
    published: "Future[PublishReceipt]"
    estimated_bytes: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    _cancel: Callable[[], bool] = field(default=_too_late, repr=False)
    replicated: "Future[None] | None" = None

    @property
    def rejection(self) -> str:
        """Why it was refused or dropped, as "code: sentence"; empty where it was not (or not yet)."""
        error = self.published.exception() if self.published.done() else None
        if isinstance(error, RejectedError):
            return f"{error.code}: {error}"
        return f"closed: {error}" if isinstance(error, ClosedError) else ""

    def cancel(self) -> bool:
        """Take it back, whole: True where it had not entered a commit; `published` then carries CancelledError.

        False changes nothing: it is durable, in the commit under way, or failed already.
        """
        return self._cancel()


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Outcome of publishing staged nodes.

    Attributes:
        nodes: nodes that are durable now.
        stored, reused: pieces written, and pieces that were durable already.
        stored_bytes, logical_bytes: bytes written, and bytes of all pieces of the nodes.
        ms: wall time.
        missing: causal ids that are neither staged intact nor durable, and staged ones whose tenant's salt is not
            known in this process.
        conflicts: causal ids whose staged content differs from the durable one, which was kept.
    """

    nodes: int = 0
    stored: int = 0
    reused: int = 0
    stored_bytes: int = 0
    logical_bytes: int = 0
    ms: float = 0.0
    missing: tuple[bytes, ...] = ()
    conflicts: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PromoteReport:
    """Outcome of a promotion: pieces copied, pieces that were there already, and failures by content id (hex)."""

    promoted: int = 0
    satisfied: int = 0
    bytes: int = 0
    ms: float = 0.0
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A replica that is not used any more, and why."""

    content: bytes
    tier: str
    volume: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Outcome of a read.

    Attributes:
        bytes, ms: bytes delivered and wall time.
        by_tier: bytes per tier they came from.
        quarantined: replicas found bad on the way.
        fallbacks: pieces read through Lance's own reader because positioned reads could not be used.
    """

    bytes: int = 0
    ms: float = 0.0
    by_tier: Mapping[str, int] = field(default_factory=dict)
    quarantined: tuple[Quarantined, ...] = ()
    fallbacks: int = 0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of a verification.

    Attributes:
        nodes, pieces, placements, bytes: what was looked at.
        bad: replicas whose bytes are not what they should be.
        missing: causal id -> content ids without any good replica.
        conflicts: causal ids that were once computed with other content.
        damaged: catalog files that cannot be trusted -> why.
        ms: wall time.
    """

    nodes: int = 0
    pieces: int = 0
    placements: int = 0
    bytes: int = 0
    bad: tuple[Quarantined, ...] = ()
    missing: Mapping[Id, tuple[Id, ...]] = field(default_factory=dict)
    conflicts: tuple[Id, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    ms: float = 0.0

    @property
    def ok(self) -> bool:
        """No bad replica, nothing missing, no damaged catalog file."""
        return not self.bad and not self.missing and not self.damaged


@dataclass(frozen=True, slots=True)
class Recovered:
    """Something that recovery did at open.

    Attributes:
        kind: "quarantined" (a bad manifest), "rebuilt" (a catalog table without any good one, made anew), "replayed"
            (acknowledged commits, committed again), "lost", "adopted" (payload without catalog facts), "swept" (files
            of commits that never happened), "foreign" (left alone).
        dataset: which dataset.
        detail: one line.
    """

    kind: str
    dataset: str
    detail: str
