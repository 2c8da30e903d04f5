"""A node as a catalog row and as a JSON document beside its payload."""

import json
from collections.abc import Mapping
from typing import Any, Final

import xxhash

from numem.errors import IntegrityError, ManifestError
from numem.identity.digest import ID_BYTES
from numem.state.node import Node
from numem.store.catalog.facts import to_json

_BINARY: Final = ("id", "parent", "scope", "applied", "marks", "pieces")
# A catalog row ends with a digest of itself, as the last member of its JSON: `,"xxh3":"<32 hex digits>"}`.
_SEAL: Final = ',"xxh3":"'
_SEAL_CHARS: Final = len(_SEAL) + 32 + 2


def join_ids(ids: tuple[bytes, ...]) -> bytes:
    """32-byte ids back to back."""
    return b"".join(ids)


def split_ids(joined: bytes) -> tuple[bytes, ...]:
    """Inverse of `join_ids`."""
    if len(joined) % ID_BYTES:
        raise IntegrityError(f"node row: {len(joined)} bytes of ids are not a multiple of {ID_BYTES}")
    return tuple(joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES))


def node_row(node: Node) -> dict[str, Any]:
    """Columns of the catalog's table of nodes, without the envelope."""
    return {
        "id": node.id,
        "parent": node.parent,
        "scope": node.scope,
        "kind": node.kind,
        "start": node.start,
        "count": node.count,
        "applied": node.applied,
        "marks": join_ids(node.marks),
        "pieces": join_ids(node.pieces),
        "extras": node.extras(),
    }


def node_of(row: Mapping[str, Any]) -> Node:
    """Inverse of `node_row`.

    Raises:
        IntegrityError: the row is not a node.
    """
    try:
        extras = json.loads(row["extras"])
        return Node(
            id=row["id"],
            parent=row["parent"],
            scope=row["scope"],
            kind=row["kind"],
            start=row["start"],
            count=row["count"],
            applied=row["applied"],
            pieces=split_ids(row["pieces"]),
            fields=tuple(extras["fields"]),
            coordinate=extras["coordinate"],
            marks=split_ids(row["marks"]),
            append_axis=extras["append_axis"],
            provenance=extras["provenance"],
        )
    except (ManifestError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"node row: not a node ({error})") from error


def sealed_row(sequence: int, node: Node) -> dict[str, Any]:
    """Columns of the catalog's table of nodes, with a digest over all of them but the writer."""
    row = {"sequence": sequence, **node_row(node)}
    return {**row, "extras": f'{row["extras"][:-1]}{_SEAL}{_digest(row, row["extras"])}"}}'}


def node_of_row(row: Mapping[str, Any], *, sealed: bool = False) -> Node:
    """The node of a catalog row, its seal checked where it has one.

    Args:
        sealed: refuse a row without a seal (one that an earlier release wrote).

    Raises:
        IntegrityError: the row is not a node, or not the one that was written.
    """
    text = row["extras"]
    body, seal = text[:-_SEAL_CHARS] + "}", text[-_SEAL_CHARS:]
    if seal.startswith(_SEAL):
        if seal != f'{_SEAL}{_digest(row, body)}"}}':
            raise IntegrityError("node row: its bytes differ from those that were written")
    elif sealed:
        raise IntegrityError("node row: it has no digest of itself")
    return node_of(row)


def _digest(row: Mapping[str, Any], extras: str) -> str:
    """xxh3-128, hex, of all columns: numbers and lengths as text, then the columns back to back."""
    parts = [row[name] for name in _BINARY]
    parts += [row["kind"].encode(), extras.encode()]
    head = " ".join(map(str, (row["sequence"], row["start"], row["count"], *map(len, parts))))
    return xxhash.xxh3_128_hexdigest(b"\0".join((head.encode(), *parts)))


def node_document(node: Node) -> str:
    """The node as JSON; binary columns in hex."""
    row = node_row(node)
    return to_json({key: value.hex() if key in _BINARY else value for key, value in row.items()})


def node_from_document(document: str) -> Node:
    """Inverse of `node_document`; IntegrityError where it is not one."""
    try:
        row = json.loads(document)
        return node_of({key: bytes.fromhex(value) if key in _BINARY else value for key, value in row.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise IntegrityError(f"node document: not a node ({error})") from error
