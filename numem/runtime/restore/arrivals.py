"""How the rows of arriving prompts come: decided by measured costs, loaded in the background, written down."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from numem.errors import InputError, StoreError
from numem.identity.chain import TOKEN_BYTES, page_ids
from numem.policy.choice import UNKNOWN_COST, Held, Prompt, alternatives, choose, sources
from numem.policy.costs import Costs
from numem.policy.decision import Alternative, Decision, Term
from numem.runtime.paging.pool import Capacity, Route
from numem.runtime.restore.arrival import Arrival
from numem.runtime.restore.kv import hit_bytes
from numem.runtime.restore.loader import Loader, Wanted, observe
from numem.runtime.restore.measured import load_costs, save_costs
from numem.runtime.restore.prefix import Hit, Match, lookup

if TYPE_CHECKING:
    from numem.lineage.decisions import DecisionLog
    from numem.runtime.continuation import Session
    from numem.store.memory import Memory

POLICIES = ("measured", "recompute", "restore", "two-ended")
# Where a copy is that went between lookup and now: the read will say so.
GONE = "none"
# Measurements are saved after so many arrivals, and at the end.
SAVE_EVERY = 64


class Arrivals:
    """Begins arrivals over one session; used by the thread that owns its engine, and closed before the memory.

    Args:
        memory: durable plane to restore from, or None: everything is computed.
        tier: read from this tier wherever it has the rows.
        policy: "measured" chooses by predicted time to first token; "recompute", "restore" and "two-ended" are forced
            where they are possible at all. A tier that was never read is probed by the first "measured" arrival.
        costs: measurements to use and to add to; default those that the last process left in the memory.
        decisions: where decisions go; None to record none.
    """

    def __init__(
        self,
        session: "Session",
        memory: "Memory | None",
        *,
        tier: str | None = None,
        policy: str = "measured",
        costs: Costs | None = None,
        decisions: "DecisionLog | None" = None,
    ) -> None:
        if policy not in POLICIES:
            raise InputError(f"arrivals: policy {policy!r}; use one of {', '.join(POLICIES)}")
        self.session = session
        self.memory = memory
        self.tier = tier
        self.policy = policy
        if memory is not None and tier is not None:
            memory.require_tier(tier)
        if memory is not None:
            memory.register(session.identity)  # so that `Memory.unread` can say what differs
        self._kept = costs is None and memory is not None
        self.costs = costs or (load_costs(memory, session.identity) if memory is not None else Costs())
        self.decisions = decisions
        engine = session.engine
        self._loader = None if memory is None else Loader(memory, engine.decoder.spec, staging=engine.storage.transfers)
        self._finished = 0

    def begin(
        self, route: Route, tokens: Sequence[int], *, request: str = "", capacity: Capacity | None = None
    ) -> Arrival:
        """Take over a route, which may hold rows already, and bring in the rest of `tokens`.

        Args:
            capacity: pages set aside for it; further ones are taken from those that are free.

        Raises:
            ContextLengthError: more tokens than max_position. The route is released, as by every error of this method.
        """
        try:
            if len(tokens):
                self.session.engine.check(0, tokens)
            return self._begin(route, tokens, request, capacity)
        except BaseException:
            if not route.released and route.pending is None:
                self.session.engine.release(route)
            raise

    def close(self) -> None:
        """Stop all loads and keep what was measured. Arrivals that are not done must be aborted."""
        if self._loader is not None:
            self._loader.close()
        self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, route: Route, tokens: Sequence[int], request: str, capacity: Capacity | None) -> Arrival:
        engine = self.session.engine
        if self.memory is None or self._loader is None:
            return Arrival(engine, self.costs, route, tokens, capacity=capacity)
        try:
            return self._decided(self.memory, self._loader, route, tokens, request, capacity)
        except (StoreError, OSError) as error:
            # What a store cannot tell or give is computed, here as where a read fails.
            arrival = Arrival(engine, self.costs, route, tokens, capacity=capacity)
            arrival.restored.failures.append(f"rows [{route.length}, {len(tokens)}): {error}; recomputed")
            return arrival

    def _decided(
        self,
        memory: "Memory",
        loader: Loader,
        route: Route,
        tokens: Sequence[int],
        request: str,
        capacity: Capacity | None,
    ) -> Arrival:
        """An arrival by the best way; an error leaves the route as it was."""
        engine = self.session.engine
        spec = engine.decoder.spec
        for read in loader.unheard():
            observe(self.costs, read)
        began = time.perf_counter()
        match = lookup(memory, self.session.identity.scope, tokens, spec=spec)
        lookup_ms = (time.perf_counter() - began) * 1e3
        with contextlib.ExitStack() as undo:
            undo.callback(match.lease.release)
            hits = [hit for hit in match.hits if hit.node.start + hit.rows > route.length]
            prompt = self._prompt(route, tokens, hits, capacity)
            decision = self._decide(prompt, request, _boundary(match))
            arrival = Arrival(engine, self.costs, route, tokens, capacity=capacity, decision=decision)
            arrival.restored.lookup_ms = lookup_ms
            arrival.on_done = self._count
            if self.decisions is not None:
                arrival.decision_id = self.decisions.record(decision)
            kind, _, way = decision.choice.partition(":")
            if way:
                wanted = [
                    Wanted(hit, held.nbytes, tier, None if tier == held.tiers[0] else tier)
                    for hit, held, tier in zip(hits, prompt.held, sources(prompt, self.costs)[way], strict=True)
                ]
                reservation = engine.reserve(route, prompt.matched - route.length, capacity)
                undo.callback(engine.pool.abort, [reservation])
                load = loader.start(
                    match, wanted, share=2 if kind == "restore" else 4, descending_only=bool(spec.groups)
                )
                arrival.expect(loader, load, wanted, reservation, waits=self.policy == "restore")
                undo.pop_all()
        return arrival

    def _prompt(self, route: Route, tokens: Sequence[int], hits: Sequence[Hit], capacity: Capacity | None) -> Prompt:
        pool = self.session.engine.pool
        copied = route.length % pool.page_tokens > 0 and pool.refs(route.pages[-1]) > 1
        return Prompt(
            tokens=len(tokens),
            resident=route.length,
            held=tuple(self._held(hit) for hit in hits),
            pages_needed=pool.pages_for(len(tokens)) - len(route.pages) + copied,
            pages_free=pool.free + (capacity.left if capacity is not None else 0),
            max_position=self.session.engine.max_position,
            prefer=self.tier,
        )

    def _held(self, hit: Hit) -> Held:
        """Where the rows of a hit can be read: in the tiers that have all of its pieces, else in those that have some."""
        assert self.memory is not None
        copies = [self.memory.placements(hit.node.pieces[index]) for index in hit.parts]
        found = [[copy.tier for copy in piece] for piece in copies]
        tiers = [tier for tier in found[0] if all(tier in others for others in found)] or [t for f in found for t in f]
        nbytes = hit_bytes(self.session.engine.decoder.spec, hit)
        return Held(hit.node.start, hit.node.start + hit.rows, nbytes, tuple(dict.fromkeys(tiers or [GONE])))

    def _decide(self, prompt: Prompt, request: str, subject: bytes) -> Decision:
        found = alternatives(prompt, self.costs)
        if self.policy == "measured":
            chosen = choose(found)
        else:
            chosen = self._forced(found)
            found = tuple(replace(a, declined="") if a is chosen else a for a in found)
        inputs: dict[str, Term] = {
            "tokens": prompt.tokens,
            "resident": prompt.resident,
            "matched": prompt.matched,
        }
        for held in prompt.held:
            for tier in held.tiers:
                inputs[f"bytes:{tier}"] = int(inputs.get(f"bytes:{tier}") or 0) + held.nbytes
        return Decision("arrive", request, subject, self.policy, inputs, found, chosen.name)

    def _forced(self, found: Sequence[Alternative]) -> Alternative:
        able = [a for a in found if a.declined in ("", UNKNOWN_COST)]
        ways = [a for a in able if a.name.startswith(f"{self.policy}:")]
        return ways[0] if ways else next(a for a in able if a.name in ("resident", "recompute"))

    def _count(self, arrival: Arrival) -> None:
        """An arrival is done: say what it cost, and keep the measurements now and then."""
        self._finished += 1
        if self.decisions is not None:
            read: dict[str, Any] = {f"bytes:{tier}": nbytes for tier, nbytes in arrival.restored.by_tier.items()}
            self.decisions.outcome(
                arrival.decision_id,
                arrival.took_ms,
                loaded=arrival.restored.tokens,
                computed=arrival.computed,
                lookup_ms=arrival.restored.lookup_ms,
                read_ms=arrival.restored.read_ms,
                page_ms=arrival.restored.load_ms,
                failures=len(arrival.restored.failures),
                **read,
            )
        if self._finished % SAVE_EVERY == 0:
            self._save()

    def _save(self) -> None:
        if self._kept and self.memory is not None:
            save_costs(self.memory, self.session.identity, self.costs)


def _boundary(match: Match) -> bytes:
    """Causal id of the boundary at which a match ends; empty where nothing matched."""
    if not match.hits:
        return b""
    node, rows = match.hits[-1].node, match.hits[-1].rows
    return node.id if rows == node.count else page_ids(node.parent, node.applied[: rows * TOKEN_BYTES])[-1]
