"""Which format each matrix of a model is quantised to.

The embedding and the output head have most of the values of a small model and the last word on every logit: under the
4-bit schemes they take more bits. So do queries, keys and values under "q4": they are a sixth of a layer, and cost
Gemma-3-270M 2.7 of the 7.2 % of loss that symmetric 4 bits everywhere would. A matrix whose rows a format cannot divide takes the next one that can, and none where
none can. Routers, norms, biases and tables of positions are never quantised.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from numem.errors import InputError
from numem.kernels import formats

# Enters the key of kept streams: raise it when another format would be chosen from the same weights.
VERSION = 2

NATIVE = "native"
TABLES = frozenset({"embed", "lm_head"})
QKV = frozenset({"attn_q", "attn_k", "attn_v"})

# Stored in half precision, a value that lay on a grid is off it by less than this part of a step; one that never did is
# off by half a step somewhere.
_ON_GRID = 1 / 16


@dataclass(frozen=True, slots=True)
class Scheme:
    """Formats in order of preference: of the matrices of layers, of the embedding and head, and of queries, keys and
    values."""

    layers: tuple[str, ...]
    tables: tuple[str, ...]
    qkv: tuple[str, ...]


SCHEMES = {
    "q8": Scheme(("q8",), ("q8",), ("q8",)),
    "q4": Scheme(("q4",), ("q8",), ("q8",)),
    "q4a": Scheme(("q4a",), ("q8",), ("q4a",)),
    "q4k": Scheme(("q4k", "q4a"), ("q6k", "q8"), ("q4k", "q4a")),
}


def check_scheme(name: str) -> None:
    """Raise InputError unless this is a way of quantising a model."""
    if name != NATIVE and name not in SCHEMES:
        raise InputError(f"quantise {name!r} is not one of {', '.join([*SCHEMES, NATIVE])}")


def choose(scheme: str, roles: Sequence[str], k: int, slabs: Callable[[], Iterable[Tensor]]) -> str | None:
    """The format of one matrix [n, k], None to leave it as it is.

    Args:
        slabs: makes the matrix in slabs of rows, where its values decide.
    """
    if scheme == NATIVE:
        return _native(k, slabs)
    found = SCHEMES[scheme]
    chain = found.tables if TABLES.intersection(roles) else found.qkv if QKV.intersection(roles) else found.layers
    return _first(chain, k)


def _first(chain: Sequence[str], k: int) -> str | None:
    return next((name for name in chain if formats.FORMATS[name].fits(k)), None)


def _native(k: int, slabs: Callable[[], Iterable[Tensor]]) -> str | None:
    """The smallest format that holds every value, for weights that were quantised before; else eight bits."""
    for _, name in sorted((f.bits, name) for name, f in formats.FORMATS.items() if f.fits(k)):
        # A few rows first: they tell nearly always.
        if all(formats.error(rows, name) < _ON_GRID for slab in slabs() for rows in (slab[:32], slab)):
            return name
    return _first(("q8",), k)
