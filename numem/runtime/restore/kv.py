"""Attention state between pages and the durable plane: capture into nodes, load back into pages."""

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from numem.errors import DeadlineError, OutOfPlanError, StoreError
from numem.identity.chain import plan
from numem.identity.digest import content_id
from numem.identity.fingerprint import Identity
from numem.runtime.engine import Engine
from numem.runtime.paging.pages import DTYPES
from numem.runtime.paging.pool import PageLease, Route
from numem.runtime.restore.chunks import chunk_grid, chunk_node
from numem.runtime.restore.prefix import Hit, Match, lookup, select
from numem.state.groups import Floor, Group
from numem.state.load import window_floors
from numem.state.node import Node
from numem.state.spec import StateSpec

if TYPE_CHECKING:
    from numem.store.memory import Memory

# What was read of a hit: the rows of its needed groups, [members, rows, width] each.
Payload = list[torch.Tensor]

# Chunks read by one call of the store; bounds the staging memory of a restore.
READ_AHEAD = 8


def raw(payload: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor as a uint8 array over the same memory."""
    return payload.view(-1).view(torch.uint8).numpy()


@dataclass(slots=True)
class Captured:
    """Chunks of one boundary, ready to be staged or published: of every node the payloads of its groups."""

    nodes: list[Node] = field(default_factory=list)
    payloads: list[list[np.ndarray]] = field(default_factory=list)
    reused: list[bytes] = field(default_factory=list)


def capture(
    memory: "Memory",
    engine: Engine,
    identity: Identity,
    tokens: Sequence[int],
    route: Route,
    *,
    upto: int | None = None,
    provenance: dict[str, str] | None = None,
    skip: Container[bytes] = (),
) -> Captured:
    """Export the chunks of `[0, upto)` that are not durable in the memory's home yet, but for those in `skip`.

    The pages are leased while they are read, so that eviction or release cannot change them.

    Raises:
        OutOfPlanError: rows that are not computed, or that lie below a window floor and were not loaded.
    """
    upto = route.length if upto is None else upto
    if not 0 <= upto <= route.length:
        raise OutOfPlanError(f"capture: boundary {upto} lies outside [0, {route.length}], the rows that are computed")
    with engine.pool.lease(route) as lease:
        return capture_pages(memory, engine, identity, tokens, lease, upto, provenance, skip)


def capture_pages(
    memory: "Memory",
    engine: Engine,
    identity: Identity,
    tokens: Sequence[int],
    lease: PageLease,
    upto: int,
    provenance: dict[str, str] | None = None,
    skip: Container[bytes] = (),
) -> Captured:
    """`capture` of pages that the caller has leased; on any thread, as a leased page is never written."""
    spec = engine.decoder.spec
    out = Captured()
    for chunk in plan(identity.scope, tokens, upto):
        if chunk.id in skip:
            continue
        if memory.durable(chunk.id):
            out.reused.append(chunk.id)
            continue
        payloads = [raw(group_rows(engine, lease, chunk.start, chunk.count, group)) for group in spec.retained]
        contents = [content_id(payload, identity.content_key) for payload in payloads]
        out.nodes.append(chunk_node(chunk, identity.scope, spec, contents, provenance or {}))
        out.payloads.append(payloads)
    return out


def group_rows(engine: Engine, held: Route | PageLease, start: int, count: int, group: Group) -> torch.Tensor:
    """A group's rows [start, start + count) as a payload.

    Raises:
        OutOfPlanError: some of them lie below the group's floor: they were not loaded.
    """
    for floor in held.floors:
        if floor.group == group.id and start < floor.start:
            raise OutOfPlanError(
                f"rows [{start}, {start + count}) of group {group.id}: those below {floor.start} were left out when the "
                "sequence was restored; compute it anew to have them"
            )
    return engine.storage.save(held.pages, start, count, group)


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
    good = first
    failed = False
    try:
        # Said before the first row lands, so that nobody takes what is left out for rows.
        pool.set_floors(route, floors_after(spec, hits, route.length, route.floors))
        for at in range(0, len(hits), READ_AHEAD):
            group = hits[at : at + READ_AHEAD]
            payloads, failure = fetch(memory, engine.decoder.spec, group, tier, report)
            began = time.perf_counter()
            for hit, payload in zip(group, payloads, strict=False):
                place(engine, reservation.pages, hit, payload, good)
                good = hit.node.start + hit.rows
            report.load_ms += (time.perf_counter() - began) * 1e3
            if failure:
                report.failures.append(failure)
                failed = True
                break
        usable = good > first and all(floor.allows(good) for floor in route.floors)
    except BaseException:
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


def place(engine: Engine, pages: Sequence[int], hit: Hit, payload: Payload, first: int) -> None:
    """Write a fetched chunk's rows into pages, but for those below position `first`, which hold theirs already."""
    skip = max(0, first - hit.node.start)
    groups = engine.decoder.spec.retained
    for index, part in zip(hit.parts, payload, strict=True):
        members, rows, width = part.shape
        moved = part.view(2, members // 2, rows, width)[:, :, skip : hit.rows].contiguous()
        engine.storage.load(moved, pages, hit.node.start + skip, groups[index])


def hit_bytes(spec: StateSpec, hit: Hit) -> int:
    """Bytes that a restore of this hit reads: its needed parts, whole."""
    return sum(spec.group_bytes(spec.retained[index], hit.node.count) for index in hit.parts)


def fetch(
    memory: "Memory", spec: StateSpec, hits: Sequence[Hit], tier: str | None, report: Restored
) -> tuple[list[Payload], str | None]:
    """Payloads of the leading hits that could be read and verified, and why the next one could not.

    Touches no page, so that any thread may call it.
    """
    dtype = DTYPES[spec.dtype]
    buffers = [
        [torch.empty(spec.group_shape(spec.retained[index], hit.node.count), dtype=dtype) for index in hit.parts]
        for hit in hits
    ]
    began = time.perf_counter()

    def fetch(a: int, b: int) -> None:
        requests = [
            (hit.node.pieces[index], raw(part))
            for hit, parts in zip(hits[a:b], buffers[a:b], strict=True)
            for index, part in zip(hit.parts, parts, strict=True)
        ]
        result = memory.read(requests, tier=tier)
        report.bytes += result.bytes
        for name, nbytes in result.by_tier.items():
            report.by_tier[name] = report.by_tier.get(name, 0) + nbytes

    failure = None
    count = len(hits)
    try:
        fetch(0, len(hits))
    except DeadlineError as error:
        # Asking again would wait again: the rest is recomputed.
        report.late = True
        count = 0
        failure = f"chunks [{hits[0].node.start}, {hits[-1].node.end}): {error}"
    except (StoreError, OSError):
        # One bad piece must not cost the good ones before it: read them one by one up to the culprit.
        for count, hit in enumerate(hits):
            try:
                fetch(count, count + 1)
            except (StoreError, OSError) as error:
                failure = f"chunk [{hit.node.start}, {hit.node.end}) {hit.node.id.hex()[:16]}: {error}"
                break
        else:
            count = len(hits)
    report.read_ms += (time.perf_counter() - began) * 1e3
    return buffers[:count], failure
