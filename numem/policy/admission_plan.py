"""Which holders go so that pages become free: planned over a frozen snapshot, which planning does not change.

A page becomes free when its last holder lets go, so references are simulated: of two forks over one page both must go
for it, and a page that a running sequence or a lease holds too is never gained.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from numem.errors import InputError
from numem.policy.value import Holder, victims


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Pages and their holders at one moment.

    Attributes:
        holders: those that may be asked to go.
        references: holders of each physical page, all of them: holders here, running sequences, leases.
        free: pages that anybody may take.
    """

    holders: tuple[Holder, ...]
    references: Sequence[int]
    free: int


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """How `required_pages` become free, or that they cannot.

    Attributes:
        available_pages: free now, and free if all that may go went (which is not counted where nobody has to go).
        evictions: ids in the order in which they go; none where the plan is not admissible. None can be left out.
        free_pages_after_eviction: free now, where the plan is not admissible.
        shortfall_pages: pages that are missing even then; 0 where the plan is admissible.
    """

    admissible: bool
    required_pages: int
    available_pages: int
    evictions: tuple[str, ...]
    free_pages_after_eviction: int
    shortfall_pages: int = 0


def required_pages(tokens: int, page_tokens: int, *, resident: int = 0, tail_copy: bool = False) -> int:
    """Pages to have before a sequence may grow to `tokens` tokens (prompt and generation).

    Args:
        resident: pages that it holds already.
        tail_copy: its last page is partial and may have another holder, so that it is copied before the first write.
    """
    if tokens < 0 or page_tokens <= 0 or resident < 0:
        raise InputError(f"required pages: {tokens} tokens in pages of {page_tokens} with {resident} pages held")
    return max(0, -(-tokens // page_tokens) - resident) + tail_copy


def evictable_pages(snapshot: Snapshot, protected: Collection[str] = ()) -> int:
    """Pages that would become free if every holder that may go went."""
    return _gained(snapshot, victims(snapshot.holders, protected))


def plan_admission(
    snapshot: Snapshot, required: int, *, protected: Collection[str] = (), order: Sequence[str] | None = None
) -> AdmissionPlan:
    """Free `required` pages by evictions in order, then leave out those that turned out not to be needed.

    Args:
        protected: ids that stay; the sequence that the room is for is always one of them.
        order: ids in the order in which they are asked to go; those that may not go are passed over, and those that it
            does not name follow by value. Default: all by value.

    Raises:
        InputError: a negative number of pages.
    """
    if required < 0:
        raise InputError(f"admission: {required} pages")
    able = victims(snapshot.holders, protected)
    available = snapshot.free + _gained(snapshot, able)
    if available < required:
        return AdmissionPlan(False, required, available, (), snapshot.free, required - available)
    if order is not None:
        rank = {holder_id: at for at, holder_id in enumerate(order)}
        able.sort(key=lambda h: rank.get(h.id, len(rank)))  # stable: the others keep their order by value
    left: dict[int, int] = {}
    free = snapshot.free
    chosen: list[Holder] = []
    for holder in able:
        if free >= required:
            break
        chosen.append(holder)
        for page in holder.pages:
            left[page] = left.get(page, snapshot.references[page]) - 1
            free += left[page] == 0
    kept: set[str] = set()
    for holder in reversed(chosen):  # what is worth more is spared first
        given_up = sum(left[page] == 0 for page in holder.pages)
        if free - given_up >= required:
            kept.add(holder.id)
            free -= given_up
            for page in holder.pages:
                left[page] += 1
    evictions = tuple(holder.id for holder in chosen if holder.id not in kept)
    return AdmissionPlan(True, required, available, evictions, free)


def _gained(snapshot: Snapshot, going: Sequence[Holder]) -> int:
    held = Counter(chain.from_iterable(holder.pages for holder in going))
    return sum(snapshot.references[page] == count for page, count in held.items())
