"""The account of one tier on this node: which nodes are resident, how large they are, and in which order they leave.

What is resident is what the catalog says, so that all processes of a node count the same; the order is this process's
own, from its reads and promotions. At open, nodes count in the order in which they were placed.
"""

import heapq
import time
from collections import deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from numem.policy import Policy, make
from numem.policy.decision import Alternative
from numem.policy.eviction.protocol import Key
from numem.state.node import Node
from numem.store.catalog.facts import Placement, State
from numem.store.payload.tier import Tier

if TYPE_CHECKING:
    from numem.store.session import Session

# Reads whose order is remembered between two looks at the account.
_READS = 1 << 14
# Candidates of an eviction that are written down with it, and how many of them are victims.
_CANDIDATES = 32
_VICTIMS = 24
# Pieces of no visible node that are younger may belong to a publication under way.
_STRAY_GRACE_NS = 60 * 10**9


class Account:
    """Residents of a tier. Used under the tier's lock; `touched` alone may be called by any thread.

    A node is resident when all of its pieces are. Pieces that several nodes share count once.

    Attributes:
        used: bytes of ready pieces in the tier on this node, without padding.
        nodes: resident nodes by causal id.
    """

    def __init__(self, parts: "Session", tier: Tier) -> None:
        self._parts = parts
        self._tier = tier
        self._policy: Policy | None = None
        self._reads: deque[tuple[bytes, ...]] = deque(maxlen=_READS)
        self._mark = (0, 0)
        self._visible: set[bytes] = set()
        self._copies: dict[bytes, tuple[Placement, ...]] = {}
        # Pieces of which no other durable copy was known when they were looked at.
        self._alone: set[bytes] = set()
        self._holders: dict[bytes, list[bytes]] = {}
        self._children: dict[bytes, list[bytes]] = {}
        self._fresh: frozenset[bytes] = frozenset()
        # Of resident nodes: uses, and how many uses of the tier there had been at the last one.
        self._uses: dict[bytes, tuple[int, int]] = {}
        self._tick = 0
        self.used = 0
        self.nodes: dict[bytes, Node] = {}

    def touched(self, contents: Iterable[bytes]) -> None:
        """One read took these pieces from the tier."""
        self._reads.append(tuple(contents))

    def look(self) -> None:
        """Take up what was placed, evicted and read since; costs as much as that is."""
        catalog = self._parts.catalog
        catalog.refresh(force=True)
        ids = catalog.nodes.ids()
        appeared = [id for id in ids if id not in self._visible]
        left = self._visible.difference(ids) if len(ids) != len(self._visible) + len(appeared) else set()
        self._visible = (self._visible - left) | set(appeared)
        self._mark, changed = catalog.placements.since(self._mark)
        # Facts about other tiers matter for what is here: it may be its last copy now, or not be it any more.
        here = dict.fromkeys(c for c, tier in changed if c and (tier == self._tier.name or c in self._copies))
        for content in here:
            self._take_stock(content)
        seen = {node.id: node for node in self._parts.holders.nodes(here)} if here else {}
        if self._copies:
            seen.update((id, node) for id in appeared if (node := catalog.nodes.get(id)) is not None)
        for id in left & self.nodes.keys():
            self._leave(id)
        come = []
        for id, node in seen.items():
            whole = all(piece in self._copies for piece in node.pieces)
            if whole and id not in self.nodes:
                come.append(node)
            elif not whole and id in self.nodes:
                self._leave(id)
        if come or self._policy is None:
            self._come(come)
        assert self._policy is not None
        while self._reads:
            contents = self._reads.popleft()
            self._tick += 1
            for id in dict.fromkeys(id for content in contents for id in self._holders.get(content, ())):
                self._policy.touch(id)
                self._uses[id] = (self._uses[id][0] + 1, self._tick)

    def wanted(self, ids: Iterable[bytes]) -> None:
        """Nodes are about to be placed here: a use of each, which the policy may have remembered them for."""
        assert self._policy is not None
        for id in ids:
            if id not in self.nodes:
                self._policy.touch(id)

    def victims(self, nbytes: int, kept: AbstractSet[bytes]) -> list[bytes] | None:
        """Nodes to evict, in this order, so that `nbytes` of pieces leave; None where that cannot be.

        A node stays that is kept or would be the last durable copy, and while a descendant stays. What was placed
        last goes only where the others do not suffice.
        """
        blocked = self._blocked(kept)
        for held in (self._with_ancestors([*blocked, *self._fresh]), blocked):
            if self._evictable(held) >= nbytes:
                return self._choose(nbytes, held)
        return None

    def most(self, kept: AbstractSet[bytes]) -> int:
        """The most that `victims` can free."""
        return self._evictable(self._blocked(kept))

    def candidates(self, victims: Sequence[bytes], kept: AbstractSet[bytes]) -> tuple[Alternative, ...]:
        """What a plan of `victims` chose among: the first of them in order, then what could have left instead, longest
        unused first. To be asked before they leave.

        Its terms are bytes, rows to be computed again, uses since it came, and uses of the tier since its last,
        and the parent where that is here.
        """
        leaving = {*victims}
        stay = self.nodes.keys() - leaving - self._blocked(kept)
        first = list(victims[:_VICTIMS])
        rest = heapq.nsmallest(_CANDIDATES - len(first), stay, key=lambda id: (self._uses[id][1], id))
        found = []
        for id in (*first, *rest):
            uses, tick = self._uses[id]
            continued = id not in leaving and any(child not in leaving for child in self._children.get(id, ()))
            node = self.nodes[id]
            found.append(
                Alternative(
                    f"evict:{id.hex()}",
                    terms={
                        "bytes": sum(map(self._size, dict.fromkeys(node.pieces))),
                        "rows": node.count,
                        "uses": uses,
                        "idle": self._tick - tick,
                        **({"parent": node.parent.hex()} if node.parent in self.nodes else {}),
                    },
                    declined="what continues it is here" if continued else "",
                )
            )
        return tuple(found)

    def freed(self, victims: Iterable[bytes]) -> list[Placement]:
        """Copies that leave with these nodes: those of pieces that no other resident node has."""
        gone = set(victims)
        contents = dict.fromkeys(piece for id in victims for piece in self.nodes[id].pieces)
        return [
            copy for content in contents if gone.issuperset(self._holders[content]) for copy in self._copies[content]
        ]

    def strays(self, pieces: AbstractSet[bytes]) -> list[Placement]:
        """Copies of no resident node that have been here for a while, are not kept and exist elsewhere."""
        before = time.time_ns() - _STRAY_GRACE_NS
        return [
            copy
            for content in self._copies.keys() - self._holders.keys() - pieces
            if self._elsewhere(content)
            for copy in self._copies[content]
            if copy.sequence < before
        ]

    def _take_stock(self, content: bytes) -> None:
        """Look at the copies of a piece anew."""
        current = self._parts.catalog.placements.current(content)
        ready = tuple(p for p in current if p.state is State.READY and self._tier.reachable(p))
        self.used -= self._size(content)
        self._copies.pop(content, None)
        self._alone.discard(content)
        if ready:
            self._copies[content] = ready
            self.used += self._size(content)
            if not self._elsewhere(content):
                self._alone.add(content)

    def _come(self, nodes: list[Node]) -> None:
        """Nodes are resident now, those placed first before the others."""
        first = not self.nodes
        for node in nodes:
            self.nodes[node.id] = node
            self._children.setdefault(node.parent, []).append(node.id)
            for piece in dict.fromkeys(node.pieces):
                self._holders.setdefault(piece, []).append(node.id)
        nodes.sort(key=lambda node: (max(self._copies[piece][0].sequence for piece in node.pieces), node.start))
        sizes = [self._own_size(node) for node in nodes]
        spec = self._tier.config.spec
        if self._policy is None:
            self._policy = make(spec.policy, spec.capacity or max(1, self.used))
        # More than the capacity can be here: another process placed it, or the capacity was lowered.
        self._policy.capacity = max(spec.capacity or 1, self._policy.used + sum(sizes))
        for node, size in zip(nodes, sizes, strict=True):
            # Rows to be computed again stand for the cost; what they cost in ms is the runtime's to know.
            self._policy.admit(node.id, size, float(node.count), node.parent)
            self._tick += 1
            self._uses[node.id] = (1, self._tick)
        self._fresh = frozenset() if first else frozenset(node.id for node in nodes)

    def _leave(self, id: bytes) -> None:
        """A node is not resident any more."""
        node = self.nodes.pop(id)
        del self._uses[id]
        _remove(self._children, node.parent, id)
        for piece in dict.fromkeys(node.pieces):
            _remove(self._holders, piece, id)
        if self._policy is not None:
            self._policy.evict(id)

    def _own_size(self, node: Node) -> int:
        """Bytes that count for a node: a piece that several nodes share counts for the first of them."""
        mine = (piece for piece in dict.fromkeys(node.pieces) if self._holders[piece][0] == node.id)
        return max(1, sum(map(self._size, mine)))

    def _choose(self, nbytes: int, blocked: AbstractSet[bytes]) -> list[bytes] | None:
        policy = self._policy
        assert policy is not None
        chosen: dict[bytes, None] = {}

        def stays(key: Key) -> bool:
            if key in blocked or policy.leaf_first:
                return key in blocked
            return isinstance(key, bytes) and any(child not in chosen for child in self._children.get(key, ()))

        left = nbytes
        while left > 0:
            # Policies that know the tree name all at once; of the others a leaf at a time is asked.
            need = left if policy.leaf_first else 1
            found = policy.victims(need + policy.capacity - policy.used, stays)
            if not found:
                return None
            for key in found:
                assert isinstance(key, bytes)
                policy.evict(key)
                chosen[key] = None
                for piece in dict.fromkeys(self.nodes[key].pieces):
                    if all(holder in chosen for holder in self._holders[piece]):
                        left -= self._size(piece)
        return list(chosen)

    def _blocked(self, kept: AbstractSet[bytes]) -> set[bytes]:
        """Resident nodes that may not leave: kept ones, the last durable copies, and what either continues."""
        alone = {content for content in self._alone if not self._elsewhere(content)}  # an archive may have it by now
        last = [id for content in alone for id in self._holders.get(content, ())]
        return self._with_ancestors([*kept, *last])

    def _evictable(self, blocked: AbstractSet[bytes]) -> int:
        """Bytes of resident nodes' pieces that no blocked node needs."""
        held = {piece for id in blocked for piece in self.nodes[id].pieces}
        return sum(map(self._size, self._holders)) - sum(map(self._size, held))

    def _size(self, content: bytes) -> int:
        return sum(copy.nbytes for copy in self._copies.get(content, ()))

    def _elsewhere(self, content: bytes) -> bool:
        """Whether a tier that lasts and that all nodes share, or an archive, has another ready copy of a piece."""
        return any(
            copy.volume and not copy.node and copy.tier != self._tier.name
            for copy in self._parts.reader.replicas(content)
        )

    def _with_ancestors(self, ids: Iterable[bytes]) -> set[bytes]:
        found: set[bytes] = set()
        for id in ids:
            while id in self.nodes and id not in found:
                found.add(id)
                id = self.nodes[id].parent
        return found


def _remove(lists: dict[bytes, list[bytes]], key: bytes, value: bytes) -> None:
    lists[key].remove(value)
    if not lists[key]:
        del lists[key]
