"""What one read asks for, and how it is cut into runs: neighbours in one sidecar that one call fetches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

from numem.identity.digest import checksum
from numem.store.catalog.facts import Placement
from numem.store.reports import Quarantined

# A run is one system call, and one unit of work of a thread.
RUN_BYTES = 16 << 20
GAP_BYTES = 64 << 10

Copy = tuple[str, str, str, str, int, int]


@dataclass(slots=True)
class Request:
    """One piece on its way into the caller's buffer, from the copy that is tried now."""

    content: bytes
    view: memoryview
    placement: Placement
    tried: set[Copy] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Failure:
    """A copy that did not deliver. `blame`: the copy itself is bad, rather than out of reach at the moment."""

    request: Request
    reason: str
    blame: bool


@dataclass(slots=True)
class Outcome:
    """Shared by the threads of one read; everything is changed under the lock."""

    lock: Lock = field(default_factory=Lock)
    failed: list[Failure] = field(default_factory=list)
    by_tier: dict[str, int] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)
    fallbacks: int = 0
    late: bool = False

    def good(self, request: Request) -> None:
        """The piece is in the caller's buffer, verified."""
        with self.lock:
            tier = request.placement.tier
            self.by_tier[tier] = self.by_tier.get(tier, 0) + request.placement.nbytes

    def bad(self, request: Request, reason: str, blame: bool) -> None:
        with self.lock:
            self.failed.append(Failure(request, reason, blame))

    def check(self, request: Request) -> bool:
        """Compare what is in the caller's buffer with its checksum, and take note of either answer."""
        if checksum(request.view) == request.placement.xxh3:
            self.good(request)
            return True
        self.bad(request, "bytes differ from their xxh3-128", True)
        return False

    def deliver(self, request: Request, data: memoryview, what: str) -> None:
        """Copy fetched bytes into the caller's buffer and check them, unless the caller waits no longer."""
        if len(data) != len(request.view):
            self.bad(request, f"{what} gave {len(data)} of {len(request.view)} bytes", True)
            return
        with self.lock:
            if self.late:
                return
            request.view[:] = data
        self.check(request)

    @property
    def nbytes(self) -> int:
        """Bytes delivered so far."""
        with self.lock:
            return sum(self.by_tier.values())


def sidecar_of(placement: Placement) -> tuple[str, str, str, str, int]:
    """What identifies the file in which a copy lies."""
    return (placement.tier, placement.node, placement.volume, placement.file, placement.blob)


def runs_of(requests: Sequence[Request], limit: int = RUN_BYTES) -> list[list[Request]]:
    """Requests by sidecar in the order of their offsets, cut at wide gaps and at `limit` bytes."""
    runs: list[list[Request]] = []
    size = 0
    for request in sorted(requests, key=lambda r: (sidecar_of(r.placement), r.placement.offset)):
        place = request.placement
        if runs:
            last = runs[-1][-1].placement
            gap = place.offset - (last.offset + last.nbytes)
            if sidecar_of(place) == sidecar_of(last) and 0 <= gap <= GAP_BYTES and size + place.nbytes <= limit:
                runs[-1].append(request)
                size += place.nbytes
                continue
        runs.append([request])
        size = place.nbytes
    return runs


def groups_of(requests: Sequence[Request], limit: int = RUN_BYTES) -> list[list[Request]]:
    """Requests by sidecar in the order of their offsets, whatever lies between them, cut at `limit` bytes of pieces."""
    groups: list[list[Request]] = []
    size = 0
    for request in sorted(requests, key=lambda r: (sidecar_of(r.placement), r.placement.offset)):
        place = request.placement
        same = bool(groups) and sidecar_of(groups[-1][-1].placement) == sidecar_of(place)
        if same and size + place.nbytes <= limit:
            groups[-1].append(request)
            size += place.nbytes
        else:
            groups.append([request])
            size = place.nbytes
    return groups
