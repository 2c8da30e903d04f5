"""What Lance raises, made typed: its errors arrive as OSError, ValueError or RuntimeError, its panics outside Exception."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from numem.errors import NumemError, StorageFullError, StoreError

LANCE_ERRORS = (OSError, ValueError, RuntimeError, NotImplementedError, KeyError)

_FULL = ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122", "StorageFull")


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a Rust panic; pyo3 derives it from BaseException and offers no importable name."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


def is_full(error: BaseException) -> bool:
    """Whether an error means that the disk or quota is full."""
    code = getattr(error, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT) or any(mark in str(error) for mark in _FULL)


@contextmanager
def lance_errors(what: str) -> Iterator[None]:
    """Turn what Lance raises into StorageFullError or StoreError with one line that names `what`."""
    try:
        yield
    except NumemError:
        raise
    except LANCE_ERRORS as error:
        if is_full(error):
            raise StorageFullError(f"{what}: no space left; free some and try again, nothing was published") from error
        raise StoreError(f"{what}: {first_line(error)}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise StoreError(f"{what}: Lance panicked: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """An error's text on one line, without the source positions that Lance appends."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].split(", /home/")[0].strip()
