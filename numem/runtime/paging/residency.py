"""What stays in the pages after a sequence has ended, and what goes when pages are needed.

A kept route is a prefix that the next prompt may continue. `match` finds the longest one by its tokens, `make_room`
evicts those that are worth least. The planning is `numem.policy.admission_plan`, pure; here are the routes.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from numem.errors import InputError
from numem.identity.chain import CHUNK_TOKENS, boundary_id
from numem.policy import NAMES, Policy, make
from numem.policy.admission_plan import AdmissionPlan, Snapshot, plan_admission
from numem.policy.decision import Decision, Term
from numem.policy.reuse import ReuseRate
from numem.policy.value import Holder, Worth, declined
from numem.runtime.engine import Engine
from numem.runtime.paging.page_tree import PageTree
from numem.runtime.paging.pool import Route
from numem.runtime.paging.room import admitting, candidates, evicting

VALUE = "value"


class RowCosts(Protocol):
    """What rows cost, as `numem.policy.costs` measures it."""

    def prefill_ms(self, start: int, count: int) -> float:
        """Time to compute rows [start, start + count)."""

    def load_ms(self, tier: str, nbytes: int, parts: int) -> float | None:
        """Time to load `nbytes` in so many parts from a tier; None where nothing is known of the tier."""


class Log(Protocol):
    """Where decisions are written down."""

    def record(self, decision: Decision) -> str: ...


@dataclass(slots=True)
class _Kept:
    """A route that outlived its sequence, with what is known of its worth (see `Residency.retain`).

    Attributes:
        added: pages of tokens that no route kept before had; parent: the route that had those before them.
    """

    route: Route
    tokens: Sequence[int]
    durable: bool
    pinned: bool
    p_reuse: float | None
    recompute_ms: float | None
    reload_ms: float
    sharing_bonus: float
    slo_bonus: float
    added: int = 0
    parent: str = ""
    uses: int = 0


class Residency:
    """Kept routes of an engine, on the thread that owns it.

    What may go: a route that is not pinned, has no append under way and no lease, and is not protected. The rule that
    only durable state may go is there so that nothing is lost. Rows that follow from known tokens are not lost: they are
    loaded where they are durable, and else computed again, bit for bit. So every kept route may go, at that price.

    Args:
        engine: whose routes are kept.
        policy: "value", or a name of `numem.policy.NAMES`. The named ones give the order by what they see of uses; how
            many pages an eviction frees is simulated all the same.
        decisions: where admissions and evictions are recorded, or None.
        costs: what rows cost to compute or to load; without them a token counts as 1 ms.
        tier: where durable rows are loaded from, or None where they are not.
        scope: scope of the engine's identity, so that decisions name the boundaries that they are about.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        policy: str = VALUE,
        decisions: Log | None = None,
        costs: RowCosts | None = None,
        tier: str | None = None,
        scope: bytes = b"",
    ) -> None:
        if policy != VALUE and policy not in NAMES:
            raise InputError(f"residency: policy {policy!r}; use one of {VALUE}, {', '.join(NAMES)}")
        self.engine = engine
        self.policy = policy
        self._order: Policy | None = None if policy == VALUE else make(policy, engine.pool.physical)
        self._decisions = decisions
        self._costs = costs
        self._tier = tier
        self._scope = scope
        self._kept: dict[str, _Kept] = {}
        self._names: dict[Route, str] = {}
        self._tree = PageTree(engine.pool.page_tokens)
        self._reuse = ReuseRate()
        self._lock = threading.RLock()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def retain(
        self,
        name: str,
        route: Route,
        tokens: Sequence[int],
        *,
        durable: bool,
        p_reuse: float | None = None,
        recompute_ms: float | None = None,
        reload_ms: float = 0.0,
        sharing_bonus: float = 0.0,
        slo_bonus: float = 0.0,
        pinned: bool = False,
    ) -> bool:
        """Keep a route that nobody else uses any more; from now on it is released here.

        Args:
            name: what it is called from now on, not empty.
            tokens: of its rows, at least route.length of them (a pending one may follow).
            durable: its rows are in the durable plane.
            p_reuse: probability of another use; default: learnt from the routes kept so far.
            recompute_ms, reload_ms: cost of the next use without the route and with it. Default: having its rows again,
                loaded or computed as is cheaper, and nothing, because a fork of resident pages costs next to nothing.
            sharing_bonus, slo_bonus: expected ms that keeping it saves beyond its own next use.
            pinned: it stays until `unpin` or `drop`.

        Returns:
            Whether it is kept. It is released at once where it holds nothing, where all its rows are kept already (which
            counts as a use of them) and it is not to be pinned, or where a named policy finds no room for it.

        Raises:
            InputError: a name that is empty or kept already, too few tokens, or a term out of its range; the route is as
                before.
        """
        Worth(p_reuse or 0.0, recompute_ms or 0.0, reload_ms, sharing_bonus, slo_bonus)
        if not name or name in self._kept:
            raise InputError(f"retain {name!r}: the name is empty, or a route is kept under it; drop that one first")
        if route.released or route.pending is not None or len(tokens) < route.length:
            raise InputError(
                f"retain {name!r}: a route with an append under way, released, or of more rows ({route.length}) than "
                f"tokens ({len(tokens)}) cannot be kept"
            )
        rows = tokens[: route.length]
        with self._lock:
            twin = self._longest(rows)
            covered = twin is not None and twin[0] == len(rows) and not pinned
            if covered and twin is not None:
                self._use(twin[1])
            if covered or not rows:
                self.engine.release(route)
                return False
            kept = _Kept(route, rows, durable, pinned, p_reuse, recompute_ms, reload_ms, sharing_bonus, slo_bonus)
            kept.added, kept.parent = self._tree.add(name, rows)
            self._kept[name] = kept
            self._names[route] = name
            self._reuse.kept()
            self.engine.pool.touch(route)
            if self._order is not None and not self._admit(self._order, name, kept):
                self._leave(name)
            return name in self._kept

    def match(self, tokens: Sequence[int]) -> tuple[Route, int] | None:
        """The kept route with the longest prefix in common, and how many tokens that is; None where there is none.

        Fork or lease it before anything else is asked here: only that keeps its pages. Asking is no use, see `used`.
        """
        with self._lock:
            found = self._longest(tokens)
            return (self._kept[found[1]].route, found[0]) if found is not None else None

    def used(self, route: Route) -> None:
        """Count a use of a kept route; one that is not kept is none of ours."""
        with self._lock:
            name = self._names.get(route)
            if name is not None:
                self._use(name)

    def snapshot(self) -> Snapshot:
        """Pages and kept routes as they are now."""
        with self._lock:
            pool = self.engine.pool
            holders = tuple(self._holder(name, kept) for name, kept in self._kept.items())
            return Snapshot(holders, pool.references(), pool.free)

    def plan(self, pages: int, protected: Collection[str] = ()) -> AdmissionPlan:
        """How `pages` free pages would be had; changes nothing."""
        with self._lock:
            return self._plan(self.snapshot(), pages, protected)

    def make_room(self, pages: int, protected: Collection[str] = (), request: str = "") -> AdmissionPlan:
        """Plan and evict under one lock, so that `pages` pages are free; an inadmissible plan changes nothing.

        Args:
            protected: names of routes that stay.
            request: what the pages are for, as decisions name it.
        """
        with self._lock:
            free = self.engine.pool.free
            if 0 <= pages <= free:
                return AdmissionPlan(True, pages, free, (), free)
            snapshot = self.snapshot()
            plan = self._plan(snapshot, pages, protected)
            if self._decisions is not None:
                self._record(plan, snapshot, protected, request)
            for name in plan.evictions:
                self._leave(name, evicted=True)
            return plan

    def drop(self, name: str) -> bool:
        """Release a kept route, pinned or not; whether there was one."""
        with self._lock:
            if name not in self._kept:
                return False
            self._leave(name)
            return True

    def clear(self) -> None:
        """Release every kept route."""
        with self._lock:
            for name in list(self._kept):
                self._leave(name)

    def pin(self, name: str) -> None:
        """Keep a route until `unpin`, whatever the pressure.

        Raises:
            InputError: no such route.
        """
        self._named(name).pinned = True

    def unpin(self, name: str) -> None:
        """Let a route go again when pages are needed."""
        self._named(name).pinned = False

    def mark_durable(self, name: str) -> None:
        """The rows of a route are in the durable plane now."""
        self._named(name).durable = True

    def _named(self, name: str) -> _Kept:
        kept = self._kept.get(name)
        if kept is None:
            raise InputError(f"residency: no route is kept as {name!r}; it was never retained, or has been evicted")
        return kept

    def _longest(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        refused: set[str] = set()
        for length, name in self._tree.matches(tokens):
            # A route without the rows of a window below some boundary cannot be cut there, nor anywhere before.
            if name in refused:
                continue
            if self.engine.pool.fork_allowed(self._kept[name].route, length):
                return length, name
            refused.add(name)
        return None

    def _use(self, name: str) -> None:
        kept = self._kept[name]
        self.engine.pool.touch(kept.route)
        self._reuse.used(kept.uses)
        kept.uses += 1
        if self._order is not None:
            self._order.touch(name)

    def _admit(self, policy: Policy, name: str, kept: _Kept) -> bool:
        """Bring a route into the account of a named policy; its units are pages, one at least, and may need room."""
        kept.added = max(1, kept.added)
        if policy.used + kept.added > policy.capacity:
            staying = {h.id for h in self.snapshot().holders if declined(h, (name, kept.parent))}
            going = policy.victims(kept.added, staying.__contains__, name)
            if going is None:
                return False
            for victim in going:
                self._leave(str(victim), evicted=True)
        worth = self._worth(kept)
        policy.admit(name, kept.added, max(0.0, worth.recompute_ms - worth.reload_ms), kept.parent or None)
        return True

    def _leave(self, name: str, evicted: bool = False) -> None:
        kept = self._kept[name]
        self.engine.release(kept.route)
        del self._kept[name], self._names[kept.route]
        self._tree.remove(name)
        if self._order is not None:
            (self._order.evict if evicted else self._order.remove)(name)
        self.evicted += evicted

    def _holder(self, name: str, kept: _Kept) -> Holder:
        return Holder(
            name,
            tuple(kept.route.pages),
            self._worth(kept).value,
            kept.route.last_access,
            pinned=kept.pinned,
            pending=kept.route.pending is not None,
            leased=self.engine.pool.leased(kept.route),
        )

    def _worth(self, kept: _Kept) -> Worth:
        p_reuse = self._reuse.probability(kept.uses) if kept.p_reuse is None else kept.p_reuse
        again = self._again_ms(kept) if kept.recompute_ms is None else kept.recompute_ms
        return Worth(p_reuse, again, kept.reload_ms, kept.sharing_bonus, kept.slo_bonus)

    def _again_ms(self, kept: _Kept) -> float:
        """Cost of having the rows of a route again once it is gone."""
        rows = kept.route.length
        if self._costs is None:
            return float(rows)
        compute = self._costs.prefill_ms(0, rows)
        if self._tier is None or not kept.durable:
            return compute
        nbytes = rows * self.engine.decoder.spec.row_bytes
        load = self._costs.load_ms(self._tier, nbytes, -(-rows // CHUNK_TOKENS))
        return compute if load is None else min(compute, load)

    def _plan(self, snapshot: Snapshot, pages: int, protected: Collection[str]) -> AdmissionPlan:
        order = self._order_of(self._order, snapshot, protected) if self._order is not None else None
        return plan_admission(snapshot, pages, protected=protected, order=order)

    def _order_of(self, policy: Policy, snapshot: Snapshot, protected: Collection[str]) -> list[str]:
        """All that may go, in the order of a named policy."""
        staying = {holder.id for holder in snapshot.holders if declined(holder, protected)}
        for name in tuple(staying) if policy.leaf_first else ():
            # A leaf-first policy does not offer what one that stays continues.
            while (name := self._kept[name].parent) in self._kept and name not in staying:
                staying.add(name)
        going = sum(kept.added for name, kept in self._kept.items() if name not in staying)
        # As many units as all of them have: the policy then names every one.
        need = policy.capacity - policy.used + going
        return [str(key) for key in policy.victims(need, staying.__contains__) or ()]

    def _record(self, plan: AdmissionPlan, snapshot: Snapshot, protected: Collection[str], request: str) -> None:
        assert self._decisions is not None
        known: dict[str, dict[str, Term]] = {
            name: {"rows": kept.route.length, "uses": kept.uses} for name, kept in self._kept.items()
        }
        named = candidates(plan, snapshot, protected, known)
        self._decisions.record(admitting(plan, snapshot, self.policy, request, named))
        if plan.evictions:
            gone = [
                boundary_id(self._scope, self._kept[name].tokens, self._kept[name].route.length)
                for name in plan.evictions
                if self._scope
            ]
            self._decisions.record(evicting(plan, snapshot, self.policy, request, named, gone))
