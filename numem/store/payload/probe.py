"""Whether an object store keeps what commits rest on, asked of the store itself and not of its name.

Lance commits by creating the next manifest only if nobody did, and numem claims volumes, memories and leases in the
same way. A store that takes the condition and ignores it answers every one of several rivals with success; the later
write then replaces the earlier one, and acknowledged rows are gone without an error.
"""

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from numem.errors import BackendError, StoreError, UnknownOutcomeError
from numem.store import barrier
from numem.store.payload.objects import Objects
from numem.store.urls import Location

REMEMBER_S = 24 * 3600.0
# Two at a time on each name: SeaweedFS makes a third rival wait for whole seconds (measured: 8 on one name, 4 to 11 s).
_PAIRS = 4
_ROUNDS = 4
_REMEDY = (
    "use a store that enforces conditional writes (Amazon S3 in a bucket that never had versioning, Google Cloud "
    "Storage, Azure Blob Storage, SeaweedFS 4.17 or newer)"
)


def require_safe(places: Iterable[tuple[Location, Mapping[str, str] | None]], memory: Path) -> None:
    """Probe every bucket among some places once; one that passed in the last `REMEMBER_S` is not asked again.

    Args:
        places: location and Lance storage options; local ones pass.
        memory: directory that remembers which buckets passed; made where needed.

    Raises:
        BackendError: a bucket lacks a guarantee. Nothing but the probe's own objects was written, and those are gone.
        StoreError: a bucket cannot be reached or refuses access.
        InputError: storage options that cannot work, see `require_options`.
    """
    asked = set()
    for location, options in places:
        if location.local:
            continue
        key = _bucket(location, options)
        if key in asked:
            continue
        asked.add(key)
        objects = Objects(location, options)
        passed = memory / hashlib.sha256(key.encode()).hexdigest()
        if not _fresh(passed):
            probe(objects)
            barrier.make_directory(memory)
            passed.touch()


def probe(objects: Objects) -> None:
    """Create twice, replace twice, race in pairs; on random names below the location, removed again.

    Raises:
        BackendError, StoreError: see `require_safe`.
    """
    root = f"probe-{secrets.token_hex(8)}"
    names = [f"{root}/{number}" for number in range(_PAIRS * _ROUNDS + 1)]
    try:
        _in_turn(objects, names[0])
        _at_once(objects, names[1:])
    except UnknownOutcomeError as error:
        names.clear()  # nobody answers: asking for their removal would take as long again
        raise StoreError(
            f"no sure answer to the start-up probe; check bucket, endpoint, region and credentials ({error})"
        ) from error
    finally:
        try:
            objects.delete(names)
        except StoreError:
            pass  # what is left is a few bytes under a name that nothing else uses


def _in_turn(objects: Objects, name: str) -> None:
    if not objects.create(name, b"first"):
        raise _refusal(objects, "create-only writes are refused even for a new name")
    if objects.create(name, b"second"):
        raise _refusal(objects, "create-only writes (If-None-Match) are ignored: the same object was created twice")
    found = objects.fetch(name)
    if found.data != b"first" or not found.write or not found.mark:
        raise _refusal(objects, "an object did not read back with its bytes, metadata and entity tag")
    if objects.replace(name, b"third", found.mark) is None:
        raise _refusal(objects, "conditional updates (If-Match) are refused even for an unchanged object")
    if objects.replace(name, b"fourth", found.mark) is not None:
        raise _refusal(objects, "conditional updates (If-Match) are ignored: a changed object was replaced")


def _at_once(objects: Objects, names: list[str]) -> None:
    with ThreadPoolExecutor(2 * _PAIRS) as pool:
        won = list(
            pool.map(objects.create, [n for name in names for n in (name, name)], [b"one", b"other"] * len(names))
        )
    for winners in map(sum, zip(won[::2], won[1::2], strict=True)):
        if winners != 1:
            raise _refusal(objects, f"create-only writes do not exclude each other: {winners} of two rivals won")


def _refusal(objects: Objects, what: str) -> BackendError:
    return BackendError(
        f"{objects.location.url}: {what}; concurrent commits would overwrite each other and lose acknowledged rows, "
        f"so nothing is stored there; {_REMEDY}"
    )


def _bucket(location: Location, options: Mapping[str, str] | None) -> str:
    parts = urlsplit(location.url)
    given = {name.lower(): value for name, value in (options or {}).items()}
    endpoint = next((given[name] for name in ("aws_endpoint", "endpoint", "aws_endpoint_url") if name in given), "")
    return f"{parts.scheme}://{parts.netloc} {endpoint}"


def _fresh(passed: Path) -> bool:
    try:
        age = time.time() - passed.stat().st_mtime
    except FileNotFoundError:
        return False
    # A clock that went backwards says nothing about the age.
    return 0 <= age < REMEMBER_S
