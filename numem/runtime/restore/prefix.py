"""Finding the longest durable prefix of a token sequence.

prompt      [------------ 0, 2049 ------------)     looked up over 2,048: the pending token is always computed
nodes       [0,256)[256,512) ... [1792,2048)        children of the boundary before, compared by token and id
match       ends at the first hole; a node that the prompt leaves in the middle gives its shared full pages
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS, TOKEN_BYTES, common_tokens, pack_tokens, page_ids
from numem.runtime.restore.chunks import KIND, chunk_grid, has_layout
from numem.state.load import needed_groups
from numem.state.node import Node
from numem.state.spec import StateSpec

if TYPE_CHECKING:
    from numem.store.memory import Memory
    from numem.store.placement.leases import Lease


@dataclass(frozen=True, slots=True)
class Hit:
    """Rows [node.start, node.start + rows) come from `node`.

    Attributes:
        parts: the pieces of the node to read, by their place in it.
    """

    node: Node
    rows: int
    parts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Match:
    """Result of a lookup; a context manager that holds its pieces until left.

    Attributes:
        hits: nodes in order, contiguous from position 0 (or from `start`).
        tokens: length of the matched prefix.
        reason: why the match ends there: "complete", "miss", "parted" (the prompt leaves a node), "hole" (a node is
            known but its bytes are not available), "layout" (a node lacks a part that the layout requires), or "tail"
            (nothing is stored beyond a short node).
        lease: keeps the pieces from being collected; released on exit.
    """

    hits: tuple[Hit, ...]
    tokens: int
    reason: str
    lease: "Lease"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.lease.release()


def lookup(
    memory: "Memory",
    scope: bytes,
    tokens: Sequence[int] | np.ndarray,
    *,
    limit: int | None = None,
    tier: str | None = None,
    spec: StateSpec | None = None,
) -> Match:
    """Longest durable prefix of `tokens`, planned over all but the last one.

    The prefix is the least over all groups: every part that its boundary needs is there.

    Args:
        limit: match at most so many tokens, in [0, len(tokens) - 1].
        tier: require the bytes in this tier (default: anywhere).
        spec: layout of the state; default: every part of every node is needed.
    """
    top = max(0, len(tokens) - 1)
    limit = top if limit is None else limit
    if not 0 <= limit <= top:
        raise InputError(f"lookup: limit {limit} lies outside [0, {top}]")
    packed = pack_tokens(tokens[:limit])
    hits: list[Hit] = []
    parent, at, reason = scope, 0, "complete"
    while at < limit:
        rest = packed[at * TOKEN_BYTES :]
        best, rows, reason = _best_child(memory, parent, at, rest, tier, spec)
        if best is None:
            break
        hits.append(Hit(best, rows, tuple(range(len(best.pieces)))))
        at += rows
        if rows < best.count:
            reason = "complete" if at == limit else "parted"
            break
        parent = best.id
    else:
        reason = "complete"
    if reason == "miss" and hits and hits[-1].node.count % PAGE_TOKENS:
        reason = "tail"
    if spec is not None and spec.groups:
        found = at
        hits, at = _reachable(memory, spec, hits, at, tier)
        reason = reason if at == found else "hole"
    if limit >= PAGE_TOKENS:
        memory.looked(scope, at)
    lease = memory.hold([hit.node.id for hit in hits])
    return Match(tuple(hits), at, reason, lease)


def select(spec: StateSpec, hits: Sequence[Hit], boundary: int) -> tuple[Hit, ...]:
    """The hits that lead to `boundary`, an end of one of them, each with the parts that this boundary needs."""
    return tuple(
        replace(hit, parts=needed_groups(spec, hit.node.start, boundary, chunk_grid(hit.node)))
        for hit in hits
        if hit.node.start < boundary
    )


def _reachable(
    memory: "Memory", spec: StateSpec, hits: Sequence[Hit], boundary: int, tier: str | None
) -> tuple[list[Hit], int]:
    """The longest of these prefixes whose windowed parts are available too, with what it needs of each node."""
    while hits:
        chosen = select(spec, hits, boundary)
        if all(memory.available(hit.node.id, tier, hit.parts) for hit in chosen if len(hit.parts) > _lasting(spec)):
            return list(chosen), boundary
        boundary = hits[-1].node.start
        hits = hits[:-1]
    return [], 0


def _lasting(spec: StateSpec) -> int:
    """How many groups keep every row; they come before those with a window."""
    return sum(group.window is None for group in spec.retained)


def _best_child(
    memory: "Memory", parent: bytes, start: int, rest: bytes, tier: str | None, spec: StateSpec | None
) -> tuple[Node | None, int, str]:
    best, rows, hole, misfit = None, 0, False, False
    # Whether a windowed part is needed shows only when the boundary is known.
    lasting = None if spec is None else [i for i, group in enumerate(spec.retained) if group.window is None]
    for node in memory.children(parent):
        if node.kind != KIND or node.start != start or len(node.applied) != node.count * TOKEN_BYTES:
            continue
        shared = common_tokens(node.applied, rest)
        # Where the prompt parts from a node, whole pages are shared; where it merely ends, every row is.
        usable = shared if shared in (node.count, len(rest) // TOKEN_BYTES) else shared - shared % PAGE_TOKENS
        if usable <= rows or page_ids(parent, node.applied)[-1] != node.id:
            continue
        if spec is not None and not has_layout(node, spec):
            misfit = True
            continue
        if not memory.available(node.id, tier, lasting):
            hole = True
            continue
        best, rows = node, usable
    return best, rows, "layout" if misfit else "hole" if hole else "miss"
