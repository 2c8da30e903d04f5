"""Where a memory may live: names that never become paths unchecked, and the schemes that Lance commits to."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from numem.errors import InputError, SchemeError

# Lance commits through its own object store. fsspec file systems, in-memory stores and read-only hubs cannot be the
# home of an open volume: a commit there is not atomic, not shared or not kept.
SCHEMES = ("file", "s3", "gs", "az")

# Filesystems of fsspec that closed volumes may be copied to: each keeps what it was given, under the name it was given.
ARCHIVE_SCHEMES = ("file", "memory", "s3", "gs", "az", "abfs", "sftp", "hdfs")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//|:)|[^/]*::")


def require_name(what: str, name: object) -> str:
    """A node or tier name: 1 to 63 of a-z, 0-9 and "-", not starting with "-". SchemeError otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SchemeError(f"{what} name {name!r}: use 1 to 63 characters of a-z, 0-9 and '-', starting with a-z or 0-9")
    return name


@dataclass(frozen=True, slots=True)
class Location:
    """A directory or an object-store prefix.

    Attributes:
        url: what Lance is given: an absolute path, or scheme://bucket/prefix without a trailing slash.
        path: the same as a local path, None where remote.
    """

    url: str
    path: Path | None

    @property
    def local(self) -> bool:
        return self.path is not None

    def child(self, name: str) -> "Location":
        """A location below this one; `name` is one of numem's own fixed or checked names."""
        return Location(f"{self.url}/{name}", None if self.path is None else self.path / name)


def locate(what: str, value: object) -> Location:
    """Check a home or tier URL before anything is written or connected.

    Raises:
        SchemeError: not a string or path, a scheme Lance does not commit to, chained URLs, credentials in the URL.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise SchemeError(
            f"{what}: {type(value).__name__} is not a path or URL; Lance commits through its own object store, "
            f"so pass a local directory or a URL on {', '.join(SCHEMES)}"
        )
    if not value or "\0" in value:
        raise SchemeError(f"{what}: {value!r} is not a usable path")
    if not _URL.match(value):
        path = Path(os.path.abspath(value))
        return Location(str(path), path)
    scheme = value.split(":", 1)[0].lower()
    if scheme not in SCHEMES or "::" in value:
        raise SchemeError(
            f"{what}: {_without_credentials(value)!r} is on a scheme that Lance does not commit to; "
            f"use a local directory or one of {', '.join(SCHEMES)}"
        )
    parts = urlsplit(value)
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise SchemeError(f"{what}: a file URL names a local directory, {parts.netloc!r} is a host")
        path = Path(os.path.abspath(unquote(parts.path)))
        return Location(str(path), path)
    if "@" in parts.netloc:
        raise SchemeError(f"{what}: credentials do not belong into a URL; pass them as storage_options")
    if not parts.netloc:
        raise SchemeError(f"{what}: {value!r} names no bucket")
    if parts.query or parts.fragment:
        raise SchemeError(f"{what}: {value!r} carries a query or fragment; pass options as storage_options")
    return Location(f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}", None)


def locate_archive(what: str, value: object) -> str:
    """Check the URL of an archive: an absolute path, or scheme://place on one of `ARCHIVE_SCHEMES`.

    Raises:
        SchemeError: another scheme, chained URLs, credentials in the URL.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value or "\0" in value:
        raise SchemeError(f"{what}: {value!r} is not a path or URL")
    scheme = value.split(":", 1)[0].lower()
    if not _URL.match(value) or scheme == "file":
        return locate(what, value).url
    parts = urlsplit(value)
    if scheme not in ARCHIVE_SCHEMES or "::" in value:
        raise SchemeError(
            f"{what}: {_without_credentials(value)!r} is on a scheme that numem does not archive to; "
            f"use a local directory or one of {', '.join(ARCHIVE_SCHEMES)}"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise SchemeError(f"{what}: credentials and options do not belong into a URL; pass them as the tier's options")
    if not parts.netloc + parts.path.strip("/"):
        raise SchemeError(f"{what}: {value!r} names no place")
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def require_options(location: Location, options: Mapping[str, str] | None) -> None:
    """Check storage options on which a store would fail late or obscurely. No message repeats a value but the endpoint.

    Raises:
        InputError: a value that is no string, an S3 endpoint that is no URL, one on plain HTTP without `allow_http`.
    """
    for name, value in (options or {}).items():
        if not isinstance(value, str):
            raise InputError(f'storage option {name}: {type(value).__name__}; values are strings, like "true"')
    given = {name.lower(): value for name, value in (options or {}).items()}
    names = ("aws_endpoint", "endpoint", "aws_endpoint_url", "endpoint_url")
    elsewhere = (os.environ.get(name.upper()) for name in ("aws_endpoint", "aws_endpoint_url"))
    endpoint = next(filter(None, (*map(given.get, names), *elsewhere)), "")
    if location.local or not location.url.startswith("s3:") or not endpoint:
        return
    shown = _without_credentials(endpoint)
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"{location.url}: endpoint {shown!r} is not a URL; write it like https://s3.example.org")
    if parts.scheme == "http" and given.get("allow_http", "").lower() not in ("true", "1", "yes", "on"):
        raise InputError(
            f'{location.url}: endpoint {shown} is on plain HTTP; add allow_http="true" to the storage options, or use https'
        )


def _without_credentials(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
