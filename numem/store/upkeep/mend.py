"""What `doctor.repair` does to a memory, in an order in which nothing is dropped before all that it said is held elsewhere.

volumes   brought to a good state from the ledger, and what they say about nodes and pieces taken into the catalog
catalog   data files that are damaged are left out of a new version, and kept in quarantine
          and a deletion that was cut short is ended
pieces    volumes with damaged data files are written anew; every copy is scrubbed
sweep     files of commits that never happened, of removed volumes and of the spool
"""

import json
import os
import shutil
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from numem.errors import RecoveryError, StoreError
from numem.state.node import Node
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import ORDER, Clock, Placement, State
from numem.store.catalog.nodes import node_document, node_from_document
from numem.store.catalog.table import FactTable
from numem.store.lance_errors import first_line
from numem.store.payload.objects import Objects
from numem.store.payload.tier import Tier
from numem.store.payload.volume import Volume
from numem.store.publication.publish import GONE
from numem.store.reports import Recovered
from numem.store.session import Session
from numem.store.upkeep import opening, recovery
from numem.store.upkeep.adoption import altered
from numem.store.upkeep.catalog_check import RECOVERABLE
from numem.store.upkeep.collect import closed, ready_copies, remove, rewrite
from numem.store.upkeep.forget import forget
from numem.store.upkeep.maintain import lane
from numem.store.upkeep.scrub import Scrubber
from numem.store.workspace import Workspace


class Mender:
    """The repair of one open memory.

    Args:

    Attributes:
        done: what was mended, opening included.
        lost: what could not be had back, one line each.
    """

    def __init__(self, parts: Session) -> None:
        self._parts = parts
        self.done: list[Recovered] = []
        self.lost: list[str] = []

    def run(self) -> None:
        """All steps, under the maintenance lease."""
        parts = self._parts
        with lane(parts) as (_, fence):
            for tier in parts.tiers.values():
                self._volumes(tier)
            fence()
            self._catalog()
            if parts.catalog.unfinished():
                ended = forget(parts, ids=(), actor="doctor", reason="a deletion that was cut short", fence=fence)
                self.done.append(Recovered("swept", "catalog/nodes", f"{ended.nodes} forgotten nodes"))
            for tier in parts.tiers.values():
                fence()
                with parts.evictor.exclusive(tier):
                    self._evacuate(tier)
            self._sweep()
            self._scrub()
        for entry in parts.recovered:
            table = entry.dataset.removeprefix("catalog/").split("/")[0]
            if entry.kind != "lost":
                self.done.append(entry)
            elif table in ORDER and table not in RECOVERABLE and entry.dataset == f"catalog/{table}":
                self.lost.append(f"{entry.dataset}: {entry.detail}")  # files that are damaged were named when dropped

    def _volumes(self, tier: Tier) -> None:
        entries = self._parts.ledger.read()
        for name in tier.volumes():
            with closed(self._parts, tier, name) as free:
                if free:
                    opening.recover_volume(self._parts, tier, name, entries, everything=True, rebuild=True)
                    continue
            opening.adopt_foreign(self._parts, tier, name, entries)

    def _catalog(self) -> None:
        catalog = self._parts.catalog
        entries = self._parts.ledger.read()
        for name, table in catalog.tables.items():
            with catalog.exclusive():
                for file, what in table.drop_damaged(self._parts.work.quarantine).items():
                    self.done.append(Recovered("quarantined", f"{table.dataset.name}/{file}", what))
                    if name not in RECOVERABLE:
                        self.lost.append(f"{table.dataset.name}/{file}: {what}")
                catalog.sync_ledger()
                if catalog.lock_path is not None:
                    acknowledged = entries.get(table.dataset.name, {}).values()
                    named = {tree["files"][0]["path"] for entry in acknowledged for tree in entry.fragments}
                    self.done += recovery.sweep(table.dataset, named)
        catalog.refresh(*ORDER, force=True)

    def _evacuate(self, tier: Tier) -> None:
        """Write volumes anew that have data files which cannot be read, or that no version names: no catalog could be
        rebuilt from them. The damaged data files are kept."""
        ready = ready_copies(self._parts, tier)
        damaged = {name: bad for name in tier.volumes() if (bad := self._bad_files(tier, name, ready.get(name, ())))}
        for name in damaged:
            tier.seal(name)  # none of them takes what is copied out of another
        for name, bad in damaged.items():
            with closed(self._parts, tier, name) as free:
                if not free:
                    continue
                copies = [copy for copy in ready_copies(self._parts, tier).get(name, ()) if tier.present(copy)]
                documents = self._documents(tier, damaged, copies)
                if copies or documents["nodes"]:
                    rewrite(self._parts, tier, copies, documents)
                gone = ready_copies(self._parts, tier).get(name, [])
                turned = [copy.turned(self._parts.clock.next(), State.QUARANTINED, GONE) for copy in gone]
                self._parts.catalog.append(Facts(placements=turned))
                for file, path in bad.items():
                    if path is not None and path.is_file():
                        self._parts.work.quarantine.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(path, self._parts.work.quarantine / f"{name}.{file}.{time.time_ns()}")
                remove(self._parts, tier, name)
                detail = f"written anew with {len(copies)} pieces: {len(bad)} data files were damaged"
                self.done.append(Recovered("rebuilt", f"{tier.label}/{name}", detail))

    def _bad_files(self, tier: Tier, name: str, ready: Iterable[Placement]) -> dict[str, Path | None]:
        """Data files of a volume that cannot be read, or that hold pieces and that no version names -> local path."""
        volume = tier.volume(name)
        root = volume.location.path
        bad = {copy.file for copy in ready}
        try:
            volume.dataset.refresh()
            files = list(volume.dataset.fragments())
        except StoreError:
            files = []
        bad -= set(files)
        bad |= altered(volume.dataset, self._parts.ledger.read().get(volume.label, {})).intersection(files)
        bad |= {file for file in files if _facts(volume, file) is None}
        return {file: None if root is None else root / "data" / file for file in bad}

    def _documents(self, tier: Tier, damaged: Container[str], copies: Sequence[Placement]) -> Mapping[str, object]:
        """What a facts row has to say in place of a damaged volume's: nodes of its pieces, and in the home tier every node
        that no volume speaks of that stays."""
        catalog = self._parts.catalog
        wanted = {copy.content for copy in copies}
        told: set[bytes] = set()
        for other in tier.volumes() if tier is self._parts.home else ():
            if other not in damaged:
                for file in tier.volume(other).dataset.fragments():
                    told |= {node.id for node in _facts(tier.volume(other), file) or ()}
        nodes = [
            node
            for node in catalog.nodes.of_kind(None)
            if not wanted.isdisjoint(node.pieces) or (tier is self._parts.home and node.id not in told)
        ]
        known = catalog.identities()
        identities = {scope.hex(): known[scope] for scope in {node.scope for node in nodes} if scope in known}
        return {"identities": identities, "nodes": [node_document(node) for node in nodes]}

    def _sweep(self) -> None:
        parts = self._parts
        for tier in parts.tiers.values():
            for name in tier.shelf.orphans(recovery.ORPHAN_GRACE_S):
                nbytes = tier.shelf.sweep(name)
                self.done.append(Recovered("swept", f"{tier.label}/{name}", f"a removed volume, {nbytes} bytes"))
        self.done += recovery.sweep_spool(parts.work.spool)
        for node in parts.spool.ids():
            try:
                parts.spool.open(node)
            except StoreError as error:
                parts.spool.set_aside(node, parts.work.quarantine)
                self.done.append(Recovered("quarantined", f"spool/{node.hex()}", first_line(error)))
                if node not in parts.catalog.nodes:
                    self.lost.append(f"spool/{node.hex()}: staged, never published: {first_line(error)}")

    def _scrub(self) -> None:
        report = Scrubber(self._parts).run(None, None, None, True)
        if report.bad or report.repaired:
            detail = f"{len(report.bad)} bad copies quarantined, {report.repaired} made anew"
            self.done.append(Recovered("replayed", "pieces", detail))
        for content, why in report.unrepairable.items():
            self.lost.append(f"piece {content.hex()}: {why}")


def _facts(volume: Volume, file: str) -> list[Node] | None:
    """The nodes that a data file of a volume speaks of, None where it cannot be read."""
    try:
        rows = [row for _, _, row in volume.rows([file]) if row["kind"] == "facts"]
        return [node_from_document(text) for row in rows for text in json.loads(row["facts"] or "{}").get("nodes", ())]
    except (StoreError, ValueError):
        return None


def step_back(work: Workspace, options: Mapping[str, str] | None) -> list[Recovered]:
    """Set damaged newest manifests of a remote catalog aside, so that the version before each is used; what they added is
    named. A local catalog is recovered when it is opened."""
    if work.home.local:
        return []
    report = []
    for name in ORDER:
        table = FactTable(name, work.home.child("catalog"), None, options, Clock())
        objects = Objects(table.dataset.location, options)
        while True:
            try:
                table.dataset.open()
                break
            except RecoveryError as error:
                manifests = sorted(n for n in (o.name for o in objects.listing("_versions")) if n.endswith(".manifest"))
                if len(manifests) < 2:
                    raise
                work.quarantine.mkdir(parents=True, exist_ok=True)
                copy = work.quarantine / f"catalog-{name}.{os.path.basename(manifests[0])}.{time.time_ns()}"
                copy.write_bytes(objects.read(manifests[0]))
                objects.delete([manifests[0]])
                detail = f"its newest commit was set aside ({first_line(error)})"
                report.append(Recovered("quarantined", table.dataset.name, detail))
    return report
