"""Recovery at open.

A dataset whose newest manifest is missing, empty, torn or altered steps back to the last good version; the fragments of
acknowledged commits behind it are committed again from the ledger, so that nothing acknowledged is lost while its data
files are intact. A catalog table without any good version is made anew in the same way. Payload that was committed
without its catalog facts is adopted (`adoption.py`). Files of commits that never happened are swept after a grace.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lance
import xxhash
from lance.fragment import FragmentMetadata

from numem.errors import RecoveryError, StoreError
from numem.store import barrier
from numem.store.lance_errors import first_line, lance_errors
from numem.store.payload.dataset import Dataset
from numem.store.payload.ledger import Entry
from numem.store.payload.manifests import MAGIC, digest_file, manifest_path, manifest_versions
from numem.store.reports import Recovered

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
    acknowledged = max(entries, default=0)
    good, bad = assess(dataset, entries)
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


def assess(dataset: Dataset, entries: Mapping[int, Entry]) -> tuple[int, list[tuple[int, str]]]:
    """(newest version of a local dataset that can be trusted, 0 for none; newer ones and why not). Changes nothing."""
    root = dataset.location.path
    assert root is not None
    bad: list[tuple[int, str]] = []
    for version in manifest_versions(root):
        reason = manifest_fault(dataset, version, entries.get(version), stepping=bool(bad))
        if not reason:
            return version, bad
        bad.append((version, reason))
    return 0, bad


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


def manifest_fault(dataset: Dataset, version: int, entry: Entry | None, *, stepping: bool = False) -> str:
    """Why a version's manifest cannot be trusted; empty where it can.

    Args:
        stepping: an older version than the newest, whose files a clean-up may have removed.
    """
    root = dataset.location.path
    assert root is not None
    path = manifest_path(root, version)
    size = path.stat().st_size
    if not size:
        return "0 bytes"
    if entry is not None:
        if digest_file(path) != entry.manifest:
            return "bytes differ from those that were acknowledged"
        if not stepping:
            return ""
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


def sweep(dataset: Dataset, keep: set[str], grace_s: float | None = None) -> list[Recovered]:
    """Remove files below `data/` that no version names and that are older than a grace.

    Args:
        keep: data files that the catalog names, whatever the manifest says.
    """
    root = dataset.location.path
    if root is None or not (root / "data").is_dir():
        return []
    old, _, foreign = strays(dataset, {*dataset.fragments(), *keep}, grace_s)
    nbytes = sum(_remove(root / "data" / name) for name in old)
    report = []
    if old:
        detail = f"{len(old)} files of commits that never happened, {nbytes} bytes"
        report.append(Recovered("swept", dataset.name, detail))
    if foreign:
        report.append(Recovered("foreign", dataset.name, f"not numem's, left alone: {', '.join(foreign[:5])}"))
    return report


def strays(
    dataset: Dataset, named: Iterable[str], grace_s: float | None = None
) -> tuple[list[str], list[str], list[str]]:
    """What lies below `data/` of a local dataset and is not `named`: left over and older than the grace, left over or
    under way, and not numem's. In name order."""
    root = dataset.location.path
    if root is None or not (root / "data").is_dir():
        return [], [], []
    limit = time.time() - (ORPHAN_GRACE_S if grace_s is None else grace_s)
    stems = {file.removesuffix(".lance") for file in named}
    old: list[str] = []
    young: list[str] = []
    foreign: list[str] = []
    for entry in sorted(os.scandir(root / "data"), key=lambda entry: entry.name):
        if entry.name.removesuffix(".lance") in stems:
            continue
        with contextlib.suppress(FileNotFoundError):  # renamed or removed by its writer meanwhile
            if not _ours(entry):
                foreign.append(entry.name)
            else:
                (old if entry.stat().st_mtime <= limit else young).append(entry.name)
    return old, young, foreign


def _ours(entry: "os.DirEntry[str]") -> bool:
    """Whether a name in `data/` can be what a writer left: data files, folders of sidecars, Lance's temporaries."""
    if entry.is_dir(follow_symlinks=False):
        return all(item.name.endswith(".blob") or item.name.startswith(".tmp") for item in os.scandir(entry.path))
    return entry.is_file(follow_symlinks=False) and (entry.name.endswith(".lance") or entry.name.startswith(".tmp"))


def _remove(path: Path) -> int:
    if not path.is_dir():
        nbytes = path.stat().st_size
        path.unlink(missing_ok=True)
        return nbytes
    nbytes = sum(item.stat().st_size for item in path.iterdir())
    shutil.rmtree(path, ignore_errors=True)
    return nbytes


def sweep_spool(spool: Path, grace_s: float | None = None) -> list[Recovered]:
    """Remove half-written spool files that no live process can still be writing."""
    limit = time.time() - (ORPHAN_GRACE_S if grace_s is None else grace_s)
    late = []
    for path in spool.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # written to its end meanwhile
            if path.stat().st_mtime <= limit:
                late.append(path)
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
    present = dataset.fragments()
    wanted, lost = replayable(dataset, entries, good, present)
    report = [Recovered("lost", dataset.name, detail) for detail in lost.values()]
    fragments = {
        file: FragmentMetadata.from_json(json.dumps(tree))
        for file, entry in wanted.items()
        if entry is not None
        for tree in entry.fragments
        if tree["files"][0]["path"] == file
    }
    digests = {f: d for entry in wanted.values() if entry is not None for f, d in entry.files.items() if f in fragments}
    kept = [fragment.metadata for file, fragment in present.items() if file in wanted]
    if len(kept) < len(present):
        dataset.recommit([*kept, *fragments.values()], digests, whole=True)
    elif fragments:
        dataset.recommit(list(fragments.values()), digests)
    if fragments or len(kept) < len(present):
        report.append(
            Recovered("replayed", dataset.name, f"{len(fragments)} acknowledged commits after version {good}")
        )
    return report


def replayable(
    dataset: Dataset, entries: Mapping[int, Entry], good: int, present: Iterable[str]
) -> tuple[dict[str, Entry | None], dict[str, str]]:
    """What a dataset holds once its acknowledged commits after `good` are committed again: (data file -> its commit, None
    where the good version has it; data file -> why it is lost). Changes nothing.

    Args:
        present: data files of the good version.
    """
    wanted: dict[str, Entry | None] = dict.fromkeys(present)
    lost: dict[str, str] = {}
    for version in sorted(v for v in entries if v > good):
        entry = entries[version]
        trees = {str(tree["files"][0]["path"]): tree for tree in entry.fragments}
        bad = {file: _file_fault(dataset, tree, entry) for file, tree in trees.items() if file not in present}
        if entry.whole and not any(bad.values()):
            wanted = {file: None if file in present else entry for file in trees}
            lost.clear()  # what a compaction replaced is not missed
        elif not entry.whole or not all(before in entries for before in range(good + 1, version)):
            # A compaction that cannot be read is passed over where what it replaced is here: that says the same.
            wanted.update({file: entry for file, reason in bad.items() if not reason})
            lost.update({file: f"version {version}: {file}: {reason}" for file, reason in bad.items() if reason})
    return wanted, lost


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
