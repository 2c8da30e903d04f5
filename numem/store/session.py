"""The parts of one open memory: built, recovered and closed together."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from numem.errors import InputError, ReadOnlyError
from numem.identity.digest import framed_sha256
from numem.identity.fingerprint import Identity
from numem.policy.decision import Decision
from numem.store.background import Background
from numem.store.catalog.catalog import Catalog, Facts
from numem.store.catalog.facts import Clock, Placement, Record, decided
from numem.store.catalog.holders import Holders
from numem.store.lance_errors import lance_errors
from numem.store.payload.ledger import Entry, Ledger
from numem.store.payload.tier import Tier, TierConfig, WriterLock
from numem.store.placement.evict import Evictor
from numem.store.placement.leases import LeaseTable
from numem.store.placement.promote import Promoter
from numem.store.placement.reconcile import Reconciler
from numem.store.publication.capture import CaptureStage, PublicationLimits
from numem.store.publication.committer import Committer
from numem.store.publication.drops import Drops
from numem.store.publication.publish import Publisher
from numem.store.publication.quota import Quotas
from numem.store.publication.spool import Spool
from numem.store.publication.writes import Writes
from numem.store.reading.host import Host
from numem.store.reading.hosting import Hosting
from numem.store.reading.lookups import Lookups
from numem.store.reading.reader import Reader
from numem.store.reading.verify import Verifier
from numem.store.reports import Recovered
from numem.store.stats import Stats
from numem.store.upkeep import maintain, opening
from numem.store.upkeep.archive import KIND as ARCHIVED
from numem.store.upkeep.archive import Archive
from numem.store.upkeep.epoch import leases_at
from numem.store.workspace import Workspace, owner, prepare, require_made, require_writable


def content_key(salt: bytes) -> bytes | None:
    """Key under which a tenant's payloads are hashed to content ids; None without a salt."""
    return framed_sha256("numem/content-key/v1", salt) if salt else None


class Session:
    """Everything behind a `Memory`, after its places were checked."""

    def __init__(
        self,
        work: Workspace,
        options: Mapping[str, str] | None,
        limits: PublicationLimits,
        read_only: bool = False,
    ) -> None:
        if read_only:
            require_made(work, options)
        else:
            require_writable(work)
        self.work = work
        self.options = options
        self.read_only = read_only
        self.recovered: list[Recovered] = []
        self.stats = Stats()
        self._commits = 0
        self.clock = Clock()
        self._keys: dict[bytes, bytes] = {}
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._owner = "" if read_only else owner(work)
        # Closed in reverse order, whatever one of them raises.
        with contextlib.ExitStack() as opened:
            self.writers = WriterLock(work.locks)
            opened.callback(self.writers.release)
            self.ledger = Ledger(work.ledger, self._writer_name, self.clock.next)
            opened.callback(self.ledger.close)
            self.catalog = Catalog(
                work.home,
                self.ledger if work.home.local else None,
                work.catalog_lock,
                options,
                self._writer_name,
                self.clock,
                read_only,
            )
            if not read_only:
                prepare(work, options, self.catalog.create)
            self.tiers = {
                name: Tier(
                    TierConfig(name, place, work.node_of(name), self._owner, work.specs[name]),
                    work.node,
                    self.ledger,
                    options if work.specs[name].options is None else work.specs[name].options,
                    self.writers,
                )
                for name, place in work.tiers.items()
            }
            self.home = self.tiers[work.home_tier]
            self.epochs = leases_at(work.home, options)
            self.spool = Spool(work.spool)
            self.hosts = {name: Host(nbytes, work.specs[name].policy) for name, nbytes in work.hosts.items()}
            identity = require_made(work, options)
            self.archives = {
                name: Archive(name, url, work.specs[name].options or options, self.catalog, work.home_tier, identity)
                for name, url in work.archives.items()
            }
            self.reader = Reader(
                self.catalog,
                list(self.tiers.values()),
                self.stats,
                self.quarantine,
                self.hosts,
                self.archives,
                work.home_tier,
            )
            opened.callback(self.reader.close)
            self.leases = LeaseTable()
            self.evictor = Evictor(self)
            self.promoter = Promoter(self)
            self.reconciler = Reconciler(self)
            self.background = Background(
                {
                    "reconcile": self.reconciler.reconcile,
                    "writes": lambda: self.writes.work(),
                    "tidy": lambda: maintain.tidy(self),
                }
            )
            self.holders = Holders(self.catalog)
            self.quotas = Quotas(self)
            self.writes = Writes(self, lambda: self.background.signal("writes"))
            opened.callback(self.writes.close)
            opened.callback(self.background.close)  # after the committer, whose last groups it copies
            self.reader.touched += [self.evictor.touched, self.writes.touched]
            self.hosting = Hosting(self.hosts, work.specs, self.catalog, self.reader, self.key_of)
            self.reader.touched.append(self.hosting.touched)
            self.publisher = Publisher(
                self.catalog, self.writes.landing, self.stats, self.prepare_volume, self._identities.get
            )
            self.publisher.published.append(
                lambda jobs: self.hosting.published(piece for job in jobs for piece in job.pieces)
            )
            self.publisher.published.append(self.writes.published)
            self.publisher.published.append(lambda jobs: self._tidy_if_due())
            self.committer = Committer(self.publisher.commit, limits.max_pending_publications, self.evictor.make_space)
            opened.callback(self.committer.close)
            self.lookups = Lookups(self.note)
            opened.callback(self.lookups.close)
            self.drops = Drops(self.decided)
            opened.callback(self.drops.close)
            self.captures = CaptureStage(self.committer, self.stats, limits)
            opened.callback(self.captures.close)
            self.verifier = Verifier(self.catalog, self.reader, self._present, self.key_of, self.quarantine)
            if read_only:
                opening.look(self)
            else:
                opening.recover(self)
                self.writes.resume()
            for archive in self.archives.values():
                archive.refresh()
            self._opened = opened.pop_all()

    def _tidy_if_due(self) -> None:
        self._commits += 1
        if self._commits % maintain.TIDY_COMMITS == 0:
            self.background.signal("tidy")

    def register(self, identity: Identity) -> bool:
        """Remember an identity; True where the catalog does not know it yet."""
        key = content_key(identity.salt)
        if key is not None:
            self._keys[identity.scope] = key
        if identity.scope in self._identities:
            return False
        self._identities[identity.scope] = identity.describe()
        return identity.scope not in self.catalog.identities()

    def key_of(self, scope: bytes) -> bytes | None:
        """Key of a scope's content ids.

        Raises:
            InputError: the scope is salted and its identity was not registered in this process.
        """
        key = self._keys.get(scope)
        if key is None and scope not in self._identities:
            known = self.catalog.identities().get(scope)
            if known is not None and known.get("salted"):
                raise InputError(
                    f"scope {scope.hex()} is salted and its salt is not kept in the memory; register its identity first"
                )
        return key

    def quarantine(self, placement: Placement) -> None:
        """Stop using a replica now, and record why with the next commit."""
        self.catalog.placements.note(placement)
        if not self.read_only:
            self.committer.submit_facts(Facts(placements=[placement]))

    def note(self, kind: str, subject: bytes, body: dict[str, Any]) -> int:
        """See `Memory.note`."""
        return 0 if self.read_only else self.committer.note(Record(self.clock.next(), kind, subject, body))

    def decided(self, decision: Decision) -> None:
        """Write down a decision of the store, with some later commit."""
        self.committer.note(decided(self.clock.next(), decision))

    def require_writes(self) -> "Session":
        """These parts, unless the memory was opened for reading alone."""
        if self.read_only:
            raise ReadOnlyError(
                f"memory {self.work.home.url}: opened with read_only=True; open it without to change it"
            )
        return self

    def trim_ledger(self) -> int:
        """Drop ledger lines that a compaction or a removed volume made useless; returns the bytes saved."""
        with self.catalog.exclusive():
            entries = self.ledger.read()
            whole = {
                name: max((version for version, entry in versions.items() if entry.whole), default=0)
                for name, versions in entries.items()
            }
            shelves = {tier.label: tier.shelf for tier in self.tiers.values()}

            def needed(entry: Entry) -> bool:
                place, _, name = entry.dataset.rpartition("/")
                if place in shelves:
                    return shelves[place].exists(name)
                return entry.version >= whole[entry.dataset]

            with lance_errors("ledger"):
                return self.ledger.trim(needed, self._idle)

    @contextlib.contextmanager
    def _idle(self, writer: str) -> Iterator[bool]:
        """Whether a writer of this node, by its name, is not running; held off for the time of the with block."""
        prefix, _, number = writer.rpartition(".w")
        if prefix != f"{self.work.node}.{self._owner[:16]}" or not number.isdigit():
            yield False
            return
        with self.writers.borrowed(int(number)) as free:
            yield free

    def volume_gone(self, tier: str, node: str, volume: str) -> bool:
        """Whether a volume of a tier that this node reaches was removed."""
        # By record, since the archive need not be a tier of this handle: its coordinates are those of the home tier.
        if tier == self.home.name and self.catalog.records(ARCHIVED, volume.encode()):
            return False
        found = self.tiers.get(tier)
        return found is not None and found.config.node == node and not found.shelf.exists(volume)

    @property
    def writer(self) -> str:
        """Name of this process, which every row of the catalog carries: node, local state, number."""
        return self._writer_name()

    def close(self) -> None:
        """Drain and let go."""
        self._opened.close()

    def _present(self, placement: Placement) -> bool:
        tier = self.tiers.get(placement.tier)
        return tier is None or tier.present(placement)

    def _writer_name(self) -> str:
        return f"{self.work.node}.{self._owner[:16]}.w{self.writers.number:03d}"

    def prepare_volume(self, tier: Tier, name: str) -> bool:
        """Recover a volume that an earlier process left; False where it must not be appended to again."""
        return opening.recover_volume(self, tier, name, self.ledger.read())
