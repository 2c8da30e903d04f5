"""`numem why`: what was decided about a request or a state, in plain sentences with numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from numem.commands.lineage import ROWS
from numem.commands.residency import moment
from numem.environment import memory_home
from numem.errors import InputError, NotFoundError
from numem.terminal import JsonFlag, MemoryOption, emit, guarded, open_memory, table

if TYPE_CHECKING:
    from numem.policy.decision import Recorded
    from numem.state.node import Node
    from numem.store.memory import Memory

# Decisions that are shown in full; of older ones there is the number.
_SHOWN = 8


@guarded
def why(
    name: Annotated[
        str,
        typer.Argument(metavar="REQUEST|CHUNK", help="A request's id, a causal id or the beginning of one, a branch."),
    ],
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what was decided about a request or a chunk, what it was expected to cost, what it cost, and what else there was."""
    from numem.lineage.decisions import DecisionLog

    if not name:  # decisions of nobody's request have an empty one
        raise InputError("why: the name is empty; give a request's id, a causal id or a branch")
    with open_memory(memory, looks=True) as store:
        log = DecisionLog(store)
        found: Sequence[Recorded] = log.of_request(name)
        about: dict[str, Any] = {"request": name}
        views: list[RenderableType] = []
        if not found:
            subject, node = _subject(store, log, name)
            found = log.about(subject)
            about = {"chunk": subject.hex(), "node": None if node is None else _node(store, node)}
            views = [f"chunk {subject.hex()}"] if node is None else _node_views(about["node"])
        alarms = store.unread()
    result = {
        "memory": memory_home(memory),
        **about,
        "decisions": [_document(one) for one in found],
        "warnings": [f"{alarm.what}; {alarm.remedy}" for alarm in alarms],
    }
    views += [view for one in reversed(found[:_SHOWN]) for view in _views(one)]
    if len(found) > _SHOWN:
        views.append(f"{len(found) - _SHOWN:,} older decisions; --json lists all")
    if not found:
        views.append("no decision about it is recorded")
    emit(result, as_json, *views, *(f"warning: {line}" for line in result["warnings"]))


def _subject(store: "Memory", log: Any, name: str) -> "tuple[bytes, Node | None]":
    """The causal id behind a name, and its node where that is published; decisions know ids that are not."""
    from numem.lineage.log import resolve

    try:
        node = resolve(store, name)
    except NotFoundError as error:
        digits = name.lower()
        hexadecimal = bool(digits) and not set(digits) - set("0123456789abcdef")
        named = {
            id
            for one in log.all()
            for id in (one.decision.subject, *one.decision.others)
            if id.hex().startswith(digits)
        }
        if hexadecimal and len(named) == 1:
            return named.pop(), None
        if hexadecimal and len(digits) <= 64 and store.find(digits):
            raise  # it lists the candidates
        if hexadecimal and named:
            raise NotFoundError(f"{name!r}: {len(named)} ids that decisions name begin so; give more digits") from error
        raise NotFoundError(
            f"{name!r}: no request of this id has a decision here, and no branch and no causal id begins so; give the id "
            "that the request was submitted with, or one that `numem log` lists"
        ) from error
    return node.id, node


def _node(store: "Memory", node: "Node") -> dict[str, Any]:
    """How a node came about and where its bytes are."""
    copies = [copy for content in dict.fromkeys(node.pieces) for copy in store.copies(content) if copy.volume]
    return {
        "id": node.id.hex(),
        "kind": node.kind,
        "range": [node.start, node.end],
        "scope": node.scope.hex(),
        "identity": store.identity(node.scope),
        "provenance": dict(node.provenance),
        "published": moment(min((copy.sequence for copy in copies), default=0)),
        "copies": [
            {
                "piece": copy.content.hex(),
                "tier": copy.tier,
                "node": copy.node or None,
                "state": str(copy.state),
                "reason": copy.reason or None,
                "bytes": copy.nbytes,
                "since": moment(copy.sequence),
            }
            for copy in copies
        ],
    }


def _node_views(node: dict[str, Any]) -> list[RenderableType]:
    from numem.commands.lineage import flat

    made = ", ".join(f"{name} {value}" for name, value in sorted(node["provenance"].items())) or "nothing is recorded"
    rows = [(c["piece"][:12], c["tier"], c["node"] or "", c["state"], c["bytes"], c["since"]) for c in node["copies"]]
    identity = [(name, str(value)) for name, value in flat(node["identity"] or {})]
    head = (
        f"chunk {node['id']}\n{node['kind']} [{node['range'][0]:,}, {node['range'][1]:,}), "
        f"published {node['published'] or 'at an unknown time'}, made by: {made}"
    )
    return [
        head,
        *([table(("identity", "value"), identity, f"scope {node['scope'][:12]}")] if identity else []),
        table(("piece", "tier", "node", "state", "bytes", "since"), rows[:ROWS], "copies"),
        *([f"{len(rows) - ROWS:,} more copies; --json lists all"] if len(rows) > ROWS else []),
    ]


def _document(one: "Recorded") -> dict[str, Any]:
    from numem.lineage.explain import explain

    found = one.regret() if one.decision.kind == "arrive" else None
    return {
        "id": one.id,
        "kind": one.decision.kind,
        "when": moment(one.when_ns),
        "subject": one.decision.subject.hex() or None,
        **one.decision.to_body(),
        "outcomes": [{"choice": m.choice, "cost_ms": m.cost_ms, "terms": dict(m.terms)} for m in one.measured],
        "regret": None if found is None else {"value": found.value, "label": found.label},
        "said": explain(one.decision, *one.measured),
    }


def _views(one: "Recorded") -> list[RenderableType]:
    from numem.lineage.explain import alternative, explain

    said = explain(one.decision, *one.measured)
    lines = [f"{moment(one.when_ns)} {said[0]}", *(f"  {line}" for line in said[1:])]
    if one.decision.kind not in ("evict", "drop"):  # whose sentences name the alternatives already
        mark = {one.decision.choice: "* "}
        lines += [f"  {mark.get(a.name, '- ')}{alternative(a, one.costs)}" for a in one.decision.alternatives]
    return ["\n".join(lines)]
