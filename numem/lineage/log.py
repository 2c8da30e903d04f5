"""Lineage for people: the ancestry of a boundary, what two boundaries share, and a tree of everything below a root.

77ab12… field step 8     36 chunks, 9 new                a run of single children keeps its column
91f0c4… field step 16    36 chunks, 16 new
├─ 0d3e55… field step 24    36 chunks, 25 new  [main]
└─ c2a871… field step 24    36 chunks, 4 new  [warm-corner]
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numem.errors import NotFoundError
from numem.state.node import Node

if TYPE_CHECKING:
    from numem.store.memory import Memory

SHORT = 12


@dataclass(frozen=True, slots=True)
class Shared:
    """What boundary `b` shares with boundary `a`.

    Attributes:
        fork: causal id of the nearest common ancestor (possibly `a` or `b` itself), None where there is none.
        ancestors: number of causal ids that both chains contain.
        pieces: distinct content ids that both boundaries consist of.
        chunks: chunks of `b` whose bytes `a` has too, out of `of` chunks.
        nbytes: logical bytes of those chunks.
    """

    fork: bytes | None
    ancestors: int
    pieces: tuple[bytes, ...]
    chunks: int
    of: int
    nbytes: int


def ancestry(memory: "Memory", node_id: bytes) -> tuple[Node, ...]:
    """The chain of causal steps that lead to a boundary, root first.

    Raises:
        NotFoundError: no such node.
    """
    return tuple(memory.chain(node_id))


def shared(memory: "Memory", a: bytes, b: bytes) -> Shared:
    """What two boundaries have in common: causes (ids in both chains) and content (pieces both consist of).

    Raises:
        NotFoundError: no such node.
    """
    left = {node.id for node in ancestry(memory, a)}
    common = [node.id for node in ancestry(memory, b) if node.id in left]
    held = set(memory.manifest(a).content_ids)
    chunks = [chunk for field in memory.manifest(b).fields for chunk in field.chunks]
    same = [chunk for chunk in chunks if bytes.fromhex(chunk.content.digest) in held]
    return Shared(
        fork=common[-1] if common else None,
        ancestors=len(common),
        pieces=tuple(dict.fromkeys(bytes.fromhex(chunk.content.digest) for chunk in same)),
        chunks=len(same),
        of=len(chunks),
        nbytes=sum(chunk.logical_byte_length for chunk in same),
    )


def new_pieces(node: Node, parent: Node | None) -> int:
    """Number of distinct pieces of a node that its parent does not have."""
    return len(set(node.pieces) - set(parent.pieces if parent else ()))


def node_bytes(node: Node) -> int:
    """Logical bytes of a node's own chunks."""
    return sum(int(chunk["logical_byte_length"]) for field in node.fields for chunk in field["chunks"])


def line(node: Node, parent: Node | None = None, heads: Sequence[str] = ()) -> str:
    """One line about a node: id, kind, coordinate, chunks, and the branches that point at it."""
    where = ", ".join(f"{key.removesuffix('_count')} {value}" for key, value in node.coordinate.items())
    names = f"  [{', '.join(heads)}]" if heads else ""
    pieces = f"{len(node.pieces)} chunk{'s' * (len(node.pieces) != 1)}, {new_pieces(node, parent)} new"
    return f"{node.id.hex()[:SHORT]} {node.kind} {where}  {pieces}{names}"


def branch_heads(memory: "Memory") -> dict[bytes, list[str]]:
    """Names of the branches at each causal id."""
    heads: dict[bytes, list[str]] = {}
    for branch in memory.branches():
        heads.setdefault(branch.head, []).append(branch.name)
    return heads


def tree(memory: "Memory", nodes: Iterable[Node] | None = None) -> str:
    """A text tree of nodes (default: all of the memory), a line each; several roots stand one below the other.

    A node whose parent is not among them is a root; the children of a node stand in the order they are given.
    """
    chosen = {node.id: node for node in (memory.nodes() if nodes is None else nodes)}
    children: dict[bytes, list[Node]] = {}
    for node in chosen.values():
        children.setdefault(node.parent, []).append(node)
    for below in children.values():
        below.sort(key=lambda node: (node.kind, node.end))
    roots = [node for node in chosen.values() if node.parent not in chosen]
    roots.sort(key=lambda node: (node.scope, node.kind, node.start))
    return "\n".join(_draw(roots, children, chosen, branch_heads(memory)))


def _draw(
    roots: Sequence[Node],
    children: Mapping[bytes, Sequence[Node]],
    known: Mapping[bytes, Node],
    heads: Mapping[bytes, Sequence[str]],
) -> list[str]:
    lines = []
    # (node, what stands before its own line, what stands before the lines below it); a stack, because chains are long.
    todo = [(node, "", "") for node in reversed(roots)]
    while todo:
        node, before, below = todo.pop()
        lines.append(before + line(node, known.get(node.parent), heads.get(node.id, ())))
        kids = children.get(node.id, ())
        if len(kids) == 1:
            todo.append((kids[0], below, below))
            continue
        for index in range(len(kids) - 1, -1, -1):
            last = index == len(kids) - 1
            todo.append((kids[index], below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))
    return lines


def resolve(memory: "Memory", name: str) -> Node:
    """The node behind a branch name or an id prefix (hex).

    Raises:
        NotFoundError: nothing or several things answer to it; the candidates are listed.
    """
    for branch in memory.branches():
        if branch.name == name:
            node = memory.get(branch.head)
            if node is None:
                raise NotFoundError(f"branch {name!r}: its head {branch.head.hex()[:SHORT]} is not in this memory")
            return node
    hexadecimal = bool(name) and len(name) <= 64 and all(c in "0123456789abcdef" for c in name.lower())
    found = memory.find(name.lower()) if hexadecimal else ()
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFoundError(f"{name!r}: no branch and no causal id of this memory begins so; `numem log` lists them")
    listed = ", ".join(node.id.hex()[: max(SHORT, len(name) + 4)] for node in found[:8])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    raise NotFoundError(f"{name!r}: {len(found)} causal ids begin so: {listed}{more}; give more digits")
