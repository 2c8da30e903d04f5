"""Opening a memory: what recovery has to look after before the first lookup, and before a volume is appended to.

catalog  every table at a good version, or made anew; files of commits that never happened are swept
volumes  those of writers that are not running recovered, their uncatalogued commits adopted; where facts were lost, the
         volumes of all others read too
spool    half-written files swept
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from numem.errors import RecoveryError, StoreError
from numem.store.payload.ledger import Entry
from numem.store.payload.manifests import manifest_versions
from numem.store.payload.tier import Tier
from numem.store.reports import Recovered
from numem.store.upkeep import recovery
from numem.store.upkeep.adoption import adopt

if TYPE_CHECKING:
    from numem.store.session import Session

Entries = Mapping[str, Mapping[int, Entry]]


def look(parts: "Session") -> None:
    """Open for reading alone: nothing is recovered, and what recovery would have to mend is refused."""
    entries = _entries(parts)
    for table in parts.catalog.tables.values():
        mine = entries.get(table.dataset.name, {})
        if parts.catalog.lock_path is not None and recovery.suspicious(table.dataset, mine):
            root = table.dataset.location.path
            assert root is not None
            newest = next(iter(manifest_versions(root)), 0)
            # A live writer notes a version after it made it, so an unknown one is looked at, and one too few is not.
            reason = "no manifest"
            if newest:
                reason = recovery.manifest_fault(table.dataset, newest, mine.get(newest))
            if reason:
                raise RecoveryError(f"{table.dataset.name}: {reason}; open it once without read_only to recover it")
        table.expect({file: digest for entry in mine.values() for file, digest in entry.files.items()})
    parts.catalog.open()


def recover(parts: "Session") -> None:
    """Open for reading and writing; what was done is added to `parts.recovered`."""
    entries = _entries(parts)
    for table in parts.catalog.tables.values():
        mine = entries.get(table.dataset.name, {})
        if parts.catalog.lock_path is not None and recovery.suspicious(table.dataset, mine):
            with parts.catalog.exclusive():
                # Read again: another process may have committed, or recovered, since.
                mine = parts.ledger.read().get(table.dataset.name, {})
                if not mine and table.dataset.missing():
                    table.dataset.create()  # a table that the release which made this memory did not have
                    continue
                parts.recovered += recovery.recover_dataset(table.dataset, mine, parts.work.quarantine, rebuild=True)
        table.expect({file: digest for entry in mine.values() for file, digest in entry.files.items()})
    parts.catalog.open()
    for table in parts.catalog.tables.values():
        if parts.catalog.lock_path is not None and table.dataset.has_strays():
            with parts.catalog.exclusive():
                acknowledged = entries.get(table.dataset.name, {}).values()
                files = {tree["files"][0]["path"] for entry in acknowledged for tree in entry.fragments}
                parts.recovered += recovery.sweep(table.dataset, files)
    parts.catalog.mend = partial(mend, parts)
    # Facts are gone: what of them the volumes hold is taken from there.
    everything = any(report.kind in ("lost", "rebuilt") for report in parts.recovered)
    for tier in parts.tiers.values():
        _recover_tier(parts, tier, entries, everything)
    parts.recovered += recovery.sweep_spool(parts.work.spool)


def mend(parts: "Session") -> None:
    """Take from the volumes what they hold of facts whose data files turned out damaged when the catalog was loaded."""
    damaged = parts.catalog.damaged()
    for file, reason in damaged.items():
        parts.recovered.append(Recovered("lost", file, f"{reason}; its facts are not used"))
    for tier in parts.tiers.values() if damaged else ():
        _recover_tier(parts, tier, parts.ledger.read(), everything=True)


def recover_volume(
    parts: "Session", tier: Tier, name: str, entries: Entries, everything: bool = False, rebuild: bool = False
) -> bool:
    """Bring a volume of a writer that is not running to a good state; False where it cannot be appended to again.

    Args:
        everything, rebuild: see `adoption.adopt` and `recovery.recover_dataset`.
    """
    volume = tier.volume(name)
    mine = entries.get(volume.label, {})
    root = volume.location.path
    try:
        if root is not None:
            if not manifest_versions(root) and not mine:
                return True  # marked, but never created: `open_volume` ends its creation
            if recovery.suspicious(volume.dataset, mine):
                parts.recovered += recovery.recover_dataset(
                    volume.dataset, mine, parts.work.quarantine, rebuild=rebuild
                )
            known = parts.catalog.files(tier.name, name)
            stems = {path.name.removesuffix(".lance") for path in (root / "data").glob("*")}
            if not everything and stems == {file.removesuffix(".lance") for file in known}:
                return True
        parts.recovered += adopt(tier, volume, parts.catalog, mine, everything=everything)
        parts.recovered += recovery.sweep(volume.dataset, parts.catalog.placements.files(tier.name, name))
    except (RecoveryError, StoreError) as error:
        # Its sidecars may still be read and verified; it is only never appended to again.
        parts.recovered.append(Recovered("lost", volume.label, str(error)))
        return False
    return True


def _recover_tier(parts: "Session", tier: Tier, entries: Entries, everything: bool) -> None:
    """Look after the volumes of writers that are not running; with `everything`, read those of all others too."""
    seen = set()
    for number in tier.writer_numbers():
        with parts.writers.borrowed(number) as mine:
            if mine:
                names = tier.own_volumes(number)
                for name in names if everything else names[-1:]:
                    recover_volume(parts, tier, name, entries, everything)
                    seen.add(name)
    for name in tier.volumes() if everything else ():
        if name not in seen:
            adopt_foreign(parts, tier, name, entries)


def adopt_foreign(parts: "Session", tier: Tier, name: str, entries: Entries) -> None:
    """Take facts from a volume that another node or a running process appends to; nothing in it is changed."""
    volume = tier.volume(name)
    root = volume.location.path
    if root is not None and not manifest_versions(root):
        return
    try:
        parts.recovered += adopt(tier, volume, parts.catalog, entries.get(volume.label, {}), everything=True)
    except StoreError as error:
        parts.recovered.append(Recovered("lost", volume.label, str(error)))


def _entries(parts: "Session") -> Entries:
    """The ledger; the clock is told of it, so that sequences rise although the catalog is not loaded yet."""
    entries = parts.ledger.read()
    parts.clock.observe(max((entry.at for versions in entries.values() for entry in versions.values()), default=0))
    return entries
