"""`numem log | show | fork`: what states a memory holds and how they came about."""

import getpass
import json
import os
import string
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from numem.environment import memory_home
from numem.errors import InputError
from numem.terminal import JsonFlag, MemoryOption, emit, guarded, open_memory, table

if TYPE_CHECKING:
    from numem.state.node import Node

# Rows of a table that could be as long as a state has chunks.
ROWS = 12


@guarded
def log(
    name: Annotated[str | None, typer.Argument(metavar="[BRANCH|ID]", help="Default: everything.")] = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Lineage: all branches and states, or the ancestry of one; a branch shows its moves too."""
    from numem.lineage.log import ancestry, resolve, tree

    with open_memory(memory, looks=True) as store:
        branches = store.branches()
        moves = []
        if name is None:
            nodes = store.nodes()
        else:
            nodes = ancestry(store, resolve(store, name).id)
            moves = list(store.log(name)) if name in {b.name for b in branches} else []
        result = {
            "memory": memory_home(memory),
            "branches": [{"name": b.name, "head": b.head.hex(), "source": b.source or None} for b in branches],
            "moves": [
                {
                    "generation": m.generation,
                    "action": m.action,
                    "previous": m.previous.hex() or None,
                    "head": m.head.hex(),
                    "actor": m.actor,
                    "reason": m.reason,
                }
                for m in moves
            ],
            "nodes": [_node(node) for node in nodes],
        }
        views: list[RenderableType] = []
        if moves:
            rows = [(m.generation, m.action, m.head.hex()[:12], m.actor, m.reason) for m in moves]
            views.append(table(("move", "action", "head", "actor", "reason"), rows, f"branch {name}"))
        views.append(tree(store, nodes) or f"{memory_home(memory)}: nothing is stored yet")
    emit(result, as_json, *views)


def _node(node: "Node") -> dict[str, Any]:
    from numem.lineage.log import node_bytes

    return {
        "id": node.id.hex(),
        "parent": None if node.is_root else node.parent.hex(),
        "scope": node.scope.hex(),
        "kind": node.kind,
        "range": [node.start, node.end],
        "coordinate": dict(node.coordinate),
        "pieces": [piece.hex() for piece in node.pieces],
        "bytes": node_bytes(node),
    }


@guarded
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="A causal id, the beginning of one, or a branch.")],
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """One state: its manifest, identity, copies and provenance."""
    from numem.lineage.log import branch_heads, line, resolve

    with open_memory(memory, looks=True) as store:
        node = resolve(store, name)
        manifest = store.manifest(node.id)
        copies = {
            content.hex(): [
                {"tier": p.tier, "node": p.node or None, "volume": p.volume, "offset": p.offset, "bytes": p.nbytes}
                for p in store.placements(content)
            ]
            for content in dict.fromkeys(manifest.content_ids)
        }
        heads = branch_heads(store).get(node.id, [])
        parent = None if node.is_root else store.get(node.parent)
        result = {
            **_node(node),
            "branches": heads,
            "manifest": manifest.model_dump(mode="json"),
            "identity": store.identity(node.scope),
            "placements": copies,
            "provenance": dict(node.provenance),
        }
        title = line(node, parent, heads)
    identity = result["identity"] or {}
    leaves = [(key, json.dumps(value, ensure_ascii=False)) for key, value in flat(identity)]
    fields = [
        (f.id, f.value.dtype, f.value.shape, f.chunk_shape, len(f.chunks), sum(c.logical_byte_length for c in f.chunks))
        for f in manifest.fields
    ]
    where = [
        (content[:12], p["tier"], p["node"] or "", p["volume"], p["offset"], p["bytes"])
        for content, found in copies.items()
        for p in found
    ]
    more = [f"{len(where) - ROWS} more copies; --json lists all"] if len(where) > ROWS else []
    lost = [content[:12] for content, found in copies.items() if not found]
    emit(
        result,
        as_json,
        f"{title}\nid     {node.id.hex()}\nparent {'the scope' if node.is_root else node.parent.hex()}",
        table(("field", "dtype", "shape", "chunk", "chunks", "bytes"), fields, "manifest"),
        table(("identity", "value"), [("scope", node.scope.hex()), *leaves], "identity"),
        table(("piece", "tier", "node", "volume", "offset", "bytes"), where[:ROWS], "copies"),
        *more,
        *([f"no copy of {', '.join(lost)}; recompute or restore a replica"] if lost else []),
        table(("provenance", "value"), sorted(node.provenance.items()), "provenance"),
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf of a tree."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@guarded
def fork(
    name: Annotated[str, typer.Argument(metavar="ID", help="A causal id, the beginning of one, or a branch.")],
    branch: Annotated[str, typer.Option("--branch", help="Name of the new branch.")],
    actor: Annotated[str | None, typer.Option("--actor", help="Who forks. Default: the user.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why.")] = "",
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Start a branch at a state. No byte is copied; a name that is taken is refused."""
    from numem.lineage.log import resolve

    _check_branch(branch)
    with open_memory(memory) as store:
        head = resolve(store, name)
        source = name if name in {b.name for b in store.branches()} else None
        made = store.create_branch(branch, head.id, actor=actor or user(), reason=reason, source=source)
    result = {
        "branch": made.name,
        "head": made.head.hex(),
        "generation": made.generation,
        "source": made.source or None,
    }
    emit(result, as_json, f"branch {made.name} at {made.head.hex()}")


def _check_branch(name: str) -> None:
    """Refuse names that a later command would take for something else."""
    if name.startswith("-"):
        raise InputError(f"branch {name!r}: a name that begins with '-' reads like an option; choose another")
    if len(name) >= 4 and all(c in string.hexdigits for c in name):
        raise InputError(f"branch {name!r}: only hex digits read like the beginning of a causal id; choose another")


def user() -> str:
    """Who runs this command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may know no name for its user
        return f"uid {os.getuid()}"
