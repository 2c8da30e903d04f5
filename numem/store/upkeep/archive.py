"""Archives: whole closed volumes of the home tier, copied to any fsspec filesystem.

    <url>/<id of the memory>/<home tier>/<volume>.lance/data/...                  first
                                                       /_versions/<newest>.manifest   last

A closed volume never changes, so its copy is a set of immutable files: each is created whole or not at all, never
overwritten by other bytes, read back and compared by BLAKE3, and one record in the catalog then says that the volume is there. A copy that a crash cut short has no
record: the next attempt keeps the files that are equal and makes the others anew. Nothing is ever committed through
fsspec, and nothing is appended to an archived volume. Single pieces are read by ranges at the coordinates that the
catalog holds for the home tier, whatever became of the copy there.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from numem.errors import IntegrityError, NotFoundError, StoreError
from numem.store import barrier
from numem.store.catalog.catalog import Catalog, Facts
from numem.store.catalog.facts import Placement, Record, State
from numem.store.lance_errors import first_line
from numem.store.payload.objects import Objects, plan_requests
from numem.store.payload.shelf import NOBODY, VOLUME, Shelf
from numem.store.payload.tier import Tier

KIND = "archive"
_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class ArchivedVolume:
    """A volume in an archive: its bytes, and path below the volume -> (size, BLAKE3-256 in hex) of each file."""

    volume: str
    nbytes: int
    files: Mapping[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """Outcome of archiving.

    Attributes:
        volumes: volumes that were copied now.
        held: volumes that the archive had already.
        bytes: bytes of the files of `volumes`.
        failed: volume -> why it is not archived; nothing is recorded of it.
        ms: wall time.
    """

    volumes: tuple[str, ...] = ()
    held: int = 0
    bytes: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    ms: float = 0.0


class Archive:
    """One archive of a memory.

    Args:
        url: checked by `urls.locate_archive`.
        options: fsspec options, or Lance's storage options for S3.
        identity: id of the memory, so that several share an archive.
    """

    def __init__(
        self, name: str, url: str, options: Mapping[str, str] | None, catalog: Catalog, home: str, identity: str
    ) -> None:
        self.name = name
        self._url = url
        self._options = dict(options or {})
        self._catalog = catalog
        self._scheme = url.split(":", 1)[0] if "://" in url else "file"
        place = url if self._scheme == "file" else url.split("://", 1)[1]
        self._root = f"{'/' if self._scheme == 'memory' else ''}{place.rstrip('/')}/{identity}/{home}"
        self._opened: Any = None
        self._volumes: dict[str, ArchivedVolume] = {}
        self._taken = (0, 0)

    def holds(self, volume: str) -> bool:
        """Whether a volume is in the archive, complete, as far as `refresh` knows."""
        return volume in self._volumes

    def refresh(self) -> None:
        """Take up volumes that this or another process archived since."""
        rows = self._catalog.rows("records")
        taken = (len(rows), rows[-1]["sequence"] if rows else 0)
        if taken == self._taken:
            return
        self._taken = taken
        self._volumes = {
            volume.volume: volume
            for record in self._catalog.records(KIND)
            if record.body.get("archive") == self.name and (volume := _parsed(record)) is not None
        }

    def volumes(self) -> tuple[ArchivedVolume, ...]:
        """What the archive holds, in name order."""
        self.refresh()
        return tuple(self._volumes[name] for name in sorted(self._volumes))

    def copy(self, tier: Tier, volumes: Sequence[str]) -> ArchiveReport:
        """Copy closed volumes of the home tier that are not here yet, or of which copies here were found bad."""
        started = time.perf_counter()
        self.refresh()
        bad = self._bad()
        done: dict[str, int] = {}
        failed: dict[str, str] = {}
        held = 0
        errors: tuple[type[Exception], ...] = (StoreError, *self._errors())
        for name in volumes:
            if name in self._volumes and name not in bad:
                held += 1
                continue
            try:
                done[name] = self._copy(tier, name, bad.get(name, []))
            except errors as error:
                failed[name] = first_line(error)
        self.refresh()
        return ArchiveReport(tuple(done), held, sum(done.values()), failed, (time.perf_counter() - started) * 1e3)

    def leftovers(self) -> list[str]:
        """Copies in the archive that were cut short, or why that cannot be told."""
        self.refresh()
        try:
            names = [str(path).rsplit("/", 1)[-1] for path in self._filesystem().ls(self._root, detail=False)]
        except self._errors() as error:
            return [] if isinstance(error, FileNotFoundError) else [f"* ({first_line(error)})"]
        return [name for name in names if name.removesuffix(".lance") not in self._volumes]

    def read_ranges(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Byte ranges of one archived sidecar, neighbours joined; FileNotFoundError where it is gone."""
        starts, ends, places = plan_requests(offsets, lengths)
        try:
            blocks = self._filesystem().cat_ranges([f"{self._root}/{name}"] * len(starts), starts, ends)
        except FileNotFoundError:
            raise
        except self._errors() as error:
            raise self._failed(f"read {name}", error) from error
        for block in blocks:
            if isinstance(block, FileNotFoundError):
                raise FileNotFoundError(f"{self._url}: {name}")
            if isinstance(block, Exception):
                raise self._failed(f"read {name}", block)
        return [
            memoryview(blocks[number])[offset - starts[number] :][:length]
            for number, offset, length in zip(places, offsets, lengths, strict=True)
        ]

    def restore(self, tier: Tier, volume: str) -> int:
        """Bring a volume back to the home tier, file by file, the manifest last; returns its bytes.

        Its copies that were found bad are ready again. What was evicted on purpose is not brought back: a volume that
        holds such pieces is refused, and `scrub` makes new copies of the others.

        Raises:
            NotFoundError: it is not in this archive.
            StoreError: it holds pieces that were evicted, or was removed.
            IntegrityError: a file here is not what was recorded; nothing became visible.
        """
        self.refresh()
        held = self._volumes.get(volume)
        if held is None:
            raise NotFoundError(f"archive {self.name}: no volume {volume}; it has {len(self._volumes)}")
        lost = self._lost(tier, volume)
        root = tier.config.location.path
        for file in _manifests_last(held.files):
            blocks = self._checked(volume, file, *held.files[file])
            if root is None:
                assert tier.objects is not None
                tier.objects.create(f"{volume}.lance/{file}", b"".join(blocks))
            else:
                _write_local(root / f"{volume}.lance" / file, blocks)
        # Without an owner: no writer goes on with it.
        Shelf(tier.config.location, tier.objects, NOBODY).mark(volume, volume.rsplit(".", 2)[0])
        clock = self._catalog.clock
        self._catalog.append(Facts(placements=[place.turned(clock.next(), State.READY, "") for place in lost]))
        return held.nbytes

    def _lost(self, tier: Tier, volume: str) -> list[Placement]:
        """Copies of a volume at home that were found bad; refuses where some were evicted."""
        placements = self._catalog.placements
        mine = [
            place
            for content in placements.contents()
            for place in placements.current(content)
            if place.tier == tier.name and place.volume == volume
        ]
        if tier.shelf.removed(volume) or any(place.state is State.EVICTED for place in mine):
            raise StoreError(f"archive {self.name}: {volume} holds pieces that were let go of; scrub makes new copies")
        return [place for place in mine if place.state is State.QUARANTINED]

    def _copy(self, tier: Tier, volume: str, bad: Sequence[Placement]) -> int:
        tier.volume(volume).dataset.open()  # what Lance itself cannot open is not worth keeping
        source = _Source(tier, volume)
        written: dict[str, tuple[int, str]] = {}
        for file in _manifests_last(source.sizes):
            path = f"{self._root}/{volume}.lance/{file}"
            written[file] = (source.sizes[file], self._store(source, file, path))
            barrier.reached("archived file", path)
        for file, (size, digest) in written.items():
            for _ in self._checked(volume, file, size, digest):
                pass
        nbytes = sum(size for size, _ in written.values())
        clock = self._catalog.clock
        body = {
            "archive": self.name,
            "tier": tier.name,
            "volume": volume,
            "bytes": nbytes,
            "files": {file: list(entry) for file, entry in written.items()},
        }
        again = [place.turned(clock.next(), State.READY, "") for place in bad]
        self._catalog.append(Facts(records=[Record(clock.next(), KIND, volume.encode(), body)], placements=again))
        return nbytes

    def _store(self, source: "_Source", file: str, path: str) -> str:
        """Create a file unless an equal one is there; returns the digest of the source."""
        filesystem = self._filesystem()
        if filesystem.exists(path):
            digest = _digest(source.blocks(file))
            if (
                filesystem.size(path) == source.sizes[file]
                and _digest(self._blocks(path, source.sizes[file])) == digest
            ):
                return digest
            filesystem.rm_file(path)
        hasher = blake3()
        if self._scheme == "file":
            _write_local(Path(path), _hashed(source.blocks(file), hasher))
            return str(hasher.hexdigest())
        try:
            filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            with filesystem.open(path, "xb") as target:
                for block in _hashed(source.blocks(file), hasher):
                    target.write(block)
        except OSError as error:
            # Another process was first (s3fs reports a refused create as EINVAL): the comparison that follows decides.
            if not isinstance(error, FileExistsError) and error.errno != errno.EINVAL:
                raise
            return _digest(source.blocks(file))
        return str(hasher.hexdigest())

    def _checked(self, volume: str, file: str, size: int, digest: str) -> Iterator[bytes]:
        """The blocks of an archived file; IntegrityError at the end where it is not what was recorded."""
        hasher = blake3()
        yield from _hashed(self._blocks(f"{self._root}/{volume}.lance/{file}", size), hasher)
        if hasher.hexdigest() != digest:
            raise IntegrityError(f"archive {self.name}: {volume}/{file} is not what was written; archive it again")

    def _blocks(self, path: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, _BLOCK):
            block: bytes = self._filesystem().cat_file(path, start=start, end=min(size, start + _BLOCK))
            yield block

    def _bad(self) -> dict[str, list[Placement]]:
        """Volume -> copies in this archive that were found bad."""
        found: dict[str, list[Placement]] = {}
        placements = self._catalog.placements
        for content in placements.contents():
            for place in placements.current(content):
                if place.tier == self.name and place.state is State.QUARANTINED:
                    found.setdefault(place.volume, []).append(place)
        return found

    def _filesystem(self) -> Any:
        if self._opened is None:
            import fsspec

            options = s3_options(self._options) if self._scheme == "s3" else self._options
            self._opened = fsspec.filesystem(self._scheme, **options)
        return self._opened

    def _errors(self) -> tuple[type[Exception], ...]:
        """What the filesystem raises."""
        if self._scheme != "s3":
            return (OSError, ValueError, RuntimeError)
        from botocore.exceptions import BotoCoreError, ClientError

        return (OSError, ValueError, RuntimeError, BotoCoreError, ClientError)

    def _failed(self, what: str, error: Exception) -> StoreError:
        return StoreError(f"archive {self.name}: cannot {what}: {first_line(error)}")


class _Source:
    """The files of a closed volume that a copy needs: data, indices and the newest manifest."""

    def __init__(self, tier: Tier, volume: str) -> None:
        self._objects: Objects | None = tier.objects
        self._prefix = f"{volume}.lance/"
        self._root = tier.volume(volume).location.path
        if self._root is not None:
            sizes = {
                path.relative_to(self._root).as_posix(): path.stat().st_size
                for path in self._root.rglob("*")
                if path.is_file()
            }
        else:
            assert self._objects is not None
            listed = self._objects.listing(f"{volume}.lance")
            sizes = {entry.name.removeprefix(self._prefix): entry.nbytes for entry in listed}
        # Newer manifests sort first: they are named by 2^64 - 1 - version.
        manifest = min(name for name in sizes if _is_manifest(name))
        wanted = [name for name in sizes if name.startswith(("data/", "_indices/", "_deletions/"))]
        self.sizes = {name: sizes[name] for name in (*wanted, manifest) if "/." not in name}

    def blocks(self, file: str) -> Iterator[bytes | memoryview]:
        """A file from front to back."""
        if self._root is not None:
            with open(self._root / file, "rb", buffering=0) as opened:
                while block := opened.read(_BLOCK):
                    yield block
            return
        assert self._objects is not None
        size = self.sizes[file]
        for start in range(0, size, _BLOCK):
            yield self._objects.read_ranges(f"{self._prefix}{file}", [start], [min(_BLOCK, size - start)])[0]


def s3_options(options: Mapping[str, str]) -> dict[str, Any]:
    """s3fs options from Lance's storage options; others are passed on as they are."""
    names = {
        "aws_access_key_id": "key",
        "aws_secret_access_key": "secret",
        "aws_session_token": "token",
        "aws_endpoint": "endpoint_url",
        "aws_endpoint_url": "endpoint_url",
    }
    found: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    for key, value in options.items():
        if key in names:
            found[names[key]] = value
        elif key in ("aws_region", "region"):
            found["client_kwargs"] = {"region_name": value}
        elif not key.startswith("aws_") and key not in ("allow_http", "client_max_retries", "retry_timeout", "timeout"):
            found[key] = value
    if options.get("aws_virtual_hosted_style_request", "false") == "false":
        found["config_kwargs"] = {"s3": {"addressing_style": "path"}}
    return found


def _is_manifest(name: str) -> bool:
    return name.startswith("_versions/") and name.endswith(".manifest")


def _manifests_last(files: Mapping[str, object]) -> list[str]:
    return sorted(files, key=lambda name: (_is_manifest(name), name))


def _hashed(blocks: Iterator[Any], hasher: Any) -> Iterator[Any]:
    for block in blocks:
        hasher.update(block)
        yield block


def _digest(blocks: Iterator[Any]) -> str:
    hasher = blake3()
    for block in blocks:
        hasher.update(block)
    return str(hasher.hexdigest())


def _write_local(path: Path, blocks: Iterator[Any]) -> None:
    """Write a file under a temporary name, sync it and give it its name, durably."""
    barrier.make_directory(path.parent)
    # One name, so that the next attempt writes over what a crash left: archiving is done under the maintenance lease.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            for block in blocks:
                view = memoryview(block)
                while len(view):
                    view = view[file.write(view) :]
        barrier.sync_file(temporary)
        os.replace(temporary, path)
        barrier.sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _parsed(record: Record) -> ArchivedVolume | None:
    """What a record says; None for one of another form. Its names become paths, so they are checked."""
    volume, files = record.body.get("volume"), record.body.get("files")
    if not isinstance(volume, str) or not VOLUME.fullmatch(volume) or not isinstance(files, dict):
        return None
    if any(".." in file or file.startswith("/") or not _entry(entry) for file, entry in files.items()):
        return None
    return ArchivedVolume(volume, int(record.body["bytes"]), {k: (int(v[0]), str(v[1])) for k, v in files.items()})


def _entry(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], int) and isinstance(value[1], str)
