"""Demands: replicas that are wanted on a node, and the plan that says what to do about them.

A plan never evicts, and what nobody demands is never deleted for that.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numem.errors import InputError, NotFoundError
from numem.state.node import Node
from numem.store.catalog.facts import Claim, Placement
from numem.store.payload.tier import Tier, rank_of
from numem.store.placement import claims
from numem.store.urls import require_name

if TYPE_CHECKING:
    from numem.store.session import Session


@dataclass(frozen=True, slots=True)
class Demand:
    """A replica of a node that somebody wants.

    Attributes:
        id: causal id of the node.
        tier, node: where it is wanted.
        priority: higher first.
        owner: who wants it.
        expires: ns since the epoch; 0 for never.
    """

    id: bytes
    tier: str
    node: str
    priority: int
    owner: str
    expires: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where the pieces of a node that the target lacks can be read: a tier, the node it belongs to, the copies there."""

    tier: str
    node: str
    copies: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Action:
    """A copy to make: from `source`, else from the others in turn.

    Attributes:
        sources: same node first, then by tier rank, node and name. Where none of them has every piece that is lacking,
            they have them together.
    """

    demand: Demand
    source: Source
    sources: tuple[Source, ...]

    @property
    def attempt(self) -> tuple[bytes, str, frozenset[tuple[str, str, str, str, int, int]]]:
        """What a failure is remembered by: the demand's target and the copies it can be made from."""
        copies = frozenset(copy.copy for source in self.sources for copy in source.copies)
        return (self.demand.id, self.demand.tier, copies)


@dataclass(frozen=True, slots=True)
class Unsatisfiable:
    """A demand that nothing can be done about now, and why."""

    demand: Demand
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What this node's demands come to, each in the order of `demands`."""

    satisfied: tuple[Demand, ...] = ()
    in_progress: tuple[Demand, ...] = ()
    actions: tuple[Action, ...] = ()
    unsatisfiable: tuple[Unsatisfiable, ...] = ()


def demand(
    parts: "Session",
    ids: Iterable[bytes],
    tier: str,
    node: str | None,
    priority: int,
    owner: str,
    ttl_s: float | None,
) -> None:
    """See `Residency.demand`."""
    claims.require_owner(owner)
    if not -(2**31) <= priority < 2**31:
        raise InputError(f"priority {priority}: use a number of 32 bits")
    where = _node(parts, tier, node)
    expires = claims.expiry(ttl_s)
    wanted = [_id(id) for id in dict.fromkeys(ids)]
    claims.append(parts, [Claim(0, "demand", id, tier, where, owner, priority, expires) for id in wanted])


def cancel(parts: "Session", ids: Iterable[bytes], tier: str, node: str | None, owner: str) -> int:
    """See `Residency.cancel`."""
    claims.require_owner(owner)
    where = _node(parts, tier, node)
    wanted = {("demand", id, tier, where, owner) for id in ids}
    return claims.take_back(parts, lambda claim: claim.key in wanted)


def demands(parts: "Session", node: str | None = None) -> tuple[Demand, ...]:
    """See `Residency.demands`."""
    found = [
        Demand(claim.subject, claim.tier, claim.node, claim.priority, claim.owner, claim.expires)
        for claim in parts.catalog.claims(time.time_ns())
        if claim.kind == "demand" and node in (None, claim.node)
    ]
    return tuple(sorted(found, key=lambda d: (-d.priority, d.id, d.tier, d.node, d.owner)))


def plan(parts: "Session") -> Plan:
    """See `Residency.plan`."""
    parts.catalog.refresh("placements", "nodes")
    satisfied, in_progress, actions, unsatisfiable = [], [], [], []
    seen = set()
    for wanted in demands(parts, parts.work.node):
        if (wanted.id, wanted.tier) in seen:
            continue  # another owner wants the same, with the same or a higher priority
        seen.add((wanted.id, wanted.tier))
        node, tier = parts.catalog.nodes.get(wanted.id), parts.tiers.get(wanted.tier)
        if node is None:
            unsatisfiable.append(Unsatisfiable(wanted, f"no node {wanted.id.hex()} in this memory; publish it first"))
        elif tier is None:
            unsatisfiable.append(Unsatisfiable(wanted, f"no tier {wanted.tier!r} on node {parts.work.node}"))
        elif all(parts.reader.replicas(piece, tier.name) for piece in node.pieces):
            satisfied.append(wanted)
        elif parts.promoter.under_way(node, tier):
            in_progress.append(wanted)
        else:
            sources, reason = _sources(parts, node, tier)
            if reason:
                unsatisfiable.append(Unsatisfiable(wanted, reason))
            else:
                actions.append(Action(wanted, sources[0], sources))
    return Plan(tuple(satisfied), tuple(in_progress), tuple(actions), tuple(unsatisfiable))


def _sources(parts: "Session", node: Node, tier: Tier) -> tuple[tuple[Source, ...], str]:
    """Where to read what the tier lacks of a node, or why that cannot be."""
    try:
        parts.key_of(node.scope)
    except InputError as error:
        return (), str(error)
    lacking = [piece for piece in dict.fromkeys(node.pieces) if not parts.reader.replicas(piece, tier.name)]
    by_place: dict[tuple[str, str], dict[bytes, Placement]] = {}
    for piece in lacking:
        copies = [copy for copy in parts.reader.replicas(piece) if copy.tier != tier.name]
        if not copies:
            return (), f"no readable replica of piece {piece.hex()}; recompute and publish it"
        for copy in copies:
            by_place.setdefault((copy.tier, copy.node), {}).setdefault(piece, copy)
    whole = {place: copies for place, copies in by_place.items() if len(copies) == len(lacking)}

    def order(place: tuple[str, str]) -> tuple[bool, int, str, str]:
        name, owner = place
        return (owner != parts.work.node and name not in parts.hosts, rank_of(name), owner, name)

    chosen = whole or by_place
    return tuple(Source(*place, tuple(chosen[place].values())) for place in sorted(chosen, key=order)), ""


def _node(parts: "Session", tier: str, node: str | None) -> str:
    """The node a demand is for; the tiers of others are theirs to know."""
    if node is None or node == parts.work.node:
        if tier not in parts.tiers:
            raise NotFoundError(
                f"no tier {require_name('tier', tier)!r} in this memory; it has {', '.join(parts.tiers)}"
            )
        return parts.work.node
    require_name("tier", tier)
    return require_name("node", node)


def _id(id: bytes) -> bytes:
    if len(id) != 32:
        raise InputError(f"demand: a causal id has 32 bytes, not {len(id)}")
    return id
