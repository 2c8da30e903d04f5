"""Small objects and ranged reads on an object store, beside the datasets that Lance keeps there."""

from collections.abc import Mapping, Sequence
from typing import Any

from numem.errors import StoreError
from numem.store.urls import Location

# Lance's storage options that obstore expects elsewhere than among the store's own settings.
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "proxy_url")
_NOT_FOR_OBSTORE = ("client_max_retries", "client_retry_timeout", "retry_timeout", "download_retry_count")


class Objects:
    """Objects below a remote location.

    Args:
        location: an s3, gs or az prefix.
        options: Lance storage options.
    """

    def __init__(self, location: Location, options: Mapping[str, str] | None) -> None:
        self._location = location
        self._options = dict(options or {})
        self._store: Any = None

    def create(self, name: str, data: bytes) -> bool:
        """Create an object unless its name is taken; True for exactly one of several creators."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            obstore.put(self._opened(), name, data, mode="create")
        except AlreadyExistsError:
            return False
        except BaseError as error:
            raise self._failed(f"create {name}", error) from error
        return True

    def read(self, name: str) -> bytes:
        """Whole object; FileNotFoundError where there is none."""
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        try:
            return bytes(obstore.get(self._opened(), name).bytes())
        except (NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(f"{self._location.url}/{name}") from error
        except BaseError as error:
            raise self._failed(f"read {name}", error) from error

    def read_ranges(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        """Byte ranges of one object, neighbours coalesced into one request; FileNotFoundError where it is gone."""
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        try:
            return list(obstore.get_ranges(self._opened(), name, starts=offsets, lengths=lengths))
        except (NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(f"{self._location.url}/{name}") from error
        except BaseError as error:
            raise self._failed(f"read {name}", error) from error

    def names(self, prefix: str) -> list[str]:
        """Names directly below the location that start with a prefix."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            listed = obstore.list_with_delimiter(self._opened())
        except BaseError as error:
            raise self._failed("list", error) from error
        found = (str(entry["path"]).rsplit("/", 1)[-1] for entry in listed["objects"])
        return [name for name in found if name.startswith(prefix)]

    def _opened(self) -> Any:
        if self._store is None:
            from obstore.store import from_url

            client: Any = {k: _plain(v) for k, v in self._options.items() if k in _CLIENT_OPTIONS}
            config: Any = {
                k: v for k, v in self._options.items() if k not in _CLIENT_OPTIONS and k not in _NOT_FOR_OBSTORE
            }
            self._store = from_url(self._location.url, config=config, client_options=client or None)
        return self._store

    def _failed(self, what: str, error: Exception) -> StoreError:
        return StoreError(f"{self._location.url}: cannot {what}: {str(error).splitlines()[0]}")


def _plain(value: str) -> bool | str:
    return value.lower() == "true" if value.lower() in ("true", "false") else value
