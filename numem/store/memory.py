"""`Memory`: the durable plane behind one handle. It knows nothing of attention, models or solvers.

stage ──> spool ──publish_staged──> volumes of the home tier ──> catalog ──> acknowledged
                                          │ promote
                                          v
                                    volumes of a nearer tier ──read──> the caller's buffers
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from numem.errors import InputError, NotFoundError
from numem.identity.digest import Buffer
from numem.identity.fingerprint import Identity
from numem.lineage.branches import Branch, Move
from numem.state.manifest import Manifest
from numem.state.node import Node, project
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Event, Placement, Record
from numem.store.config import TierSpec
from numem.store.handle import Handle
from numem.store.placement import claims
from numem.store.placement.leases import TTL_S, Lease
from numem.store.placement.residency import Residency
from numem.store.publication import intake
from numem.store.publication.capture import PublicationLimits
from numem.store.reading.host import Borrowed
from numem.store.reports import (
    PromoteReport,
    PublishReceipt,
    PublishReport,
    ReadReport,
    Recovered,
    Ticket,
    VerifyReport,
)
from numem.store.upkeep.care import Care

__all__ = [
    "Branch",
    "Event",
    "Lease",
    "Memory",
    "Move",
    "Placement",
    "PromoteReport",
    "PublicationLimits",
    "PublishReceipt",
    "PublishReport",
    "ReadReport",
    "Record",
    "Recovered",
    "Ticket",
    "TierSpec",
    "VerifyReport",
]


class Memory(Handle):
    """An open memory. A context manager; one handle may be used from several threads, never in a forked child.

    Args:
        home: local directory or s3:// (gs://, az://) URL; created where it does not exist.
        tiers: tier name -> local directory, URL or `TierSpec`; default {"object": home/object,
            "ssd": local/nodes/<node>/ssd}. Publication makes pieces durable in "object" (or the first tier given).
        node: name of this node; a tier on a local directory other than the home tier belongs to its node.
        local: where spool, locks, ssd and quarantine lie; default the home where that is local, else a directory
            under the user's cache.
        storage_options: Lance storage options for remote places (credentials, endpoint, region).
        limits: how much publication may have under way; default `PublicationLimits()`.
        read_deadline_s: how long one `read` may take; None for no limit. See `read`.
        read_only: only look and read: nothing is created, locked or recovered, and every change is a ReadOnlyError.

    Raises:
        SchemeError: a place that Lance does not commit to, an unusable name; nothing was written.
        RecoveryError: a catalog without any good version, or one of a newer format.
        ReadOnlyError: this process cannot write to the home or the local directory.
    """

    # identity

    def register(self, identity: Identity) -> None:
        """Describe a scope, once. A tenant's salt stays in this process; the description does not hold it."""
        parts = self._open()
        if parts.register(identity) and not parts.read_only:
            parts.committer.submit_facts(Facts(identities=[(identity.scope, identity.describe())]))

    def identity(self, scope: bytes) -> dict[str, Any] | None:
        """Description of a scope, or None."""
        return self.identities().get(scope)

    def identities(self) -> dict[bytes, dict[str, Any]]:
        """Every registered scope and its description."""
        return self._settled().catalog.identities()

    # publication

    def stage(self, node: Node, payloads: Sequence[Buffer]) -> bool:
        """Put a node's pieces into the spool: digested, not yet durable, in no catalog.

        Args:
            payloads: one C-contiguous buffer per entry of `node.pieces`.

        Returns:
            False where the node is staged or published already; that is success.

        Raises:
            IntegrityError: a payload is empty or is not what its content id says.
            StorageFullError: nothing was staged.
        """
        return intake.stage(self._open().require_writes(), node, payloads)

    def staged(self, ids: Iterable[bytes] | None = None) -> tuple[Node, ...]:
        """Nodes in the spool (those asked for), parents before children; damaged files are left out."""
        return tuple(entry.node for entry in intake.staged(self._open(), ids)[0])

    def publish_staged(self, ids: Iterable[bytes] | None = None) -> PublishReport:
        """Make staged nodes durable and visible, and take them from the spool.

        Args:
            ids: which nodes; None for all that are staged. A node that is published already counts as reused. One of
                a salted scope whose identity is not registered in this process stays staged, is named in the report's
                `missing`, and holds up no other.

        Raises:
            StorageFullError: what was not published stays staged; call again when there is space.
        """
        return intake.publish_staged(self._open().require_writes(), ids)

    def publish(
        self, node: Node, payloads: Sequence[Buffer], *, queue: str = "checkpoint", capture: str = "now"
    ) -> Ticket:
        """Publish in the background, by the next group commit.

        Args:
            payloads: one C-contiguous buffer per entry of `node.pieces`.
            queue: "checkpoint" is never dropped: where the limits are reached this waits. "cache" never waits: it is
                refused or dropped instead, counted in `stats`, and the ticket says why.
            capture: "now" copies and digests before this returns. "later" returns at once; the caller holds the
                buffers, unchanged, until `ticket.captured` is done.

        Returns:
            A ticket; not accepted where the node is published already, where a limit was reached, and where the memory
            is closed.

        Raises:
            IntegrityError: a payload is empty, or (with "now") not what its content id says.
        """
        parts = self._parts if self._closed else self._open().require_writes()
        return intake.publish(parts, node, payloads, queue, capture)

    def flush(self) -> None:
        """Return when everything published or recorded before is durable; raises what facts failed with. What a
        publication failed with is in its ticket."""
        parts = self._open()
        parts.captures.drain()
        parts.committer.flush()
        parts.writes.flush()

    # lookup

    def refresh(self) -> None:
        """Take up what other processes appended. Lookups do so by themselves, on an object store at most every second."""
        self._open().catalog.refresh(force=True)

    def get(self, id: bytes) -> Node | None:
        """A published node by causal id."""
        return self._nodes().get(id)

    def lookup(self, ids: Sequence[bytes]) -> tuple[Node | None, ...]:
        """Published nodes by causal id, in the order asked for, None where one is missing: one query for all of them.

        On a handle that has looked nothing up yet this does not load the catalog; see `Catalog.lookup`.
        """
        return self._open().catalog.lookup(ids)

    def children(self, parent: bytes) -> tuple[Node, ...]:
        """Published nodes whose parent is this causal id (or scope), oldest first."""
        return self._nodes().children(parent)

    def nodes(self, kind: str | None = None) -> tuple[Node, ...]:
        """All published nodes (of a kind), oldest first."""
        return self._nodes().of_kind(kind)

    def find(self, prefix_hex: str) -> tuple[Node, ...]:
        """Nodes whose causal id starts with these hex digits; InputError for anything else."""
        digits = prefix_hex.lower()
        if not digits or len(digits) > 64 or set(digits) - set("0123456789abcdef"):
            raise InputError(f"id prefix {prefix_hex[:80]!r}: use 1 to 64 hex digits")
        return self._nodes().with_prefix(digits)

    def chain(self, id: bytes) -> tuple[Node, ...]:
        """The nodes that lead to a boundary, root first; NotFoundError where one is missing."""
        nodes = self._nodes()
        chain: list[Node] = []
        while not chain or not chain[-1].is_root:
            wanted = chain[-1].parent if chain else id
            node = nodes.get(wanted)
            if node is None:
                raise NotFoundError(f"chain to {id.hex()}: no node {wanted.hex()} in this memory; recompute it")
            chain.append(node)
        return tuple(reversed(chain))

    def manifest(self, id: bytes) -> Manifest:
        """Manifest of the boundary that a node reaches."""
        return project(self.chain(id))

    def available(self, id: bytes, tier: str | None = None, pieces: Sequence[int] | None = None) -> bool:
        """Whether a node is published and every piece has a ready copy this node reaches (in that tier).

        `pieces` asks for some of them alone, by their place in the node.

        What a reader asks: any tier will do, and a copy counts until something finds it bad. A publisher asks `durable`.

        Raises:
            NotFoundError: this memory has no such tier.
        """
        parts = self._open()
        if tier is not None:
            self.require_tier(tier)
        parts.catalog.refresh("placements", "nodes")
        node = parts.catalog.nodes.get(id)
        if node is None:
            return False
        wanted = node.pieces if pieces is None else [node.pieces[index] for index in pieces]
        return all(parts.reader.replicas(content, tier) for content in wanted)

    def require_tier(self, name: str) -> None:
        """Refuse the name of a tier that this memory does not have.

        Raises:
            NotFoundError: it names those that there are.
        """
        known = self._open().work.specs
        if name not in known:
            raise NotFoundError(f"no tier {name!r} in this memory; it has {', '.join(known)}")

    def durable(self, id: bytes) -> bool:
        """Whether a node is published and every piece lies in the home tier: ready there, its file present and long
        enough (asked of the file system now; on an object store the catalog's word is taken).

        What a publisher asks: False means that staging and publishing the node writes it to the home tier again. A
        node can be `available` from a nearer tier without being durable, and once its files are deleted it is
        `available` by the catalog's word until a read, promotion or verification finds out.
        """
        return intake.durable(self._open(), id)

    def placements(self, content: bytes) -> tuple[Placement, ...]:
        """Ready copies of a piece that this node reaches, nearest tier first."""
        parts = self._open()
        parts.catalog.refresh("placements")
        return parts.reader.replicas(content)

    def copies(self, content: bytes) -> tuple[Placement, ...]:
        """The newest fact about every copy of a piece, of this node or another, failed and evicted ones too."""
        parts = self._open()
        parts.catalog.refresh("placements")
        return parts.catalog.placements.current(content)

    # residency

    def hold(self, ids: Iterable[bytes], ttl_s: float = TTL_S, *, shared: bool = False) -> Lease:
        """Keep nodes from eviction until the lease is released (once) or `ttl_s` seconds passed.

        Args:
            shared: say so to other processes too, which costs a commit now and one at the release.
        """
        parts = self._open()
        return claims.lease(parts, ids, ttl_s) if shared else parts.leases.hold(ids, ttl_s)

    def promote(self, ids: Sequence[bytes], tier: str = "ssd") -> PromoteReport:
        """Copy the pieces of nodes into a nearer tier, BLAKE3 verified before they are ready there.

        A tier with a capacity evicts first what its policy values least. Where the disk is full all the same, the
        report names what was not copied.

        Raises:
            NotFoundError: a node that is not published; nothing was copied.
            CapacityError: what is pinned, leased or nowhere else durable leaves too little room; nothing was changed.
        """
        parts = self._open()
        if tier in parts.hosts:
            return parts.hosting.promote(ids, tier)
        return parts.require_writes().promoter.promote(ids, self._tier(tier))

    def read(
        self,
        requests: Sequence[tuple[bytes, Buffer]],
        *,
        tier: str | None = None,
        deadline_s: float | None = None,
    ) -> ReadReport:
        """Fill buffers with pieces, each verified (length and xxh3-128) before this returns.

        Args:
            requests: (content id, writable C-contiguous buffer of exactly the piece's size).
            tier: read from this tier alone; default the nearest that has the piece.
            deadline_s: how long it may take; default `read_deadline_s`. A local read that has begun is waited for.

        Raises:
            NotFoundError: a piece without any ready copy; nothing was read.
            DeadlineError: not everything came in time; it says how much did. Nothing was quarantined, nothing is written
                to the buffers any more, and their content is undefined.
            IntegrityError: no copy of a piece is good; each bad one was quarantined with the reason. The buffers'
                content is undefined then.
        """
        started = time.perf_counter()
        parts = self._open()
        if tier is not None and tier not in parts.hosts and tier not in parts.archives:
            self._tier(tier)
        parts.catalog.refresh("placements")
        report = parts.reader.read(requests, tier, self._read_deadline_s if deadline_s is None else deadline_s)
        return replace(report, ms=(time.perf_counter() - started) * 1e3)

    def borrow(
        self, content: bytes, *, tier: str | None = None, page_locked: bool = False
    ) -> tuple[str, Borrowed] | None:
        """A piece where a tier in RAM holds it, and the tier's name; verified, not copied, and to be released. None where
        no tier does.

        Args:
            tier: this tier alone.
            page_locked: only memory from which a device copies beside the host.
        """
        parts = self._open()
        for name, host in parts.hosts.items():
            found = host.borrow(content, page_locked=page_locked) if tier in (None, name) else None
            if found is not None:
                parts.stats.add("reads", 1)
                parts.stats.add("bytes_read", found.data.nbytes)
                return name, found
        return None

    @property
    def residency(self) -> Residency:
        """Demands, pins and eviction."""
        return Residency(self._settled())

    # care

    @property
    def care(self) -> Care:
        """Maintenance, repair and deletion."""
        return Care(self._settled().require_writes())

    @property
    def recovered(self) -> tuple[Recovered, ...]:
        """What recovery found and did at open, when the catalog was loaded (this loads it), or when an abandoned volume
        was taken over since."""
        if not self._closed:
            self._parts.catalog.load()
        return tuple(self._parts.recovered)

    def verify(self, ids: Iterable[bytes] | None = None, *, deep: bool = True) -> VerifyReport:
        """Check copies against their content ids (`deep`), or only that they are there and long enough.

        Bad copies are quarantined. `VerifyReport.ok` says whether anything is wrong.
        """
        return self._settled().verifier.verify(ids, deep)

    def stats(self) -> dict[str, int]:
        """Counters since this handle was opened, and the sizes of its indexes."""
        parts = self._open()
        held = self._parts.leases.held()
        return {
            **parts.stats.snapshot(),
            **parts.captures.gauges(),
            "publication_queue": parts.committer.depth,
            "nodes": len(parts.catalog.nodes),
            "leases": sum(held.values()),
            "leases_expired": self._parts.leases.expired,
            "failed_attempts": parts.reconciler.failed_attempts,
            "notes_lost": parts.committer.notes_lost,
            "lookups": parts.lookups.lookups,
            "lookups_found": parts.lookups.found,
        }

    def usage(self) -> dict[str, int]:
        """Bytes of ready pieces per tier that this node reaches, without padding."""
        parts = self._open()
        parts.catalog.refresh("placements")
        sizes = dict.fromkeys((*parts.tiers, *parts.hosts, *parts.archives), 0)
        for content in parts.catalog.placements.contents():
            for placement in parts.reader.replicas(content):
                sizes[placement.tier] += placement.nbytes
        return sizes
