"""Restore or recompute: the alternatives for one prompt with their predicted time to first token, and the choice.

    first token = max(queue, rows in pages) + rows computed after them + one step

Rows get into pages by loading (from one tier, or each chunk from the nearest that has it), by computing, or both at
once (`two_ended`). Pure: nothing here reads or computes a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from numem.errors import InputError
from numem.identity.chain import PAGE_TOKENS
from numem.policy.costs import Costs
from numem.policy.decision import Alternative, cheapest
from numem.policy.two_ended import Piece, landed_ms, simulate

NOTHING_RESIDENT = "nothing resident"
NOTHING_DURABLE = "no durable prefix"
SHORT = "prefix shorter than a page"
UNKNOWN_COST = "cost unknown"
NO_PAGES = "insufficient pages"
NO_CONTEXT = "context capacity exceeded"

# Of equal costs the first is taken.
ORDER = ("resident-exact", "restore-exact", "recompute-exact", "modular-repair")


@dataclass(frozen=True, slots=True)
class Held:
    """Durable rows [start, end) of a prompt.

    Attributes:
        nbytes: what is read for them.
        tiers: where they can be read, nearest first.
    """

    start: int
    end: int
    nbytes: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a prompt when it arrives.

    Attributes:
        tokens: its length; the last one's row is always computed, it gives the first token.
        resident: rows that are in its pages already.
        held: durable rows beyond the resident ones, contiguous; the first may begin before them.
        pages_needed, pages_free: for all of its rows; None where nobody counts.
        max_position: positions that may be evaluated.
        queue_ms: until the engine comes to it.
        prefer: a tier that is read wherever it has the rows.
    """

    tokens: int
    resident: int = 0
    held: tuple[Held, ...] = ()
    pages_needed: int = 0
    pages_free: int | None = None
    max_position: int | None = None
    queue_ms: float = 0.0
    prefer: str | None = None

    @property
    def matched(self) -> int:
        """Rows that are resident or durable."""
        return max(self.resident, self.held[-1].end) if self.held else self.resident


def sources(prompt: Prompt, costs: Costs) -> dict[str, tuple[str, ...]]:
    """Ways to load the durable rows: name -> the tier of each chunk.

    One for each tier that holds all of them, nearest first. Where none does, or where a preferred tier holds some, each
    chunk comes from the preferred tier or else from the nearest, and the way has the name of the slowest tier it uses.
    """
    held = prompt.held
    if not held:
        return {}
    everywhere = [tier for tier in held[0].tiers if all(tier in part.tiers for part in held)]
    if prompt.prefer in everywhere:
        everywhere = [prompt.prefer]
    if everywhere and (prompt.prefer is None or prompt.prefer in everywhere):
        return {tier: (tier,) * len(held) for tier in everywhere}
    mixed = tuple(prompt.prefer if prompt.prefer in part.tiers else part.tiers[0] for part in held)
    return {_slowest(mixed, held, costs): mixed}


def alternatives(prompt: Prompt, costs: Costs) -> tuple[Alternative, ...]:
    """Every way to the first token, declined ones too, in the order in which equal ones are chosen.

    A way through a tier that was never read has no cost; its two-ended form is marked `probe`, since computing goes on
    while the one read that measures the tier is under way.
    """
    too_long = NO_CONTEXT if prompt.max_position is not None and prompt.tokens > prompt.max_position else ""
    # A load needs all of its pages at once; computing takes them as it goes.
    short = NO_PAGES if prompt.pages_free is not None and prompt.pages_needed > prompt.pages_free else ""
    refused = too_long or short
    nothing = too_long or ("" if prompt.resident else NOTHING_RESIDENT)
    out = [_computed("resident", prompt, prompt.resident, costs, nothing)]
    ways = sources(prompt, costs)
    if not ways or prompt.matched - prompt.resident < PAGE_TOKENS:
        why = refused or (SHORT if ways else NOTHING_DURABLE)
        out += [Alternative("restore", declined=why), _computed("recompute", prompt, 0, costs, too_long)]
        return (*out, Alternative("two-ended", declined=why))
    pieces = {name: _pieces(prompt, way, costs) for name, way in ways.items()}
    out += [_restored(name, prompt, pieces[name], costs, refused) for name in ways]
    out.append(_computed("recompute", prompt, 0, costs, too_long))
    out += [_two_ended(name, prompt, pieces[name], costs, refused) for name in ways]
    return tuple(out)


def choose(found: Sequence[Alternative]) -> Alternative:
    """The alternative to take: a probe where a tier has not been measured, else the one of least cost."""
    probes = [a for a in found if a.terms.get("probe") and not a.declined]
    return probes[0] if probes else cheapest(found)


def _pieces(prompt: Prompt, way: Sequence[str], costs: Costs) -> list[Piece] | None:
    """The loads of a way; None where the cost of a tier is unknown."""
    out = []
    for part, tier in zip(prompt.held, way, strict=True):
        load = costs.load_ms(tier, part.nbytes)
        if load is None:
            return None
        out.append(Piece(max(part.start, prompt.resident), part.end, load, costs.page_ms(part.nbytes)))
    return out


def _rest(prompt: Prompt, cached: int, costs: Costs) -> tuple[float, float]:
    """What is computed after `cached` rows: up to the last token, and that one."""
    return costs.prefill_ms(cached, prompt.tokens - 1 - cached), costs.decode_ms


def _computed(name: str, prompt: Prompt, cached: int, costs: Costs, declined: str) -> Alternative:
    compute, first = _rest(prompt, cached, costs)
    terms = {
        "tokens": cached,
        "compute_tokens": prompt.tokens - cached,
        "compute_ms": compute,
        "queue_ms": prompt.queue_ms,
        "first_token_ms": first,
    }
    return Alternative(name, prompt.queue_ms + compute + first, terms, declined)


def _restored(tier: str, prompt: Prompt, pieces: Sequence[Piece] | None, costs: Costs, refused: str) -> Alternative:
    name = f"restore:{tier}"
    nbytes = sum(part.nbytes for part in prompt.held)
    tokens = prompt.matched - prompt.resident
    if pieces is None:
        return Alternative(name, None, {"tokens": tokens, "bytes": nbytes}, refused or UNKNOWN_COST)
    landed = landed_ms([(p.load_ms, p.page_ms) for p in reversed(pieces)])
    compute, first = _rest(prompt, prompt.matched, costs)
    terms = {
        "tokens": tokens,
        "compute_tokens": prompt.tokens - prompt.matched,
        "bytes": nbytes,
        "load_ms": sum(p.load_ms for p in pieces),
        "page_ms": sum(p.page_ms for p in pieces),
        "landed_ms": landed,
        "compute_ms": compute,
        "queue_ms": prompt.queue_ms,
        "first_token_ms": first,
    }
    return Alternative(name, max(prompt.queue_ms, landed) + compute + first, terms, refused)


def _two_ended(tier: str, prompt: Prompt, pieces: Sequence[Piece] | None, costs: Costs, refused: str) -> Alternative:
    name = f"two-ended:{tier}"
    nbytes = sum(part.nbytes for part in prompt.held)
    probe = not costs.prefill_measured or pieces is None
    if pieces is None:
        return Alternative(name, None, {"bytes": nbytes, "probe": True}, refused)
    run = simulate("two-ended", pieces, costs.prefill_ms)
    compute, first = _rest(prompt, prompt.matched, costs)
    terms = {
        "tokens": run.loaded,
        "compute_tokens": prompt.tokens - prompt.resident - run.loaded,
        "bytes": sum(part.nbytes for part in prompt.held if part.end > prompt.matched - run.loaded),
        "landed_ms": run.ms,
        "compute_ms": compute,
        "queue_ms": prompt.queue_ms,
        "first_token_ms": first,
        **({"probe": True} if probe else {}),
    }
    return Alternative(name, max(prompt.queue_ms, run.ms) + compute + first, terms, refused)


def _slowest(way: Sequence[str], held: Sequence[Held], costs: Costs) -> str:
    """The tier of a way that takes longest per byte; one of unknown cost before all others."""
    per_byte: dict[str, float] = {}
    for tier, part in zip(way, held, strict=True):
        cost = costs.load_ms(tier, part.nbytes)
        per_byte[tier] = max(per_byte.get(tier, 0.0), float("inf") if cost is None else cost / max(1, part.nbytes))
    return max(per_byte, key=lambda tier: (per_byte[tier], tier))


@dataclass(frozen=True, slots=True)
class Source:
    """A source of cached rows.

    Attributes:
        kind: one of ORDER; "modular-repair" is approximate.
        quality: of what it gives, 1 for exact rows.
    """

    kind: str
    cost_ms: float
    quality: float = 1.0


def choose_cache_source(found: Sequence[Source], *, approximate: bool = False, minimum_quality: float = 1.0) -> Source:
    """The source of least cost; of equals the first in ORDER.

    Args:
        approximate: admit sources that are not exact, of at least `minimum_quality`.

    Raises:
        InputError: none is admitted, or a kind is unknown.
    """
    unknown = [source.kind for source in found if source.kind not in ORDER]
    if unknown:
        raise InputError(f"cache source {unknown[0]!r}: unknown; known: {', '.join(ORDER)}")
    able = [s for s in found if s.kind.endswith("-exact") or (approximate and s.quality >= minimum_quality)]
    if not able:
        raise InputError("cache source: none is exact, and none that is approximate is admitted")
    return min(able, key=lambda source: (source.cost_ms, ORDER.index(source.kind)))
