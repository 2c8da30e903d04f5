"""Claims that keep nodes: pins, and leases that other processes see. One function says what they keep: `protected`.

A pin is hard without an expiry and soft with one. A lease is a soft pin of one process that reads: taken by a lookup,
let go when the rows are restored. Nothing that only asks whether a node is there makes or extends a claim.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numem.errors import InputError, NotFoundError
from numem.state.node import Node
from numem.store.catalog.catalog import Catalog, Facts
from numem.store.catalog.facts import Claim
from numem.store.placement.leases import Lease
from numem.store.urls import require_name

if TYPE_CHECKING:
    from numem.store.session import Session

KEEPING = ("pin", "lease")


@dataclass(frozen=True, slots=True)
class Protected:
    """What eviction and collection leave alone: nodes (causal ids) and their pieces (content ids)."""

    nodes: frozenset[bytes]
    pieces: frozenset[bytes]


def protected(parts: "Session", tier: str = "") -> Protected:
    """Nodes that a pin, a lease or a holder of this process keeps, with every node that leads to them.

    Args:
        tier: what is kept in this tier of this node; "" for what is kept anywhere, by any node.
    """
    parts.catalog.refresh("nodes", "claims")
    kept = set(parts.leases.held())
    for claim in parts.catalog.claims(time.time_ns()):
        everywhere = claim.tier == "" or not tier
        here = claim.tier == tier and claim.node in ("", parts.work.node)
        if claim.kind in KEEPING and (everywhere or here):
            kept.add(claim.subject)
    nodes = with_ancestors(parts.catalog, kept)
    return Protected(frozenset(nodes), frozenset(piece for node in nodes.values() for piece in node.pieces))


def with_ancestors(catalog: Catalog, ids: Iterable[bytes]) -> dict[bytes, Node]:
    """Published nodes and all that lead to them: a boundary without its beginning restores nothing."""
    found: dict[bytes, Node] = {}
    for id in ids:
        while id not in found:
            node = catalog.nodes.get(id)
            if node is None:
                break
            found[id] = node
            id = node.parent
    return found


def pin(parts: "Session", ids: Iterable[bytes], tier: str, ttl_s: float | None, owner: str) -> None:
    """See `Residency.pin`."""
    require_owner(owner)
    node = _node_of(parts, tier)
    expires = expiry(ttl_s)
    wanted = list(dict.fromkeys(ids))
    with parts.catalog.transaction():  # what is there now is not collected before it is pinned
        for id in wanted:
            if id not in parts.catalog.nodes:
                raise NotFoundError(f"pin: no node {id.hex()} in this memory; publish it first")
        append(parts, [Claim(0, "pin", id, tier, node, owner, expires=expires) for id in wanted])


def unpin(parts: "Session", ids: Iterable[bytes], tier: str, owner: str) -> int:
    """See `Residency.unpin`."""
    require_owner(owner)
    wanted = set(ids)
    return take_back(
        parts,
        lambda claim: claim.kind == "pin" and claim.subject in wanted and (claim.tier, claim.owner) == (tier, owner),
    )


def pins(parts: "Session") -> tuple[Claim, ...]:
    """See `Residency.pins`."""
    held = [claim for claim in parts.catalog.claims(time.time_ns()) if claim.kind == "pin"]
    return tuple(sorted(held, key=lambda claim: (claim.subject, claim.tier, claim.node, claim.owner)))


def lease(parts: "Session", ids: Iterable[bytes], ttl_s: float) -> Lease:
    """A hold that other processes see too: a lease of this process, and a claim for each node."""
    wanted = tuple(dict.fromkeys(ids))
    owner = f"{parts.writer}.{secrets.token_hex(8)}"
    claims = [Claim(0, "lease", id, owner=owner, expires=expiry(ttl_s)) for id in wanted]
    append(parts, claims)
    return parts.leases.hold(wanted, ttl_s, released=lambda: _let_go(parts, owner))


def _let_go(parts: "Session", owner: str) -> None:
    take_back(parts, lambda claim: claim.kind == "lease" and claim.owner == owner)


def take_back(parts: "Session", chosen: Callable[[Claim], bool]) -> int:
    """Cancel the claims that hold now and are chosen; how many they were."""
    with parts.catalog.transaction():
        gone = [claim for claim in parts.catalog.claims(time.time_ns()) if chosen(claim)]
        append(
            parts,
            [Claim(0, c.kind, c.subject, c.tier, c.node, c.owner, c.priority, c.expires, active=False) for c in gone],
        )
    return len(gone)


def append(parts: "Session", claims: Iterable[Claim]) -> None:
    """Append claims durably, each with a sequence of its own."""
    stamped = [
        Claim(parts.clock.next(), c.kind, c.subject, c.tier, c.node, c.owner, c.priority, c.expires, c.active)
        for c in claims
    ]
    if stamped:
        parts.catalog.append(Facts(claims=stamped))


def expiry(ttl_s: float | None) -> int:
    """Nanoseconds since the epoch at which a claim that is made now ends; 0 for never."""
    if ttl_s is None:
        return 0
    if not 0 < ttl_s < 1e9:
        raise InputError(f"ttl_s={ttl_s}: give a positive number of seconds, or None for no end")
    return time.time_ns() + int(ttl_s * 1e9)


def require_owner(owner: str) -> None:
    """InputError for an owner that cannot be told from nobody."""
    if not owner or len(owner) > 200 or not owner.isprintable():
        raise InputError(f"owner {owner[:80]!r}: give a printable name of 1 to 200 characters")


def _node_of(parts: "Session", tier: str) -> str:
    """The node that a tier of this memory belongs to; "" for all tiers and for a tier that all nodes share."""
    if not tier or tier in parts.tiers:
        return parts.tiers[tier].config.node if tier else ""
    if tier in parts.work.specs:
        return parts.work.node  # memory of this process
    raise NotFoundError(f"no tier {require_name('tier', tier)!r} in this memory; it has {', '.join(parts.tiers)}")
