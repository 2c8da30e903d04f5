"""The doctor's look at the catalog: its tables as files, then what their facts say about each other."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from numem.errors import StoreError
from numem.store.catalog.facts import FORGOTTEN, ORDER, Clock, State
from numem.store.catalog.index import PlacementIndex
from numem.store.catalog.nodes import split_ids
from numem.store.catalog.table import FactTable
from numem.store.lance_errors import first_line
from numem.store.payload.dataset import Dataset
from numem.store.payload.ledger import Entry
from numem.store.upkeep import recovery
from numem.store.upkeep.findings import Finding, Severity, some
from numem.store.workspace import Workspace

# What of a table that is damaged can be had from the volumes.
RECOVERABLE = ("identities", "placements", "nodes")
_OPEN = "open the memory, or repair: it is made good from the ledger"


class CatalogCheck:
    """The catalog of a memory that is not open.

    Args:
        entries: lines of the ledger; none where the home is remote.

    Attributes:
        nodes: causal id -> row of every visible node.
        retired: causal id -> sequence of its newest retirement.
        copies: copies of pieces that are said to be ready.
        broken: tables that could not be read whole.
        half_forgotten: nodes of a deletion that was cut short.
    """

    def __init__(
        self, work: Workspace, options: Mapping[str, str] | None, entries: Mapping[str, Mapping[int, Entry]]
    ) -> None:
        self._work = work
        self._entries = entries if work.home.local else {}
        self._location = work.home.child("catalog")
        clock = Clock()
        self.tables = {name: FactTable(name, self._location, None, options, clock) for name in ORDER}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self.placements = PlacementIndex()
        self.nodes: dict[bytes, dict[str, Any]] = {}
        self.retired: dict[bytes, int] = {}
        self.copies = 0
        self.broken: set[str] = set()
        self.half_forgotten: set[bytes] = set()

    def run(self) -> list[Finding]:
        """Look at the files of every table, and read what can be read of them."""
        findings = [finding for table in self.tables.values() for finding in self._table(table)]
        root = self._location.path
        if root is not None and root.is_dir():
            foreign = [path.name for path in root.iterdir() if path.name.removesuffix(".lance") not in ORDER]
            if foreign:
                what = f"not numem's: {some(foreign)}"
                findings.append(Finding(Severity.NOTE, "catalog", what, "keep them elsewhere; they are left alone"))
        # Every deletion ends those before it, and leaves a record at its end.
        ended = max((row["sequence"] for row in self.rows("records") if row["kind"] == FORGOTTEN), default=-1)
        forgotten = set()
        for row in self.rows("retired"):
            self.retired[row["id"]] = max(row["sequence"], self.retired.get(row["id"], -1))
            if row["reason"] == FORGOTTEN and row["sequence"] > ended:
                forgotten.add(row["id"])
        findings += self._visible()
        self.half_forgotten = forgotten - self.nodes.keys()
        if self.half_forgotten:
            what = f"{len(self.half_forgotten)} nodes that were to be forgotten: some of them may still be in the files"
            remedy = "repair ends the deletion that was cut short"
            findings.append(Finding(Severity.REPAIRABLE, "catalog/nodes", what, remedy))
        return findings

    def rows(self, table: str) -> list[dict[str, Any]]:
        """What could be read of a table, in commit order."""
        return self._rows.get(table, [])

    def cross_check(self, lacking: Mapping[bytes, str], archived: Collection[str]) -> list[Finding]:
        """What the facts say about each other.

        Args:
            lacking: content id -> why it has no good copy though one is said to be ready.
            archived: volumes of the home tier that an archive holds.
        """
        findings = []
        for content in self.placements.contents():
            self.copies += sum(copy.state is State.READY for copy in self.placements.current(content))
        for node, row in self.nodes.items():
            gone = [piece for piece in split_ids(row["pieces"]) if self._gone(piece, lacking, archived)]
            if gone:
                why = lacking.get(gone[0], "no copy is ready in any tier")
                what = f"{len(gone)} of its pieces cannot be read: {gone[0].hex()}: {why}"
                remedy = "publish it again from where it was computed; if it is reproducible, recompute it"
                severity = Severity.REPAIRABLE if "placements" in self.broken else Severity.LOSS
                findings.append(Finding(severity, f"node {node.hex()}", what, remedy))
        if "nodes" not in self.broken:
            findings += self._dangling()
        return findings + self._expired()

    def examine(self, dataset: Dataset, entries: Mapping[int, Entry], loss: Severity) -> tuple[int, list[Finding]]:
        """(newest version of a local dataset that is good, 0 for none; what is wrong with newer ones).

        Args:
            loss: how bad it is where an acknowledged commit's files are damaged as well.
        """
        try:
            good, bad = recovery.assess(dataset, entries)
        except FileNotFoundError:
            good, bad = recovery.assess(dataset, entries)  # a clean-up removed an old version meanwhile
        findings = [
            Finding(Severity.REPAIRABLE, dataset.name, f"manifest of version {version}: {why}", _OPEN)
            for version, why in bad
        ]
        acknowledged = max(entries, default=0)
        if not bad and good < acknowledged:
            what = (
                f"the manifest of version {acknowledged} is missing"
                if good
                else "no manifest, or the directory is gone"
            )
            findings.append(Finding(Severity.REPAIRABLE, dataset.name, what, _OPEN))
        elif good and not bad and good not in entries:
            what = f"version {good} is not in the ledger: a commit that was cut short, or lines that were lost"
            findings.append(Finding(Severity.NOTE, dataset.name, what, "none: it is used as it is"))
        elif not good and not acknowledged:
            findings.append(Finding(Severity.REPAIRABLE, dataset.name, "no good manifest", _OPEN))
        if findings and good < acknowledged:
            if good:
                dataset.open(good)
            present = dataset.fragments() if good else {}
            _, lost = recovery.replayable(dataset, entries, good, present)
            for what in lost.values():
                findings.append(
                    Finding(loss, dataset.name, what, "repair takes what the volumes hold of it from there")
                )
        return good, findings

    def _table(self, table: FactTable) -> list[Finding]:
        dataset = table.dataset
        findings: list[Finding] = []
        loss = Severity.REPAIRABLE if table.name in RECOVERABLE else Severity.LOSS
        try:
            if dataset.location.path is None:
                dataset.open()
            else:
                entries = self._entries.get(dataset.name, {})
                good, findings = self.examine(dataset, entries, loss)
                if any(finding.severity is not Severity.NOTE for finding in findings):
                    self.broken.add(table.name)
                if not good:
                    return findings
                dataset.open(good)
                table.expect({file: digest for entry in entries.values() for file, digest in entry.files.items()})
            fragments = dataset.fragments()
            parts = table.read(table.sound(list(fragments.values())))
        except StoreError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.broken.add(table.name)
            remedy = "move the object aside by hand: the version before it is then used, and its commit is lost"
            return [*findings, Finding(loss, dataset.name, first_line(error), remedy)]
        for file, why in table.damaged.items():
            self.broken.add(table.name)
            count = fragments[file].metadata.physical_rows
            remedy = "repair replaces it; " + (
                "the volumes hold the same facts" if loss is Severity.REPAIRABLE else "its facts are lost"
            )
            findings.append(Finding(loss, f"{dataset.name}/{file}", f"{count} rows: {why}", remedy))
        if dataset.location.path is not None:
            acknowledged = self._entries.get(dataset.name, {}).values()
            named = {tree["files"][0]["path"] for entry in acknowledged for tree in entry.fragments}
            findings += strays(dataset, {*fragments, *named})
        for _, rows in parts:
            if table.name == "placements":
                self.placements.add(rows)
            else:
                self._rows.setdefault(table.name, []).extend(rows.to_pylist())
        return findings

    def _visible(self) -> list[Finding]:
        twice: set[str] = set()
        differing: set[str] = set()
        for row in self.rows("nodes"):
            node = row["id"]
            if row["sequence"] <= self.retired.get(node, -1):
                continue
            held = self.nodes.setdefault(node, row)
            if held is not row:
                (twice if held["pieces"] == row["pieces"] else differing).add(node.hex())
        return [
            Finding(
                Severity.NOTE, "catalog/nodes", f"{len(nodes)} causal ids stand there twice{how}: {some(nodes)}", remedy
            )
            for nodes, how, remedy in (
                (twice, "", "none: they are the same; maintenance drops the second"),
                (differing, ", with other pieces", "none: the first holds; maintenance drops the second"),
            )
            if nodes
        ]

    def _gone(self, piece: bytes, lacking: Mapping[bytes, str], archived: Collection[str]) -> bool:
        if piece in lacking:
            return True
        copies = self.placements.current(piece)
        home = self._work.home_tier
        return not any(copy.state is State.READY or (copy.tier == home and copy.volume in archived) for copy in copies)

    def _dangling(self) -> list[Finding]:
        known = {*self.nodes, *(row["scope"] for row in self.rows("identities"))}
        findings = []
        orphans = [node.hex() for node, row in self.nodes.items() if row["parent"] not in (row["scope"], *known)]
        if orphans:
            what = f"{len(orphans)} nodes whose parent is not in the memory: {some(orphans)}"
            findings.append(Finding(Severity.NOTE, "catalog/nodes", what, "publish the parents too"))
        heads: dict[str, tuple[int, bytes]] = {}
        for row in self.rows("branches"):
            heads[row["name"]] = max(heads.get(row["name"], (0, b"")), (row["generation"], row["head"]))
        known |= self.half_forgotten  # their branches go with them
        lost = [name for name, (_, head) in heads.items() if head not in known]
        if lost:
            what = f"branches whose head is not in the memory: {some(lost)}"
            findings.append(Finding(Severity.LOSS, "catalog/branches", what, "publish it again, or move the branch"))
        return findings

    def _expired(self) -> list[Finding]:
        newest: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in sorted(self.rows("claims"), key=lambda row: int(row["sequence"])):
            newest[tuple(row[name] for name in ("kind", "subject", "tier", "node", "owner"))] = row
        now = time.time_ns()
        counts: dict[str, int] = {}
        for row in newest.values():
            if row["active"] and 0 < row["expires"] <= now:
                counts[row["kind"]] = counts.get(row["kind"], 0) + 1
        return [
            Finding(Severity.NOTE, "catalog/claims", f"{count} {kind}s ended", "none: maintenance drops them")
            for kind, count in sorted(counts.items())
        ]


def strays(dataset: Dataset, named: Collection[str], live: bool = False) -> list[Finding]:
    """Files below `data/` of a local dataset that nothing names; `live`: its writer is running, and may yet name them."""
    old, young, foreign = recovery.strays(dataset, named, recovery.ORPHAN_GRACE_S if not live else float("inf"))
    findings = []
    if old:
        what = f"{len(old)} files of commits that never happened: {some(old)}"
        findings.append(Finding(Severity.REPAIRABLE, dataset.name, what, "repair sweeps them"))
    if young:
        what = f"{len(young)} files of commits under way, or that never happened: {some(young)}"
        findings.append(Finding(Severity.NOTE, dataset.name, what, "none: they are swept once they are old"))
    if foreign:
        what = f"not numem's: {some(foreign)}"
        findings.append(Finding(Severity.NOTE, dataset.name, what, "keep them elsewhere; they are left alone"))
    return findings
