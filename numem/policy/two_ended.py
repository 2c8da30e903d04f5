"""Two-ended restore: rows are computed from the front while chunks are loaded from the back, until they meet.

One rule, `step_helps`, says before each step whether to compute or to wait; the execution and the simulated clock use
it alike. It never makes things later than waiting would: with exact costs the whole takes at most as long as loading
alone, and at most as long as computing alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Part = tuple[float, float]  # ms to read it, then ms to write it into pages


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, end) that one load brings.

    Attributes:
        load_ms: to read them, in the background, one piece after the other.
        page_ms: to write them into pages, on the thread that also computes.
    """

    start: int
    end: int
    load_ms: float
    page_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """How a restore went on the simulated clock: when all rows were there, and where they came from."""

    ms: float
    loaded: int
    computed: int


def landed_ms(parts: Sequence[Part], busy_ms: float = 0.0) -> float:
    """When the last of `parts`, read in this order, is in its pages; their writer is busy until `busy_ms`."""
    read = 0.0
    written = busy_ms
    for load, page in parts:
        read += load
        written = max(written, read) + page
    return written


def expected(ready: Sequence[Part], reading: Sequence[Part], elapsed_ms: float, pending: Sequence[Part]) -> list[Part]:
    """What is still to be written, in this order, when nothing has been read for `elapsed_ms`.

    One read brings all of `reading` at once. What is overdue, or has not begun, is expected to take as long again as it
    is late by, so that a tier that stalls is not waited for.
    """
    group, rest = (reading, pending) if reading else (pending[:1], pending[1:])
    left = abs(sum(load for load, _ in group) - elapsed_ms)
    times = [0.0] * len(ready) + [left] + [0.0] * (len(group) - 1)
    return [(time, page) for time, (_, page) in zip(times, (*ready, *group), strict=False)] + list(rest)


def step_helps(compute_ms: float, all_ms: float, parts: Sequence[Part]) -> bool:
    """Whether computing the lowest missing rows now ends no later than waiting for all that is to be loaded.

    Args:
        compute_ms: to compute the rows that the last of `parts` would bring.
        all_ms: to compute what all of them would bring.
        parts: what is still to be loaded, in the order of loading.
    """
    return min(all_ms, landed_ms(parts[:-1], compute_ms)) <= landed_ms(parts)


def beaten(front: int, loads: Iterable[tuple[int, float]], prefill_ms: Callable[[int, int], float]) -> int:
    """Up to where computing on from `front` is done before a load that begins now could be: no such load is begun.

    Args:
        loads: (end, ms) of the missing pieces, from the front.
    """
    upto = front
    for end, ms in loads:
        if prefill_ms(front, end - front) > ms:
            break
        upto = end
    return upto


def simulate(policy: str, pieces: Sequence[Piece], prefill_ms: Callable[[int, int], float], *, step: int = 256) -> Run:
    """Run a restore of contiguous pieces on a simulated clock on which costs are exact.

    Args:
        policy: "restore", "recompute" or "two-ended".
        prefill_ms: cost of computing (start, count).
        step: rows of one step of computation.
    """
    queue = deque(reversed(pieces)) if policy != "recompute" else deque()
    loading: tuple[Piece, float] | None = None
    ready: list[Piece] = []
    landed: dict[int, int] = {}
    now = free = 0.0
    front = claimed = pieces[0].start if pieces else 0
    end = pieces[-1].end if pieces else 0
    computed = 0

    def load(until: float) -> None:
        """Let the loader work until then; it passes over what is claimed at its start of a piece."""
        nonlocal loading, free
        while True:
            if loading is not None:
                if loading[1] > until:
                    return
                ready.append(loading[0])
                free, loading = loading[1], None
            while queue and queue[0].end <= claimed:
                queue.popleft()
            if not queue:
                return
            piece = queue.popleft()
            loading = piece, free + piece.load_ms

    load(0.0)
    while front < end:
        ready = [piece for piece in ready if piece.end > front]
        piece = next(p for p in pieces if p.start <= front < p.end)
        coming = [(0.0, p) for p in ready]
        if loading is not None and loading[0].end > front:
            coming.append((loading[1] - now, loading[0]))
        coming += [(p.load_ms, p) for p in queue if p.end > max(front, claimed)]
        lost = piece not in [p for _, p in coming]
        if lost or (
            policy == "two-ended"
            and step_helps(
                prefill_ms(front, piece.end - front),
                prefill_ms(front, coming[0][1].end - front),
                [(ms, p.page_ms) for ms, p in coming],
            )
        ):
            count = min(step, piece.end - front)
            missing = ((p.end, p.load_ms) for p in pieces if p.end > front)
            claimed = max(front + count, beaten(front, missing, prefill_ms))
            now += prefill_ms(front, count)
            front += count
            computed += count
        elif ready:
            piece = ready.pop(0)
            now += piece.page_ms
            landed[max(piece.start, front)] = piece.end
        elif loading is not None:
            now = max(now, loading[1])
        load(now)
        while front in landed:
            front = landed[front]
    return Run(now, end - (pieces[0].start if pieces else 0) - computed, computed)
