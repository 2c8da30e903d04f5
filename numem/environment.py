"""Which memory a process works on, and through which tiers, as environment variables say it.

    NUMEM_MEMORY   home of the memory: directory or s3:// URL               (default: <cache>/memory)
    NUMEM_LOCAL    local directory of a remote memory                       (default: chosen by the store)
    NUMEM_NODE     name of this node                                        (default: local)
    NUMEM_TIERS    its tiers, in place of the default ones; see `parse_tiers`
    NUMEM_STORAGE_OPTIONS   Lance storage options of remote places, a JSON object of strings

An object store reads its own variables too: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT and so on.
"""

import json
import os
import re
from typing import TypedDict

from numem.errors import InputError
from numem.store.config import TierSpec

MEMORY = "NUMEM_MEMORY"
LOCAL = "NUMEM_LOCAL"
NODE = "NUMEM_NODE"
TIERS = "NUMEM_TIERS"
STORAGE_OPTIONS = "NUMEM_STORAGE_OPTIONS"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Places(TypedDict):
    """See `places`."""

    tiers: dict[str, TierSpec] | None
    node: str
    local: str | None
    storage_options: dict[str, str] | None


def parse_tiers(value: str) -> dict[str, TierSpec] | None:
    """Tiers of "name=url;option=value,name=url"; None of an empty value.

    Options are those of `TierSpec`: capacity (bytes, or like 200GB and 64MiB), policy, write. A URL that holds a comma
    or a semicolon can only be given in Python.

    Raises:
        InputError: a part without a name or a URL, an unknown option, a name given twice.
    """
    tiers: dict[str, TierSpec] = {}
    for part in filter(None, (p.strip() for p in value.split(","))):
        place, *options = (piece.strip() for piece in part.split(";"))
        name, _, url = place.partition("=")
        if not name or not url:
            raise InputError(f"{TIERS}: {place!r} is not name=url")
        if name in tiers:
            raise InputError(f"{TIERS}: tier {name!r} is given twice")
        given: dict[str, str] = {}
        for option in options:
            key, _, text = option.partition("=")
            if key not in ("capacity", "policy", "write") or not text or key in given:
                raise InputError(f"{TIERS}: tier {name!r}: {option!r} is not capacity=, policy= or write=, once")
            given[key] = text
        capacity = parse_bytes(given.pop("capacity")) if "capacity" in given else None
        usual = TierSpec(url)
        tiers[name] = TierSpec(url, capacity, given.get("policy", usual.policy), given.get("write", usual.write))
    return tiers or None


def parse_bytes(text: str) -> int:
    """A number of bytes: 1048576, 64MiB, 200GB; InputError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if found is None:
        raise InputError(f"{text!r}: not a number of bytes; write it like 1048576, 64MiB or 200GB")
    number, unit = found.groups()
    return round(float(number) * (_UNITS | _BINARY)[unit or ""])


def places() -> Places:
    """Where the parts of this process's memory lie, as arguments of `Memory`."""
    get = os.environ.get
    return {
        "tiers": parse_tiers(get(TIERS) or ""),
        "node": get(NODE) or "local",
        "local": get(LOCAL) or None,
        "storage_options": storage_options(),
    }


def storage_options() -> dict[str, str] | None:
    """Options of $NUMEM_STORAGE_OPTIONS, None without it. They may hold credentials, so no message repeats them.

    Raises:
        InputError: not a JSON object of strings.
    """
    text = os.environ.get(STORAGE_OPTIONS)
    if not text:
        return None
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise InputError(f'{STORAGE_OPTIONS}: not JSON; write it like {{"aws_region": "us-east-1"}}') from error
    if not isinstance(tree, dict) or not all(isinstance(value, str) for value in tree.values()):
        raise InputError(f"{STORAGE_OPTIONS}: not a JSON object whose values are all strings")
    return tree


def memory_home(given: str | None) -> str:
    """The memory a process works on: as given, else $NUMEM_MEMORY, else the default below the user's cache."""
    given = given or os.environ.get(MEMORY)
    if given:
        return given
    from numem.models.hub.registry import cache_dir

    return str(cache_dir() / "memory")
