"""Which prefixes of a set of prompts are worth computing once.

The prompts in sorted order form a trie; a prefix that two or more prompts have in common is a branching point of it.
Each prompt is assigned the longest such prefix that reaches at least `gain` tokens beyond the previous branching point
kept above it, so that prompts which happen to share a few more words do not each get a prefix of their own. A prompt
that shares nothing gets its own prefix (all but the pending token) where that fills a chunk.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numem.errors import InputError
from numem.identity.chain import CHUNK_TOKENS

GAIN = 32


@dataclass(frozen=True, slots=True)
class Prefix:
    """A token prefix and the indices of the prompts that begin with it."""

    tokens: tuple[int, ...]
    prompts: tuple[int, ...]


def trie_order(prompts: Sequence[Sequence[int] | np.ndarray]) -> list[int]:
    """Indices of prompts in the order of a walk through their trie: what shares a prefix, nested ones too, is adjacent."""
    # Big-endian ids compare as bytes like the ids themselves.
    return sorted(range(len(prompts)), key=lambda i: np.asarray(prompts[i], dtype=">i8").tobytes())


def shared_prefixes(prompts: Sequence[Sequence[int]], gain: int = GAIN) -> tuple[Prefix, ...]:
    """Prefixes to compute once, in the order in which neighbours share most; every prompt is in at most one.

    A prefix never covers a prompt's last token: it is pending and always computed.

    Raises:
        InputError: `gain` below 1.
    """
    if gain < 1:
        raise InputError(f"shared prefixes: gain {gain} must be at least 1 token")
    rows = [np.asarray(p[:-1], dtype=np.int64) for p in prompts]
    order = trie_order(rows)
    common = [_common(rows[a], rows[b]) for a, b in itertools.pairwise(order)]
    groups: list[tuple[int, list[int]]] = []
    # Ranges order[lo:hi] still to assign, whose prompts all share `floor` tokens that are already kept. A stack of our
    # own, because the turns of a long conversation nest as deep as there are turns.
    open_ranges = [(0, len(order), 0)] if order else []
    while open_ranges:
        lo, hi, floor = open_ranges.pop()
        if hi - lo == 1:
            groups.append((floor, [order[lo]]))
            continue
        depth = min(common[lo : hi - 1])
        kept = depth if depth - floor >= gain else floor
        start = lo
        loose: list[int] = []
        for at in range(lo, hi):
            # Runs of neighbours that go on together for at least `gain` tokens beyond what is kept.
            if at == hi - 1 or common[at] - kept < gain:
                if at == start:
                    loose.append(order[at])
                else:
                    open_ranges.append((start, at + 1, kept))
                start = at + 1
        if loose:
            groups.append((kept, loose))

    found: list[Prefix] = []
    for length, members in groups:
        if length:
            found.append(Prefix(tuple(prompts[members[0]][:length]), tuple(sorted(members))))
            continue
        found.extend(Prefix(tuple(prompts[i][:-1]), (i,)) for i in members if len(rows[i]) >= CHUNK_TOKENS)
    merged: dict[tuple[int, ...], set[int]] = {}
    for prefix in found:
        merged.setdefault(prefix.tokens, set()).update(prefix.prompts)
    return tuple(Prefix(tokens, tuple(sorted(members))) for tokens, members in sorted(merged.items()))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n
