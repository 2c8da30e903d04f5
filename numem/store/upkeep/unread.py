"""The alarm of a memory that is written and never found: state under one scope, lookups under another.

A reader with another salt, policy or device than the writer computes everything anew and notices nothing, since a lookup
without a match is no error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numem.identity.canonical import flatten
from numem.store.reading.lookups import Count

# Lookups under the writer's own scope after which finding nothing is worth a word: the first run over prompts that
# have nothing in common finds nothing either.
SAME_SCOPE = 16


@dataclass(frozen=True, slots=True)
class Unread:
    """State that was written and never found.

    Attributes:
        scope, nodes: under which scope, and how many nodes.
        other, lookups: the scope under which lookups found nothing, and how many; it may be the same.
        fields: dotted names of the identity fields that differ; empty where an identity is not known.
    """

    scope: bytes
    nodes: int
    other: bytes
    lookups: int
    fields: tuple[str, ...]

    @property
    def what(self) -> str:
        written = f"written and never found: {self.nodes} chunks under scope {self.scope.hex()[:16]}"
        if self.other == self.scope:
            return f"{written}, {self.lookups} lookups under the same scope"
        differ = f"they differ in {', '.join(self.fields)}" if self.fields else "an identity of them is not registered"
        return f"{written}, {self.lookups} lookups under scope {self.other.hex()[:16]}; {differ}"

    @property
    def remedy(self) -> str:
        if self.other == self.scope:
            return "none, where no prompt begins like one before it for a page; else compare the prompts' first tokens"
        return "open writer and reader with the same model, numeric policy, device class and salt"


def unread(
    nodes: Mapping[bytes, int], lookups: Mapping[bytes, Count], identities: Mapping[bytes, Mapping[str, Any]]
) -> tuple[Unread, ...]:
    """What was written and never found.

    Args:
        nodes: scope -> visible nodes.
        lookups: scope -> lookups.
        identities: scope -> its description.
    """
    silent = {scope: count for scope, count in lookups.items() if count.lookups and not count.found}
    alarms = []
    for scope, written in nodes.items():
        if not written or lookups.get(scope, Count()).found:
            continue
        for other, count in silent.items():
            mine, theirs = identities.get(scope), identities.get(other)
            fields = differences(mine, theirs) if mine and theirs else ()
            if other == scope:
                meant = count.lookups >= SAME_SCOPE
            else:  # another model with state of its own is no accident
                meant = not nodes.get(other) or bool(mine and theirs and mine["semantic"] == theirs["semantic"])
            if meant:
                alarms.append(Unread(scope, written, other, count.lookups, fields))
    return tuple(alarms)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what differs between the descriptions of two scopes; a salt is not described, and is what is left."""
    mine, theirs = flatten(first), flatten(second)
    names = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
    return tuple(sorted("salt" if name == "salted" else name for name in names)) or ("salt",)


def described(rows: list[dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    """Scope -> description, from rows of the catalog's table of identities."""
    found: dict[bytes, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["scope"], json.loads(row["description"]))
    return found
