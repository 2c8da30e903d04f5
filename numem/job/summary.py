"""The job's figures in one object, put together from what its stages recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

from numem.errors import NotFoundError
from numem.job.batch import Batch
from numem.job.record import recall
from numem.job.reports import Series, Summary
from numem.store.memory import Memory

NO_PROOF: dict[str, Any] = {"prompts": 0, "tokens": 0, "bytes_compared": 0, "ms": None, "differences": []}


def summarise(memory: Memory, batch: Batch, run: str) -> Summary:
    """Summary of a run.

    Raises:
        NotFoundError: the decode stage of this run recorded nothing.
    """
    decoded = recall(memory, batch, run, "decode")
    if decoded is None:
        raise NotFoundError(f"batch {batch.id}: run {run} has no decode stage; run the job first")
    stages = {name: recall(memory, batch, run, name) or {} for name in ("prefill", "publish", "promote", "restore")}
    proof = dict(recall(memory, batch, run, "proof") or {})
    exact = proof.pop("exact", None)
    for name in ("run", "scope"):
        proof.pop(name, None)
    published = stages["publish"]
    missing = published.get("missing", 0)
    damaged = decoded.get("damaged", 0)
    failed = stages["promote"].get("failed", {})
    warnings = [
        *(f"{missing} chunks were gone before publication and were recomputed" for _ in range(1) if missing),
        *_some(
            [f"promotion of {piece[:16]} failed: {why}" for piece, why in failed.items()], stages["promote"], "failures"
        ),
        *_some(stages["restore"].get("failures", ()), stages["restore"], "failed"),
        *_some(decoded["failures"], decoded, "failed"),
        *(f"damaged lines of the journal, decoded again: {damaged}" for _ in range(1) if damaged),
    ]
    return Summary(
        batch=batch.id,
        model=batch.model,
        memory=memory.home,
        prompts=decoded["prompts"],
        requested_tokens=decoded["requested"],
        computed_tokens=decoded["computed"],
        shared_tokens=decoded["shared"],
        restored_tokens=decoded["restored"],
        prefixes=len(batch.prefixes),
        chunks_stored=published.get("stored", 0),
        chunks_reused=_reused(len(batch.chunk_ids()), stages["prefill"], published),
        stored_bytes=published.get("stored_bytes", 0),
        restored_bytes=decoded["restored_bytes"],
        resumed=decoded["resumed"],
        preemptions=decoded["preemptions"],
        ttft_ms={source: Series(**one) for source, one in decoded["ttft_ms"].items()},
        decode_tokens=decoded["decode_tokens"],
        decode_tokens_per_s=_rate(decoded["decode_tokens"], decoded["decode_ms"]),
        outputs=decoded["outputs"],
        exact=None if exact is None else bool(exact and decoded["digests_equal"]),
        proof=proof or dict(NO_PROOF),
        stages_ms={
            name: round(body["ms"], 1) for name, body in {**stages, "decode": decoded}.items() if body.get("ms")
        },
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _some(kept: Sequence[str], stage: Mapping[str, Any], counter: str) -> list[str]:
    """What a report kept of its sentences, and how many more there were."""
    more = int(stage.get(counter, 0)) - len(kept)
    return [*kept, *([f"and {more} more of this kind"] if more > 0 else [])]


def _reused(chunks: int, prefilled: Mapping[str, Any], published: Mapping[str, Any]) -> int:
    """Chunks of the batch that this run found durable, each once: prefill and publication may both meet the same one."""
    if not published:
        return int(prefilled.get("reused_chunks", 0))
    return max(0, chunks - int(published["stored"]) - int(published["missing"]))


def _rate(tokens: int, ms: float) -> float | None:
    return round(tokens / (ms / 1e3), 2) if ms else None
