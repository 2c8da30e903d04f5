"""The parts of one open memory: built, recovered and closed together."""

import contextlib
from collections.abc import Mapping
from typing import Any

from numem.errors import InputError, RecoveryError, StoreError
from numem.identity.digest import framed_sha256
from numem.identity.fingerprint import Identity
from numem.store import recovery
from numem.store.catalog import Catalog, Facts
from numem.store.committer import Committer
from numem.store.dataset import manifest_versions
from numem.store.facts import Clock, Placement
from numem.store.ledger import Entry, Ledger
from numem.store.promote import Promoter
from numem.store.publish import Publisher
from numem.store.reader import Reader
from numem.store.reports import Recovered
from numem.store.spool import Spool
from numem.store.stats import Stats
from numem.store.tier import Tier, TierConfig, WriterLock
from numem.store.verify import Verifier
from numem.store.workspace import Workspace, owner, prepare


def content_key(salt: bytes) -> bytes | None:
    """Key under which a tenant's payloads are hashed to content ids; None without a salt."""
    return framed_sha256("numem/content-key/v1", salt) if salt else None


class Session:
    """Everything behind a `Memory`, after its places were checked."""

    def __init__(self, work: Workspace, options: Mapping[str, str] | None) -> None:
        self.work = work
        self.recovered: list[Recovered] = []
        self.stats = Stats()
        self.clock = Clock()
        self._keys: dict[bytes, bytes] = {}
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._owner = owner(work)
        # Closed in reverse order, whatever one of them raises.
        with contextlib.ExitStack() as opened:
            self.writers = WriterLock(work.locks)
            opened.callback(self.writers.release)
            self.ledger = Ledger(work.ledger, self._writer_name)
            opened.callback(self.ledger.close)
            self.catalog = Catalog(
                work.home,
                self.ledger if work.home.local else None,
                work.catalog_lock,
                options,
                self._writer_name,
                self.clock,
            )
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
            self.spool = Spool(work.spool)
            self.reader = Reader(self.catalog, list(self.tiers.values()), self.stats, self.quarantine)
            opened.callback(self.reader.close)
            self.publisher = Publisher(self.catalog, self.home, self.stats, self._prepare_volume, self._identities.get)
            self.committer = Committer(self.publisher.commit)
            opened.callback(self.committer.close)
            self.promoter = Promoter(
                self.catalog, self.reader, self.stats, self._prepare_volume, self.key_of, self.quarantine
            )
            self.verifier = Verifier(self.catalog, self.reader, self._present, self.key_of, self.quarantine)
            self._recover()
            self._opened = opened.pop_all()

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
        self.committer.submit_facts(Facts(placements=[placement]))

    def close(self) -> None:
        """Drain and let go."""
        self._opened.close()

    def _present(self, placement: Placement) -> bool:
        return self.tiers[placement.tier].present(placement)

    def _writer_name(self) -> str:
        return f"{self.work.node}.{self._owner[:16]}.w{self.writers.number:03d}"

    def _recover(self) -> None:
        entries = self.ledger.read()
        for table in self.catalog.tables.values():
            mine = entries.get(table.dataset.name, {})
            if self.catalog.lock_path is not None and recovery.suspicious(table.dataset, mine):
                with self.catalog.exclusive():
                    # Read again: another process may have committed, or recovered, since.
                    mine = self.ledger.read().get(table.dataset.name, {})
                    if not mine and table.dataset.missing():
                        table.dataset.create()  # a table that the release which made this memory did not have
                        continue
                    self.recovered += recovery.recover_dataset(table.dataset, mine, self.work.quarantine, rebuild=True)
            table.expect({file: digest for entry in mine.values() for file, digest in entry.files.items()})
        self.catalog.open()
        for table in self.catalog.tables.values():
            if self.catalog.lock_path is not None and table.dataset.has_strays():
                with self.catalog.exclusive():
                    self.recovered += recovery.sweep(table.dataset, set())
        damaged = self.catalog.damaged()
        for file, reason in damaged.items():
            self.recovered.append(Recovered("lost", file, f"{reason}; its facts are not used"))
        # Facts are gone: what of them the volumes hold is taken from there.
        everything = any(report.kind in ("lost", "rebuilt") for report in self.recovered)
        for tier in self.tiers.values():
            self._recover_tier(tier, entries, everything)
        self.recovered += recovery.sweep_spool(self.work.spool)

    def _recover_tier(self, tier: Tier, entries: Mapping[str, Mapping[int, Entry]], everything: bool) -> None:
        """Look after the volumes of writers that are not running; with `everything`, read those of all others too."""
        seen = set()
        for number in tier.writer_numbers():
            with self.writers.borrowed(number) as mine:
                if mine:
                    names = tier.own_volumes(number)
                    for name in names if everything else names[-1:]:
                        self._recover_volume(tier, name, entries, everything)
                        seen.add(name)
        for name in tier.volumes() if everything else ():
            if name not in seen:
                self._adopt_foreign(tier, name)

    def _adopt_foreign(self, tier: Tier, name: str) -> None:
        """Take facts from a volume that another node or a running process appends to; nothing in it is changed."""
        volume = tier.volume(name)
        root = volume.location.path
        if root is not None and not manifest_versions(root):
            return
        try:
            self.recovered += recovery.adopt(tier, volume, self.catalog, everything=True)
        except StoreError as error:
            self.recovered.append(Recovered("lost", volume.label, str(error)))

    def _recover_volume(
        self, tier: Tier, name: str, entries: Mapping[str, Mapping[int, Entry]], everything: bool = False
    ) -> bool:
        volume = tier.volume(name)
        mine = entries.get(volume.label, {})
        root = volume.location.path
        try:
            if root is not None:
                if not manifest_versions(root) and not mine:
                    return True  # marked, but never created: `open_volume` ends its creation
                if recovery.suspicious(volume.dataset, mine):
                    self.recovered += recovery.recover_dataset(volume.dataset, mine, self.work.quarantine)
                known = self.catalog.placements.files(tier.name, name)
                stems = {path.name.removesuffix(".lance") for path in (root / "data").glob("*")}
                if not everything and stems == {file.removesuffix(".lance") for file in known}:
                    return True
            self.recovered += recovery.adopt(tier, volume, self.catalog, everything=everything)
            self.recovered += recovery.sweep(volume.dataset, self.catalog.placements.files(tier.name, name))
        except (RecoveryError, StoreError) as error:
            # Its sidecars may still be read and verified; it is only never appended to again.
            self.recovered.append(Recovered("lost", volume.label, str(error)))
            return False
        return True

    def _prepare_volume(self, tier: Tier, name: str) -> bool:
        return self._recover_volume(tier, name, self.ledger.read())
