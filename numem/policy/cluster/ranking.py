"""Which worker serves a request, and from where its prefix comes: pure, over what the workers last reported.

load   = sum over loaded parts of fixed_ms[tier] + bytes / throughput[tier]
write  = bytes / restore_bytes_per_ms
TTFT   = max(queue, load) + write + missing * prefill_ms_per_token + first_token_ms
missing = (tokens - 1) - cached
pages   = max(0, pages_for(tokens - 1 + max_new) - resident pages)      resident ones count for tier "gpu" alone
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from numem.policy.costs import TierCost

OFFLINE = "worker-offline"
NOT_LOADED = "model-not-loaded"
NO_CONTEXT = "context-capacity-exceeded"
TOO_LONG = "prefix-longer-than-request"
NO_PAGES = "insufficient-pages"

RESIDENT = "gpu"
COMPUTED = "none"
OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker last said of itself.

    Attributes:
        node: where its own tiers lie.
        epoch: grows with every restart; sequence: with every report of an epoch.
        models: fingerprints that it can run.
        queue_ms: until it comes to a new request.
        evictable_pages: pages that it could free.
        max_context: positions that it may evaluate.
        restore_bytes_per_ms: writing loaded bytes into pages.
        tiers: cost of one part from each tier that it reads.
        resident: (fingerprint, prefix) of boundaries in its pages.
        object_store: whether it reaches the object store.
    """

    id: str
    node: str
    epoch: int = 0
    sequence: int = 0
    models: frozenset[str] = frozenset()
    online: bool = True
    queue_ms: float = 0.0
    page_size: int = 16
    free_pages: int = 0
    evictable_pages: int = 0
    max_context: int = 8192
    prefill_ms_per_token: float = 1.0
    first_token_ms: float = 1.0
    restore_bytes_per_ms: float = 1e6
    tiers: Mapping[str, TierCost] = field(default_factory=dict)
    resident: frozenset[tuple[str, bytes]] = frozenset()
    object_store: bool = False

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Stored:
    """One chunk of a request's prefix.

    Attributes:
        prefix: causal id of the boundary that it ends at.
        end: tokens up to there.
        nbytes: what is read for it.
        copies: (tier, node) of ready copies; the node does not matter for the object store.
    """

    prefix: bytes
    end: int
    nbytes: int
    copies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as a router sees it.

    Attributes:
        tokens: length of the prompt; its last token is always computed.
        chunks: of its prefix, from the front; also those that are stored nowhere but may be resident.
    """

    id: str
    fingerprint: str
    tokens: int
    max_new: int
    chunks: tuple[Stored, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way for one worker to serve a request.

    Attributes:
        tier: "none" where all is computed, "gpu" where the prefix is resident, else the slowest tier that is read.
        cached: tokens that are not computed.
        nbytes: read for them.
        load_ms, write_ms, compute_ms, queue_ms, first_token_ms: terms of `ttft_ms`.
        required_pages: beyond those that hold the resident prefix.
        declined: the first reason why it cannot be; empty where it can.
    """

    worker: str
    tier: str
    cached: int
    nbytes: int
    load_ms: float
    write_ms: float
    compute_ms: float
    queue_ms: float
    first_token_ms: float
    required_pages: int
    declined: str = ""

    @property
    def ttft_ms(self) -> float:
        return max(self.queue_ms, self.load_ms) + self.write_ms + self.compute_ms + self.first_token_ms


def candidates(wish: Wish, worker: Worker) -> tuple[Candidate, ...]:
    """What a worker could do: compute everything, go on from every resident boundary, or load up to every durable one."""
    out = [_candidate(wish, worker, COMPUTED, 0, 0, 0.0)]
    for chunk in wish.chunks:
        if (wish.fingerprint, chunk.prefix) in worker.resident:
            out.append(_candidate(wish, worker, RESIDENT, chunk.end, 0, 0.0))
    nbytes, load, slowest = 0, 0.0, (0.0, "")
    for chunk in wish.chunks:
        source = _source(chunk, worker)
        if source is None:
            break
        nbytes += chunk.nbytes
        load += source[0]
        slowest = max(slowest, source)
        out.append(_candidate(wish, worker, slowest[1], chunk.end, nbytes, load))
    return tuple(out)


def rank(wish: Wish, workers: Iterable[Worker]) -> tuple[Candidate, ...]:
    """All that is possible, the best first: least time to first token, then more cached tokens, then worker id."""
    able = [c for worker in workers for c in candidates(wish, worker) if not c.declined]
    return tuple(sorted(able, key=lambda c: (c.ttft_ms, -c.cached, c.worker)))


def declined(wish: Wish, workers: Iterable[Worker]) -> dict[str, str]:
    """Why workers that can do nothing for a request cannot, by id."""
    out = {}
    for worker in workers:
        found = candidates(wish, worker)
        if all(c.declined for c in found):
            out[worker.id] = found[0].declined
    return out


def required_pages(wish: Wish, worker: Worker, resident: int = 0) -> int:
    """Pages that a request needs of a worker that holds its first `resident` tokens in pages."""
    return max(0, worker.pages_for(wish.tokens - 1 + wish.max_new) - worker.pages_for(resident))


def _candidate(wish: Wish, worker: Worker, tier: str, cached: int, nbytes: int, load_ms: float) -> Candidate:
    pages = required_pages(wish, worker, cached if tier == RESIDENT else 0)
    missing = wish.tokens - 1 - cached
    return Candidate(
        worker=worker.id,
        tier=tier,
        cached=cached,
        nbytes=nbytes,
        load_ms=load_ms,
        write_ms=nbytes / worker.restore_bytes_per_ms,
        compute_ms=missing * worker.prefill_ms_per_token,
        queue_ms=worker.queue_ms,
        first_token_ms=worker.first_token_ms,
        required_pages=pages,
        declined=_reason(wish, worker, missing, pages),
    )


def _reason(wish: Wish, worker: Worker, missing: int, pages: int) -> str:
    if not worker.online:
        return OFFLINE
    if wish.fingerprint not in worker.models:
        return NOT_LOADED
    if wish.tokens - 1 + wish.max_new > worker.max_context:
        return NO_CONTEXT
    if missing < 0:
        return TOO_LONG
    return NO_PAGES if pages > worker.free_pages + worker.evictable_pages else ""


def _source(chunk: Stored, worker: Worker) -> tuple[float, str] | None:
    """Cost and name of the fastest tier from which a worker reads a chunk; None where it reaches no copy."""
    found: Sequence[tuple[float, str]] = [
        (worker.tiers[tier].fixed_ms + chunk.nbytes / worker.tiers[tier].bytes_per_ms, tier)
        for tier, node in chunk.copies
        if tier in worker.tiers and (worker.object_store if tier == OBJECT else node == worker.node)
    ]
    return min(found, default=None)
