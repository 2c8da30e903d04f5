"""`Memory.residency`: which copies of a node are wanted, kept and let go of, beyond the process that says so."""

from collections.abc import Iterable

from numem.errors import NotFoundError
from numem.store.catalog.facts import Claim
from numem.store.payload.tier import Tier
from numem.store.placement import claims, demands
from numem.store.placement.demands import Demand, Plan
from numem.store.placement.evict import EvictReport
from numem.store.placement.reconcile import ReconcileReport
from numem.store.placement.survey import TierReport, survey
from numem.store.session import Session


class Residency:
    """Demands, pins and eviction of one open memory."""

    def __init__(self, parts: Session) -> None:
        self._parts = parts

    # wanted

    def demand(
        self,
        ids: Iterable[bytes],
        tier: str,
        *,
        node: str | None = None,
        priority: int = 0,
        owner: str,
        ttl_s: float | None = None,
    ) -> None:
        """Say that replicas of nodes are wanted in a tier; saying it again renews priority and expiry. Durable.

        Args:
            ids: causal ids; they need not be published yet.
            node: whose tier; default this node.
            priority: higher is served first.
            owner: who wants it; each owner's demand stands by itself.
            ttl_s: seconds until it lapses; None for no end.
        """
        demands.demand(self._parts, ids, tier, node, priority, owner, ttl_s)

    def cancel(self, ids: Iterable[bytes], tier: str, *, node: str | None = None, owner: str) -> int:
        """Take an owner's demands back; how many stood. Replicas stay."""
        return demands.cancel(self._parts, ids, tier, node, owner)

    def demands(self, node: str | None = None) -> tuple[Demand, ...]:
        """Demands that have not lapsed (of one node), highest priority first, then by causal id."""
        return demands.demands(self._parts, node)

    def plan(self) -> Plan:
        """What this node's demands come to. Nothing is changed, renewed or extended by asking."""
        return demands.plan(self._parts)

    def reconcile(self, *, retry_failed: bool = False) -> ReconcileReport:
        """Carry out the plan, highest priority first; demanded replicas do not push each other out.

        An attempt that failed is not made again until its sources change.

        Args:
            retry_failed: make failed attempts again all the same.
        """
        return self._parts.reconciler.reconcile(retry_failed)

    def signal(self) -> bool:
        """Reconcile in the background, soon; False where that is pending already. Never blocks."""
        accepted = self._parts.background.signal("reconcile")
        self._parts.stats.add("signals_accepted" if accepted else "signals_coalesced", 1)
        return accepted

    def settle(self) -> None:
        """Return when nothing is left to do in the background: reconciliation and copies that write policies ask for."""
        self._parts.background.settle()

    # kept

    def pin(self, ids: Iterable[bytes], *, tier: str = "", ttl_s: float | None = None, owner: str) -> None:
        """Keep nodes, and those that lead to them, from eviction and collection. Pinning does not promote. Durable.

        Args:
            tier: where; "" for everywhere.
            ttl_s: seconds until it lapses (a soft pin); None for a hard one.
            owner: who keeps it; each owner's pin stands by itself.

        Raises:
            NotFoundError: a node that is not published; nothing was pinned.
        """
        claims.pin(self._parts, ids, tier, ttl_s, owner)

    def unpin(self, ids: Iterable[bytes], *, tier: str = "", owner: str) -> int:
        """Take an owner's pins back; how many stood."""
        return claims.unpin(self._parts, ids, tier, owner)

    def pins(self) -> tuple[Claim, ...]:
        """Pins that have not lapsed, by causal id, tier, node and owner."""
        return claims.pins(self._parts)

    # let go

    def evict(self, tier: str, nbytes: int) -> EvictReport:
        """Let at least `nbytes` of pieces leave a tier of this node, in the order of its policy.

        Raises:
            CapacityError: so much may not leave; nothing was evicted.
        """
        return self._parts.evictor.evict(self._tier(tier), nbytes, "asked for")

    def used(self, tier: str) -> int:
        """Bytes of ready pieces that count against the capacity of a tier on this node."""
        return self._parts.evictor.used(self._tier(tier))

    # how much

    def tiers(self) -> tuple[TierReport, ...]:
        """What every tier holds, and whether it holds what it should."""
        return survey(self._parts)

    def set_quota(self, scope: bytes, nbytes: int | None) -> None:
        """Limit the bytes of a scope's pieces in the home tier; None takes the limit away. Durable.

        What would go over it is refused with `QuotaError` when it is staged or published; in the cache queue it is
        dropped, and the ticket says why. What is there already stays.
        """
        self._parts.quotas.set(scope, nbytes)

    def quotas(self) -> dict[bytes, int]:
        """Scope -> bytes, of the scopes that have a quota."""
        return self._parts.quotas.limits()

    def scope_bytes(self, scope: bytes) -> int:
        """Bytes of a scope's ready pieces in the home tier, each piece once: what its quota is held against."""
        return self._parts.quotas.used(scope)

    def _tier(self, name: str) -> Tier:
        tier = self._parts.tiers.get(name)
        if tier is None:
            raise NotFoundError(f"no tier {name!r} in this memory; it has {', '.join(self._parts.tiers)}")
        return tier
