"""The stages of the main job that run the model. Each is a function of memory, model and batch, idempotent by causal id.

    prefill   compute what neither the memory nor its spool holds, leave the chunks staged
    ...       publication and promotion, which need no model: `numem.job.durable`
    restore   tier -> pages, recorded with a digest of the restored rows
    decode    tier -> pages again, then tokens out

What a stage did is recorded (`numem.job.record`), so that a later stage, in this process or another, finds it.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from numem.identity.chain import PAGE_TOKENS
from numem.job.batch import Batch, check_identity
from numem.job.decode import decode, rows_digest
from numem.job.record import Progress, record, silent
from numem.job.reports import SHOWN, PrefillReport, PrefixRestore, PrefixWork, RestoredReport
from numem.job.versions import rows_version
from numem.lineage.decisions import DecisionLog
from numem.policy.decision import Alternative, Decision
from numem.runtime.continuation import Session, provenance
from numem.runtime.engine import pages_for_lanes
from numem.runtime.paging.pool import Route
from numem.runtime.restore.capture import capture
from numem.runtime.restore.kv import restore_rows
from numem.store.memory import Memory

if TYPE_CHECKING:
    from numem.models.lm import LM

__all__ = ["decode", "prefill", "restore"]


def prefill(memory: Memory, lm: "LM", batch: Batch, run: str, progress: Progress = silent) -> PrefillReport:
    """Compute every prefix whose chunks are neither durable nor staged, and stage them.

    Prefixes are in sorted order, so that one which begins like its predecessor starts from the predecessor's pages; no
    other pages are held. A run that was killed goes on behind the last staged chunk.
    """
    check_identity(lm, batch)
    began = time.perf_counter()
    memory.register(lm.identity)
    durable = {chunk for chunk in batch.chunk_ids() if memory.durable(chunk)}
    held = durable | {node.id for node in memory.staged(chunk for chunk in batch.chunk_ids() if chunk not in durable)}
    longest = max((len(p.tokens) for p in batch.prefixes), default=1)
    session = lm.session(pages=pages_for_lanes(2, longest + 1))
    works: list[PrefixWork] = []
    charged, staged, staged_bytes, total = [], 0, 0, Counter[str]()
    previous: tuple[tuple[int, ...], Route] | None = None
    for index, (prefix, chunks) in enumerate(zip(batch.prefixes, batch.chunks(), strict=True)):
        progress("prefill", index, len(batch.prefixes))
        start = time.perf_counter()
        work = dict.fromkeys(("computed", "shared", "restored"), 0)
        if any(chunk.id not in held for chunk in chunks):
            route, work = _rows(memory, session, prefix.tokens, previous)
            if previous is not None:
                session.engine.release(previous[1])
            previous = (prefix.tokens, route)
            found = capture(
                memory, session.engine, session.identity, prefix.tokens, route,
                upto=len(prefix.tokens), provenance=provenance(), skip=held,
            )  # fmt: skip
            for node, payloads in zip(found.nodes, found.payloads, strict=True):
                held.add(node.id)
                if memory.stage(node, payloads):
                    staged += 1
                    staged_bytes += sum(payload.nbytes for payload in payloads)
        ms = (time.perf_counter() - start) * 1e3
        total.update(work)
        if work["computed"]:
            charged.append((index, work["computed"], round(ms, 3)))
        if len(works) < SHOWN:
            works.append(PrefixWork(chunks[-1].id.hex(), len(prefix.prompts), len(prefix.tokens), **work, ms=ms))
    progress("prefill", len(batch.prefixes), len(batch.prefixes))
    report = PrefillReport(
        tuple(works), staged, staged_bytes, len(durable), (time.perf_counter() - began) * 1e3,
        count=len(batch.prefixes), charged=tuple(charged), computed=total["computed"], shared=total["shared"],
        restored=total["restored"],
    )  # fmt: skip
    record(memory, batch, run, "prefill", report)
    return report


def _rows(
    memory: Memory, session: Session, tokens: Sequence[int], previous: tuple[tuple[int, ...], Route] | None
) -> tuple[Route, dict[str, int]]:
    """A route over all `tokens`: rows shared with the previous route, restored, or computed."""
    engine = session.engine
    shared = 0
    if previous is not None:
        pairs = zip(previous[0], tokens, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(previous[0]), len(tokens)))
    if previous is not None and shared >= PAGE_TOKENS and engine.pool.fork_allowed(previous[1], shared):
        route = engine.pool.fork(previous[1], shared)
    else:
        route, shared = engine.pool.allocate(), 0
    # The pending token stands outside a lookup: one more, of no consequence, lets the whole prefix match.
    route, report, _ = restore_rows(memory, engine, session.identity.scope, route, [*tokens, 0])
    restored = report.tokens
    rest = tokens[route.length :]
    if rest:
        engine.append([(route, rest)], logits="none")
    return route, {"computed": len(rest), "shared": shared, "restored": restored}


def restore(
    memory: Memory, lm: "LM", batch: Batch, run: str, tier: str = "ssd", progress: Progress = silent
) -> RestoredReport:
    """Restore every prefix into empty pages and record the decision, times, bytes and a digest of the rows."""
    check_identity(lm, batch)
    began = time.perf_counter()
    longest = max((len(p.tokens) for p in batch.prefixes), default=1)
    session = lm.session(pages=pages_for_lanes(1, longest + 1))
    shown: list[PrefixRestore] = []
    failures: list[str] = []
    decisions, digests, total = DecisionLog(memory, lm.identity.scope), [], Counter[str]()
    for index, (prefix, chunks) in enumerate(zip(batch.prefixes, batch.chunks(), strict=True)):
        progress("restore", index, len(batch.prefixes))
        route = session.engine.pool.allocate()
        route, report, reason = restore_rows(
            memory, session.engine, session.identity.scope, route, [*prefix.tokens, 0], tier=tier
        )
        digest = rows_digest(session, route, report.tokens) if report.tokens else ""
        session.engine.release(route)
        one = PrefixRestore(
            id=chunks[-1].id.hex(),
            tokens=len(prefix.tokens),
            restored=report.tokens,
            bytes=report.bytes,
            tier=tier,
            lookup_ms=report.lookup_ms,
            read_ms=report.read_ms,
            load_ms=report.load_ms,
            digest=digest,
            failures=tuple(report.failures),
        )
        _decide(decisions, run, chunks[-1].id, one, reason)
        digests.append(digest)
        total.update(tokens=one.tokens, restored=one.restored, bytes=one.bytes, failed=len(one.failures))
        failures += one.failures[: SHOWN - len(failures)]
        if len(shown) < SHOWN:
            shown.append(one)
    progress("restore", len(batch.prefixes), len(batch.prefixes))
    result = RestoredReport(
        tuple(shown), (time.perf_counter() - began) * 1e3, count=len(batch.prefixes), tokens=total["tokens"],
        restored=total["restored"], bytes=total["bytes"], failures=tuple(failures), failed=total["failed"],
        version=rows_version(digests),
    )  # fmt: skip
    record(memory, batch, run, "restore", result)
    return result


def _decide(decisions: DecisionLog, run: str, boundary: bytes, one: PrefixRestore, reason: str) -> None:
    """Record that a prefix was read back, as far as it went: this stage computes nothing."""
    why = "this stage shows what the durable plane holds"
    restore = Alternative(
        f"restore:{one.tier}", terms={"tokens": one.restored}, declined="" if one.restored else reason
    )
    decision = Decision(
        kind="arrive",
        request=run,
        subject=boundary,
        policy="restore",
        inputs={"tokens": one.tokens, "tier": one.tier},
        alternatives=(restore, Alternative("recompute", declined=why if one.restored else "")),
        choice=restore.name if one.restored else "recompute",
    )
    decisions.outcome(
        decisions.record(decision),
        one.lookup_ms + one.read_ms + one.load_ms,
        restored=one.restored,
        bytes=one.bytes,
        lookup_ms=one.lookup_ms,
        read_ms=one.read_ms,
        load_ms=one.load_ms,
    )
