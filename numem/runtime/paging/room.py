"""Decisions about pages: whether there was room for a request, and who went for it."""

from collections.abc import Collection, Mapping, Sequence

from numem.policy.admission_plan import AdmissionPlan, Snapshot
from numem.policy.decision import Alternative, Decision, Term
from numem.policy.value import declined, victims

# Holders that one decision names; how many more there were is an input of it.
NAMED = 32


def candidates(
    plan: AdmissionPlan,
    snapshot: Snapshot,
    protected: Collection[str],
    known: Mapping[str, Mapping[str, Term]],
) -> tuple[Alternative, ...]:
    """Holders as alternatives, up to NAMED: those that go, those that could, and those that may not, with why.

    The cost of each is its value per page: expected ms that letting it go costs, by which the "value" policy orders.

    Args:
        known: further terms of holders, by id.
    """
    holders = {holder.id: holder for holder in snapshot.holders}
    going = [holders.pop(id) for id in plan.evictions]
    able = victims(holders.values(), protected)
    staying = sorted((h for h in holders.values() if declined(h, protected)), key=lambda h: (h.per_page, h.id))
    return tuple(
        Alternative(
            f"evict:{holder.id}",
            holder.per_page,
            {
                "pages": len(holder.pages),
                "shared_pages": sum(snapshot.references[page] > 1 for page in holder.pages),
                "value": holder.value,
                **known.get(holder.id, {}),
            },
            declined(holder, protected),
        )
        for holder in (*going, *able, *staying)[:NAMED]
    )


def admitting(
    plan: AdmissionPlan, snapshot: Snapshot, policy: str, request: str, open_to_it: Sequence[Alternative]
) -> Decision:
    """The decision whether something that needed room got it: at what its evictions cost, or not at all."""
    short = f"{plan.shortfall_pages} pages short even if all that may go went" if plan.shortfall_pages else ""
    values = {holder.id: holder.value for holder in snapshot.holders}
    cost = None if short else sum(values[id] for id in plan.evictions)
    room = Alternative("admit", cost, {"evictions": len(plan.evictions)}, short)
    refuse = Alternative("refuse", declined="" if short else "pages can be freed")
    return Decision(
        "admit",
        request,
        b"",
        policy,
        _inputs(plan, snapshot, open_to_it),
        (room, refuse, *open_to_it),
        "refuse" if short else "admit",
    )


def evicting(
    plan: AdmissionPlan,
    snapshot: Snapshot,
    policy: str,
    request: str,
    open_to_it: Sequence[Alternative],
    boundaries: Sequence[bytes],
) -> Decision:
    """The decision who goes.

    Args:
        boundaries: causal ids of what the evicted routes hold, in order; empty where nobody knows the scope.
    """
    subject, *others = boundaries or [b""]
    inputs = _inputs(plan, snapshot, open_to_it)
    return Decision("evict", request, subject, policy, inputs, tuple(open_to_it), open_to_it[0].name, tuple(others))


def _inputs(plan: AdmissionPlan, snapshot: Snapshot, named: Sequence[Alternative]) -> dict[str, Term]:
    return {
        "tier": "pages",
        "required_pages": plan.required_pages,
        "free_pages": snapshot.free,
        "available_pages": plan.available_pages,
        "free_pages_after_eviction": plan.free_pages_after_eviction,
        "shortfall_pages": plan.shortfall_pages,
        "evictions": len(plan.evictions),
        "routes": len(snapshot.holders),
        "not_named": len(snapshot.holders) - len(named),
    }
