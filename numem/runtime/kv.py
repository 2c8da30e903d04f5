"""Attention state between pages and the durable plane: capture into nodes, load back into pages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from numem.errors import DeadlineError, IntegrityError, NotFoundError, OutOfPlanError, StoreError
from numem.identity.chain import plan
from numem.identity.digest import content_id
from numem.identity.fingerprint import Identity
from numem.runtime.chunks import chunk_node
from numem.runtime.engine import Engine
from numem.runtime.pool import Route
from numem.runtime.prefix import Hit, Match, lookup
from numem.state.node import Node
from numem.state.spec import StateSpec
from numem.store.memory import Memory

# Chunks read by one call of the store; bounds the staging memory of a restore.
READ_AHEAD = 8


def raw(payload: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor as a uint8 array over the same memory."""
    return payload.view(-1).view(torch.uint8).numpy()


@dataclass(slots=True)
class Captured:
    """Chunks of one boundary, ready to be staged or published."""

    nodes: list[Node] = field(default_factory=list)
    payloads: list[np.ndarray] = field(default_factory=list)
    reused: list[bytes] = field(default_factory=list)


def capture(
    memory: Memory,
    engine: Engine,
    identity: Identity,
    tokens: Sequence[int],
    route: Route,
    *,
    upto: int | None = None,
    provenance: dict[str, str] | None = None,
) -> Captured:
    """Export the chunks of `[0, upto)` that are not durable in the memory's home yet.

    The pages are leased while they are read, so that eviction or release cannot change them.
    """
    upto = route.length if upto is None else upto
    if not 0 <= upto <= route.length:
        raise OutOfPlanError(f"capture: boundary {upto} lies outside [0, {route.length}], the rows that are computed")
    spec = engine.decoder.spec
    out = Captured()
    with engine.pool.lease(route) as lease:
        for chunk in plan(identity.scope, tokens, upto):
            if memory.durable(chunk.id):
                out.reused.append(chunk.id)
                continue
            payload = raw(engine.storage.save(lease.pages, chunk.start, chunk.count))
            out.nodes.append(
                chunk_node(chunk, identity.scope, spec, content_id(payload, identity.content_key), provenance or {})
            )
            out.payloads.append(payload)
    return out


@dataclass(slots=True)
class Restored:
    """What a restore did.

    Attributes:
        tokens: rows now in the route.
        bytes: payload bytes read; by_tier the same per tier.
        lookup_ms, read_ms, load_ms: time in the lookup, in the store and in writing pages.
        failures: sentences naming chunks that could not be used, and what became of their rows.
    """

    tokens: int = 0
    bytes: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    lookup_ms: float = 0.0
    read_ms: float = 0.0
    load_ms: float = 0.0
    failures: list[str] = field(default_factory=list)

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
    memory: Memory,
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
        with lookup(memory, scope, tokens, tier=source, limit=limit) as match:
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
    memory: Memory, engine: Engine, route: Route, match: Match, *, tier: str | None = None
) -> tuple[Route, Restored]:
    """Append the matched rows beyond the route's length to it.

    A chunk that cannot be read or verified ends the restore before it: the rows from there on are left to be
    recomputed, and `failures` says why.

    Returns:
        The route that holds the rows (the given one, or a shorter fork after a failure) and the report.
    """
    report = Restored()
    hits = [hit for hit in match.hits if hit.node.start + hit.rows > route.length]
    if not hits:
        return route, report
    first = route.length
    reservation = engine.reserve(route, match.tokens - first)
    good = first
    try:
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
                break
    except BaseException:
        engine.pool.abort([reservation])
        raise
    engine.pool.commit([reservation])
    report.tokens = good - first
    if good < match.tokens:
        shorter = engine.pool.fork(route, good)
        engine.release(route)
        route = shorter
    return route, report


def place(engine: Engine, pages: Sequence[int], hit: Hit, payload: torch.Tensor, first: int) -> None:
    """Write a fetched chunk's rows into pages, but for those below position `first`, which hold theirs already."""
    skip = max(0, first - hit.node.start)
    engine.storage.load(payload[:, :, skip : hit.rows].contiguous(), pages, hit.node.start + skip)


def fetch(
    memory: Memory, spec: StateSpec, hits: Sequence[Hit], tier: str | None, report: Restored
) -> tuple[list[torch.Tensor], str | None]:
    """Payloads of the leading hits that could be read and verified, and why the next one could not.

    Touches no page, so that any thread may call it.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec.dtype]
    layers = spec.slabs[0].members
    buffers = [torch.empty((2, layers, hit.node.count, spec.width), dtype=dtype) for hit in hits]
    began = time.perf_counter()

    def fetch(a: int, b: int) -> None:
        requests = [(hit.node.pieces[0], raw(buffer)) for hit, buffer in zip(hits[a:b], buffers[a:b], strict=True)]
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
        count = 0
        failure = f"chunks [{hits[0].node.start}, {hits[-1].node.end}): {error}"
    except (IntegrityError, NotFoundError, StoreError):
        # One bad piece must not cost the good ones before it: read them one by one up to the culprit.
        for count, hit in enumerate(hits):
            try:
                fetch(count, count + 1)
            except (IntegrityError, NotFoundError, StoreError) as error:
                failure = f"chunk [{hit.node.start}, {hit.node.end}) {hit.node.id.hex()[:16]}: {error}"
                break
        else:
            count = len(hits)
    report.read_ms += (time.perf_counter() - began) * 1e3
    return buffers[:count], failure
