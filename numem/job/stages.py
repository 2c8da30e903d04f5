"""The stages of the main job that run the model. Each is a function of memory, model and batch, idempotent by causal id.

    prefill   compute what neither the memory nor its spool holds, leave the chunks staged
    ...       publication and promotion, which need no model: `numem.job.durable`
    restore   tier -> pages, recorded with a digest of the restored rows
    decode    tier -> pages again, then tokens out

What a stage did is recorded (`numem.job.record`), so that a later stage, in this process or another, finds it.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numem.errors import InputError, StoreError
from numem.identity.chain import PAGE_TOKENS, plan
from numem.identity.digest import content_id
from numem.job.batch import Batch
from numem.job.record import Progress, recall, record, silent
from numem.job.reports import DecodedReport, PrefillReport, PrefixRestore, PrefixWork, PromptResult, RestoredReport
from numem.job.versions import outputs_digest
from numem.runtime.continuation import Session, provenance
from numem.runtime.engine import pages_for_lanes
from numem.runtime.kv import capture, raw, restore_rows
from numem.runtime.lanes import Lanes
from numem.runtime.request import Outcome, Request
from numem.store.memory import Memory

if TYPE_CHECKING:
    from numem.models.lm import LM


def check_identity(lm: "LM", batch: Batch) -> None:
    """Refuse to run a batch under a model it was not encoded for."""
    if lm.identity.scope.hex() != batch.scope:
        raise InputError(
            f"batch {batch.id}: was made for another model or numeric policy (scope {batch.scope[:16]}, this model has "
            f"{lm.identity.scope.hex()[:16]}); make the batch again with this model"
        )


def prefill(memory: Memory, lm: "LM", batch: Batch, run: str, progress: Progress = silent) -> PrefillReport:
    """Compute every prefix whose chunks are neither durable nor staged, and stage them.

    Prefixes are in sorted order, so that one which begins like its predecessor starts from the predecessor's pages.
    """
    check_identity(lm, batch)
    began = time.perf_counter()
    memory.register(lm.identity)
    longest = max((len(p.tokens) for p in batch.prefixes), default=1)
    session = lm.session(pages=pages_for_lanes(2, longest + 1))
    works, staged, staged_bytes, reused = [], 0, 0, set[bytes]()
    previous: tuple[tuple[int, ...], Any] | None = None
    try:
        for index, prefix in enumerate(batch.prefixes):
            progress("prefill", index, len(batch.prefixes))
            start = time.perf_counter()
            chunks = plan(session.identity.scope, prefix.tokens, len(prefix.tokens))
            held = {node.id for node in memory.staged([c.id for c in chunks])}
            durable = {c.id for c in chunks if memory.durable(c.id)}
            reused |= durable
            work = {"computed": 0, "shared": 0, "restored": 0}
            if any(c.id not in held and c.id not in durable for c in chunks):
                route, work = _rows(memory, session, prefix.tokens, previous)
                if previous is not None:
                    session.engine.release(previous[1])
                previous = (prefix.tokens, route)
                found = capture(
                    memory, session.engine, session.identity, prefix.tokens, route,
                    upto=len(prefix.tokens), provenance=provenance(),
                )  # fmt: skip
                for node, payload in zip(found.nodes, found.payloads, strict=True):
                    if memory.stage(node, [payload]):
                        staged += 1
                        staged_bytes += payload.nbytes
            works.append(
                PrefixWork(
                    chunks[-1].id.hex(),
                    len(prefix.prompts),
                    len(prefix.tokens),
                    **work,
                    ms=(time.perf_counter() - start) * 1e3,
                )
            )
    finally:
        if previous is not None:
            session.engine.release(previous[1])
    progress("prefill", len(batch.prefixes), len(batch.prefixes))
    report = PrefillReport(tuple(works), staged, staged_bytes, len(reused), (time.perf_counter() - began) * 1e3)
    record(memory, batch, run, "prefill", report)
    return report


def _rows(
    memory: Memory, session: Session, tokens: Sequence[int], previous: tuple[tuple[int, ...], Any] | None
) -> tuple[Any, dict[str, int]]:
    """A route over all `tokens`: rows shared with the previous route, restored, or computed."""
    engine = session.engine
    shared = 0
    if previous is not None:
        pairs = zip(previous[0], tokens, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(previous[0]), len(tokens)))
    if previous is not None and shared >= PAGE_TOKENS:
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
    done = []
    for index, (prefix, chunks) in enumerate(zip(batch.prefixes, batch.chunks(), strict=True)):
        progress("restore", index, len(batch.prefixes))
        route = session.engine.pool.allocate()
        route, report, reason = restore_rows(
            memory, session.engine, session.identity.scope, route, [*prefix.tokens, 0], tier=tier
        )
        digest = rows_digest(session, route.pages, report.tokens) if report.tokens else ""
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
        memory.record("decision/restore", chunks[-1].id, {"run": run, "reason": reason, **asdict(one)})
        done.append(one)
    progress("restore", len(batch.prefixes), len(batch.prefixes))
    result = RestoredReport(tuple(done), (time.perf_counter() - began) * 1e3)
    record(memory, batch, run, "restore", result)
    return result


def rows_digest(session: Session, pages: Sequence[int], tokens: int) -> str:
    """BLAKE3-256 over cache rows [0, tokens) in canonical payload order, hex."""
    return content_id(raw(session.engine.storage.save(pages, 0, tokens))).hex()


def decode(
    memory: Memory,
    lm: "LM",
    batch: Batch,
    run: str,
    *,
    out: Path,
    max_new_tokens: int = 64,
    lanes: int = 4,
    tier: str = "ssd",
    ignore_eos: bool = False,
    witnesses: Sequence[int] = (),
    progress: Progress = silent,
) -> tuple[DecodedReport, dict[int, Outcome]]:
    """Decode every prompt from restored prefixes; write completions to `out`/completions.jsonl.

    Args:
        witnesses: prompts whose logits and cache bytes are kept for a proof.

    Returns:
        The report, and the outcomes of the witnesses by prompt index.
    """
    check_identity(lm, batch)
    began = time.perf_counter()
    longest = max(len(item.tokens) for item in batch.items) + max_new_tokens
    session = lm.session(pages=pages_for_lanes(lanes, min(longest, lm.max_position)))
    runner = Lanes(session, lanes, memory=memory, tier=tier)
    order = _order(batch)
    eos = frozenset() if ignore_eos else lm.tokenizer.eos_ids
    requests = [Request(str(i), batch.items[i].tokens, max_new_tokens, eos=eos, witness=i in witnesses) for i in order]
    outcomes: dict[int, Outcome] = {}
    for outcome in runner.run(requests):
        outcomes[int(outcome.request.id)] = outcome
        progress("decode", len(outcomes), len(batch.items))
    compared, equal = _compare_digests(memory, session, batch, run, tier)
    outputs = _write(lm, batch, outcomes, out)
    report = DecodedReport(
        prompts=_attribute(batch, outcomes, order, recall(memory, batch, run, "prefill")),
        decode_tokens=runner.decode_tokens,
        decode_ms=runner.decode_ms,
        outputs=str(outputs),
        outputs_digest=outputs_digest(batch, {i: o.generated for i, o in outcomes.items()}),
        digests_compared=compared,
        digests_equal=equal,
        failures=tuple(f for o in outcomes.values() for f in o.restore.failures),
        ms=(time.perf_counter() - began) * 1e3,
    )
    record(memory, batch, run, "decode", report)
    return report, {i: outcomes[i] for i in witnesses}


def _order(batch: Batch) -> list[int]:
    """Prompts of one prefix next to each other, so that running lanes share its pages."""
    grouped = [i for prefix in batch.prefixes for i in prefix.prompts]
    rest = set(grouped)
    return grouped + [i for i in range(len(batch.items)) if i not in rest]


def _compare_digests(memory: Memory, session: Session, batch: Batch, run: str, tier: str) -> tuple[int, bool]:
    """Restore each prefix once more in this process: its rows must have the digest the restore stage recorded.

    A run that decodes only is held to the newest restore of any run: equal ids must give equal rows at all times.
    """
    recorded = recall(memory, batch, run, "restore") or recall(memory, batch, None, "restore")
    compared, equal = 0, True
    for prefix, fact in zip(batch.prefixes, (recorded or {}).get("prefixes", []), strict=False):
        if not fact["digest"]:
            continue
        route = session.engine.pool.allocate()
        route, report, _ = restore_rows(
            memory,
            session.engine,
            session.identity.scope,
            route,
            [*prefix.tokens, 0],
            tier=tier,
            limit=fact["restored"],
        )
        if report.tokens == fact["restored"]:
            compared += 1
            equal = equal and rows_digest(session, route.pages, report.tokens) == fact["digest"]
        session.engine.release(route)
    if not equal:
        raise StoreError(f"batch {batch.id}: restored rows differ from those of the restore stage; run `numem verify`")
    return compared, equal


def _attribute(
    batch: Batch, outcomes: Mapping[int, Outcome], order: Sequence[int], prefilled: Mapping[str, Any] | None
) -> tuple[PromptResult, ...]:
    """Where every prompt token came from, each under the costliest thing this run did for it.

    The rows that the prefill stage of this run computed are charged to the first prompt of their prefix, although the
    decoding side restored them: they were computed for it.
    """
    owed: dict[int, tuple[int, float]] = {}
    for index, work in enumerate((prefilled or {}).get("prefixes", [])):
        if work["computed"]:
            first = next(i for i in order if i in batch.prefixes[index].prompts)
            owed[first] = (work["computed"], work["ms"])
    results = []
    for i, item in enumerate(batch.items):
        o = outcomes[i]
        charged, prefill_ms = owed.get(i, (0, 0.0))
        from_restored = min(charged, o.restored)
        from_shared = min(charged - from_restored, o.shared)
        waited = o.restore.lookup_ms + o.restore.read_ms + o.restore.load_ms
        restored, shared = o.restored - from_restored, o.shared - from_shared
        computed = o.computed + from_restored + from_shared
        recomputed = charged > 0 or (not o.restored and not o.shared)
        results.append(
            PromptResult(
                id=item.id,
                tokens=len(item.tokens),
                generated=len(o.generated),
                computed=computed,
                shared=shared,
                restored=restored,
                restored_bytes=o.restore.bytes,
                source="recomputed" if recomputed else "restored" if o.restored else "shared",
                ttft_ms=o.ttft_ms - waited + prefill_ms if charged else o.ttft_ms,
                restored_ttft_ms=o.ttft_ms if o.restored else None,
                finish=o.finish.value,
            )
        )
    return tuple(results)


def _write(lm: "LM", batch: Batch, outcomes: Mapping[int, Outcome], out: Path) -> Path:
    """Completions in table order, one JSON object a line, written whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "completions.jsonl"
    temporary = out / f".completions-{uuid.uuid4().hex}.partial"
    with temporary.open("w", encoding="utf-8") as file:
        for i, item in enumerate(batch.items):
            o = outcomes[i]
            end = next((n for n, t in enumerate(o.generated) if t in lm.tokenizer.eos_ids), len(o.generated))
            row = {
                "id": item.id,
                "completion": lm.tokenizer.decode(o.generated[:end]),
                "tokens": o.generated,
                "finish": o.finish.value,
                "prompt_tokens": len(item.tokens),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    temporary.replace(path)
    return path
