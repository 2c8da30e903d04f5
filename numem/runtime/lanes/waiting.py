"""Who waits for a lane, by priority and order of submission, followers of a leader apart; and whose time is up."""

import heapq
from collections.abc import Iterator

from numem.runtime.lanes.sequence import Entry, State

# Deadlines are looked through for those of ended entries when so many have come.
DEADLINES = 64


class Waiting:
    """A queue of entries that are not running.

    A follower is parked: it comes back into the queue when its leader's route reaches the boundary that both share,
    or when the leader is let go.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._parked: dict[Entry, list[tuple[int, Entry]]] = {}
        self._live: set[Entry] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._live, key=lambda e: (-e.request.priority, e.order)))

    def push(self, entry: Entry) -> None:
        """Let an entry wait in its place."""
        self._live.add(entry)
        heapq.heappush(self._heap, (-entry.request.priority, entry.order, entry))

    def peek(self) -> Entry | None:
        """The first that is not parked."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Entry:
        """Take the first out; `peek` has just named it."""
        entry = heapq.heappop(self._heap)[2]
        self._live.discard(entry)
        return entry

    def park(self, leader: Entry, boundary: int) -> None:
        """Let the first wait until `leader` holds the rows [0, boundary)."""
        self._parked.setdefault(leader, []).append((boundary, heapq.heappop(self._heap)[2]))

    def discard(self, entry: Entry) -> None:
        """Take an entry out, if it is here."""
        if entry not in self._live:
            return
        if entry is self.peek():
            self.pop()
            return
        self._live.remove(entry)
        self._heap = [item for item in self._heap if item[2] is not entry]
        heapq.heapify(self._heap)
        for leader, followers in list(self._parked.items()):
            left = [pair for pair in followers if pair[1] is not entry]
            if left:
                self._parked[leader] = left
            else:
                del self._parked[leader]

    def wake(self, leader: Entry, rows: int) -> None:
        """Bring back the followers whose boundary the leader has reached."""
        followers = self._parked.pop(leader, None)
        if not followers:
            return
        behind = [(boundary, entry) for boundary, entry in followers if boundary > rows]
        if behind:
            self._parked[leader] = behind
        for boundary, entry in followers:
            if boundary <= rows:
                heapq.heappush(self._heap, (-entry.request.priority, entry.order, entry))

    def release(self, leader: Entry) -> None:
        """Bring back every follower of a leader, which ended, lost its lane or makes no progress."""
        for _, entry in self._parked.pop(leader, ()):
            heapq.heappush(self._heap, (-entry.request.priority, entry.order, entry))

    def release_stalled(self, since: int) -> None:
        """Bring back the followers of leaders that gained no row since a step."""
        for leader in [leader for leader in self._parked if leader.moved < since]:
            self.release(leader)


class Deadlines:
    """Entries by their deadlines, forgotten some time after they ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._most = DEADLINES

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: Entry) -> None:
        """Note an entry's deadline, if it has one."""
        if entry.deadline is None:
            return
        if len(self._heap) >= self._most:
            self._heap = [item for item in self._heap if item[2].state is not State.ENDED]
            heapq.heapify(self._heap)
            self._most = max(DEADLINES, 2 * len(self._heap))
        heapq.heappush(self._heap, (entry.deadline, entry.order, entry))

    @property
    def soonest(self) -> float | None:
        """The next deadline of an entry that has not ended, or None."""
        while self._heap and self._heap[0][2].state is State.ENDED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Entry | None:
        """Take out an entry whose deadline has come before it ended, if there is one."""
        soonest = self.soonest
        return heapq.heappop(self._heap)[2] if soonest is not None and soonest <= now else None
