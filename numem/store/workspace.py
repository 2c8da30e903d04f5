"""What lies under a memory's home and under the local directory of a node.

home/numem.json          made last at creation: format and random id of the memory
home/catalog/            LanceDB database of facts
home/object/             payload volumes of the home tier (elsewhere where configured)
home/ledger/  locks/     digests of acknowledged commits, and the catalog's lock (local homes)
local/spool/             staged nodes
local/locks/             writers of this node
local/nodes/<node>/ssd/  payload volumes of the node's own tier
local/probes/            object stores that passed the start-up probe, by a digest of their bucket
local/quarantine/        damaged manifests and spool files, kept for inspection
local/costs/             what loads and computations were measured to cost, a small file per scope (runtime/measured.py)
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock

from numem.errors import InputError, NotFoundError, ReadOnlyError, RecoveryError, SchemeError, StoreError
from numem.store import barrier
from numem.store.config import TierSpec
from numem.store.lance_errors import lance_errors
from numem.store.payload.objects import Objects
from numem.store.payload.probe import require_safe
from numem.store.urls import Location, locate, locate_archive, require_name

FORMAT = 1
HOME_TIER = "object"
# In place of a URL: bounded memory of this process.
HOST = "host"
_MARKER = "numem.json"
_CLAIM_S = 60.0


@dataclass(frozen=True, slots=True)
class Workspace:
    """Checked places of one memory, as one node sees it."""

    home: Location
    local: Path
    node: str
    tiers: Mapping[str, Location]
    home_tier: str
    specs: Mapping[str, TierSpec]
    archives: Mapping[str, str]

    @property
    def spool(self) -> Path:
        return self.local / "spool"

    @property
    def locks(self) -> Path:
        return self.local / "locks"

    @property
    def quarantine(self) -> Path:
        return self.local / "quarantine"

    @property
    def ledger(self) -> Path:
        return (self.home.path or self.local) / "ledger"

    @property
    def catalog_lock(self) -> Path | None:
        return None if self.home.path is None else self.home.path / "locks" / "catalog.lock"

    @property
    def hosts(self) -> dict[str, int]:
        """Tiers in RAM and their bytes."""
        return {name: spec.capacity or 0 for name, spec in self.specs.items() if spec.url == HOST}

    def node_of(self, tier: str) -> str:
        """ "" for a tier that every node sees, else this node."""
        shared = tier == self.home_tier or not self.tiers[tier].local
        return "" if shared else self.node


def plan(
    home: object,
    tiers: Mapping[str, "str | os.PathLike[str] | TierSpec"] | None,
    node: str,
    local: str | os.PathLike[str] | None,
) -> Workspace:
    """Check every name and URL; nothing is written or connected.

    Raises:
        SchemeError: a scheme Lance does not commit to, an unusable name, two places that contain each other.
    """
    require_name("node", node)
    where = locate("memory home", home)
    if local is not None:
        at = locate("local directory", local)
        if at.path is None:
            raise SchemeError(f"local directory {at.url!r}: spool and locks need a local directory")
        place = at.path
    else:
        place = where.path or _cache() / hashlib.sha256(where.url.encode()).hexdigest()
    if tiers is None:
        tiers = {HOME_TIER: where.child(HOME_TIER).url, "ssd": str(place / "nodes" / node / "ssd")}
    specs = {
        require_name("tier", name): spec if isinstance(spec, TierSpec) else TierSpec(spec)
        for name, spec in tiers.items()
    }
    for name, spec in specs.items():
        if spec.url == HOST and spec.capacity is None:
            raise InputError(f'tier {name!r}: memory of this process needs a capacity; TierSpec("host", capacity=...)')
        if spec.url == HOST and spec.write in ("back", "archive"):
            raise InputError(
                f"tier {name!r}: memory of this process does not last; write it through, selective or demand"
            )
    archives = {
        name: locate_archive(f"tier {name!r}", spec.url) for name, spec in specs.items() if spec.write == "archive"
    }
    named = {
        name: locate(f"tier {name!r}", spec.url)
        for name, spec in specs.items()
        if spec.url != HOST and name not in archives
    }
    if not named:
        raise SchemeError("tiers: at least one tier that lasts is needed")
    home_tier = HOME_TIER if HOME_TIER in named else next(iter(named))
    if specs[home_tier].write != "demand":
        raise SchemeError(f"tier {home_tier!r}: it is the home tier, which every publication writes; leave write out")
    apart = named | {name: Location(url, None) for name, url in archives.items()}
    _apart({"catalog": where.child("catalog"), **{f"tier {name!r}": at for name, at in apart.items()}})
    return Workspace(where, place, node, named, home_tier, specs, archives)


def prepare(work: Workspace, options: Mapping[str, str] | None, create: Callable[[], None]) -> None:
    """Make the memory where it is new: exactly one process creates, the others wait for it.

    Raises:
        BackendError: an object store without a guarantee that commits rest on; nothing was written there.
        RecoveryError: made by a newer numem, or a creation elsewhere that never ended.
    """
    places = [(work.home, options)]
    for name, at in work.tiers.items():
        places.append((at, options if work.specs[name].options is None else work.specs[name].options))
    require_safe(places, work.local / "probes")
    with lance_errors(f"memory {work.home.url}"):
        if work.home.path is None:
            _prepare_remote(work, options, create)
            return
        barrier.make_directory(work.home.path / "locks")
        marker = work.home.path / _MARKER
        if not marker.exists():
            with filelock.FileLock(work.home.path / "locks" / "create.lock", thread_local=False):
                if not marker.exists():
                    barrier.make_directory(work.home.path / "catalog")
                    create()
                    barrier.write_exclusive(marker, _new_marker(), marker.with_name(f".{_MARKER}.tmp"))
        _require_format(marker.read_bytes(), str(marker))


def require_made(work: Workspace, options: Mapping[str, str] | None) -> str:
    """The random id of a memory that was made before; nothing is written.

    Raises:
        NotFoundError: there is no memory.
        RecoveryError: made by a newer numem, or its marker is damaged.
    """
    what = f"{work.home.url}/{_MARKER}"
    try:
        data = (work.home.path / _MARKER).read_bytes() if work.home.path else Objects(work.home, options).read(_MARKER)
    except FileNotFoundError as error:
        raise NotFoundError(f"{what}: no memory there; open it without read_only to make one") from error
    _require_format(data, what)
    return str(json.loads(data).get("id", "0" * 32))


def require_writable(work: Workspace) -> None:
    """Refuse local places that this process cannot write to, before anything is done there.

    Raises:
        ReadOnlyError: names the first of them.
    """
    home = work.home.path
    homes = () if home is None else (home, home / "catalog", home / "locks", work.tiers[work.home_tier].path)
    for path in (*homes, work.local, work.ledger, work.spool, work.locks):
        while path is not None and not path.exists():
            path = path.parent
        if path is not None and not os.access(path, os.W_OK | os.X_OK):
            raise ReadOnlyError(
                f"{path}: this process cannot write there; open the memory with read_only=True, or give it write access"
            )


def owner(work: Workspace) -> str:
    """Make the local directories; returns the random id of this node's local state, made once."""
    for directory in (work.local, work.spool, work.locks, work.ledger):
        barrier.make_directory(directory)
    path = work.local / "owner"
    if not path.exists():
        barrier.write_exclusive(path, secrets.token_hex(16).encode(), work.local / f".owner.{secrets.token_hex(8)}")
    name = path.read_text().strip()
    if not name.isalnum():
        raise RecoveryError(f"{path}: not an owner id; remove the file, its volumes are then closed")
    return name


def _prepare_remote(work: Workspace, options: Mapping[str, str] | None, create: Callable[[], None]) -> None:
    objects = Objects(work.home, options)
    deadline = time.monotonic() + _CLAIM_S
    claimed = False
    while True:
        try:
            _require_format(objects.read(_MARKER), f"{work.home.url}/{_MARKER}")
            return
        except FileNotFoundError:
            pass
        if claimed or objects.create(f"{_MARKER}.claim", secrets.token_hex(16).encode()):
            claimed = True
            try:
                create()
            except StoreError:
                # What is there of it is taken up by whoever tries next.
                objects.delete([f"{_MARKER}.claim"])
                raise
            objects.create(_MARKER, _new_marker())
        elif time.monotonic() > deadline:
            raise RecoveryError(
                f"{work.home.url}: another process began to create this memory and never ended; "
                f"if none is running, delete {_MARKER}.claim and open it again"
            )
        else:
            time.sleep(0.2)


def _new_marker() -> bytes:
    return json.dumps({"format": FORMAT, "id": secrets.token_hex(16)}).encode()


def _require_format(data: bytes, what: str) -> None:
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise RecoveryError(f"{what}: not JSON; this is not a memory, or its marker is damaged") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else tree
        raise RecoveryError(f"{what}: format {found!r}, this numem reads {FORMAT}; upgrade numem")


def _cache() -> Path:
    root = os.environ.get("NUMEM_CACHE")
    if root:
        return Path(root) / "memories"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numem" / "memories"


def _apart(places: Mapping[str, Location]) -> None:
    """Volumes sweep what they do not know below themselves, so no place may lie inside another."""
    for what, place in places.items():
        for other, elsewhere in places.items():
            if what != other and f"{elsewhere.url}/".startswith(f"{place.url}/"):
                raise SchemeError(f"{other} at {elsewhere.url} lies inside {what} at {place.url}; keep them apart")
