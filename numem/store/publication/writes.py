"""What the tiers' ways of writing ask for, in the background: copies behind a publication, and behind second reads.

through    a published node is promoted into the tier as well
selective  a node is promoted when a piece of it is read for the second time from a farther tier
back       publication ends in the tier, which lies on this node; the home tier follows, and `durable` says when it has

None of it fails a publication or a read: what does not work is counted, and a home copy is tried again, at the latest
when the memory is opened next. Until then its pieces are not evicted from where they are.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING

from numem.errors import CapacityError, ClosedError, InputError, NumemError, StoreError
from numem.policy.eviction.admission import SecondTouch
from numem.store.payload.tier import Tier, rank_of
from numem.store.publication.publish import NodeJob
from numem.store.reading.runs import Request
from numem.store.reports import PublishReceipt

if TYPE_CHECKING:
    from numem.store.session import Session

# Nodes promoted together; pieces read twice that may wait for it.
_BATCH = 64
_WAITING = 4096


class Writes:
    """Copies that are due, by tier.

    Args:
        signal: asks for `work`, soon.

    Raises:
        InputError: several tiers that are written back, or one that other nodes share.
    """

    def __init__(self, parts: "Session", signal: Callable[[], object]) -> None:
        self._parts = parts
        self._signal = signal
        by_way: dict[str, list[Tier]] = {"through": [], "selective": [], "back": [], "demand": []}
        for tier in () if parts.read_only else parts.tiers.values():
            by_way[tier.config.spec.write].append(tier)
        self._through, self._selective = by_way["through"], by_way["selective"]
        self._back = by_way["back"]
        if len(self._back) > 1 or any(not tier.config.node for tier in self._back):
            names = ", ".join(tier.name for tier in self._back)
            raise InputError(f'tiers {names}: write="back" is for one tier, on a directory of this node')
        self._lock = Lock()
        self._published: dict[bytes, None] = {}
        self._read_twice: dict[str, dict[bytes, None]] = {tier.name: {} for tier in self._selective}
        self._touches = {tier.name: SecondTouch() for tier in self._selective}
        self._failed_home = False
        self._replicated: dict[bytes, list[Future[None]]] = {}

    @property
    def landing(self) -> Tier:
        """The tier in which a publication ends: the home tier, or the first that is written back."""
        return self._back[0] if self._back else self._parts.home

    def replicated(self, id: bytes) -> "Future[None] | None":
        """Done when the home tier has a node that is published next; None where publication ends there anyway."""
        if not self._back:
            return None
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._replicated.setdefault(id, []).append(future)
        return future

    def give_up(self, id: bytes, future: "Future[None]", published: "Future[PublishReceipt]") -> None:
        """A publication ended: where it failed, nothing will come home."""
        error = published.exception()
        if error is None:
            return
        with self._lock:
            waiting = self._replicated.get(id, [])
            if future not in waiting:
                return  # resolved, or told of the end by `close`
            waiting.remove(future)
            if not waiting:
                del self._replicated[id]
        future.set_exception(error)

    def published(self, jobs: Sequence[NodeJob]) -> None:
        """A group is durable where publications end."""
        if jobs and (self._through or self._back):
            with self._lock:
                self._published.update(dict.fromkeys(job.node.id for job in jobs))
            self._signal()

    def touched(self, requests: Iterable[Request]) -> None:
        """One read took these pieces."""
        due, refused = False, 0
        with self._lock:
            for tier in self._selective:
                waiting, touches = self._read_twice[tier.name], self._touches[tier.name]
                for request in requests:
                    if rank_of(request.placement.tier) <= tier.config.rank:
                        continue
                    if not touches.use(request.content):
                        refused += 1
                        continue
                    if len(waiting) >= _WAITING:
                        self._parts.stats.add("selective_dropped", 1)
                        continue
                    waiting[request.content] = None
                    due = True
        if refused:
            self._parts.stats.add("selective_refused", refused)
        if due:
            self._signal()

    def work(self) -> None:
        """Make the copies that are due."""
        with self._lock:
            published, self._published = list(self._published), {}
            read_twice, self._read_twice = self._read_twice, {name: {} for name in self._read_twice}
        try:
            self._send_home(published)
        except NumemError:
            self._failed_home = True
            self._parts.stats.add("writeback_failed", 1)
        for tier in self._through:
            self._parts.stats.add("through_failed", self._promote(published, tier))
        for tier in self._selective:
            ids = (
                [node.id for node in self._parts.holders.nodes(read_twice[tier.name])] if read_twice[tier.name] else []
            )
            self._parts.stats.add("selective_promoted", len(ids))
            self._parts.stats.add("selective_failed", self._promote(ids, tier))

    def flush(self) -> None:
        """Return when the home tier has all that was published through a tier that is written back.

        Raises:
            StoreError: it cannot be written now; nothing is lost, a later call tries again.
        """
        if not self._back:
            return
        owed = self.owed()
        self._send_home(owed)
        left = self.owed() if owed else []
        if left:
            raise StoreError(
                f"tier {self._parts.home.name}: {len(left)} published nodes are not there yet, the first is "
                f"{left[0].hex()}; tier {self._back[0].name} keeps them; see that the first can be written, and flush again"
            )

    def resume(self) -> None:
        """Take up what an earlier process, or a failure, left of the home copies."""
        owed = self.owed()
        if owed:
            with self._lock:
                self._published.update(dict.fromkeys(owed))
            self._signal()

    def owed(self) -> list[bytes]:
        """Nodes with a piece that lies in a tier of this node that is written back, and not at home."""
        parts = self._parts
        if not self._back:
            return []
        parts.catalog.refresh("placements", "nodes")
        contents = [
            content
            for content in parts.catalog.placements.contents()
            if not parts.reader.replicas(content, parts.home.name)
            and any(parts.reader.replicas(content, tier.name) for tier in self._back)
        ]
        return [node.id for node in self._parts.holders.nodes(contents)] if contents else []

    def _send_home(self, ids: Sequence[bytes]) -> None:
        if not self._back:
            return
        parts = self._parts
        if self._failed_home:
            ids = self.owed()
        self._failed_home = False
        for batch in _batches([id for id in ids if id in parts.catalog.nodes]):
            report = parts.promoter.promote(batch, parts.home)
            self._failed_home |= bool(report.failed)
            self._tell(batch)
            parts.stats.add("pieces_written_back", report.promoted)
            parts.stats.add("writeback_failed", len(report.failed))
        for tier in self._back:
            parts.evictor.trim(tier)

    def _tell(self, ids: Sequence[bytes]) -> None:
        """Resolve the futures of the nodes that are whole at home."""
        parts = self._parts
        for id in ids:
            node = parts.catalog.nodes.get(id)
            if node is not None and all(parts.reader.replicas(piece, parts.home.name) for piece in node.pieces):
                with self._lock:
                    futures = self._replicated.pop(id, [])
                for future in futures:
                    future.set_result(None)

    def close(self) -> None:
        """Say of every node that is not at home yet that it will be."""
        with self._lock:
            left, self._replicated = self._replicated, {}
        for id, futures in left.items():
            for future in futures:
                future.set_exception(
                    ClosedError(f"node {id.hex()}: closed before the home tier had it; it follows at the next open")
                )

    def _promote(self, ids: Sequence[bytes], tier: Tier) -> int:
        """Promote nodes where that works; how many pieces, or nodes that do not fit, it did not."""
        failed = 0
        for batch in _batches([id for id in ids if id in self._parts.catalog.nodes]):
            try:
                failed += len(self._parts.promoter.promote(batch, tier).failed)
            except CapacityError:
                failed += self._promote_each(batch, tier)
            except NumemError:
                failed += len(batch)
        return failed

    def _promote_each(self, ids: Sequence[bytes], tier: Tier) -> int:
        failed = 0
        for id in ids:
            try:
                failed += len(self._parts.promoter.promote([id], tier).failed)
            except NumemError:
                failed += 1
        return failed


def _batches(ids: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [ids[at : at + _BATCH] for at in range(0, len(ids), _BATCH)]
