"""The doctor's look at the volumes of one tier: manifests, commits that the catalog does not know, files, sidecars."""

import json
from collections.abc import Callable, Collection, Mapping

from numem.errors import StoreError
from numem.store.catalog.facts import Placement, State
from numem.store.catalog.nodes import node_from_document
from numem.store.lance_errors import first_line
from numem.store.payload.ledger import Entry
from numem.store.payload.manifests import manifest_versions
from numem.store.payload.sidecar import sidecar_name
from numem.store.payload.tier import Tier
from numem.store.payload.volume import Volume
from numem.store.upkeep import recovery
from numem.store.upkeep.adoption import altered
from numem.store.upkeep.catalog_check import CatalogCheck, strays
from numem.store.upkeep.findings import Finding, Severity, some

_PUBLISH = "publish it again from where it was computed"


class VolumeCheck:
    """Volumes of one tier of a memory that is not open.

    Args:
        running: whether a process holds a writer number of this node.
        archived: volumes that an archive holds.

    Attributes:
        volumes: how many were looked at.
        lacking: content id -> why no copy of it is good in any tier.
    """

    def __init__(
        self,
        tier: Tier,
        catalog: CatalogCheck,
        entries: Mapping[str, Mapping[int, Entry]],
        running: Callable[[int], bool],
        archived: Collection[str],
    ) -> None:
        self._tier = tier
        self._catalog = catalog
        self._entries = entries
        self._running = running
        self._archived = archived
        self._ready: dict[str, list[Placement]] = {}
        self.volumes = 0
        self.lacking: dict[bytes, str] = {}

    def run(self) -> list[Finding]:
        findings = []
        tier = self._tier
        placements = self._catalog.placements
        for content in placements.contents():
            for copy in placements.current(content):
                if copy.state is State.READY and tier.reachable(copy):
                    self._ready.setdefault(copy.volume, []).append(copy)
        for name in tier.volumes():
            self.volumes += 1
            findings += self._volume(name)
        findings += self._sidecars()
        late = tier.shelf.orphans(recovery.ORPHAN_GRACE_S)
        young = [name for name in tier.shelf.orphans(0) if name not in late]
        if late:
            what = f"files of {len(late)} removed volumes: {some(late)}"
            findings.append(Finding(Severity.REPAIRABLE, tier.label, what, "repair, or maintenance, sweeps them"))
        if young:
            what = f"files of {len(young)} volumes that are being removed: {some(young)}"
            findings.append(Finding(Severity.NOTE, tier.label, what, "none: maintenance sweeps them once they are old"))
        root = tier.config.location.path
        if root is not None and root.is_dir():
            ours = (".volume", ".lance", ".tmp")
            foreign = [path.name for path in root.iterdir() if not path.name.endswith(ours)]
            if foreign:
                what = f"not numem's: {some(foreign)}"
                findings.append(Finding(Severity.NOTE, tier.label, what, "keep them elsewhere; they are left alone"))
        return findings

    def _volume(self, name: str) -> list[Finding]:
        volume = self._tier.volume(name)
        findings: list[Finding] = []
        root = volume.location.path
        entries = self._entries.get(volume.label, {})
        try:
            if root is None:
                volume.dataset.open()
            else:
                if not manifest_versions(root) and not entries:
                    what = "it was begun, and holds nothing yet"
                    return [Finding(Severity.NOTE, volume.label, what, "none: its writer ends it")]
                good, findings = self._catalog.examine(volume.dataset, entries, Severity.REPAIRABLE)
                if not good:
                    return findings
                volume.dataset.open(good)
        except StoreError as error:
            if isinstance(error.__cause__, OSError):
                raise
            remedy = "its pieces may still be read; repair copies them to a new volume where it can"
            return [*findings, Finding(Severity.REPAIRABLE, volume.label, first_line(error), remedy)]
        findings += self._facts(volume, not findings)
        if root is not None:
            named = {tree["files"][0]["path"] for entry in entries.values() for tree in entry.fragments}
            known = self._catalog.placements.files(self._tier.name, name)
            findings += strays(volume.dataset, {*volume.dataset.fragments(), *known, *named}, self._live(name))
        return findings

    def _facts(self, volume: Volume, whole: bool) -> list[Finding]:
        """Commits of a volume, and nodes in them, that the catalog does not know.

        Args:
            whole: the newest version was good.
        """
        catalog = self._catalog
        name = volume.name
        known = catalog.placements.files(self._tier.name, name)
        files = sorted(volume.dataset.fragments())
        unknown = [file for file in files if file not in known]
        ready = {copy.file for copy in self._ready.get(name, ())}
        missing = sorted(ready - set(files)) if whole else []
        nodes: set[str] = set()
        findings = []
        wrong = altered(volume.dataset, self._entries.get(volume.label, {}))
        for file in files:
            if file in wrong:
                remedy = "its pieces may still be read; repair copies them to a new volume"
                what = "bytes differ from those that were acknowledged"
                findings.append(Finding(Severity.REPAIRABLE, f"{volume.label}/{file}", what, remedy))
                continue
            try:
                for _, _, row in volume.rows([file]):
                    if row["kind"] == "facts":
                        texts = json.loads(row["facts"] or "{}").get("nodes", ())
                        nodes |= {node.id.hex() for node in map(node_from_document, texts) if self._unheard(node.id)}
            except StoreError as error:
                remedy = "its pieces may still be read; repair copies them to a new volume where it can"
                findings.append(Finding(Severity.REPAIRABLE, f"{volume.label}/{file}", first_line(error), remedy))
        if missing:
            what = f"no version names {len(missing)} of its data files: {some(missing)}"
            remedy = "their pieces may still be read; repair copies them to a new volume"
            findings.append(Finding(Severity.REPAIRABLE, volume.label, what, remedy))
        if unknown and "placements" not in catalog.broken:
            severity = Severity.NOTE if self._live(name) else Severity.REPAIRABLE
            what = f"{len(unknown)} commits that the catalog does not know: {some(unknown)}"
            findings.append(Finding(severity, volume.label, what, "open the memory, or repair: they are adopted"))
        if nodes and not unknown and "nodes" not in catalog.broken:
            # On local disk the ledger would know of a catalog commit that was lost.
            severity = Severity.REPAIRABLE if volume.location.path is None else Severity.NOTE
            what = f"{len(nodes)} nodes that were never catalogued, or not acknowledged: {some(nodes)}"
            findings.append(Finding(severity, volume.label, what, "repair adopts them"))
        return findings

    def _live(self, name: str) -> bool:
        """Whether the writer of a volume is running, or may be: it is another node's, or the tier is remote."""
        mine = self._tier.objects is None and self._tier.shelf.owned(name)
        return not mine or self._running(int(name.split(".")[1][1:]))

    def _unheard(self, node: bytes) -> bool:
        return node not in self._catalog.nodes and node not in self._catalog.retired

    def _sidecars(self) -> list[Finding]:
        """Copies that are said to be ready, and whose bytes cannot be there."""
        sizes: dict[str, dict[str, int]] = {}
        findings = []
        for volume, ready in sorted(self._ready.items()):
            copies = [copy for copy in ready if not self._present(copy, sizes)]
            if not copies:
                continue
            alone = [copy for copy in copies if not self._elsewhere(copy, sizes)]
            what = f"the sidecar of {len(copies)} copies is missing or cut short"
            for copy in alone:
                self.lacking[copy.content] = f"{self._tier.label}/{volume}: sidecar missing or cut short"
            severity = Severity.LOSS if alone else Severity.REPAIRABLE
            what += f", and {len(alone)} pieces have no other: {some(c.content.hex() for c in alone)}" if alone else ""
            remedy = _PUBLISH if alone else "repair makes them anew from another copy"
            findings.append(Finding(severity, f"{self._tier.label}/{volume}", what, remedy))
        return findings

    def _present(self, copy: Placement, sizes: dict[str, dict[str, int]]) -> bool:
        objects = self._tier.objects
        if objects is None:
            return self._tier.present(copy)
        if copy.volume not in sizes:
            sizes[copy.volume] = {listed.name: listed.nbytes for listed in objects.listing(f"{copy.volume}.lance")}
        name = f"{copy.volume}.lance/{sidecar_name(copy.file, copy.blob)}"
        return sizes[copy.volume].get(name, -1) >= copy.offset + copy.nbytes

    def _elsewhere(self, bad: Placement, sizes: dict[str, dict[str, int]]) -> bool:
        """Whether another copy is said to be ready, and is there as far as this tier knows."""
        return bad.volume in self._archived or any(
            copy.state is State.READY
            and copy.copy != bad.copy
            and (not self._tier.reachable(copy) or self._present(copy, sizes))
            for copy in self._catalog.placements.current(bad.content)
        )
