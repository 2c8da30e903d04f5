"""`numem doctor`: what is wrong with a memory, said without changing it; and the repair of what can be mended.

Diagnosis works where the memory cannot be opened. It reads manifests, data files of the catalog, the facts rows of volumes
and the lengths of sidecars, never payload: whether the bytes of a piece are right is what `verify` and `scrub` find out.
"""

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from os import PathLike

from numem.errors import NotFoundError, StoreError
from numem.store import workspace
from numem.store.catalog.facts import ORDER
from numem.store.config import TierSpec
from numem.store.lance_errors import first_line
from numem.store.payload.ledger import Ledger
from numem.store.payload.manifests import manifest_versions
from numem.store.payload.objects import Objects
from numem.store.payload.tier import Tier, TierConfig, WriterLock
from numem.store.publication.capture import PublicationLimits
from numem.store.publication.spool import Spool
from numem.store.reading.lookups import KIND as LOOKUPS
from numem.store.reading.lookups import added
from numem.store.session import Session
from numem.store.upkeep.archive import KIND as ARCHIVED
from numem.store.upkeep.catalog_check import CatalogCheck
from numem.store.upkeep.findings import DoctorReport, Finding, RepairReport, Severity, some
from numem.store.upkeep.mend import Mender, step_back
from numem.store.upkeep.recovery import ORPHAN_GRACE_S
from numem.store.upkeep.unread import described, unread
from numem.store.upkeep.volume_check import VolumeCheck
from numem.store.workspace import Workspace

# What is looked at may change meanwhile: a volume is removed, a table compacted. Then it is looked at again.
_ATTEMPTS = 4
# Names that the spool gives its files.
_STAGED = re.compile(r"[0-9a-f]{64}\.stage")

__all__ = ["DoctorReport", "Finding", "RepairReport", "Severity", "diagnose", "repair"]


def diagnose(
    home: str | PathLike[str],
    *,
    tiers: Mapping[str, str | PathLike[str] | TierSpec] | None = None,
    node: str = "local",
    local: str | PathLike[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DoctorReport:
    """Everything that is wrong with a memory, as one node sees it. Nothing is changed.

    Args:
        home, tiers, node, local, storage_options: see `Memory`.

    Raises:
        NotFoundError: there is no memory.
        SchemeError: a place or name that no memory has.
        StoreError: an object store does not answer.
    """
    work = workspace.plan(home, tiers, node, local)
    for _ in range(_ATTEMPTS - 1):
        before = _versions(work)
        report = _diagnose(work, storage_options)
        if report.ok or _versions(work) == before:
            return report
    return _diagnose(work, storage_options)


def _diagnose(work: Workspace, storage_options: Mapping[str, str] | None) -> DoctorReport:
    started = time.perf_counter()
    findings = _marker(work, storage_options)
    ledger = Ledger(work.ledger, lambda: "")
    entries = ledger.read()
    catalog = CatalogCheck(work, storage_options, entries)
    findings += catalog.run()
    volumes = 0
    lacking: dict[bytes, str] = {}
    archived = {
        volume for row in catalog.rows("records") if row["kind"] == ARCHIVED and (volume := _archived(row["body"]))
    }
    for tier in _tiers(work, storage_options):
        check = VolumeCheck(tier, catalog, entries, lambda number: running(work, number), archived)
        findings += check.run()
        volumes += check.volumes
        lacking.update(check.lacking)
    findings += catalog.cross_check(lacking, archived)
    findings += _unread(catalog)
    staged, found = _spool(work)
    findings += found
    for name, count in ledger.faults().items():
        what = f"{count} lines are torn or damaged, and are not used"
        findings.append(Finding(Severity.NOTE, f"ledger/{name}", what, "none: a crash leaves such lines"))
    return DoctorReport(
        tuple(findings),
        len(catalog.tables),
        volumes,
        len(catalog.nodes),
        catalog.copies,
        staged,
        (time.perf_counter() - started) * 1e3,
    )


def repair(
    home: str | PathLike[str],
    *,
    tiers: Mapping[str, str | PathLike[str] | TierSpec] | None = None,
    node: str = "local",
    local: str | PathLike[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> RepairReport:
    """Mend what can be mended, and say what cannot.

    The memory is opened (which steps back over bad manifests and commits again what the ledger knows), facts that volumes
    hold are taken into the catalog, its damaged data files are replaced, orphans are swept, and every copy is scrubbed.
    Whatever is set aside stays in the quarantine directory.

    Args:
        home, tiers, node, local, storage_options: see `Memory`.

    Raises:
        LeaseHeldError: another process maintains this memory.
        NotFoundError, StoreError: it cannot be opened; nothing was changed but what opening does.
    """
    before = diagnose(home, tiers=tiers, node=node, local=local, storage_options=storage_options)
    work = workspace.plan(home, tiers, node, local)
    done = step_back(work, storage_options)
    lost = [f"{entry.dataset}: {entry.detail}" for entry in done]
    parts = Session(work, storage_options, PublicationLimits())
    try:
        mender = Mender(parts)
        mender.run()
    finally:
        parts.close()
    after = diagnose(home, tiers=tiers, node=node, local=local, storage_options=storage_options)
    return RepairReport(before, after, (*done, *mender.done), (*lost, *mender.lost))


def _unread(catalog: CatalogCheck) -> list[Finding]:
    """State that was written and never found."""
    written = ((row["subject"], json.loads(row["body"])) for row in catalog.rows("records") if row["kind"] == LOOKUPS)
    scopes = Counter(row["scope"] for row in catalog.nodes.values())
    alarms = unread(scopes, added(written), described(catalog.rows("identities")))
    return [Finding(Severity.NOTE, f"scope {one.scope.hex()[:16]}", one.what, one.remedy) for one in alarms]


def running(work: Workspace, number: int) -> bool:
    """Whether a process of this node holds a writer's number."""
    try:
        descriptor = os.open(work.locks / f"writer-{number:03d}.lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _versions(work: Workspace) -> list[int]:
    """Newest version of every table of a local catalog: moves whenever a fact is added."""
    if work.home.path is None:
        return []
    roots = [work.home.path / "catalog" / f"{name}.lance" for name in ORDER]
    return [max(manifest_versions(root), default=0) for root in roots]


def _marker(work: Workspace, options: Mapping[str, str] | None) -> list[Finding]:
    place = f"{work.home.url}/numem.json"
    try:
        workspace.require_made(work, options)
    except NotFoundError:
        if work.home.path is not None and (work.home.path / "catalog").is_dir():
            remedy = "open the memory: a new marker is made; archives of it are known by the old one's id"
            return [Finding(Severity.REPAIRABLE, place, "missing, though there is a catalog", remedy)]
        if work.home.path is None and any(Objects(work.home, options).listing("catalog")):
            remedy = "open the memory: a new marker is made; archives of it are known by the old one's id"
            return [Finding(Severity.REPAIRABLE, place, "missing, though there is a catalog", remedy)]
        raise NotFoundError(f"{place}: no memory there; name the home of one") from None
    except StoreError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return [Finding(Severity.LOSS, place, first_line(error), "restore it from a copy, or upgrade numem")]
    return []


def _tiers(work: Workspace, options: Mapping[str, str] | None) -> list[Tier]:
    owner = work.local / "owner"
    name = owner.read_text().strip() if owner.exists() else ""
    return [
        Tier(
            TierConfig(tier, place, work.node_of(tier), name, work.specs[tier]),
            work.node,
            None,
            options if work.specs[tier].options is None else work.specs[tier].options,
            WriterLock(work.locks),
        )
        for tier, place in work.tiers.items()
    ]


def _archived(body: str) -> str:
    """The volume that a record says is in an archive, "" where it says something else."""
    try:
        tree = json.loads(body)
    except ValueError:
        return ""
    volume = tree.get("volume") if isinstance(tree, dict) else None
    return volume if isinstance(volume, str) else ""


def _spool(work: Workspace) -> tuple[int, list[Finding]]:
    """How many staged nodes are whole, and what else lies there."""
    spool = Spool(work.spool)
    findings = []
    whole = 0
    for node in spool.ids():
        try:
            spool.open(node)
            whole += 1
        except StoreError as error:
            remedy = "repair sets it aside; stage the node again"
            findings.append(Finding(Severity.REPAIRABLE, f"spool/{node.hex()}", first_line(error), remedy))
    if not work.spool.is_dir():
        return whole, findings
    late = time.time() - ORPHAN_GRACE_S
    old: list[str] = []
    young: list[str] = []
    foreign: list[str] = []
    for entry in list(os.scandir(work.spool)):
        try:
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                (old if entry.stat().st_mtime <= late else young).append(entry.name)
            elif not _STAGED.fullmatch(entry.name):
                foreign.append(entry.name)
        except FileNotFoundError:
            continue  # written to its end meanwhile
    for names, severity, what, remedy in (
        (old, Severity.REPAIRABLE, "half-written files", "open the memory, or repair: they are swept"),
        (young, Severity.NOTE, "files under way or half-written", "none: they are swept once they are old"),
        (foreign, Severity.NOTE, "files that are not numem's", "keep them elsewhere; they are left alone"),
    ):
        if names:
            findings.append(Finding(severity, "spool", f"{len(names)} {what}: {some(names)}", remedy))
    return whole, findings
