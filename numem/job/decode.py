"""The decode stage: every prompt of a batch to its completion, journaled as it ends, in memory that the table does not grow.

Prompts are fed in the order of a walk through their trie, so that running lanes and kept pages hold what comes next.
What an earlier run under the same settings finished is taken from its journal.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numem.errors import ModelError, StoreError
from numem.identity.chain import PAGE_TOKENS
from numem.identity.digest import content_id
from numem.job.batch import Batch, check_identity
from numem.job.completions import write_completions
from numem.job.journal import Entry, Journal, Witness
from numem.job.record import Progress, recall, record, silent
from numem.job.reports import DecodedReport
from numem.job.settings import Decoding
from numem.job.several import Several
from numem.job.sharing import trie_order
from numem.lineage.decisions import DecisionLog
from numem.runtime.continuation import Session
from numem.runtime.device.fleet import Fleet
from numem.runtime.engine import pages_for_lanes
from numem.runtime.front import Runtime
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.residency import Residency
from numem.runtime.paging.route import Route
from numem.runtime.request import Finish, Outcome, Request
from numem.runtime.restore.arrivals import Arrivals
from numem.runtime.restore.kv import held_rows, restore_rows
from numem.store.memory import Memory

if TYPE_CHECKING:
    from numem.models.lm import LM

# Ends that are no completion: such a prompt is not journaled, and decoded anew by the next run.
UNFINISHED = frozenset({Finish.DEADLINE, Finish.CANCELLED, Finish.ERROR})


def decode(
    memory: Memory,
    lm: "LM",
    batch: Batch,
    run: str,
    *,
    out: Path,
    decoding: Decoding | None = None,
    witnesses: Sequence[int] = (),
    progress: Progress = silent,
) -> tuple[DecodedReport, dict[int, Entry]]:
    """Decode every prompt from restored prefixes; write completions to `out`/completions.jsonl.

    Args:
        witnesses: prompts of which the journal keeps digests of logits and cache bytes, for a proof.

    Returns:
        The report, and the entries of the witnesses by prompt index.

    Raises:
        LeaseHeldError: another run decodes this batch under the same settings.
        ModelError: a prompt failed; all others are finished and stay so.
        StoreError: rows restored now differ from those of the restore stage.
    """
    check_identity(lm, batch)
    began = time.perf_counter()
    decoding = decoding or Decoding()
    eos: frozenset[int] = frozenset() if decoding.ignore_eos else lm.tokenizer.eos_ids
    settings = decoding.digest(batch, eos)
    session = lm.session(pages=pool_pages(lm, batch, decoding))
    with Journal(journal_path(memory, batch, settings), settings, len(batch.items), again=decoding.again) as journal:
        todo = [i for i in _order(batch) if i not in journal or (i in witnesses and journal.read(i).witness is None)]
        requests = (
            Request(
                batch.items[i].id,
                batch.items[i].tokens,
                decoding.max_new_tokens,
                sampler=decoding.sampler_of(i),
                eos=eos,
                witness=i in witnesses,
            )
            for i in todo
        )
        with _lanes(memory, lm, session, decoding) as scheduler:
            _complete(memory, lm, batch, run, journal, scheduler, todo, requests, progress)
        compared, equal = _compare_digests(memory, session, batch, run, decoding.tier)
        outputs, digest, tally = write_completions(journal, out)
        report = DecodedReport(
            prompts=len(batch.items),
            resumed=len(batch.items) - len(todo),
            requested=tally.totals["prompt_tokens"],
            computed=tally.totals["computed"],
            shared=tally.totals["shared"],
            restored=tally.totals["restored"],
            restored_bytes=tally.totals["restored_bytes"],
            ttft_ms=tally.ttft_ms,
            preemptions=tally.preemptions,
            rows_again=tally.rows_again,
            decode_tokens=scheduler.decode_tokens,
            decode_ms=scheduler.decode_ms,
            outputs=str(outputs),
            outputs_digest=digest,
            journal=str(journal.path),
            digests_compared=compared,
            digests_equal=equal,
            failures=tuple(tally.failures),
            failed=tally.failed,
            shown=tuple(tally.shown),
            ms=(time.perf_counter() - began) * 1e3,
            damaged=journal.damaged if todo else 0,
        )
        record(memory, batch, run, "decode", report)
        return report, {i: journal.read(i) for i in witnesses}


def journal_path(memory: Memory, batch: Batch, settings: str) -> Path:
    """The journal of a batch under settings: another run of the same finds it, and forgetting the batch removes it."""
    return memory.local / "outputs" / batch.id / "journals" / f"{settings}.jsonl"


def pool_pages(lm: "LM", batch: Batch, decoding: Decoding) -> int:
    """Pages of the decode stage: what its lanes need at most, and `cache_mib` for the state of ended prompts.

    The second part is no larger than all the state that the batch could leave.
    """
    lengths = [min(len(item.tokens) + decoding.max_new_tokens, lm.max_position) for item in batch.items]
    page_bytes = PAGE_TOKENS * lm.decoder.spec.row_bytes
    kept = min((decoding.cache_mib << 20) // page_bytes, sum(-(-length // PAGE_TOKENS) for length in lengths))
    return pages_for_lanes(decoding.lanes, max(lengths)) + kept


def rows_digest(session: Session, route: Route, tokens: int) -> str:
    """BLAKE3-256 over cache rows [0, tokens) in canonical payload order, of windowed layers those that are held, hex."""
    return content_id(held_rows(session.engine, route, tokens)).hex()


def _complete(
    memory: Memory,
    lm: "LM",
    batch: Batch,
    run: str,
    journal: Journal,
    scheduler: Scheduler | Several,
    todo: Sequence[int],
    requests: Iterable[Request],
    progress: Progress,
) -> None:
    """Run the requests of the prompts that are left, and journal each as it ends."""
    prefilled = recall(memory, batch, run, "prefill") or {}
    owed = _owed(batch, todo, prefilled.get("charged", ()))
    index_of = {batch.items[i].id: i for i in todo}
    done = len(batch.items) - len(todo)
    failed: list[str] = []

    def advanced() -> None:
        journal.tick()
        progress("decode", done, len(batch.items), scheduler.decode_tokens)

    advanced()
    for outcome in scheduler.run(requests, progress=advanced):
        index = index_of[outcome.request.id]
        if outcome.finish in UNFINISHED:
            failed.append(f"prompt {outcome.request.id}: {outcome.error or outcome.finish.value}")
            continue
        journal.append(_entry(lm, batch, run, index, outcome, *owed.get(index, (0, 0.0))))
        done += 1
        advanced()
    if failed:
        raise ModelError(
            f"batch {batch.id}: {len(failed)} of {len(batch.items)} prompts failed, first {failed[0]}; run again: the "
            "others are finished and kept"
        )


@contextmanager
def _lanes(memory: Memory, lm: "LM", session: Session, decoding: Decoding) -> Iterator[Scheduler | Several]:
    """A scheduler; where the model lies on several GPUs, one on each, with pages like those of the session."""
    if not lm.others:
        with _scheduler(memory, session, decoding) as scheduler:
            yield scheduler
        return
    pages = session.engine.pool.stats().physical
    sessions = [session, *(other.session(pages=pages) for other in lm.others)]

    def runtime(model: "LM", own: Session) -> Runtime:
        @contextmanager
        def on_thread(_: object) -> Iterator[Scheduler]:
            model.adopt_thread()
            with _scheduler(memory, own, decoding) as scheduler:
                yield scheduler

        return Runtime(on_thread)

    runtimes = [runtime(model, own) for model, own in zip((lm, *lm.others), sessions, strict=True)]
    with Fleet(runtimes, lanes=decoding.lanes, tokens=pages * PAGE_TOKENS) as fleet:
        yield Several(fleet, decoding.lanes)


@contextmanager
def _scheduler(memory: Memory, session: Session, decoding: Decoding) -> Iterator[Scheduler]:
    """A scheduler that keeps what ends in the pages that are left, and writes its decisions down."""
    decisions = DecisionLog(memory, session.identity.scope)
    with Arrivals(session, memory, tier=decoding.tier, policy=decoding.arrivals, decisions=decisions) as arrivals:
        residency = Residency(
            session.engine, decisions=decisions, costs=arrivals.costs, tier=decoding.tier, scope=session.identity.scope
        )
        scheduler = Scheduler(
            session, decoding.lanes, memory=memory, tier=decoding.tier, arrivals=arrivals, residency=residency,
            decisions=decisions,
        )  # fmt: skip
        try:
            yield scheduler
        finally:
            scheduler.close()
            residency.clear()


def _order(batch: Batch) -> list[int]:
    return trie_order([item.tokens for item in batch.items])


def _owed(batch: Batch, todo: Iterable[int], charges: Iterable[Any]) -> dict[int, tuple[int, float]]:
    """Rows and ms of this run's prefill stage that each prompt answers for: the first one decoded of each prefix."""
    charged = {int(index): (int(rows), float(ms)) for index, rows, ms in charges}
    prefix_of = {item: index for index in charged for item in batch.prefixes[index].prompts}
    owed: dict[int, tuple[int, float]] = {}
    for item in todo:
        index = prefix_of.get(item)
        if index is not None and index in charged:
            owed[item] = charged.pop(index)
    return owed


def _entry(lm: "LM", batch: Batch, run: str, index: int, o: Outcome, charged: int, prefill_ms: float) -> Entry:
    """What the journal keeps of an outcome: every prompt token under the costliest thing this run did for it.

    Rows that the prefill stage computed are charged to the first prompt of their prefix, although the decoding side
    restored them: they were computed for it.
    """
    from_restored = min(charged, o.restored)
    from_shared = min(charged - from_restored, o.shared)
    waited = o.restore.lookup_ms + o.restore.read_ms + o.restore.load_ms
    recomputed = charged > 0 or (not o.restored and not o.shared)
    end = next((n for n, token in enumerate(o.generated) if token in lm.tokenizer.eos_ids), len(o.generated))
    return Entry(
        index=index,
        id=batch.items[index].id,
        run=run,
        prompt_tokens=len(batch.items[index].tokens),
        tokens=tuple(o.generated),
        text=lm.tokenizer.decode(o.generated[:end]),
        finish=o.finish.value,
        computed=o.computed + from_restored + from_shared,
        shared=o.shared - from_shared,
        restored=o.restored - from_restored,
        restored_bytes=o.restore.bytes,
        source="recomputed" if recomputed else "restored" if o.restored else "shared",
        preempted=o.preempted,
        again=sum(o.again.values()),
        queue_ms=round(o.queue_ms, 3),
        ttft_ms=round(max(0.0, o.ttft_ms - waited) + prefill_ms if charged else o.ttft_ms, 3),
        restored_ttft_ms=round(o.ttft_ms, 3) if o.restored else None,
        step_ms=round(o.step_ms, 3),
        failures=tuple(o.restore.failures),
        witness=_witness(o) if o.request.witness else None,
    )


def _witness(o: Outcome) -> Witness:
    kv = b"" if o.kv is None else o.kv
    nbytes = len(kv) + sum(row.nbytes for row in o.logits)
    return Witness(content_id(kv).hex(), tuple(content_id(row).hex() for row in o.logits), nbytes)


def _compare_digests(memory: Memory, session: Session, batch: Batch, run: str, tier: str) -> tuple[int, bool]:
    """Restore prefixes once more in this process: their rows must have the digests the restore stage recorded.

    A run that decodes only is held to the newest restore of any run: equal ids must give equal rows at all times. Of
    many prefixes the first ones are compared, those that the record names.
    """
    recorded = recall(memory, batch, run, "restore") or recall(memory, batch, None, "restore") or {}
    engine = session.engine
    compared, equal = 0, True
    for prefix, fact in _with_digest(batch, recorded):
        route, report, _ = restore_rows(
            memory, engine, session.identity.scope, engine.pool.allocate(), [*prefix, 0], tier=tier,
            limit=fact["restored"],
        )  # fmt: skip
        if report.tokens == fact["restored"]:
            compared += 1
            equal = equal and rows_digest(session, route, report.tokens) == fact["digest"]
        engine.release(route)
    if not equal:
        raise StoreError(f"batch {batch.id}: restored rows differ from those of the restore stage; run `numem verify`")
    return compared, equal


def _with_digest(batch: Batch, recorded: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], Mapping[str, Any]]]:
    for prefix, fact in zip(batch.prefixes, recorded.get("prefixes", ()), strict=False):
        if fact["digest"]:
            yield prefix.tokens, fact
