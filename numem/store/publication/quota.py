"""Quotas: how many bytes a scope (one identity of one tenant) may keep in the home tier.

A quota is a fact: a claim of kind "quota" whose subject is the scope. It is checked where pieces enter a memory, against
what is published and what this process has staged or under way; several processes may together go over it by what they
have under way at that moment.
"""

from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING

from numem.errors import InputError, QuotaError
from numem.identity.digest import ID_BYTES
from numem.state.node import Node
from numem.store.catalog.facts import Claim
from numem.store.placement.claims import append, take_back
from numem.store.reports import PublishReceipt

if TYPE_CHECKING:
    from numem.store.session import Session

_TABLES = ("placements", "retired", "nodes")
_OWNER = "quota"


class Quotas:
    """Quotas of one open memory, and what each scope uses."""

    def __init__(self, parts: "Session") -> None:
        self._parts = parts
        self._lock = Lock()
        self._used: dict[bytes, tuple[tuple[int, ...], int]] = {}
        # Nodes of this process that are not in the catalog yet: scope, bytes, and the publication (None: in the spool).
        self._coming: dict[bytes, tuple[bytes, int, Future[PublishReceipt] | None]] = {}

    def set(self, scope: bytes, nbytes: int | None) -> None:
        """See `Residency.set_quota`."""
        if len(scope) != ID_BYTES:
            raise InputError(f"quota: a scope has {ID_BYTES} bytes, not {len(scope)}")
        if nbytes is None:
            take_back(self._parts, lambda claim: claim.kind == "quota" and claim.subject == scope)
        elif not 0 <= nbytes < 2**63:
            raise InputError(f"quota: {nbytes} bytes; give a number from 0, or None for no quota")
        else:
            append(self._parts, [Claim(0, "quota", scope, owner=_OWNER, priority=nbytes)])

    def limits(self) -> dict[bytes, int]:
        """Scope -> bytes, of the scopes that have a quota."""
        return {
            claim.subject: claim.priority
            for claim in self._parts.catalog.claims()
            if claim.kind == "quota" and claim.active
        }

    def used(self, scope: bytes) -> int:
        """Bytes of a scope's ready pieces in the home tier, each piece once."""
        catalog = self._parts.catalog
        pieces = self._parts.holders.pieces(scope)
        seen = tuple(catalog.tables[name].dataset.version for name in _TABLES)
        held = self._used.get(scope)
        if held is None or held[0] != seen:
            held = self._used[scope] = (seen, sum(map(self._size, pieces)))
        return held[1]

    def require(self, node: Node, sizes: "list[int]", future: "Future[PublishReceipt] | None" = None) -> None:
        """Take note of a node that enters; QuotaError where its scope would go over its quota by it.

        Args:
            sizes: bytes of its pieces.
            future: of its publication; None for a node that is staged.
        """
        quota = self.limits().get(node.scope)
        if quota is None:
            return
        with self._lock:
            self._coming = {id: entry for id, entry in self._coming.items() if self._still_coming(id, entry[2])}
            self._coming.pop(node.id, None)
            used = self.used(node.scope)
            used += sum(nbytes for scope, nbytes, _ in self._coming.values() if scope == node.scope)
            new = dict(zip(node.pieces, sizes, strict=True))
            nbytes = sum(size for piece, size in new.items() if not self._size(piece))
            if nbytes and used + nbytes > quota:
                raise QuotaError(
                    f"scope {node.scope.hex()}: {nbytes} more bytes do not fit its quota, {used} of {quota} are used; "
                    "forget or collect nodes of it, or raise the quota",
                    node.scope,
                    used,
                    quota,
                )
            self._coming[node.id] = (node.scope, nbytes, future)

    def _still_coming(self, id: bytes, future: "Future[PublishReceipt] | None") -> bool:
        if id in self._parts.catalog.nodes:
            return False
        return id in self._parts.spool if future is None else not future.done()

    def _size(self, content: bytes) -> int:
        return next((p.nbytes for p in self._parts.reader.replicas(content, self._parts.home.name)), 0)
