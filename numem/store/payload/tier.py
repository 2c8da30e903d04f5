"""A tier: a set of volumes at one location, of which this process appends to its own newest."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, RLock

import filelock

from numem.errors import IntegrityError, StoreError
from numem.store.catalog.facts import Placement
from numem.store.config import TierSpec
from numem.store.payload.ledger import Ledger
from numem.store.payload.objects import Objects
from numem.store.payload.pieces import CLOSE_BYTES, CLOSE_COMMITS, Piece, Written, padded
from numem.store.payload.shelf import VOLUME, Shelf
from numem.store.payload.sidecar import SidecarFiles
from numem.store.payload.volume import Volume
from numem.store.urls import Location

# Nearer to compute first. Names that are not listed stand between ssd and object.
_CLOSE_LEAST = 1 << 20
_RANKS = {"gpu": 0, "host": 1, "ram": 1, "ssd": 2, "object": 4, "archive": 5}


def rank_of(tier: str) -> int:
    """How far from compute a tier is, by its name: lower is nearer. Names that are not listed stand before object."""
    return _RANKS.get(tier, 3)


class WriterLock:
    """A writer's number on this node, held for the life of the process: it names the volumes this process appends to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: filelock.FileLock | None = None
        self._number = -1
        self._lock = RLock()

    @property
    def number(self) -> int:
        """The number, taken on first use: the lowest that no live process holds."""
        with self._lock:
            number = 0
            while self._held is None:
                lock = self.try_lock(number)
                if lock is not None:
                    self._held, self._number = lock, number
                number += 1
            return self._number

    def try_lock(self, number: int) -> filelock.FileLock | None:
        """The lock of a number, acquired, or None where another process (or this one) holds it."""
        lock = filelock.FileLock(self._directory / f"writer-{number:03d}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return None
        return lock

    @contextmanager
    def borrowed(self, number: int) -> Iterator[bool]:
        """Whether a number is free, or held by this process anyway; held for the time of the with block.

        No thread waits for the block: it may take the catalog's lock, under which others ask for `number`.
        """
        with self._lock:
            own = self._held is not None and self._number == number
            lock = None if own else self.try_lock(number)
        try:
            yield own or lock is not None
        finally:
            if lock is not None:
                lock.release()

    def release(self) -> None:
        with self._lock:
            if self._held is not None:
                self._held.release()
                self._held = None


Prepare = Callable[["Tier", str], bool]


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A configured tier.

    Attributes:
        name, location: as given.
        node: "" where every node sees the same bytes, else the node it belongs to.
        owner: random id of this node's local state; only volumes of the same owner are appended to.
        spec: capacity, policy and way of writing.
    """

    name: str
    location: Location
    node: str
    owner: str
    spec: TierSpec

    @property
    def rank(self) -> int:
        return rank_of(self.name)

    @property
    def close_bytes(self) -> int:
        """Payload at which a volume is closed: space comes back by whole volumes, so a small tier has small ones."""
        if self.spec.capacity is None:
            return CLOSE_BYTES
        return min(CLOSE_BYTES, max(_CLOSE_LEAST, self.spec.capacity // 8))


class Tier:
    """Volumes of one tier."""

    def __init__(
        self,
        config: TierConfig,
        node: str,
        ledger: Ledger | None,
        options: Mapping[str, str] | None,
        writers: WriterLock,
    ) -> None:
        self.config = config
        self.name = config.name
        self._node = node
        self._ledger = ledger if config.location.local else None
        self._options = options
        self._writers = writers
        self._lock = RLock()
        # Held while an append takes its time. Order of locks: this one, `_lock`, the catalog's, `_volumes_lock`.
        self.appending = RLock()
        self._volumes_lock = Lock()
        self._volumes: dict[str, Volume] = {}
        self._checked: dict[str, bool] = {}
        self._writing: tuple[Volume, int] | None = None
        self._closed: set[str] = set()
        self.objects = None if config.location.local else Objects(config.location, options)
        self.shelf = Shelf(config.location, self.objects, config.owner)

    def reachable(self, placement: Placement) -> bool:
        """Whether this node can read a placement."""
        return placement.tier == self.name and placement.node == self.config.node

    def volume(self, name: str) -> Volume:
        """A volume by the name that a placement gives; names of another form are refused."""
        with self._volumes_lock:
            found = self._volumes.get(name)
            if found is None:
                if not VOLUME.fullmatch(name):
                    raise StoreError(f"tier {self.name}: {name!r} is not the name of a volume")
                found = self._volumes[name] = Volume(
                    name,
                    f"{self.label}/{name}",
                    self.config.location.child(f"{name}.lance"),
                    self._ledger,
                    self._options,
                )
            return found

    def positioned(self, placement: Placement, files: SidecarFiles) -> bool:
        """Whether the volume's sidecars may be read by position: compared with Lance's reader once per volume."""
        agrees = self._checked.get(placement.volume)
        if agrees is None:
            agrees = self.volume(placement.volume).sidecar_agrees(files, placement)
            if agrees is None:
                return True  # xxh3 still decides about every byte that is read by position
            self._checked[placement.volume] = agrees
        return agrees

    def present(self, placement: Placement) -> bool:
        """Whether the placement's sidecar is there and long enough: what deduplication may rely on."""
        try:
            path = self.volume(placement.volume).sidecar(placement.file, placement.blob)
        except IntegrityError:
            return False
        if path is None:
            return True
        try:
            return path.stat().st_size >= placement.offset + placement.nbytes
        except OSError:
            return False

    def own_volumes(self, number: int) -> list[str]:
        """Volumes that a writer number of this node made, oldest first."""
        return [name for name in self.shelf.marked(f"{self._node}.w{number:03d}.") if self.shelf.owned(name)]

    def volumes(self) -> list[str]:
        """Volumes of every node and writer, in name order."""
        return [name for name in self.shelf.marked() if self.shelf.exists(name)]

    def writer_numbers(self) -> list[int]:
        """Writer numbers of this node that ever made a volume here."""
        return sorted({int(name.split(".")[1][1:]) for name in self.shelf.marked(f"{self._node}.w")})

    def closed_volumes(self) -> list[str]:
        """Volumes that nobody appends to any more: their writer has a newer one."""
        marked = self.shelf.marked()
        newest = self.shelf.newest(marked)
        return [name for name in marked if name not in newest and self.shelf.exists(name)]

    def seal_volumes(self) -> list[str]:
        """Close the volumes that writers of this node would go on with, for good: the next ones are made now. Those that
        another live process writes are left to it."""
        sealed = []
        with self.appending, self._lock:
            for number in self.writer_numbers():
                with self._writers.borrowed(number) as mine:
                    last = "".join(self.shelf.marked(f"{self._node}.w{number:03d}.")[-1:])
                    if mine and self.shelf.owned(last) and self.shelf.exists(last) and self.volume(last).commits > 1:
                        volume = self._make_next(number, last)
                        if self._writing is not None and self._writing[0].name == last:
                            self._writing = (volume, 0)
                        sealed.append(last)
        return sealed

    def close_volume(self) -> None:
        """Append no more to the volume that this process writes, or would go on with: the next append makes a new one."""
        with self.appending, self._lock:
            last = self._last() if self._writing is None else self._writing[0].name
            self._writing = None
            self._closed.add(last)

    def seal(self, name: str) -> None:
        """Never append to a volume again, though it has room; it is about to go."""
        with self._lock:
            self._closed.add(name)

    def writes(self, name: str) -> bool:
        """Whether this process appends to a volume at the moment."""
        with self._lock:
            return self._writing is not None and self._writing[0].name == name

    def forget_volume(self, name: str) -> None:
        """Let go of what is held open of a volume that was removed."""
        with self._volumes_lock:
            self._volumes.pop(name, None)
            self._checked.pop(name, None)

    def append(
        self, pieces: Iterable[Piece], facts: Callable[[Volume, Mapping[bytes, str]], str], prepare: Prepare
    ) -> tuple[Volume, Written]:
        """Append pieces to this process's volume, durably; one thread at a time. See `Volume.append`.

        Args:
            prepare: recovers a volume that an earlier process left, before it is appended to; False closes it.
        """
        with self.appending:
            volume = self._open_volume(prepare)
            written = volume.append(pieces, partial(facts, volume))
            if self._writing is not None:
                self._writing = (volume, self._writing[1] + sum(padded(slot.nbytes) for slot in written.slots))
            return volume, written

    def _open_volume(self, prepare: Prepare) -> Volume:
        with self._lock:
            if self._writing is not None:
                volume, size = self._writing
                room = size < self.config.close_bytes and volume.commits < CLOSE_COMMITS
                if room and self.shelf.owned(volume.name):  # else it was removed: see `collect.closed`
                    return volume
                self._writing = None
                return self._create_next(volume.name)
            last = self._last()
            if last and last not in self._closed and self.shelf.owned(last) and prepare(self, last):
                volume = self.volume(last)
                volume.create()
                size = volume.payload_bytes()
                if size < self.config.close_bytes and volume.commits < CLOSE_COMMITS:
                    self._writing = (volume, size)
                    return volume
            return self._create_next(last)

    def _last(self) -> str:
        """The newest volume under this process's number, an earlier process's perhaps; "" where there is none."""
        return "".join(self.shelf.marked(f"{self._node}.w{self._writers.number:03d}.")[-1:])

    def _create_next(self, after: str) -> Volume:
        volume = self._make_next(self._writers.number, after)
        self._writing = (volume, 0)
        return volume

    def _make_next(self, writer: int, after: str) -> Volume:
        number = int(after.rsplit(".", 1)[1]) + 1 if after else 1
        while not self.shelf.mark(name := f"{self._node}.w{writer:03d}.{number:06d}", self._node):
            number += 1
        volume = self.volume(name)
        volume.create()
        return volume

    @property
    def label(self) -> str:
        """The tier's name in the ledger and in messages; with its node where it is not shared."""
        return f"{self.name}@{self.config.node}" if self.config.node else self.name
