"""Replay of request traces: the hit ratio of each eviction policy at each capacity.

A trace is a file of JSON lines, gzipped where its name ends in .gz, with a list `hash_ids` in each: the prefix blocks
of one request, in order. An id stands for its block and everything before it, so that the ids form a forest.

Requests are taken in the order of the file, one at a time, as if bandwidth were unlimited; a block is one unit. A block
is a hit where it is resident and every earlier block of its request was a hit; the hit ratio is hits over all blocks.
Every block is used, and admitted where it is not resident, with the block before it as its parent. A leaf-first policy
keeps the running request; where nothing may go, the rest of the request is not admitted.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numem.errors import InputError
from numem.policy import NAMES, make
from numem.policy.eviction.admission import SecondTouch
from numem.policy.eviction.protocol import nothing

CAPACITIES = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)

Request = Sequence[int]


def read_trace(path: Path) -> list[Request]:
    """The prefix blocks of each request.

    Raises:
        InputError: not a trace; names the line.
        OSError: cannot be read.
    """
    requests: list[Request] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                requests.append(_request(json.loads(line), f"{path}:{number}"))
    except (ValueError, EOFError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a trace of JSON lines: {error}") from None
    if not any(requests):
        raise InputError(f"{path}: no request has a block; a trace has a list hash_ids in each line")
    return requests


def _request(value: Any, where: str) -> Request:
    ids = value.get("hash_ids") if isinstance(value, dict) else None
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise InputError(f"{where}: no list of integers hash_ids; a trace has one in each line")
    return ids


@dataclass(frozen=True, slots=True)
class Replay:
    """One policy at one capacity.

    Attributes:
        blocks, hits: block references, and those that were hits.
        written: blocks admitted, each time they were.
    """

    blocks: int
    hits: int
    written: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.blocks


def replay(requests: Sequence[Request], name: str, capacity: int, second_touch: bool = False) -> Replay:
    """Replay a trace.

    Args:
        name: of a policy, see `numem.policy.NAMES`.
        capacity: blocks that may be resident.
        second_touch: admit a block only from its second use on.

    Raises:
        InputError: no such policy, or a capacity below 1.
    """
    policy = make(name, capacity)
    selective = SecondTouch() if second_touch else None
    blocks = hits = written = 0
    for ids in requests:
        blocks += len(ids)
        protected = set(ids).__contains__ if policy.leaf_first else nothing
        parent = None
        unbroken = admitting = True
        for id in ids:
            wanted = selective is None or selective.use(id)
            if policy.touch(id):
                hits += unbroken
            else:
                unbroken = False
                if wanted and admitting:
                    victims = policy.victims(1, protected, id) if policy.used >= capacity else ()
                    if victims is None:
                        admitting = False
                    else:
                        for victim in victims:
                            policy.evict(victim)
                        policy.admit(id, 1, 1.0, parent)
                        written += 1
            parent = id
    return Replay(blocks, hits, written)


def trace(
    path: Path,
    policies: Sequence[str] = (),
    capacities: Sequence[int] = (),
    second_touch: bool = False,
) -> dict[str, dict[int, Replay]]:
    """Replay a trace with each policy at each capacity.

    Args:
        policies: all by default.
        capacities: those of `CAPACITIES` below the number of different blocks by default.
        second_touch: see `replay`.

    Raises:
        InputError: not a trace, no such policy, or a capacity below 1.
        OSError: the file cannot be read.
    """
    requests = read_trace(path)
    unique = len({id for ids in requests for id in ids})
    if not capacities:
        capacities = [capacity for capacity in CAPACITIES if capacity < unique] or [unique]
    for name in policies:
        make(name, 1)  # a wrong name is said before minutes of work
    return {
        name: {capacity: replay(requests, name, capacity, second_touch) for capacity in capacities}
        for name in policies or NAMES
    }


def ratios(results: Mapping[str, Mapping[int, Replay]]) -> dict[str, dict[str, float]]:
    """The hit ratios alone, by policy and capacity: what `numem bench trace --json` prints."""
    return {
        name: {str(capacity): round(one.hit_ratio, 6) for capacity, one in by_capacity.items()}
        for name, by_capacity in results.items()
    }
