"""Attention state between pages and the durable plane: rows out of pages, and loads back into them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from numem.errors import DeadlineError, OutOfPlanError, StoreError
from numem.runtime.engine import Engine
from numem.runtime.paging.pool import PageLease, Route
from numem.runtime.restore.chunks import chunk_grid
from numem.runtime.restore.payload import Payload, borrow, drop, room_for
from numem.runtime.restore.prefix import Hit, Match, lookup, select
from numem.state.groups import Floor, Group
from numem.state.load import window_floors
from numem.state.spec import StateSpec

if TYPE_CHECKING:
    from numem.runtime.device.streams import Event
    from numem.runtime.device.transfer import Transfers
    from numem.store.memory import Memory

# Chunks read by one call of the store; bounds the staging memory of a restore.
READ_AHEAD = 8


def raw(payload: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor as a uint8 array over the same memory."""
    return payload.view(-1).view(torch.uint8).numpy()


def group_rows(
    engine: Engine, held: Route | PageLease, start: int, count: int, group: Group, after: "Event | None" = None
) -> torch.Tensor:
    """A group's rows [start, start + count) as a payload.

    Args:
        after: see `PageStorage.save`.

    Raises:
        OutOfPlanError: some of them lie below the group's floor: they were not loaded.
    """
    require_rows(held, start, count, group)
    return engine.storage.save(held.pages, start, count, group, after)


def require_rows(held: Route | PageLease, start: int, count: int, group: Group) -> None:
    """Refuse rows that lie below the group's floor; see `group_rows`."""
    for floor in held.floors:
        if floor.group == group.id and start < floor.start:
            raise OutOfPlanError(
                f"rows [{start}, {start + count}) of group {group.id}: those below {floor.start} were left out when the "
                "sequence was restored; compute it anew to have them"
            )


def held_rows(engine: Engine, held: Route | PageLease, count: int) -> np.ndarray:
    """The bytes of rows [0, count), group after group, of a windowed one from its floor on: all that is held of them.

    Equal tokens under equal floors have equal bytes.
    """
    starts = {floor.group: min(floor.start, count) for floor in held.floors}
    parts = []
    for group in engine.decoder.spec.retained:
        start = starts.get(group.id, 0)
        parts.append(raw(group_rows(engine, held, start, count - start, group)))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(slots=True)
class Restored:
    """What a restore did.

    Attributes:
        tokens: rows now in the route.
        bytes: payload bytes read; by_tier the same per tier.
        lookup_ms, read_ms, load_ms: time in the lookup, in the store and in writing pages.
        failures: sentences naming chunks that could not be used, and what became of their rows.
        late: a read did not end before its deadline; asking again would wait again.
    """

    tokens: int = 0
    bytes: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    lookup_ms: float = 0.0
    read_ms: float = 0.0
    load_ms: float = 0.0
    failures: list[str] = field(default_factory=list)
    late: bool = False

    def add(self, other: "Restored") -> None:
        """Count what another restore of the same rows did."""
        self.tokens += other.tokens
        self.bytes += other.bytes
        for name, nbytes in other.by_tier.items():
            self.by_tier[name] = self.by_tier.get(name, 0) + nbytes
        self.read_ms += other.read_ms
        self.load_ms += other.load_ms
        self.failures += other.failures


def restore_rows(
    memory: "Memory",
    engine: Engine,
    scope: bytes,
    route: Route,
    tokens: Sequence[int],
    *,
    tier: str | None = None,
    limit: int | None = None,
) -> tuple[Route, Restored, str]:
    """Append the longest durable prefix of `tokens` beyond the route's rows to it.

    Rows come from `tier` where it has them; what is missing or damaged there is read from any other tier, and what no
    tier can give is left to be recomputed.

    Returns:
        The route that holds the rows, the report, and why the match ended (see `Match.reason`).
    """
    total = Restored()
    wanted, reason = 0, ""
    for source in dict.fromkeys((tier, None)):
        began = time.perf_counter()
        with lookup(memory, scope, tokens, tier=source, limit=limit, spec=engine.decoder.spec) as match:
            total.lookup_ms += (time.perf_counter() - began) * 1e3
            wanted, reason = max(wanted, match.tokens), match.reason
            if match.tokens > route.length:
                route, report = load(memory, engine, route, match, tier=source)
                total.add(report)
        if reason != "hole" and route.length >= wanted:
            break
    outcome = "recomputed" if route.length < wanted else "read from another tier"
    total.failures = [f"{failure}; {outcome}" for failure in total.failures]
    return route, total, reason


def load(
    memory: "Memory", engine: Engine, route: Route, match: Match, *, tier: str | None = None
) -> tuple[Route, Restored]:
    """Append the matched rows beyond the route's length to it.

    A chunk that cannot be read or verified ends the restore before it: the rows from there on are left to be
    recomputed, and `failures` says why. Of windowed layers only what the boundary needs is read, and the route's floors
    say what it lacks; where an earlier boundary needs more than a failed restore had read, it is read anew.

    Returns:
        The route that holds the rows (the given one, or a shorter fork after a failure) and the report.
    """
    report = Restored()
    hits, boundary = match.hits, match.tokens
    while boundary > route.length:
        good, route = _load(memory, engine, route, hits, boundary, tier, report)
        if good == route.length or report.late:
            break
        hits, boundary = select(engine.decoder.spec, hits, good), good
    return route, report


def _load(
    memory: "Memory",
    engine: Engine,
    route: Route,
    hits: Sequence[Hit],
    boundary: int,
    tier: str | None,
    report: Restored,
) -> tuple[int, Route]:
    """One attempt at `load`: the rows that could be read, and a route; it holds them unless they cannot be gone on from."""
    pool = engine.pool
    spec = engine.decoder.spec
    hits = [hit for hit in hits if hit.node.start + hit.rows > route.length]
    first, before = route.length, route.floors
    reservation = engine.reserve(route, boundary - first)
    storage = engine.storage
    after, landed = storage.fence(), None
    good = first
    failed = False
    payloads: list[Payload] = []
    try:
        # Said before the first row lands, so that nobody takes what is left out for rows.
        pool.set_floors(route, floors_after(spec, hits, route.length, route.floors))
        for at in range(0, len(hits), READ_AHEAD):
            group = hits[at : at + READ_AHEAD]
            payloads, failure = fetch(memory, spec, group, tier, report, storage.transfers)
            began = time.perf_counter()
            for hit, payload in zip(group, payloads, strict=False):
                landed = place(engine, reservation.pages, hit, payload, good, after) or landed
                storage.join(landed)
                good = hit.node.start + hit.rows
            report.load_ms += (time.perf_counter() - began) * 1e3
            if failure:
                report.failures.append(failure)
                failed = True
                break
        usable = good > first and all(floor.allows(good) for floor in route.floors)
    except BaseException:
        drop(payloads)
        pool.set_floors(route, before)
        pool.abort([reservation])
        raise
    if not usable:
        pool.set_floors(route, before)
        pool.abort([reservation])
        return good, route
    pool.commit([reservation])
    report.tokens += good - first
    if failed:
        shorter = pool.fork(route, good)
        engine.release(route)
        route = shorter
    return good, route


def floors_after(spec: StateSpec, hits: Sequence[Hit], held: int, floors: tuple[Floor, ...]) -> tuple[Floor, ...]:
    """The floors of a route once these hits brought it to their end; it had rows [0, held) without them, with `floors`."""
    boundary = hits[-1].node.start + hits[-1].rows
    return window_floors(spec, boundary, chunk_grid(hits[0].node), held=held, floors=floors)


def place(
    engine: Engine, pages: Sequence[int], hit: Hit, payload: Payload, first: int, after: "Event | None" = None
) -> "Event | None":
    """Write a fetched chunk's rows into pages, but for those below position `first`, which hold theirs already.

    The payload is used up.

    Args:
        after: on a device, behind which nobody reads, writes or fills the pages; default: behind all that this thread
            has computed.

    Returns:
        On a device, behind which the rows are there: to be joined before they are read, and before the pages are given
        back.
    """
    skip = max(0, first - hit.node.start)
    groups = engine.decoder.spec.retained
    storage = engine.storage
    halves = []
    for part in payload.parts:
        members, rows, width = part.shape
        halves.append(part.view(2, members // 2, rows, width))
    if storage.transfers is not None:
        source, payload.source = payload.source, None  # released when the copy is done, and not before
        return storage.transfers.upload(
            halves,
            source,
            pages,
            hit.node.start,
            [storage.layers_of(groups[index]) for index in hit.parts],
            after=after or storage.transfers.fence(),
            skip=skip,
            count=hit.rows,
        )
    for index, half in zip(hit.parts, halves, strict=True):
        storage.load(half[:, :, skip : hit.rows].contiguous(), pages, hit.node.start + skip, groups[index])
    return None


def hit_bytes(spec: StateSpec, hit: Hit) -> int:
    """Bytes that a restore of this hit reads: its needed parts, whole."""
    return sum(spec.group_bytes(spec.retained[index], hit.node.count) for index in hit.parts)


def fetch(
    memory: "Memory",
    spec: StateSpec,
    hits: Sequence[Hit],
    tier: str | None,
    report: Restored,
    staging: "Transfers | None" = None,
    *,
    wait: bool = False,
) -> tuple[list[Payload], str | None]:
    """Payloads of the leading hits that could be read and verified, and why the next one could not.

    Touches no page, so that any thread may call it.

    Args:
        staging: of the device: pieces are read into its page-locked slots, and where a tier in RAM has them in such
            memory itself they are not copied at all.
        wait: for a slot, where all are in use; else ordinary memory does.
    """
    payloads: list[Payload] = []
    began = time.perf_counter()
    try:
        for hit in hits:
            held = None if staging is None else borrow(memory, spec, hit, tier, staging)
            payloads.append(held or room_for(spec, hit, staging, wait=wait))
        count, failure = _read(memory, hits, payloads, tier, report)
    except BaseException:
        drop(payloads)
        raise
    drop(payloads[count:])
    for payload in payloads[:count]:
        for name, nbytes in payload.there.items():
            report.bytes += nbytes
            report.by_tier[name] = report.by_tier.get(name, 0) + nbytes
    report.read_ms += (time.perf_counter() - began) * 1e3
    return payloads[:count], failure


def _read(
    memory: "Memory", hits: Sequence[Hit], payloads: Sequence[Payload], tier: str | None, report: Restored
) -> tuple[int, str | None]:
    """How many of the leading hits could be read and verified, and why the next one could not."""

    def read(a: int, b: int) -> None:
        requests = [
            (hit.node.pieces[index], raw(part))
            for hit, payload in zip(hits[a:b], payloads[a:b], strict=True)
            if not payload.there
            for index, part in zip(hit.parts, payload.parts, strict=True)
        ]
        if not requests:
            return
        result = memory.read(requests, tier=tier)
        report.bytes += result.bytes
        for name, nbytes in result.by_tier.items():
            report.by_tier[name] = report.by_tier.get(name, 0) + nbytes

    try:
        read(0, len(hits))
    except DeadlineError as error:
        # Asking again would wait again: the rest is recomputed.
        report.late = True
        return 0, f"chunks [{hits[0].node.start}, {hits[-1].node.end}): {error}"
    except (StoreError, OSError):
        # One bad piece must not cost the good ones before it: read them one by one up to the culprit.
        for count, hit in enumerate(hits):
            try:
                read(count, count + 1)
            except (StoreError, OSError) as error:
                return count, f"chunk [{hit.node.start}, {hit.node.end}) {hit.node.id.hex()[:16]}: {error}"
    return len(hits), None
