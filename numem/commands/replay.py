"""`numem replay`: what another policy would have made of the decisions that a memory has recorded."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from numem.environment import memory_home
from numem.errors import InputError, NotFoundError
from numem.terminal import JsonFlag, MemoryOption, emit, guarded, open_memory, table

if TYPE_CHECKING:
    from numem.policy.replay import Arrivals, Evictions


@guarded
def replay(
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="A policy; may be repeated. Default: all of them.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help='"arrive" or "evict". Default: both, as far as recorded.')
    ] = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate other policies on the recorded decisions. Nothing is executed, and nothing changes."""
    from numem.lineage.decisions import DecisionLog
    from numem.policy.replay import POLICIES, RECORDED, arrivals, evictions

    kinds = list(POLICIES) if kind is None else [kind]
    for one in kinds:
        if one not in POLICIES:
            raise InputError(f"replay: decisions of kind {one!r} cannot be replayed; use {' or '.join(POLICIES)}")
    known = {name for one in kinds for name in POLICIES[one]}
    for name in policy or ():
        if name not in known:
            raise InputError(f"replay: no policy {name!r}; known: {', '.join(sorted(known))}")
    with open_memory(memory, looks=True) as store:
        recorded = DecisionLog(store).all()
    wanted = {
        one: [name for name in POLICIES[one] if not policy or name in policy or name == RECORDED] for one in kinds
    }
    arrived = [arrivals(recorded, name) for name in wanted.get("arrive", ())]
    evicted = [evictions(recorded, name) for name in wanted.get("evict", ())]
    if not any(one.decision.kind in kinds for one in recorded):
        raise NotFoundError(
            f"{memory_home(memory)}: no decision of kind {' or '.join(kinds)} is recorded; serve requests with decisions on "
            "(`numem run` does), or let a tier with a capacity fill up, then replay"
        )
    result = {
        "memory": memory_home(memory),
        "arrive": [asdict(one) for one in arrived],
        "evict": [asdict(one) for one in evicted],
    }
    views: list[RenderableType] = []
    if arrived and arrived[0].decisions + arrived[0].without:
        views.append(_arrivals(arrived))
    if evicted and evicted[0].plans + evicted[0].without:
        views.append(_evictions(evicted))
    emit(result, as_json, *views)


def _arrivals(found: "Sequence[Arrivals]") -> RenderableType:
    columns = ("policy", "differ", "predicted ms", "measured ms", "total ms", "regret")
    rows = [
        (
            one.policy,
            one.differ,
            f"{one.predicted_ms:,.1f}",
            f"{one.measured_ms:,.1f} ({one.measured:,})",
            f"{one.cost_ms:,.1f}",
            _regret(one.regret, "measured" if one.exact == one.decisions else "estimated"),
        )
        for one in found
    ]
    title = f"restore or recompute, {found[0].decisions:,} times: total ms is measured (so often), else predicted"
    return table(columns, rows, title)


def _evictions(found: "Sequence[Evictions]") -> RenderableType:
    columns = ("policy", "plans", "differ", "bytes", "rows", "used again", "rows", "regret")
    rows = [
        (
            one.policy,
            one.plans,
            one.differ,
            one.bytes,
            one.rows,
            one.again_bytes,
            one.again_rows,
            _regret(one.regret, "estimated"),
        )
        for one in found
    ]
    return table(columns, rows, "evictions of tiers: who would have left, and was used again as far as records tell")


def _regret(value: float | None, label: str) -> str:
    return "" if value is None else f"{value:.1%} {label}"
