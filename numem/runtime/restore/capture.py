"""Capture: rows of attention state out of pages into nodes with their payloads, for the durable plane."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from numem.errors import OutOfPlanError
from numem.identity.chain import plan
from numem.identity.digest import content_id
from numem.identity.fingerprint import Identity
from numem.runtime.engine import Engine
from numem.runtime.paging.pool import PageLease, Route
from numem.runtime.restore.chunks import chunk_node
from numem.runtime.restore.kv import group_rows, raw, require_rows
from numem.state.node import Node

if TYPE_CHECKING:
    from numem.runtime.device.streams import Event
    from numem.store.memory import Memory


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
    after: "Event | None" = None,
) -> Captured:
    """`capture` of pages that the caller has leased; on any thread, as a leased page is never written.

    Args:
        after: on a device, behind which the rows are written; default: behind all that the calling thread has computed.
    """
    spec = engine.decoder.spec
    out = Captured()
    chunks = []
    for chunk in plan(identity.scope, tokens, upto):
        if chunk.id in skip:
            continue
        if memory.durable(chunk.id):
            out.reused.append(chunk.id)
            continue
        chunks.append(chunk)
    spans = [(chunk.start, chunk.count) for chunk in chunks]
    for chunk, parts in zip(chunks, chunk_rows(engine, lease, spans, after), strict=True):
        payloads = [raw(part) for part in parts]
        contents = [content_id(payload, identity.content_key) for payload in payloads]
        out.nodes.append(chunk_node(chunk, identity.scope, spec, contents, provenance or {}))
        out.payloads.append(payloads)
    return out


def chunk_rows(
    engine: Engine, held: Route | PageLease, spans: Sequence[tuple[int, int]], after: "Event | None"
) -> Iterator[list[torch.Tensor]]:
    """Rows [start, start + count) of every group, chunk after chunk; on a device the next one is on its way meanwhile.

    Raises:
        OutOfPlanError: see `group_rows`.
    """
    storage, groups = engine.storage, engine.decoder.spec.retained
    if storage.transfers is None or storage.guard is not None:
        for start, count in spans:
            yield [group_rows(engine, held, start, count, group, after) for group in groups]
        return
    from numem.runtime.device.transfer import Wanted

    for start, count in spans:
        for group in groups:
            require_rows(held, start, count, group)
    layers = [storage.layers_of(group) for group in groups]
    jobs = (Wanted(held.pages, start, count, layers) for start, count in spans)
    yield from storage.transfers.downloads(jobs, after=after or storage.transfers.fence())
