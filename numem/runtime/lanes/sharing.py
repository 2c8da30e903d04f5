"""Rows of a prompt that somebody holds already, or is about to hold.

new      |== common with a running sequence ==|-- own --|
leader   |== rows it holds ==|-- on their way --|          worth waiting for where at least a page is
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numem.identity.chain import PAGE_TOKENS
from numem.runtime.lanes.sequence import Entry, State
from numem.runtime.paging.pool import PagePool, Route

if TYPE_CHECKING:
    from numem.runtime.paging.residency import Residency


@dataclass(frozen=True, slots=True)
class Source:
    """Where leading rows come from.

    Attributes:
        route: to fork, or None.
        length: rows to take.
        owner: the running entry whose route it is.
        leader: an arriving entry that will hold `boundary` rows in common, which is worth waiting for.
    """

    route: Route | None = None
    length: int = 0
    owner: Entry | None = None
    leader: Entry | None = None
    boundary: int = 0


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Leading elements that are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def find_source(
    entry: Entry,
    running: Iterable[Entry],
    pool: PagePool,
    residency: "Residency | None",
    *,
    share: bool,
    moving_since: int,
) -> Source:
    """The most leading rows that are held now, and a leader that will soon hold more.

    The last token is always left to be evaluated. Prefixes of less than a page are not worth a fork.

    Args:
        share: whether sequences of other requests may be used; samples of one request and a fork's origin always are.
        moving_since: an arriving entry that gained no rows since this step is no leader.
    """
    limit = len(entry.target) - 1
    wanted = entry.ids[:limit]
    found, boundary, leader = Source(), 0, None
    for other in running:
        own = other.request is entry.request or other is entry.origin
        route = other.held
        if route is None or not (share or own):
            continue
        common = common_prefix(wanted, other.ids[: len(other.tokens)])
        ready = min(common, route.length) if route.pending is None else 0
        if ready > found.length and (ready >= PAGE_TOKENS or own) and pool.fork_allowed(route, ready):
            found = Source(route, ready, other)
        if common > boundary and other.state is State.ARRIVING and other.moved >= moving_since:
            boundary, leader = common, other
    if share and residency is not None:
        kept = residency.match(entry.tokens[:limit])
        if kept is not None and kept[1] > found.length and kept[1] >= PAGE_TOKENS:
            found = Source(kept[0], kept[1])
    if leader is not None and boundary - found.length >= PAGE_TOKENS:
        return Source(found.route, found.length, found.owner, leader, boundary)
    return found


def pages_needed(pool: PagePool, entry: Entry, shared: int) -> int:
    """Pages to set aside: for all rows it may hold, less the full pages it shares. A shared partial tail is copied."""
    rows = max(entry.most_rows, len(entry.target))
    return pool.pages_for(rows) - shared // pool.page_tokens


def full_pages(pool: PagePool, source: Source) -> Source:
    """As much of a source as shares no partial page."""
    length = source.length - source.length % pool.page_tokens
    if source.route is None or not length or not pool.fork_allowed(source.route, length):
        return Source()
    return Source(source.route, length, source.owner)


def tail_to_copy(pool: PagePool, owner: Entry | None, length: int) -> tuple[int, int] | None:
    """The owner's partial tail, as (pages of its route, physical page), if a fork of `length` rows would share it and no
    page was set aside yet for its copy. Whoever of the two writes first copies it."""
    if owner is None or owner.held is None:
        return None
    route = owner.held
    shares = route.length % pool.page_tokens and pool.pages_for(length) == len(route.pages)
    tail = (len(route.pages), route.pages[-1]) if shares else None
    return tail if tail != owner.tail else None


def freed_pages(pool: PagePool, entries: Iterable[Entry]) -> int:
    """Pages that become free when these entries lose their lanes: held by nobody else, reserved, or set aside."""
    held: Counter[int] = Counter()
    aside = 0
    for entry in entries:
        route = entry.held
        if route is not None:
            held.update(route.pages)
            held.update(route.pending.taken if route.pending is not None else ())
        aside += entry.capacity.left if entry.capacity is not None else 0
    return aside + sum(pool.refs(page) == count for page, count in held.items())
