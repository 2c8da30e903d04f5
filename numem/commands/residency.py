"""`numem tiers | pin | unpin | pins | demand | cancel | demands | reconcile | evict`: which copies are kept, and where."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from numem.commands.lineage import user
from numem.environment import memory_home, parse_bytes
from numem.terminal import JsonFlag, MemoryOption, busy, emit, guarded, open_memory, table

if TYPE_CHECKING:
    from numem.store.memory import Memory

Names = Annotated[list[str], typer.Argument(metavar="ID...", help="Causal ids, beginnings of some, or branches.")]
Owner = Annotated[str | None, typer.Option("--owner", help="Who wants it. Default: the user.")]
TierName = Annotated[str, typer.Option("--tier", help="The tier.")]
PinTier = Annotated[str, typer.Option("--tier", help="In this tier alone. Default: everywhere.")]
Ttl = Annotated[float | None, typer.Option("--ttl", min=0, metavar="SECONDS", help="Until it lapses. Default: never.")]
NodeName = Annotated[str | None, typer.Option("--node", help="The node whose tier it is. Default: this one.")]


@guarded
def tiers(memory: MemoryOption = None, as_json: JsonFlag = False) -> None:
    """What every tier holds, and whether it has the copies that it should have."""
    with open_memory(memory, looks=True) as store:
        found = store.residency.tiers()
    space = [
        (t.name, "" if t.capacity is None else t.capacity, t.used_bytes, t.file_bytes, t.pieces, t.volumes)
        for t in found
    ]
    health = [(t.name, "publication" if t.home else t.write, t.desired, t.actual, t.quarantined) for t in found]
    emit(
        {"memory": memory_home(memory), "tiers": [asdict(t) for t in found]},
        as_json,
        table(("tier", "capacity", "used bytes", "on disk", "pieces", "volumes"), space),
        table(("tier", "written at", "copies wanted", "there", "bad"), health),
        *(f"{t.name}: {t.url}{f' (node {t.node})' if t.node else ''}" for t in found),
    )


@guarded
def pin(
    names: Names,
    tier: PinTier = "",
    ttl: Ttl = None,
    owner: Owner = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep states, and those that lead to them, from eviction and collection. It copies nothing."""
    owner = owner or user()
    with open_memory(memory) as store:
        ids = node_ids(store, names)
        store.residency.pin(ids, tier=tier, ttl_s=ttl, owner=owner)
    result = {"pinned": [id.hex() for id in ids], "tier": tier or None, "owner": owner, "ttl_s": ttl}
    emit(result, as_json, *(f"{id.hex()[:12]} pinned in {tier or 'every tier'} for {owner}" for id in ids))


@guarded
def unpin(
    names: Names,
    tier: PinTier = "",
    owner: Owner = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Take an owner's pins back, with the tier that they were made with."""
    owner = owner or user()
    with open_memory(memory) as store:
        count = store.residency.unpin(node_ids(store, names), tier=tier, owner=owner)
    emit({"unpinned": count, "tier": tier or None, "owner": owner}, as_json, f"{count:,} pins of {owner} taken back")


@guarded
def pins(memory: MemoryOption = None, as_json: JsonFlag = False) -> None:
    """Pins that hold."""
    with open_memory(memory, looks=True) as store:
        held = store.residency.pins()
    result = [
        {
            "id": claim.subject.hex(),
            "tier": claim.tier or None,
            "node": claim.node or None,
            "owner": claim.owner,
            "expires": moment(claim.expires),
        }
        for claim in held
    ]
    rows = [
        (str(p["id"])[:12], p["tier"] or "all", p["node"] or "all", p["owner"], p["expires"] or "never") for p in result
    ]
    emit({"pins": result}, as_json, table(("id", "tier", "node", "owner", "expires"), rows))


@guarded
def demand(
    names: Names,
    tier: TierName,
    node: NodeName = None,
    priority: Annotated[int, typer.Option("--priority", help="Higher is served first.")] = 0,
    ttl: Ttl = None,
    owner: Owner = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say that copies of states are wanted in a tier; `numem reconcile` on that node makes them."""
    owner = owner or user()
    with open_memory(memory) as store:
        ids = node_ids(store, names)
        store.residency.demand(ids, tier, node=node, priority=priority, owner=owner, ttl_s=ttl)
    result = {
        "demanded": [id.hex() for id in ids],
        "tier": tier,
        "node": node,
        "priority": priority,
        "owner": owner,
        "ttl_s": ttl,
    }
    emit(result, as_json, *(f"{id.hex()[:12]} demanded in {tier} for {owner}" for id in ids))


@guarded
def cancel(
    names: Names,
    tier: TierName,
    node: NodeName = None,
    owner: Owner = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Take an owner's demands back. Copies stay."""
    owner = owner or user()
    with open_memory(memory) as store:
        count = store.residency.cancel(node_ids(store, names), tier, node=node, owner=owner)
    result = {"cancelled": count, "tier": tier, "node": node, "owner": owner}
    emit(result, as_json, f"{count:,} demands of {owner} taken back")


@guarded
def demands(
    node: Annotated[str | None, typer.Option("--node", help="Of this node alone.")] = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Demands that stand, in the order in which they are served."""
    with open_memory(memory, looks=True) as store:
        wanted = store.residency.demands(node)
    result = [{**asdict(d), "id": d.id.hex(), "expires": moment(d.expires)} for d in wanted]
    columns = ("id", "tier", "node", "priority", "owner", "expires")
    rows = [(d.id.hex()[:12], d.tier, d.node, d.priority, d.owner, moment(d.expires) or "never") for d in wanted]
    emit({"demands": result}, as_json, table(columns, rows))


@guarded
def reconcile(
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Make failed attempts again.")] = False,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make the copies that this node's demands ask for. Exits with 1 when some could not be made."""
    with open_memory(memory) as store, busy("copying what is demanded"):
        report = store.residency.reconcile(retry_failed=retry_failed)
    stuck = [
        {"id": u.demand.id.hex(), "tier": u.demand.tier, "owner": u.demand.owner, "reason": u.reason}
        for u in report.unsatisfiable
    ]
    failed = {id.hex(): why for id, why in report.failed.items()}
    result = {
        "ready": [id.hex() for id in report.ready],
        "satisfied": report.satisfied,
        "in_progress": report.in_progress,
        "failed": failed,
        "suppressed": [id.hex() for id in report.suppressed],
        "unsatisfiable": stuck,
    }
    emit(
        result,
        as_json,
        f"{len(report.ready):,} copied, {report.satisfied:,} were there, {report.in_progress:,} under way",
        *(f"{id[:12]}: failed: {why}" for id, why in failed.items()),
        *(f"{u['id'][:12]}: {u['reason']}" for u in stuck),
    )
    if failed or stuck or report.suppressed:
        raise typer.Exit(1)


@guarded
def evict(
    tier: Annotated[str, typer.Argument(metavar="TIER")],
    nbytes: Annotated[str, typer.Argument(metavar="BYTES", help="At least so much, like 64MiB or 10GB.")],
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Let pieces leave a tier of this node, in the order of its policy. The home tier keeps what is nowhere else."""
    amount = parse_bytes(nbytes)
    with open_memory(memory) as store, busy(f"evicting from {tier}"):
        report = store.residency.evict(tier, amount)
    result = {**asdict(report), "nodes": [id.hex() for id in report.nodes]}
    emit(
        result,
        as_json,
        f"{len(report.nodes):,} states left {tier} ({report.policy}): {report.pieces:,} pieces, {report.bytes:,} bytes",
    )


def node_ids(store: "Memory", names: Sequence[str]) -> list[bytes]:
    """Causal ids behind names, each once; one of 64 hex digits need not be published."""
    from numem.lineage.log import resolve

    whole = [name for name in names if len(name) == 64 and not set(name.lower()) - set("0123456789abcdef")]
    ids = (bytes.fromhex(name) if name in whole else resolve(store, name).id for name in names)
    return list(dict.fromkeys(ids))


def moment(ns: int) -> str | None:
    """A time in ns since the epoch as people write it, to the second; None for never."""
    if not ns:
        return None
    return datetime.fromtimestamp(ns // 10**9, UTC).isoformat().replace("+00:00", "Z")
