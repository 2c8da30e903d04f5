"""Values of a config.json, checked as they are read: the key that is wrong is the one the error names."""

import math
from collections.abc import Mapping
from typing import Any

from numem.errors import CheckpointError


class Config:
    """A config.json over the defaults of its family.

    A key that is absent takes the family's default. A key that is null stays null where null means something
    (`get`), and takes the default where a value is needed (`count`, `number`).

    Args:
        values: config.json, or the part of it that describes the text model.
        defaults: what the family's own configuration assumes for absent keys.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.values = values
        self.defaults: Mapping[str, Any] = {} if defaults is None else defaults

    def get(self, key: str) -> Any:
        """The value of a key, null included; its default where it is absent."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number in [least, most].

        Raises:
            CheckpointError: absent without a default, or anything else.
        """
        value = self.get(key)
        if value is None:
            value = self.defaults.get(key, default)
        if value is None:
            raise CheckpointError(f"config.json: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CheckpointError(f"config.json: {key} is {value!r}, not a whole number in [{least}, {most}]")
        return value

    def flag(self, key: str) -> bool:
        """True or false; null and absent are false unless the family says otherwise."""
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} is {value!r}, not true or false")
        return value

    def number(self, key: str, default: float | None = None, *, below: float = math.inf) -> float:
        """A number greater than 0 and less than `below`."""
        value = self.get(key)
        if value is None:
            value = self.defaults.get(key, default)
        number = finite(value)
        if number is None or not 0 < number < below:
            kind = "a positive number" if below == math.inf else f"a number between 0 and {below:g}"
            raise CheckpointError(f"config.json: {key} is {value!r}, not {kind}")
        return number


def finite(value: Any) -> float | None:
    """A finite number as a float; None for anything else, integers beyond float64 among it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A config value that may be null, an id or a list of ids, as a tuple."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        # Some configs write -1 for "none".
        if isinstance(item, bool) or not isinstance(item, int):
            raise CheckpointError(f"{key} is {value!r}; expected an id, a list of ids or null")
    return tuple(item for item in values if item >= 0)
