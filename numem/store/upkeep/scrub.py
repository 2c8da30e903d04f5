"""Scrubbing: every copy read and compared with its content id, those that were looked at longest ago first; what is bad is
quarantined, and made anew from a good copy in any tier.

Copies of a tier are taken in the order (volume, file, sidecar, offset), from where the last scrub of the tier ended (a
record in the catalog), and around: so the oldest verdict is always renewed first, however small the budget of one call.
What is written meanwhile was verified when it was published.

A read may be served from the page cache; a disk that rots under a page that is still in memory is found later.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from numem.errors import InputError, IntegrityError, NotFoundError, StoreError
from numem.identity.digest import content_id
from numem.store import barrier
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import Placement, Record, State
from numem.store.lance_errors import first_line
from numem.store.payload.pieces import Piece
from numem.store.payload.tier import Tier
from numem.store.publication.publish import placement_at
from numem.store.reports import Id, Quarantined

if TYPE_CHECKING:
    from numem.store.session import Session

KIND = "scrub"
WRONG = "bytes are not those of the content id"
_GROUP_BYTES = 64 << 20

Position = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """Outcome of a scrub.

    Attributes:
        checked, bytes: copies looked at.
        bad: copies that were found bad and are not used any more.
        repaired: copies that were made anew, some of them for copies that were found bad earlier.
        unrepairable: content id -> why no good copy could be made in a tier that lost one.
        damaged: volume -> why Lance cannot open it. Its sidecars are read all the same.
        whole: whether every copy was looked at within the budget.
        ms: wall time.
    """

    checked: int = 0
    bytes: int = 0
    bad: tuple[Quarantined, ...] = ()
    repaired: int = 0
    unrepairable: Mapping[Id, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True
    ms: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing was bad, or everything that was is good again."""
        return not self.unrepairable and not self.damaged and self.repaired >= len(self.bad)


class Scrubber:
    """One scrub of one open memory."""

    def __init__(self, parts: "Session") -> None:
        self._parts = parts
        self._scopes: dict[bytes, bytes] = {}
        self._checked = 0
        self._bytes = 0
        self._bad: list[Quarantined] = []
        self._damaged: dict[str, str] = {}

    def run(self, tier: str | None, budget_bytes: int | None, budget_s: float | None, repair: bool) -> ScrubReport:
        """See `Care.scrub`."""
        parts = self._parts
        started = time.perf_counter()
        names = [*parts.tiers, *parts.archives]
        if tier is not None and tier not in names:
            raise NotFoundError(f"scrub: no tier {tier!r} with copies on disk; there are {', '.join(names)}")
        parts.catalog.refresh("placements", "nodes", "records")
        for node in parts.catalog.nodes.of_kind(None):
            for content in node.pieces:
                self._scopes.setdefault(content, node.scope)
        whole = True
        # A small budget would else be spent on the first tier for ever.
        for name in sorted(names, key=self._last) if tier is None else [tier]:
            copies = self._copies(name)
            self._open_volumes(name, copies)
            whole = self._scrub(name, copies, budget_bytes, started, budget_s) and whole
        repaired, unrepairable = self._repair(names if tier is None else [tier]) if repair else (0, {})
        if tier is None:
            unrepairable = {**self._nowhere(), **unrepairable}
        parts.stats.add("copies_scrubbed", self._checked)
        parts.stats.add("copies_repaired", repaired)
        return ScrubReport(
            self._checked,
            self._bytes,
            tuple(self._bad),
            repaired,
            unrepairable,
            self._damaged,
            whole,
            (time.perf_counter() - started) * 1e3,
        )

    def _copies(self, name: str) -> list[Placement]:
        """Ready copies in a tier, those first that were looked at longest ago."""
        parts = self._parts
        contents = parts.catalog.placements.contents()
        copies = [place for content in contents for place in parts.reader.replicas(content, name)]
        copies.sort(key=_position)
        last = self._cursor(name)
        return [p for p in copies if _position(p) > last] + [p for p in copies if _position(p) <= last]

    def _scrub(
        self, name: str, copies: Sequence[Placement], budget_bytes: int | None, started: float, budget_s: float | None
    ) -> bool:
        """Look at copies until the budget is spent; whether all were looked at."""
        parts = self._parts
        buffer = np.empty(0, np.uint8)
        done: Placement | None = None
        for place in copies:
            spent = budget_bytes is not None and self._checked > 0 and self._bytes + place.nbytes > budget_bytes
            if spent or (budget_s is not None and time.perf_counter() - started > budget_s):
                break
            if len(buffer) < place.nbytes:
                buffer = np.empty(place.nbytes, np.uint8)
            reason = self._fault(place, buffer.data[: place.nbytes])
            self._checked += 1
            self._bytes += place.nbytes
            if reason:
                self._bad.append(Quarantined(place.content, name, place.volume, reason))
                parts.quarantine(place.turned(parts.clock.next(), State.QUARANTINED, reason))
                parts.stats.add("quarantined", 1)
            done = place
        else:
            self._remember(name, done)
            return True
        self._remember(name, done)
        return False

    def _fault(self, place: Placement, view: memoryview) -> str:
        reason = self._parts.reader.read_replica(place, view)
        if reason:
            # Removed on purpose meanwhile, or rewritten elsewhere: no fault of the copy.
            self._parts.catalog.refresh("placements", force=True)
            ready = self._parts.reader.replicas(place.content, place.tier)
            return reason if place.copy in {replica.copy for replica in ready} else ""
        scope = self._scopes.get(place.content)
        return "" if scope is None else self._differs(place.content, scope, view)

    def _differs(self, content: bytes, scope: bytes, view: memoryview) -> str:
        try:
            key = self._parts.key_of(scope)
        except InputError:
            return ""  # salted, and the salt is not known here: xxh3 held, BLAKE3 cannot be recomputed
        return "" if content_id(view, key) == content else WRONG

    def _open_volumes(self, name: str, copies: Sequence[Placement]) -> None:
        tier = self._parts.tiers.get(name)
        if tier is None:
            return
        for volume in sorted({place.volume for place in copies}):
            try:
                dataset = tier.volume(volume).dataset
                dataset.refresh()
                dataset.fragments()
            except StoreError as error:
                self._damaged[f"{tier.label}/{volume}"] = first_line(error)

    def _cursor(self, name: str) -> Position:
        records = self._parts.catalog.records(KIND, self._subject(name))
        at = records[-1].body.get("at") if records else None
        if not isinstance(at, list) or [type(value) for value in at] != [str, str, int, int]:
            return ("", "", 0, -1)
        return (at[0], at[1], at[2], at[3])

    def _last(self, name: str) -> int:
        """When a tier was looked at last, as the sequence of what was noted then; -1 for never."""
        records = self._parts.catalog.records(KIND, self._subject(name))
        return records[-1].sequence if records else -1

    def _remember(self, name: str, done: Placement | None) -> None:
        if done is not None:
            clock = self._parts.clock
            body = {"tier": name, "at": list(_position(done))}
            self._parts.committer.submit_facts(Facts(records=[Record(clock.next(), KIND, self._subject(name), body)]))

    def _subject(self, name: str) -> bytes:
        tier = self._parts.tiers.get(name)
        return (name if tier is None else tier.label).encode()

    def _repair(self, names: Sequence[str]) -> tuple[int, dict[bytes, str]]:
        """Make copies anew where a tier lost one: those that nodes need, and that no other copy in the tier replaces."""
        parts = self._parts
        parts.committer.flush()
        repaired = 0
        failed: dict[bytes, str] = {}
        for name in names:
            tier = parts.tiers.get(name)
            if tier is None:
                failed.update(
                    {
                        bad.content: f"archive {name} has a bad copy: archive it again"
                        for bad in self._bad
                        if bad.tier == name
                    }
                )
                continue
            repaired += self._revive(tier)
            for group in self._groups(list(self._lost(tier)), failed):
                repaired += self._rebuild(tier, group, failed)
        return repaired, failed

    def _nowhere(self) -> dict[bytes, str]:
        """Pieces of visible nodes that are ready in no tier of any node: there is nothing to look at."""
        current = self._parts.catalog.placements.current
        ready = {content for content in self._scopes if any(copy.state is State.READY for copy in current(content))}
        return {content: "no good copy in any tier; recompute it" for content in self._scopes if content not in ready}

    def _revive(self, tier: Tier) -> int:
        """Copies that were found bad and are good: the disk was not mounted, or the tier's place was wrong. How many."""
        parts = self._parts
        good: list[Placement] = []
        for content in self._lost(tier):
            for place in parts.catalog.placements.current(content):
                if tier.reachable(place) and place.state is State.QUARANTINED and place.nbytes:
                    view = memoryview(bytearray(place.nbytes))
                    if not parts.reader.read_replica(place, view) and not self._differs(
                        content, self._scopes[content], view
                    ):
                        good.append(place.turned(parts.clock.next(), State.READY, "found good again"))
                        break
        if good:
            parts.catalog.append(Facts(placements=good))
        return len(good)

    def _lost(self, tier: Tier) -> Iterator[bytes]:
        placements = self._parts.catalog.placements
        for content in placements.contents():
            if content in self._scopes and not self._parts.reader.replicas(content, tier.name):
                mine = [place for place in placements.current(content) if tier.reachable(place) and place.volume]
                # Evicted on purpose is not lost: the newest word about the tier counts.
                if mine and max(mine, key=lambda place: place.sequence).state is State.QUARANTINED:
                    yield content

    def _groups(self, contents: Sequence[bytes], failed: dict[bytes, str]) -> Iterator[list[Piece]]:
        group: list[Piece] = []
        size = 0
        for content in contents:
            sources = self._parts.reader.replicas(content)
            if not sources:
                failed[content] = "no good copy in any tier; recompute it"
                continue
            if group and size + sources[0].nbytes > _GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(self._piece(sources[0]))
            size += sources[0].nbytes
        if group:
            yield group

    def _piece(self, source: Placement) -> Piece:
        scope = self._scopes[source.content]

        def load(view: memoryview) -> None:
            content = source.content
            reason = self._parts.reader.read_from_others(content, view, "", lambda v: self._differs(content, scope, v))
            if reason:
                raise IntegrityError(reason)

        return Piece(source.content, source.nbytes, source.xxh3, load)

    def _rebuild(self, tier: Tier, pieces: Sequence[Piece], failed: dict[bytes, str]) -> int:
        parts = self._parts
        volume, written = tier.append(pieces, lambda volume, damaged: "{}", parts.prepare_volume)
        barrier.reached("payload durable", volume.label)
        places = [placement_at(slot, tier, volume, parts.clock.next()) for slot in written.slots]
        failed.update(written.damaged)
        parts.catalog.append(Facts(placements=places))
        barrier.reached("repaired", volume.label)
        return len(pieces) - len(written.damaged)


def _position(place: Placement) -> Position:
    return (place.volume, place.file, place.blob, place.offset)
