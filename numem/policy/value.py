"""What it is worth to keep state resident, who may go, and in which order.

    value    = p_reuse * max(0, recompute_ms - reload_ms) + sharing_bonus + slo_bonus
    victims  : ascending (value / max(1, pages), last access, id)
    eligible : durable, not pinned, no pending append, not leased, not protected

The formula compares two costs of the next use: `recompute_ms` without what is kept, `reload_ms` with it.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from numem.errors import InputError


@dataclass(frozen=True, slots=True)
class Worth:
    """The terms of the value of a holder.

    Attributes:
        p_reuse: probability that it is used again, in [0, 1].
        recompute_ms, reload_ms: cost of its next use without and with what is kept, at least 0.
        sharing_bonus, slo_bonus: expected ms beyond that, at least 0.

    Raises:
        InputError: a term out of its range.
    """

    p_reuse: float
    recompute_ms: float
    reload_ms: float = 0.0
    sharing_bonus: float = 0.0
    slo_bonus: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.p_reuse <= 1.0:
            raise InputError(f"worth: p_reuse {self.p_reuse} lies outside [0, 1]")
        for name in ("recompute_ms", "reload_ms", "sharing_bonus", "slo_bonus"):
            cost = getattr(self, name)
            if not (math.isfinite(cost) and cost >= 0.0):
                raise InputError(f"worth: {name} {cost} must be finite and not negative")

    @property
    def value(self) -> float:
        """Expected ms that keeping it saves."""
        saved = max(0.0, self.recompute_ms - self.reload_ms)
        return self.p_reuse * saved + self.sharing_bonus + self.slo_bonus


@dataclass(frozen=True, slots=True)
class Holder:
    """One of those that keep pages, as a moment saw it.

    Attributes:
        pages: physical pages in logical order, possibly shared with other holders.
        value: expected ms that keeping it saves.
        last_access: on any clock that only rises.
        durable: nothing is lost when it goes.
        pinned, pending, leased: what forbids that it goes: a pin, an append under way, a lease on its pages.
    """

    id: str
    pages: tuple[int, ...]
    value: float
    last_access: int = 0
    durable: bool = True
    pinned: bool = False
    pending: bool = False
    leased: bool = False

    @property
    def per_page(self) -> float:
        """Value per page, by which holders are ordered."""
        return self.value / max(1, len(self.pages))


def declined(holder: Holder, protected: Collection[str] = ()) -> str:
    """Why a holder may not go; empty where it may."""
    if not holder.durable:
        return "not durable"
    if holder.pinned:
        return "pinned"
    if holder.pending:
        return "pending append"
    if holder.leased:
        return "leased"
    return "protected" if holder.id in protected else ""


def victims(holders: Iterable[Holder], protected: Collection[str] = ()) -> list[Holder]:
    """Those that may go, the least worth first."""
    able = [holder for holder in holders if not declined(holder, protected)]
    return sorted(able, key=lambda h: (h.per_page, h.last_access, h.id))
