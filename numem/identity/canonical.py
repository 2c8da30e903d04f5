"""Canonical JSON: one byte string for one value, in every process and on every platform.

Keys are sorted, separators minimal, text is UTF-8 without escapes beyond JSON's own. A float is written as the string
of its hexadecimal form under the key "$float", so that 1.0, 1 and "1.0" stay three values and no digit is lost.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from numem.errors import InputError


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"canonical JSON: {where or 'value'} is {value!r}; only finite floats have an identity")
        return {"$float": value.hex()}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"canonical JSON: key {key!r} of {where or 'value'} is not a string")
            if key.startswith("$"):
                raise InputError(f"canonical JSON: key {key!r} of {where or 'value'} starts with the reserved '$'")
            _text(key, f"a key of {where or 'value'}")
        return {key: _encode(item, f"{where}.{key}" if where else key) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise InputError(f"canonical JSON: {where or 'value'} has type {type(value).__name__}, which has no canonical form")


def _text(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"canonical JSON: {where or 'value'} is not valid Unicode ({error.reason})") from error
    return value


def canonical_json(value: Any) -> bytes:
    """Return the canonical UTF-8 bytes of a tree of None, bool, int, float, str, bytes, mappings and sequences.

    Raises:
        InputError: for other types, non-finite floats, keys that are not strings or start with "$".
    """
    tree = _encode(value, "")
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def flatten(value: Any) -> dict[str, bytes]:
    """Map the dotted path of every leaf to its canonical bytes (lists and empty mappings count as leaves).

    A dot or backslash inside a key is escaped with a backslash, so that two different trees never flatten alike.
    """
    out: dict[str, bytes] = {}

    def walk(item: Any, path: tuple[str, ...]) -> None:
        if isinstance(item, Mapping) and item:
            for key, below in item.items():
                walk(below, (*path, str(key).replace("\\", "\\\\").replace(".", "\\.")))
        else:
            out[".".join(path)] = canonical_json(item)

    walk(value, ())
    return out
