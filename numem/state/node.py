"""A node: the causal fact that applying something to a parent gave a boundary, and which pieces hold its bytes.

A node stores only what it adds. The manifest of a boundary is a projection over the chain of nodes that lead to it.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numem.errors import ManifestError
from numem.identity.digest import ID_BYTES
from numem.state.groups import floor_of
from numem.state.manifest import SCHEMA_VERSION, Manifest, build


@dataclass(frozen=True, slots=True)
class Node:
    """One causal step.

    Attributes:
        id: causal id of the boundary it reaches, 32 bytes.
        parent: causal id it starts from, 32 bytes; a chain's root has the scope as its parent.
        scope: scope of the identity, 32 bytes.
        kind: what grows, for example "kv" or "field".
        start, count: range of the growing axis that the node covers.
        applied: what was applied to the parent, opaque to the store (for KV: packed tokens).
        marks: causal ids of boundaries inside the node, in order, the last being `id` (for KV: page ids).
        pieces: content ids in the order of the fields' chunks.
        fields: fields of the manifest as plain values, holding only this node's chunks.
        coordinate: logical coordinate of the boundary.
        append_axis: axis along which fields of consecutive nodes join (for KV: 1), or None where every node carries
            whole fields.
        provenance: library versions, code hash and so on; shown, never part of an id.
    """

    id: bytes
    parent: bytes
    scope: bytes
    kind: str
    start: int
    count: int
    applied: bytes
    pieces: tuple[bytes, ...]
    fields: tuple[Mapping[str, Any], ...]
    coordinate: Mapping[str, int]
    marks: tuple[bytes, ...] = ()
    append_axis: int | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("id", "parent", "scope"):
            if len(getattr(self, name)) != ID_BYTES:
                raise ManifestError(f"node: {name} has {len(getattr(self, name))} bytes, not {ID_BYTES}")
        if self.count <= 0 or self.start < 0:
            raise ManifestError(f"node {self.id.hex()[:16]}: range start {self.start}, count {self.count}")

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_root(self) -> bool:
        return self.parent == self.scope

    def extras(self) -> str:
        """The parts without a column of their own, as byte-stable JSON."""
        return json.dumps(
            {
                "append_axis": self.append_axis,
                "coordinate": dict(self.coordinate),
                "fields": [dict(f) for f in self.fields],
                "provenance": dict(self.provenance),
            },
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
        )


def project(chain: Sequence[Node], determinism: str = "bitwise") -> Manifest:
    """Manifest of the boundary that a chain of nodes, root first, leads to.

    Fields of appending nodes are joined along their axis, a windowed one from its floor on (its coordinates say where
    that is); otherwise the last node's fields stand alone.

    Raises:
        ManifestError: an empty or broken chain, another scope inside it, or chunks that do not cover the field.
    """
    if not chain:
        raise ManifestError("manifest: an empty chain of nodes has no boundary")
    last = chain[-1]
    if last.append_axis is None:
        fields = [dict(f) for f in last.fields]
    else:
        if not chain[0].is_root or chain[0].start != 0:
            raise ManifestError(f"manifest: the chain to {last.id.hex()[:16]} does not start at its scope")
        for before, after in itertools.pairwise(chain):
            if after.parent != before.id or after.start != before.end or after.scope != before.scope:
                raise ManifestError(f"manifest: the chain to {last.id.hex()[:16]} breaks at position {after.start}")
        fields = [_in_window(f, last.append_axis) for f in _joined(chain, last.append_axis)]
    return build(
        {
            "schema_version": SCHEMA_VERSION,
            "id": last.id.hex(),
            "parents": [] if last.is_root else [last.parent.hex()],
            "logical_coordinate": dict(last.coordinate),
            "fields": fields,
            "numerical_contract": {
                "mode": last.kind,
                "determinism": determinism,
                "compatibility_id": last.scope.hex(),
            },
            "provenance": {"program_fingerprint": last.scope.hex(), **last.provenance},
            "attributes": {"kind": last.kind},
        }
    )


def _joined(chain: Sequence[Node], axis: int) -> list[dict[str, Any]]:
    joined: dict[str, dict[str, Any]] = {}
    for node in chain:
        for delta in node.fields:
            name = str(delta["id"])
            if name not in joined:
                joined[name] = {
                    **delta,
                    "value": {**delta["value"], "shape": list(delta["value"]["shape"])},
                    "chunks": [],
                }
            whole = joined[name]
            _same_layout(whole, delta, axis)
            whole["chunks"] = [*whole["chunks"], *delta["chunks"]]
            whole["value"]["shape"][axis] = node.end
    return list(joined.values())


def _in_window(whole: dict[str, Any], axis: int) -> dict[str, Any]:
    """A field whose coordinates name a window without the chunks below its floor: what a restore loads."""
    window = whole.get("coordinate_space", {}).get("window")
    if window is None:
        return whole
    end = whole["value"]["shape"][axis]
    floor = floor_of(end, window, whole["chunk_shape"][axis])
    kept = []
    for chunk in whole["chunks"]:
        offsets = list(chunk["offsets"])
        if offsets[axis] >= floor:
            offsets[axis] -= floor
            kept.append({**chunk, "offsets": offsets})
    shape = list(whole["value"]["shape"])
    shape[axis] = end - floor
    return {
        **whole,
        "value": {**whole["value"], "shape": shape},
        "coordinate_space": {**whole["coordinate_space"], "origin": floor},
        "chunks": kept,
    }


def _same_layout(whole: Mapping[str, Any], delta: Mapping[str, Any], axis: int) -> None:
    """Two nodes join only where they agree in everything but the length along `axis`."""

    def essence(tree: Mapping[str, Any]) -> tuple[Any, ...]:
        shape = tree["value"]["shape"]
        return (
            tree["value"]["dtype"],
            [*shape[:axis], *shape[axis + 1 :]],
            tree["chunk_shape"],
            tree.get("coordinate_space"),
        )

    if essence(whole) != essence(delta):
        raise ManifestError(f"manifest: field {whole['id']!r} changes its dtype, shape, chunks or coordinates midway")
