"""Small objects and ranged reads on an object store, beside the datasets that Lance keeps there.

Every wait is bounded: a request that fails in passing (5xx, reset, timeout) is repeated with jitter until a deadline.

A conditional write whose reply was lost may have landed, and its repetition is then refused because of itself. So each
write carries a random id as metadata of the object, and after a lost reply the object is read back: the own id means
success, another one that somebody else won, and no answer that the outcome is unknown. Nothing is deleted on the way.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from numem.errors import StoreError, UnknownOutcomeError
from numem.store.urls import Location, require_options

DEADLINE_S = 20.0
# Neighbours join one request up to this size; obstore keeps at most ten of them in flight.
REQUEST_BYTES = 8 << 20
GAP_BYTES = 64 << 10

_ATTEMPT_S = 10.0
_SHORT_READS = 3
_READ_RETRIES = 10
_WRITE_ID = "numem-write"
# Lance's storage options that obstore expects elsewhere than among the store's own settings.
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "proxy_url")
_NOT_FOR_OBSTORE = ("client_max_retries", "client_retry_timeout", "retry_timeout", "download_retry_count")

Mark = Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as it was read: its bytes, the id of the write that made it, and what `replace` compares."""

    data: bytes
    write: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing: name below the location, size in bytes, time of its last write in ns since the epoch."""

    name: str
    nbytes: int
    modified: int


class Objects:
    """Objects below a remote location.

    Args:
        location: an s3, gs or az prefix.
        options: Lance storage options.
        deadline_s: how long one call may take at most before it fails, about; a read of ranges, per attempt.

    Raises:
        InputError: options that cannot work, see `require_options`.
    """

    def __init__(
        self, location: Location, options: Mapping[str, str] | None, *, deadline_s: float = DEADLINE_S
    ) -> None:
        require_options(location, options)
        self.location = location
        self.deadline_s = deadline_s
        self._options = dict(options or {})
        self._stores: dict[int, Any] = {}

    def create(self, name: str, data: bytes) -> bool:
        """Create an object unless its name is taken; True for exactly one of several creators.

        Raises:
            UnknownOutcomeError: no answer in time; the object may be there or come to be. Nothing was deleted.
        """
        return self._write(name, data, None) is not None

    def replace(self, name: str, data: bytes, mark: Mark) -> Mark | None:
        """Replace an object that is still as `fetch` read it; returns the new mark, None where it changed or is gone.

        Args:
            data: other bytes than before: some stores compare the content.

        Raises:
            UnknownOutcomeError: as `create`.
        """
        return self._write(name, data, mark)

    def read(self, name: str) -> bytes:
        """Whole object; FileNotFoundError where there is none."""
        return self.fetch(name).data

    def fetch(self, name: str) -> Stored:
        """Whole object with its mark; FileNotFoundError where there is none."""
        import obstore

        def call() -> Stored:
            got = obstore.get(self._store(0), name)
            return Stored(bytes(got.bytes()), str(got.attributes.get(_WRITE_ID, "")), _mark(got.meta))

        return self._retried(f"read {name}", name, call)

    def size(self, name: str) -> int | None:
        """Bytes of an object, asked of the store now (no listing, no cache); None where there is none."""
        import obstore

        try:
            return self._retried(f"look up {name}", name, lambda: int(obstore.head(self._store(0), name)["size"]))
        except FileNotFoundError:
            return None

    def read_ranges(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Byte ranges of one object, in few requests: at most one for `REQUEST_BYTES`, one for each wide gap, and one.

        A range that reaches beyond the end of the object is returned short.

        Raises:
            FileNotFoundError: the object is gone.
            StoreError: it could not be read in time, or came cut short although it is long enough.
        """
        starts, ends, places = plan_requests(offsets, lengths)
        for _ in range(_SHORT_READS):
            failed: StoreError | None = None
            blocks: list[memoryview] = []
            try:
                blocks = self._blocks(name, starts, ends)
            except StoreError as error:
                failed = error
            if [len(block) for block in blocks] == [end - start for start, end in zip(starts, ends, strict=True)]:
                break
            size = self.size(name)
            if size is None:
                raise FileNotFoundError(f"{self.location.url}/{name}")
            if size < max(ends):  # the object itself is short (S3 refuses a range behind its end)
                blocks = self._blocks(name, starts, [min(end, size) for end in ends])
                break
            if failed is not None:
                raise failed
        else:
            raise StoreError(f"{self.location.url}: {name} came cut short {_SHORT_READS} times; try again later")
        return [
            blocks[number][offset - starts[number] :][:length]
            for number, offset, length in zip(places, offsets, lengths, strict=True)
        ]

    def names(self, prefix: str) -> list[str]:
        """Names directly below the location that start with a prefix, however many there are."""
        import obstore

        listed = self._retried("list", "", lambda: obstore.list_with_delimiter(self._store(0)))
        found = (str(entry["path"]).rsplit("/", 1)[-1] for entry in listed["objects"])
        return [name for name in found if name.startswith(prefix)]

    def listing(self, directory: str = "") -> list[Listed]:
        """Everything below a directory of the location, at any depth, in name order."""
        import obstore

        def call() -> list[Listed]:
            return sorted(
                (
                    Listed(str(entry["path"]), int(entry["size"]), int(entry["last_modified"].timestamp() * 1e9))
                    for page in obstore.list(self._store(0), directory or None, chunk_size=1000)
                    for entry in page
                ),
                key=lambda listed: listed.name,
            )

        return self._retried("list", directory, call)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        import obstore

        gone = list(names)
        if gone:
            try:
                self._retried("delete", "", lambda: obstore.delete(self._store(0), gone))
            except FileNotFoundError:
                for name in gone if len(gone) > 1 else ():
                    self.delete([name])

    def _write(self, name: str, data: bytes, mark: Mark | None) -> Mark | None:
        """Create (no mark) or replace; None where somebody else's object stands there."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

        mode: Any = "create" if mark is None else dict(mark)
        identity = secrets.token_hex(16)
        pause = _Pause(self.deadline_s)
        doubted = ""
        while True:
            try:
                return _mark(obstore.put(self._store(0), name, data, mode=mode, attributes={_WRITE_ID: identity}))
            except (AlreadyExistsError, PreconditionError, NotFoundError):
                if not doubted:
                    return None
            except _final_errors() as error:
                raise self._failed(f"write {name}", error) from error
            except BaseError as error:
                doubted = _line(error)
            try:
                found = self.fetch(name)
            except FileNotFoundError:
                found = None
                if mark is not None:
                    return None
            except StoreError as error:
                raise self._unknown(name, doubted) from error
            if found is not None and found.write == identity:
                return found.mark
            # Still the one to be replaced: the write did not land yet, and lands at most once if it is sent again.
            if found is not None and found.mark != mark:
                return None
            if not pause.again():
                raise self._unknown(name, doubted)

    def _retried(self, what: str, name: str, call: Callable[[], T], attempts: int = 1 << 30) -> T:
        from obstore.exceptions import BaseError, NotFoundError

        pause = _Pause(self.deadline_s)
        while True:
            attempts -= 1
            try:
                return call()
            except (NotFoundError, FileNotFoundError) as error:
                raise FileNotFoundError(f"{self.location.url}/{name}") from error
            except _final_errors() as error:
                raise self._failed(what, error) from error
            except BaseError as error:
                if attempts < 1 or not pause.again():
                    raise self._failed(what, error) from error

    def _blocks(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        """One request each, in parallel; nothing is asked where a request is empty."""
        import obstore

        asked = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

        def call() -> list[Any]:
            begin, stop = [start for start, _ in asked], [end for _, end in asked]
            return list(obstore.get_ranges(self._store(_READ_RETRIES), name, starts=begin, ends=stop, coalesce=0))

        found = iter(self._retried(f"read {name}", name, call, attempts=1) if asked else [])
        return [memoryview(next(found) if start < end else b"") for start, end in zip(starts, ends, strict=True)]

    def _store(self, retries: int) -> Any:
        """The store; its own retries serve reads only, which may be repeated blindly."""
        if retries not in self._stores:
            from obstore.store import from_url

            attempt_s = self.deadline_s if retries else min(_ATTEMPT_S, self.deadline_s)
            client: Any = {"connect_timeout": "5s", "timeout": f"{attempt_s * 1e3:.0f}ms"}
            client |= {k: _plain(v) for k, v in self._options.items() if k in _CLIENT_OPTIONS}
            config: Any = {
                k: v for k, v in self._options.items() if k not in _CLIENT_OPTIONS and k not in _NOT_FOR_OBSTORE
            }
            self._stores[retries] = from_url(
                self.location.url,
                config=config,
                client_options=client,
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=self.deadline_s),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=50),
                        "max_backoff": timedelta(seconds=2),
                        "base": 2,
                    },
                },
            )
        return self._stores[retries]

    def _failed(self, what: str, error: Exception) -> StoreError:
        return StoreError(f"{self.location.url}: cannot {what}: {_line(error)}")

    def _unknown(self, name: str, doubted: str) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"{self.location.url}: whether {name} was written is not known ({doubted}); nothing was deleted, try again"
        )


def plan_requests(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Requests that cover ranges: (start of each, end of each, for each range the number of its request)."""
    starts: list[int] = []
    ends: list[int] = []
    places = [0] * len(offsets)
    for index in sorted(range(len(offsets)), key=lambda i: (offsets[i], lengths[i])):
        start, end = offsets[index], offsets[index] + lengths[index]
        joins = bool(starts) and start - ends[-1] <= GAP_BYTES and max(end, ends[-1]) - starts[-1] <= REQUEST_BYTES
        if joins or (starts and end <= ends[-1]):
            ends[-1] = max(end, ends[-1])
        else:
            starts.append(start)
            ends.append(end)
        places[index] = len(starts) - 1
    return starts, ends, places


class _Pause:
    """Waits between attempts: each up to twice the last one, at random, until a deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._end = time.monotonic() + deadline_s
        self._longest = 0.1

    def again(self) -> bool:
        """Wait; False, at once, where the time is over."""
        wait = random.uniform(self._longest / 4, self._longest)
        if time.monotonic() + wait > self._end:
            return False
        time.sleep(wait)
        self._longest = min(2.0, 2 * self._longest)
        return True


def _final_errors() -> tuple[type[Exception], ...]:
    """What no repetition mends."""
    from obstore import exceptions

    return (
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.NotSupportedError,
        exceptions.InvalidPathError,
        exceptions.UnknownConfigurationKeyError,
    )


def _mark(found: Mapping[str, Any]) -> Mark:
    return {key: str(found[key]) for key in ("e_tag", "version") if found.get(key)}


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _plain(value: str) -> bool | str:
    return value.lower() == "true" if value.lower() in ("true", "false") else value
