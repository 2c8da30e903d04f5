"""What enters a memory: nodes with payloads into the spool, from the spool into the committer, or straight into it."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from numem.errors import InputError, IntegrityError, QuotaError, RejectedError
from numem.identity.digest import Buffer
from numem.state.node import Node
from numem.store.catalog.catalog import Facts
from numem.store.payload.pieces import Piece
from numem.store.payload.tier import Tier
from numem.store.publication.capture import require_content
from numem.store.publication.publish import ORPHANED, NodeJob, difference
from numem.store.publication.spool import Staged, StagedPiece
from numem.store.reports import PublishReceipt, PublishReport, Ticket
from numem.store.session import Session


def stage(parts: Session, node: Node, payloads: Sequence[Buffer]) -> bool:
    """See `Memory.stage`."""
    views = _views(node, payloads)
    key = parts.key_of(node.scope)
    for content, view in zip(node.pieces, views, strict=True):
        require_content(node, content, view, key)
    parts.catalog.refresh("placements", "nodes")
    held = parts.catalog.nodes.get(node.id)
    if held is None and node.id in parts.spool:
        try:
            held = parts.spool.open(node.id).node
        except IntegrityError:
            held = None  # damaged: staged again in its place
    elif held is not None and held.pieces == node.pieces and not _whole(parts, held):
        held = None  # published, but lost since: staged again to repair it
    if held is None:
        parts.quotas.require(node, [len(view) for view in views])
        parts.spool.put(node, views)
        parts.stats.add("nodes_staged", 1)
        return True
    if held.pieces != node.pieces:
        parts.committer.flush()  # an event of this process may be on its way
        event = difference(held, node, parts.catalog.events(), parts.clock)
        if event is not None:
            parts.committer.submit_facts(Facts(events=[event]))
    return False


def staged(parts: Session, ids: Iterable[bytes] | None) -> tuple[list[Staged], list[bytes]]:
    """Spool entries, parents first, and the ids of damaged ones."""
    entries, damaged = [], []
    for node in parts.spool.ids() if ids is None else dict.fromkeys(ids):
        if node in parts.spool:
            try:
                entries.append(parts.spool.open(node))
            except IntegrityError:
                damaged.append(node)
    return sorted(entries, key=lambda entry: (entry.node.start, entry.node.id)), damaged


def publish_staged(parts: Session, ids: Iterable[bytes] | None) -> PublishReport:
    """See `Memory.publish_staged`."""
    started = time.perf_counter()
    asked = None if ids is None else tuple(dict.fromkeys(ids))
    entries, damaged = staged(parts, asked)
    jobs, locked = [], []
    for entry in entries:
        try:
            jobs.append(NodeJob(entry.node, _staged_pieces(parts, entry), _future()))
        except InputError as error:  # its tenant's salt is not known here; that holds up nobody else
            locked.append(PublishReceipt(entry.node.id, missing=str(error)))
    if jobs:
        parts.committer.submit(jobs)
    errors = [error for error in (job.future.exception() for job in jobs) if error is not None]
    receipts = [_settle(parts, job) for job in jobs if job.future.exception() is None]
    receipts += locked
    if errors:
        raise errors[0]
    for node in damaged:
        parts.spool.set_aside(node, parts.work.quarantine)
    spooled = {entry.node.id for entry in entries}
    others = damaged if asked is None else asked
    receipts += [already(parts, node) for node in others if node not in spooled]
    return _report(receipts, started)


def publish(parts: Session, node: Node, payloads: Sequence[Buffer], queue: str, capture: str) -> Ticket:
    """See `Memory.publish`."""
    views = _views(node, payloads)
    key = parts.key_of(node.scope)
    parts.catalog.refresh("placements", "nodes")
    held = parts.catalog.nodes.get(node.id)
    if held is not None and held.pieces == node.pieces and _whole(parts, held):
        for content, view in zip(node.pieces, views, strict=True):
            require_content(node, content, view, key)
        captured: Future[None] = Future()
        captured.set_result(None)
        published = _future()
        published.set_result(already(parts, node.id))
        return Ticket(False, captured, published)
    entering: Future[PublishReceipt] = Future()
    try:
        parts.quotas.require(node, [len(view) for view in views], entering)
    except QuotaError as error:
        if queue != "cache":
            raise
        ticket = _refused(parts, error)
        _note_drop(parts, node, views, ticket)
        return ticket
    replicated = parts.writes.replicated(node.id)
    try:
        ticket = parts.captures.publish(node, views, key, queue=queue, capture=capture)
    except BaseException:
        entering.set_result(PublishReceipt(node.id))
        raise
    ticket.published.add_done_callback(lambda _: entering.set_result(PublishReceipt(node.id)))
    if queue == "cache":
        _note_drop(parts, node, views, ticket)
    if replicated is not None:
        ticket.published.add_done_callback(partial(parts.writes.give_up, node.id, replicated))
    return replace(ticket, replicated=replicated)


def _refused(parts: Session, error: QuotaError) -> Ticket:
    captured: Future[None] = Future()
    published = _future()
    captured.set_exception(error)
    published.set_exception(error)
    parts.stats.add("captures_rejected", 1)
    return Ticket(False, captured, published)


def _note_drop(parts: Session, node: Node, views: Sequence[memoryview], ticket: Ticket) -> None:
    """Write down that a cache entry was dropped, now or once it is."""
    nbytes = sum(len(view) for view in views)

    def ended(published: "Future[PublishReceipt]") -> None:
        error = published.exception()
        if isinstance(error, RejectedError):
            parts.drops.dropped(node.id, nbytes, parts.committer.depth, error)

    ticket.published.add_done_callback(ended)


def already(parts: Session, id: bytes) -> PublishReceipt:
    """Receipt of a node that is not in the spool: durable already, or missing."""
    parts.catalog.refresh("placements", "nodes")
    node = parts.catalog.nodes.get(id)
    if node is None or not _whole(parts, node):
        return PublishReceipt(id, missing="neither staged nor durable")
    sizes = [parts.reader.replicas(content)[0].nbytes for content in node.pieces]
    return PublishReceipt(id, reused=len(sizes), logical_bytes=sum(sizes))


def durable(parts: Session, id: bytes) -> bool:
    """See `Memory.durable`."""
    parts.catalog.refresh("placements", "nodes")
    node = parts.catalog.nodes.get(id)
    return node is not None and _whole(parts, node, parts.home)


def _future() -> "Future[PublishReceipt]":
    """A future that cannot be cancelled: a commit that is under way is not taken back."""
    future: Future[PublishReceipt] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(parts: Session, job: NodeJob) -> PublishReceipt:
    """Take a published node from the spool, or set a damaged one aside."""
    receipt = job.future.result()
    if receipt.missing:
        # Another process may have published and emptied the spool meanwhile.
        elsewhere = already(parts, job.node.id)
        receipt = receipt if elsewhere.missing else elsewhere
    if receipt.missing == ORPHANED:
        parts.spool.discard(job.node.id)
        return replace(receipt, logical_bytes=0)
    if receipt.missing:
        parts.spool.set_aside(job.node.id, parts.work.quarantine)
        return replace(receipt, logical_bytes=0)
    parts.spool.discard(job.node.id)
    return receipt


def _whole(parts: Session, node: Node, *tiers: Tier) -> bool:
    """Whether every piece is durable in one of the tiers; default where a publication ends, or comes to in time."""
    return all(
        any(
            tier.present(placement)
            for tier in dict.fromkeys(tiers or (parts.home, parts.writes.landing))
            for placement in parts.reader.replicas(content, tier.name)
        )
        for content in node.pieces
    )


def _staged_pieces(parts: Session, entry: Staged) -> tuple[Piece, ...]:
    key = parts.key_of(entry.node.scope)
    return tuple(
        Piece(piece.content, piece.nbytes, piece.xxh3, partial(_load_staged, entry, piece, key))
        for piece in entry.pieces
    )


def _load_staged(entry: Staged, piece: StagedPiece, key: bytes | None, view: memoryview) -> None:
    entry.load(piece, view, key)


def _views(node: Node, payloads: Sequence[Buffer]) -> list[memoryview]:
    if len(payloads) != len(node.pieces):
        raise InputError(f"node {node.id.hex()}: {len(payloads)} payloads for {len(node.pieces)} pieces")
    views = []
    for content, payload in zip(node.pieces, payloads, strict=True):
        view = memoryview(payload)
        if not view.c_contiguous:
            raise InputError(f"node {node.id.hex()}: the payload of piece {content.hex()} is not contiguous")
        if not view.nbytes:
            raise IntegrityError(f"node {node.id.hex()}: the payload of piece {content.hex()} is empty")
        views.append(view.cast("B"))
    return views


def _report(receipts: Sequence[PublishReceipt], started: float) -> PublishReport:
    good = [receipt for receipt in receipts if not receipt.missing and not receipt.conflict]
    return PublishReport(
        nodes=len(good),
        stored=sum(receipt.stored for receipt in good),
        reused=sum(receipt.reused for receipt in good),
        stored_bytes=sum(receipt.stored_bytes for receipt in good),
        logical_bytes=sum(receipt.logical_bytes for receipt in good),
        ms=(time.perf_counter() - started) * 1e3,
        missing=tuple(receipt.id for receipt in receipts if receipt.missing),
        conflicts=tuple(receipt.id for receipt in receipts if receipt.conflict),
    )
