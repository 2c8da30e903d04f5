"""Facts of the catalog: what is appended, never updated.

Every fact carries a sequence from a hybrid clock: nanoseconds since the epoch, but always above every sequence seen.
Where facts supersede each other (a placement's state) the newest sequence wins; where they must not (the pieces of a
node, the generation of a branch) the first in commit order wins.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import Lock
from typing import Any

import pyarrow as pa

from numem.policy.decision import Decision


class Clock:
    """Sequences: strictly rising in this process, above all that were observed, close to the wall clock."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = Lock()

    def next(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, time.time_ns())
            return self._last

    def observe(self, sequence: int) -> None:
        with self._lock:
            self._last = max(self._last, sequence)


class State(StrEnum):
    """State of a placement."""

    COPYING = "copying"  # a promotion that was announced and has not ended
    READY = "ready"
    FAILED = "failed"  # a promotion that did not verify
    QUARANTINED = "quarantined"  # was ready, did not verify later
    EVICTED = "evicted"  # removed on purpose; its bytes may be gone


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one copy of a piece lies. It names a configured tier, never a URL or path.

    Attributes:
        content: content id.
        tier, node: the tier, and the node it belongs to ("" for a tier that all nodes share).
        volume, file, blob: the volume, the data file inside it, the packed sidecar of that file.
        offset: first byte inside the sidecar.
        nbytes: true length, without padding.
        row, skip: the blob's row in the data file, and the first byte inside that blob (bundles), for Lance's reader.
        xxh3: xxh3-128 of the bytes, checked at every restore.
        state, reason: newest state and why.
    """

    sequence: int
    content: bytes
    tier: str
    node: str
    volume: str
    file: str
    blob: int
    offset: int
    nbytes: int
    row: int
    skip: int
    xxh3: bytes
    state: State = State.READY
    reason: str = ""

    @property
    def copy(self) -> tuple[str, str, str, str, int, int]:
        """What identifies the copy whatever its state."""
        return (self.tier, self.node, self.volume, self.file, self.blob, self.offset)

    def turned(self, sequence: int, state: State, reason: str) -> "Placement":
        """The same copy in another state."""
        return replace(self, sequence=sequence, state=state, reason=reason)


@dataclass(frozen=True, slots=True)
class Record:
    """A decision or observation: plain JSON about a subject, in sequence."""

    sequence: int
    kind: str
    subject: bytes
    body: Mapping[str, Any]


def decided(sequence: int, decision: Decision) -> Record:
    """The record of a decision that the store made itself; see `numem.lineage.decisions`."""
    body = {"id": os.urandom(16).hex(), **decision.to_body(), "outcomes": []}
    return Record(sequence, f"decision/{decision.kind}", decision.subject, body)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that must not be lost though nothing stopped: for example one causal id with two content ids."""

    sequence: int
    kind: str
    subject: bytes
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BranchFact:
    """One move of a branch head; generation 1 creates it."""

    sequence: int
    name: str
    generation: int
    head: bytes
    previous: bytes
    action: str
    actor: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What keeps a node, or asks for it, beyond the process that said so. Of several with one `key` the newest holds.

    Attributes:
        kind: "demand" (a replica is wanted in `tier` of `node`), "pin" (soft with an expiry, hard without), "lease",
            "quota" (of a scope).
        subject: causal id, or the scope.
        tier, node: where; "" for everywhere.
        owner: who claims.
        priority: of a demand; higher first. Of a quota, its bytes.
        expires: ns since the epoch; 0 for never.
        active: False takes the claim back.
    """

    sequence: int
    kind: str
    subject: bytes
    tier: str = ""
    node: str = ""
    owner: str = ""
    priority: int = 0
    expires: int = 0
    active: bool = True

    @property
    def key(self) -> tuple[str, bytes, str, str, str]:
        """What identifies the claim whatever it says now."""
        return (self.kind, self.subject, self.tier, self.node, self.owner)

    def holds(self, now_ns: int) -> bool:
        """Whether it was neither taken back nor expired."""
        return self.active and (not self.expires or now_ns < self.expires)


# Why a node was deleted for good, and the kind of the record that a deletion leaves at its end.
FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class Retired:
    """A node that is not visible any more ("collected", "forgotten"), unless it is published again later."""

    sequence: int
    id: bytes
    reason: str


def _schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


_ENVELOPE = (("sequence", pa.int64()), ("writer", pa.string()))

SCHEMAS: Mapping[str, pa.Schema] = {
    "identities": _schema(*_ENVELOPE, ("scope", pa.binary()), ("description", pa.string())),
    "placements": _schema(
        *_ENVELOPE,
        ("content", pa.binary()),
        ("tier", pa.string()),
        ("node", pa.string()),
        ("volume", pa.string()),
        ("file", pa.string()),
        ("blob", pa.int64()),
        ("offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("row", pa.int64()),
        ("skip", pa.int64()),
        ("xxh3", pa.binary()),
        ("state", pa.string()),
        ("reason", pa.string()),
    ),
    "nodes": _schema(
        *_ENVELOPE,
        ("id", pa.binary()),
        ("parent", pa.binary()),
        ("scope", pa.binary()),
        ("kind", pa.string()),
        ("start", pa.int64()),
        ("count", pa.int64()),
        ("applied", pa.binary()),
        ("marks", pa.binary()),
        ("pieces", pa.binary()),
        ("extras", pa.string()),
    ),
    "branches": _schema(
        *_ENVELOPE,
        ("name", pa.string()),
        ("generation", pa.int64()),
        ("head", pa.binary()),
        ("previous", pa.binary()),
        ("action", pa.string()),
        ("actor", pa.string()),
        ("reason", pa.string()),
        ("source", pa.string()),
    ),
    "claims": _schema(
        *_ENVELOPE,
        ("kind", pa.string()),
        ("subject", pa.binary()),
        ("tier", pa.string()),
        ("node", pa.string()),
        ("owner", pa.string()),
        ("priority", pa.int64()),
        ("expires", pa.int64()),
        ("active", pa.bool_()),
    ),
    "retired": _schema(*_ENVELOPE, ("id", pa.binary()), ("reason", pa.string())),
    "records": _schema(*_ENVELOPE, ("kind", pa.string()), ("subject", pa.binary()), ("body", pa.string())),
    "events": _schema(*_ENVELOPE, ("kind", pa.string()), ("subject", pa.binary()), ("body", pa.string())),
}

# Nodes come last: a node is visible only after the placements of its pieces.
ORDER = ("identities", "placements", "records", "events", "branches", "claims", "retired", "nodes")
KEYS = {"identities": "scope", "placements": "content", "nodes": "id", "branches": "name"}
# What lookups need in RAM, in the order in which it is taken up.
LOADED = ("placements", "retired", "nodes")


def to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
