"""What one iteration evaluates: a pure plan over plain values.

budget   | decode rows, one a sequence | repair | prefill pieces, cut at multiples of the chunk |
                                        never into what is kept for prefill while prefill waits
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from numem.errors import InputError


class Kind(IntEnum):
    """What rows are for; the lower goes first."""

    DECODE = 0
    REPAIR = 1
    PREFILL = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one iteration.

    Attributes:
        max_batched_tokens: rows of all sequences together.
        max_sequences: sequences that take part.
        prefill_chunk_size, repair_chunk_size: rows of one sequence, and the grid that no piece crosses.
        minimum_prefill_tokens: rows kept for prefill while any waits, and with them the place of one sequence. At
            least one row and one place are left to the others.
    """

    max_batched_tokens: int
    max_sequences: int
    prefill_chunk_size: int = 128
    repair_chunk_size: int = 128
    minimum_prefill_tokens: int = 0

    def __post_init__(self) -> None:
        sizes = (self.max_batched_tokens, self.max_sequences, self.prefill_chunk_size, self.repair_chunk_size)
        if min(sizes) < 1 or self.minimum_prefill_tokens < 0:
            raise InputError(f"iteration: sizes {sizes} must be positive and the minimum not negative")


@dataclass(frozen=True, slots=True)
class Demand:
    """Rows that a sequence wants evaluated.

    Attributes:
        tokens: rows, 1 for a decode.
        arrival: order of submission.
        priority: the higher goes first within a kind.
        position: of its first row.
    """

    id: str
    kind: Kind
    tokens: int
    arrival: float = 0
    priority: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """Rows granted, in order, and who got none."""

    scheduled: tuple[tuple[str, int], ...]
    deferred: tuple[str, ...]
    unused_tokens: int
    unused_sequences: int


def plan_iteration(limits: Limits, demands: Sequence[Demand]) -> Iteration:
    """Grant rows in the order of kind, priority, arrival and id."""
    waiting = sum(d.tokens for d in demands if d.kind is Kind.PREFILL)
    kept = min(limits.minimum_prefill_tokens, waiting, limits.max_batched_tokens - 1)
    kept_place = int(kept > 0 and limits.max_sequences > 1)
    tokens, places = limits.max_batched_tokens, limits.max_sequences
    scheduled, deferred = [], []
    for d in sorted(demands, key=lambda d: (d.kind, -d.priority, d.arrival, d.id)):
        prefill = d.kind is Kind.PREFILL
        granted = 0
        if places > (0 if prefill else kept_place):
            granted = min(_piece(limits, d), tokens if prefill else tokens - kept)
        if granted <= 0:
            deferred.append(d.id)
            continue
        scheduled.append((d.id, granted))
        tokens -= granted
        places -= 1
    return Iteration(tuple(scheduled), tuple(deferred), tokens, places)


def _piece(limits: Limits, demand: Demand) -> int:
    """Rows up to the next multiple of the chunk."""
    if demand.kind is Kind.DECODE:
        return 1
    chunk = limits.prefill_chunk_size if demand.kind is Kind.PREFILL else limits.repair_chunk_size
    return min(demand.tokens, chunk - demand.position % chunk)
