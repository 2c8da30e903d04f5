"""Background reading for arrivals: chunks of a prompt into buffers, the last one first, while the owner computes.

    pending ──group──> reading (a thread of the loader) ──> ready ──take──> the owner writes them into pages
                            └─ not in this tier: once more from any ──> or failed, and left to be computed

The loader touches no page. A read that is under way when its load is cancelled ends in buffers that nobody looks at.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import TYPE_CHECKING

from numem.errors import ClosedError
from numem.policy.costs import Costs
from numem.runtime.restore.kv import READ_AHEAD, Restored, fetch
from numem.runtime.restore.payload import Payload, drop
from numem.runtime.restore.prefix import Hit, Match
from numem.state.spec import StateSpec

if TYPE_CHECKING:
    from numem.runtime.device.transfer import Transfers
    from numem.store.memory import Memory

# Bytes of all loads that are being read or wait to be written into pages; one group always may.
STAGING_BYTES = 256 << 20
# The same of one load, in chunks.
STAGED_CHUNKS = 2 * READ_AHEAD
THREADS = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk to load.

    Attributes:
        nbytes: what is read for it.
        source: tier by which its cost is predicted.
        tier: the only tier to read it from; None for the nearest that has it.
        failure: why an earlier try failed.
    """

    hit: Hit
    nbytes: int
    source: str
    tier: str | None
    failure: str = ""

    @property
    def end(self) -> int:
        return self.hit.node.start + self.hit.rows


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chunk that has been read and verified."""

    wanted: Wanted
    payload: Payload


@dataclass(frozen=True, slots=True)
class Read:
    """One call of the store: parts of together so many bytes, by tier, and how long it took."""

    parts: int
    by_tier: dict[str, int]
    ms: float


def observe(costs: Costs, read: Read) -> None:
    """Let a read count as a measurement, where all of it came from one tier."""
    if len(read.by_tier) == 1:
        ((tier, nbytes),) = read.by_tier.items()
        costs.observe_load(tier, nbytes, read.parts, read.ms)


@dataclass(eq=False, slots=True)
class Load:
    """The chunks of one arrival on their way; everything is changed under the loader's lock.

    Attributes:
        pending: not begun, in the order of reading: from the back of the prompt.
        reading: being read now.
        since: when reading began or the last one ended (of `time.perf_counter`).
        ready: read, to be taken by the owner.
        claimed: rows below it are there or being computed; what ends at or below it is not read any more.
        share: a group is at most this part of what is pending; the larger, the smaller the groups.
        reads, failures: what has happened, for the owner to take.
        error: what a read raised unexpectedly.
    """

    match: Match
    pending: deque[Wanted]
    share: int
    descending_only: bool
    claimed: int = 0
    reading: tuple[Wanted, ...] = ()
    since: float = field(default_factory=time.perf_counter)
    ready: list[Loaded] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    error: Exception | None = None
    cancelled: bool = False
    queued: bool = False
    released: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return not self.pending and not self.reading


class Loader:
    """Threads that read for many arrivals, in turn, with a bound on what is staged.

    Args:
        staging_bytes: see STAGING_BYTES.
        staging: of a device: where chunks are read to. Every chunk then counts as a slot, and there are never more on
            their way than slots, so that a thread that waits for one waits only for copies that are under way.
    """

    def __init__(
        self,
        memory: "Memory",
        spec: StateSpec,
        *,
        staging_bytes: int = STAGING_BYTES,
        staging: "Transfers | None" = None,
    ) -> None:
        self.memory = memory
        self.spec = spec
        self.staged = 0
        self._staging = staging
        self._limit = staging_bytes if staging is None else staging.slot_bytes * staging.ring.slots
        self._changed = Condition()
        self._parked: deque[Load] = deque()
        self._live: set[Load] = set()
        self._unheard: deque[Read] = deque(maxlen=16)
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="numem-load")

    def start(self, match: Match, wanted: Sequence[Wanted], *, share: int, descending_only: bool) -> Load:
        """Begin to read chunks, which are given from the front and are read from the back.

        The match's lease is released when the last read has ended; it stays with the caller where this raises.

        Args:
            share: see `Load`.
            descending_only: what lies before a chunk that failed is not read, since it alone would not do.
        """
        load = Load(match, deque(reversed(wanted)), share, descending_only)
        with self._changed:
            if self._closed:
                raise ClosedError("loader: closed; make a new one")
            self._live.add(load)
            self._queue(load)
        return load

    def take(self, load: Load, wait_s: float = 0.0) -> list[Loaded]:
        """What is ready, after waiting up to `wait_s` for anything, a failure too.

        Raises:
            Exception: what a read raised that is no failure of the store.
        """
        with self._changed:
            if wait_s > 0:
                self._changed.wait_for(lambda: load.ready or load.failures or load.error or load.ended, wait_s)
            if load.error is not None:
                raise load.error
            taken, load.ready = load.ready, []
            self._free([loaded.wanted for loaded in taken])
            if load.pending and not load.reading:
                self._queue(load)
        return taken

    def report(self, load: Load) -> tuple[list[Read], list[str]]:
        """Reads and failures since the last call."""
        with self._changed:
            reads, load.reads = load.reads, []
            failures, load.failures = load.failures, []
        return reads, failures

    def unheard(self) -> list[Read]:
        """Reads since the last call that ended after their load was cancelled: they too tell what a tier costs."""
        with self._changed:
            reads = list(self._unheard)
            self._unheard.clear()
        return reads

    def claim(self, load: Load, position: int) -> None:
        """Rows below `position` are being computed; after a failure a lower claim takes that back."""
        with self._changed:
            load.claimed = position

    def snapshot(self, load: Load) -> tuple[list[Wanted], tuple[Wanted, ...], float, list[Wanted]]:
        """What is ready, what is being read, for how many ms nothing has come, and what will be, in the order of
        reading."""
        with self._changed:
            elapsed = (time.perf_counter() - load.since) * 1e3
            return (
                [loaded.wanted for loaded in load.ready],
                load.reading,
                elapsed,
                [w for w in load.pending if w.end > load.claimed],
            )

    def cancel(self, load: Load) -> None:
        """Read nothing more. What is being read is dropped when it comes."""
        with self._changed:
            if load.cancelled:
                return
            load.cancelled = True
            load.failures += [f"{w.failure}; recomputed" for w in (*load.reading, *load.pending) if w.failure]
            load.pending.clear()
            taken, load.ready = load.ready, []
            drop([loaded.payload for loaded in taken])
            self._free([loaded.wanted for loaded in taken])
            self._end(load)
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel every load and wait for the reads under way."""
        with self._changed:
            self._closed = True
            live = list(self._live)
        for load in live:
            self.cancel(load)
        self._threads.shutdown(wait=True)

    def _queue(self, load: Load) -> None:
        if not load.queued:
            load.queued = True
            self._threads.submit(self._work, load)

    def _size(self, wanted: Wanted) -> int:
        return wanted.nbytes if self._staging is None else self._staging.slot_bytes

    def _free(self, chunks: Sequence[Wanted]) -> None:
        """Give back room for staged chunks, and let loads that stopped for want of it go on."""
        self.staged -= sum(map(self._size, chunks))
        while self._parked and self.staged < self._limit:
            parked = self._parked.popleft()
            if parked.pending:
                self._queue(parked)

    def _end(self, load: Load) -> None:
        """Release the lease, once, when no read is under way or to come."""
        if load.ended and not load.released:
            load.released = True
            self._live.discard(load)
            load.match.lease.release()

    def _group(self, load: Load) -> tuple[Wanted, ...]:
        """The next chunks to read, of one tier and within the bounds; none where it has to stop for now."""
        while load.pending and load.pending[-1].end <= load.claimed:
            load.pending.pop()
        room = min(max(1, len(load.pending) // load.share), READ_AHEAD, STAGED_CHUNKS - len(load.ready))
        group: list[Wanted] = []
        nbytes = self.staged
        for wanted in load.pending:
            same = not group or (wanted.tier == group[0].tier and not group[0].failure)
            nbytes += self._size(wanted)
            if len(group) >= room or not same or (nbytes > self._limit and (group or self.staged)):
                break
            group.append(wanted)
        full = bool(load.pending) and not group and len(load.ready) < STAGED_CHUNKS
        if full and load not in self._parked:
            self._parked.append(load)
        return tuple(group)

    def _work(self, load: Load) -> None:
        """Read one group; then let the next load have its turn."""
        with self._changed:
            load.queued = False
            group = self._group(load)
            for _ in group:
                load.pending.popleft()
            load.reading, load.since = group, time.perf_counter()
            self.staged += sum(map(self._size, group))
            if not group:
                self._end(load)
                self._changed.notify_all()
                return
        report = Restored()
        payloads: list[Payload] = []
        failure: str | None = None
        error: Exception | None = None
        try:
            hits = [wanted.hit for wanted in group]
            payloads, failure = fetch(self.memory, self.spec, hits, group[0].tier, report, self._staging, wait=True)
        except Exception as raised:  # noqa: BLE001 - told to the owner, who would wait for ever otherwise
            error = raised
        with self._changed:
            load.reading, load.since = (), time.perf_counter()
            good = [Loaded(wanted, payload) for wanted, payload in zip(group, payloads, strict=False)]
            rest = list(group[len(good) :])
            unused = rest
            if load.cancelled:
                unused = list(group)
                drop(payloads)
                self._unheard.append(Read(len(good), report.by_tier, report.read_ms))
            else:
                load.ready += good
                load.reads.append(Read(len(good), report.by_tier, report.read_ms))
                load.failures += [f"{w.failure}; read from another tier" for w in group[: len(good)] if w.failure]
                if error is not None:
                    load.error = error
                    load.pending.clear()
                elif failure is not None:
                    self._failed(load, rest, failure, report.late)
                if load.pending:
                    self._queue(load)
            self._free(unused)
            self._end(load)
            self._changed.notify_all()

    def _failed(self, load: Load, rest: list[Wanted], failure: str, late: bool) -> None:
        """The first of `rest` could not be read: try it elsewhere, or leave its rows to be computed."""
        culprit, *others = rest
        load.pending.extendleft(reversed(others))
        if culprit.tier is not None:
            load.pending.appendleft(replace(culprit, tier=None, failure=failure))
            if late:
                load.pending = deque(replace(w, tier=None) for w in load.pending)
            return
        load.failures.append(f"{culprit.failure or failure}; recomputed")
        if late or load.descending_only:
            load.pending.clear()
