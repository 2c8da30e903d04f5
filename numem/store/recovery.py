"""Recovery at open.

A dataset whose newest manifest is missing, empty, torn or altered steps back to the last good version; the fragments of
acknowledged commits behind it are committed again from the ledger, so that nothing acknowledged is lost while its data
files are intact. A catalog table without any good version is made anew in the same way. Payload that was committed
without its catalog facts is adopted. Files of commits that never happened are swept after a grace.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lance
import xxhash
from lance.fragment import FragmentMetadata

from numem.errors import RecoveryError, StoreError
from numem.store import barrier
from numem.store.catalog import Catalog, Facts
from numem.store.dataset import MAGIC, Dataset, digest_file, manifest_path, manifest_versions
from numem.store.lance_errors import first_line, lance_errors
from numem.store.ledger import Entry
from numem.store.nodes import node_from_document
from numem.store.pieces import NO_CONTENT
from numem.store.publish import placement_at
from numem.store.reports import Recovered
from numem.store.tier import Tier
from numem.store.volume import Volume, slots_of

ORPHAN_GRACE_S = 3600.0


def recover_dataset(
    dataset: Dataset, entries: Mapping[int, Entry], quarantine: Path, *, rebuild: bool = False
) -> list[Recovered]:
    """Bring a local dataset to a state that is known to be good, before it is opened.

    Args:
        dataset: not yet open; the caller holds the right to write to it.
        entries: its acknowledged commits.
        quarantine: where bad manifests are moved.
        rebuild: where no version is good, make the dataset anew instead of giving up.

    Raises:
        RecoveryError: no version is good.
    """
    root = dataset.location.path
    if root is None:
        return []
    versions = manifest_versions(root)
    acknowledged = max(entries, default=0)
    bad: list[tuple[int, str]] = []
    good = 0
    for version in versions:
        reason = manifest_fault(dataset, version, entries.get(version))
        if not reason:
            good = version
            break
        bad.append((version, reason))
    if not good and rebuild:
        return _rebuild(dataset, entries, bad, quarantine)
    if not good:
        raise RecoveryError(
            f"{dataset.name}: no good manifest in {root / '_versions'}; restore the directory from a replica"
        )
    if not bad and good >= acknowledged:
        return []
    report = [
        Recovered("quarantined", dataset.name, f"manifest of version {version}: {reason}") for version, reason in bad
    ]
    for version, _ in bad:
        _set_aside(manifest_path(root, version), quarantine, f"{_flat(dataset.name)}.{version}.manifest")
    barrier.sync_directory(root / "_versions")
    report += _step_forward(dataset, entries, good, max([acknowledged, *(version for version, _ in bad)]))
    return report


def _rebuild(
    dataset: Dataset, entries: Mapping[int, Entry], bad: list[tuple[int, str]], quarantine: Path
) -> list[Recovered]:
    """Make a dataset anew that has no good version, and commit again what the ledger names and is intact.

    Its data files stay where they are meanwhile: a crash in the middle of it loses none of them.
    """
    root = dataset.location.path
    assert root is not None
    barrier.make_directory(root.parent)
    found = root.exists() or root.is_symlink()
    if found and (root.is_symlink() or not root.is_dir()):
        _set_aside(root, quarantine, _flat(dataset.name))
    elif found:
        for path in sorted(root.iterdir()):
            if path.name != "data":
                _set_aside(path, quarantine, f"{_flat(dataset.name)}.{path.name}")
    why = f"no good manifest; version {bad[0][0]}: {bad[0][1]}" if bad else "no manifest" if found else "directory gone"
    report = [Recovered("rebuilt", dataset.name, f"{why}; made anew, from the ledger and the volumes where they know")]
    dataset.create_new()
    # Version numbers go on where they were: those that were given out are in the ledger, with other manifests.
    replayed = _step_forward(dataset, entries, dataset.version, max([0, *entries, *(v for v, _ in bad)]))
    lost = [entry for entry in replayed if entry.kind == "lost"]
    if len(lost) > 1:
        detail = f"{len(lost)} acknowledged data files; the first: {lost[0].detail}"
        replayed = [Recovered("lost", dataset.name, detail), *(entry for entry in replayed if entry.kind != "lost")]
    return report + replayed


def suspicious(dataset: Dataset, entries: Mapping[int, Entry]) -> bool:
    """Whether the newest manifest is not one that was acknowledged; cheap, and changes nothing."""
    root = dataset.location.path
    assert root is not None
    newest = next(iter(manifest_versions(root)), 0)
    entry = entries.get(newest)
    return entry is None or newest < max(entries) or digest_file(manifest_path(root, newest)) != entry.manifest


def manifest_fault(dataset: Dataset, version: int, entry: Entry | None) -> str:
    """Why a version's manifest cannot be trusted; empty where it can."""
    root = dataset.location.path
    assert root is not None
    path = manifest_path(root, version)
    size = path.stat().st_size
    if not size:
        return "0 bytes"
    if entry is not None:
        return "" if digest_file(path) == entry.manifest else "bytes differ from those that were acknowledged"
    with open(path, "rb") as file:
        file.seek(-min(size, len(MAGIC)), os.SEEK_END)
        if file.read() != MAGIC:
            return "does not end like a manifest"
    try:
        with lance_errors(dataset.name):
            opened = lance.dataset(str(root), version=version)
            if opened.version != version or opened.schema.names != dataset.schema.names:
                return f"reads as version {opened.version} with columns {opened.schema.names}"
            opened.count_rows()
            missing = [
                file.path
                for fragment in opened.get_fragments()
                for file in fragment.metadata.files
                if not (root / "data" / file.path).is_file()
            ]
    except StoreError as error:
        return first_line(error)
    return f"names a data file that is not there: {missing[0]}" if missing else ""


def adopt(tier: Tier, volume: Volume, catalog: Catalog, *, everything: bool = False) -> list[Recovered]:
    """Enter payload into the catalog that a writer committed without getting to its catalog facts.

    In a transaction: the writer may have catalogued its last commit and ended since the catalog was opened.

    Args:
        everything: look at commits that the catalog knows too, because some of its own files were damaged.
    """
    with catalog.transaction():
        return _adopt(tier, volume, catalog, everything)


def _adopt(tier: Tier, volume: Volume, catalog: Catalog, everything: bool) -> list[Recovered]:
    dataset = volume.dataset
    known = catalog.placements.files(tier.name, volume.name)
    files = [file for file in dataset.fragments() if everything or file not in known]
    facts = Facts()
    described = catalog.identities() if files else {}
    for file, number, row in volume.rows(files):
        for slot in slots_of(file, number, row):
            placement = placement_at(slot, tier, volume, catalog.clock.next())
            # Whatever is known about a copy stays: it may have been quarantined since.
            if file not in known or placement.copy not in {p.copy for p in catalog.placements.current(slot.content)}:
                facts.placements.append(placement)
        if row["kind"] == "facts":
            document = json.loads(row["facts"] or "{}")
            for scope, description in document.get("identities", {}).items():
                if bytes.fromhex(scope) not in described:
                    facts.identities.append((bytes.fromhex(scope), description))
            facts.nodes.extend(
                node for node in map(node_from_document, document.get("nodes", ())) if node.id not in catalog.nodes
            )
    if not any(p.content != NO_CONTENT for p in facts.placements) and not facts.nodes and not facts.identities:
        if any(file not in known for file in files):
            catalog.append(facts)
        return []
    catalog.append(facts)
    pieces = sum(placement.content != NO_CONTENT for placement in facts.placements)
    detail = f"{pieces} pieces and {len(facts.nodes)} nodes that were committed, but not catalogued"
    return [Recovered("adopted", volume.label, detail)]


def sweep(dataset: Dataset, keep: set[str], grace_s: float | None = None) -> list[Recovered]:
    """Remove files below `data/` that no version names and that are older than a grace.

    Args:
        keep: data files that the catalog names, whatever the manifest says.
    """
    root = dataset.location.path
    if root is None or not (root / "data").is_dir():
        return []
    limit = time.time() - (ORPHAN_GRACE_S if grace_s is None else grace_s)
    entries = list(os.scandir(root / "data"))
    named = {file.removesuffix(".lance") for file in (*dataset.fragments(), *keep)}
    removed, nbytes, foreign = 0, 0, []
    for entry in entries:
        if entry.name.removesuffix(".lance") in named:
            continue
        if not _ours(entry):
            foreign.append(entry.name)
        elif entry.stat().st_mtime <= limit:
            nbytes += _remove(entry)
            removed += 1
    report = []
    if removed:
        detail = f"{removed} files of commits that never happened, {nbytes} bytes"
        report.append(Recovered("swept", dataset.name, detail))
    if foreign:
        report.append(Recovered("foreign", dataset.name, f"not numem's, left alone: {', '.join(sorted(foreign)[:5])}"))
    return report


def _ours(entry: "os.DirEntry[str]") -> bool:
    """Whether a name in `data/` can be what a writer left: data files, folders of sidecars, Lance's temporaries."""
    if entry.is_dir(follow_symlinks=False):
        return all(item.name.endswith(".blob") or item.name.startswith(".tmp") for item in os.scandir(entry.path))
    return entry.is_file(follow_symlinks=False) and (entry.name.endswith(".lance") or entry.name.startswith(".tmp"))


def _remove(entry: "os.DirEntry[str]") -> int:
    if not entry.is_dir(follow_symlinks=False):
        nbytes = entry.stat().st_size
        Path(entry.path).unlink(missing_ok=True)
        return nbytes
    nbytes = sum(item.stat().st_size for item in os.scandir(entry.path))
    shutil.rmtree(entry.path, ignore_errors=True)
    return nbytes


def sweep_spool(spool: Path, grace_s: float | None = None) -> list[Recovered]:
    """Remove half-written spool files that no live process can still be writing."""
    limit = time.time() - (ORPHAN_GRACE_S if grace_s is None else grace_s)
    late = [path for path in spool.glob(".*.tmp") if path.stat().st_mtime <= limit]
    for path in late:
        path.unlink(missing_ok=True)
    return [Recovered("swept", "spool", f"{len(late)} half-written files")] if late else []


def _step_forward(dataset: Dataset, entries: Mapping[int, Entry], good: int, burnt: int) -> list[Recovered]:
    """Commit again what was acknowledged after `good`, under version numbers that were never used."""
    dataset.open()
    if dataset.version != good:
        raise RecoveryError(f"{dataset.name}: opens at version {dataset.version}, not at the good version {good}")
    while dataset.version < burnt:
        with lance_errors(f"recover {dataset.name}"):
            dataset.lance.update_config({"numem.recovered": str(burnt)})
        dataset.acknowledge([], {})
    present = set(dataset.fragments())
    fragments: dict[str, Any] = {}
    digests: dict[str, str] = {}
    report = []
    for version in sorted(v for v in entries if v > good):
        for tree in entries[version].fragments:
            file = str(tree["files"][0]["path"])
            if file in present or file in fragments:
                continue
            reason = _file_fault(dataset, tree, entries[version])
            if reason:
                report.append(Recovered("lost", dataset.name, f"version {version}: {file}: {reason}"))
            else:
                fragments[file] = FragmentMetadata.from_json(json.dumps(tree))
                digests.update({k: v for k, v in entries[version].files.items() if k == file})
    if fragments:
        dataset.recommit(list(fragments.values()), digests)
        report.append(
            Recovered("replayed", dataset.name, f"{len(fragments)} acknowledged commits after version {good}")
        )
    return report


def _file_fault(dataset: Dataset, tree: Mapping[str, Any], entry: Entry) -> str:
    root = dataset.location.path
    assert root is not None
    for part in tree["files"]:
        path = root / "data" / part["path"]
        try:
            data = path.read_bytes()
        except OSError as error:
            return f"{error.strerror}"
        if part["file_size_bytes"] and len(data) != part["file_size_bytes"]:
            return f"has {len(data)} of {part['file_size_bytes']} bytes"
        expected = entry.files.get(path.name)
        if expected is not None and xxhash.xxh3_128_hexdigest(data) != expected:
            return "bytes differ from those that were acknowledged"
        if data[-4:] != MAGIC:
            return "does not end like a data file"
    return ""


def _set_aside(path: Path, quarantine: Path, name: str) -> None:
    quarantine.mkdir(parents=True, exist_ok=True)
    target = quarantine / f"{name}.{time.time_ns()}"
    try:
        os.replace(path, target)
    except OSError:
        # Another file system: copy, then remove.
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target, symlinks=True)
            shutil.rmtree(path)
        else:
            shutil.copyfile(path, target)
            path.unlink()


def _flat(name: str) -> str:
    return name.replace("/", "-")
