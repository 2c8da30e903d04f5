"""Adoption: payload that a writer committed without getting to its catalog facts, and facts that the catalog lost."""

import json
from collections.abc import Mapping

import xxhash

from numem.store.catalog.catalog import Catalog, Facts
from numem.store.catalog.nodes import node_from_document
from numem.store.payload.dataset import Dataset
from numem.store.payload.ledger import Entry
from numem.store.payload.pieces import NO_CONTENT
from numem.store.payload.tier import Tier
from numem.store.payload.volume import Volume, slots_of
from numem.store.publication.publish import placement_at
from numem.store.reports import Recovered


def adopt(
    tier: Tier, volume: Volume, catalog: Catalog, entries: Mapping[int, Entry], *, everything: bool = False
) -> list[Recovered]:
    """Enter payload into the catalog that a writer committed without getting to its catalog facts.

    In a transaction: the writer may have catalogued its last commit and ended since the catalog was opened.

    Args:
        entries: acknowledged commits of the volume.
        everything: look at commits that the catalog knows too, because some of its own files were damaged.
    """
    with catalog.transaction():
        return _adopt(tier, volume, catalog, entries, everything)


def altered(dataset: Dataset, entries: Mapping[int, Entry]) -> set[str]:
    """Data files of a local dataset that do not have the bytes that were acknowledged. Those that are gone are not."""
    root = dataset.location.path
    if root is None:
        return set()
    expected = {file: digest for entry in entries.values() for file, digest in entry.files.items()}
    paths = {file: root / "data" / file for file in expected}
    return {
        file
        for file, path in paths.items()
        if path.is_file() and xxhash.xxh3_128_hexdigest(path.read_bytes()) != expected[file]
    }


def _adopt(
    tier: Tier, volume: Volume, catalog: Catalog, entries: Mapping[int, Entry], everything: bool
) -> list[Recovered]:
    dataset = volume.dataset
    known = catalog.placements.files(tier.name, volume.name)
    files = [file for file in dataset.fragments() if everything or file not in known]
    wrong = altered(dataset, entries).intersection(files) if files else set()
    report = [Recovered("lost", f"{volume.label}/{file}", "bytes differ from those acknowledged") for file in wrong]
    files = [file for file in files if file not in wrong]
    commits = catalog.placements.commits(tier.name, volume.name)
    facts = Facts()
    described = catalog.identities() if files else {}
    for file, number, row in volume.rows(files):
        for slot in slots_of(file, number, row):
            placement = placement_at(slot, tier, volume, catalog.clock.next())
            # Whatever is known about a copy stays: it may have been quarantined since.
            # So does the mark of a commit, which says when it was catalogued.
            told = {p.copy for p in catalog.placements.current(slot.content)}
            if file not in known or (slot.content != NO_CONTENT and placement.copy not in told):
                facts.placements.append(placement)
        if row["kind"] == "facts":
            document = json.loads(row["facts"] or "{}")
            for scope, description in document.get("identities", {}).items():
                if bytes.fromhex(scope) not in described:
                    facts.identities.append((bytes.fromhex(scope), description))
            facts.nodes.extend(
                node
                for node in map(node_from_document, document.get("nodes", ()))
                # What was retired since stays so.
                if node.id not in catalog.nodes and catalog.nodes.retired(node.id) < _committed(dataset, file, commits)
            )
    if not any(p.content != NO_CONTENT for p in facts.placements) and not facts.nodes and not facts.identities:
        if any(file not in known for file in files):
            catalog.append(facts)
        return report
    catalog.append(facts)
    pieces = sum(placement.content != NO_CONTENT for placement in facts.placements)
    detail = f"{pieces} pieces and {len(facts.nodes)} nodes that were committed, but not catalogued"
    return [*report, Recovered("adopted", volume.label, detail)]


def _committed(dataset: Dataset, file: str, commits: Mapping[str, int]) -> int:
    """When a data file was committed, ns since the epoch; where nothing tells, later than anything."""
    root = dataset.location.path
    if file in commits or root is None:
        return commits.get(file, 1 << 63)
    return (root / "data" / file).stat().st_mtime_ns
