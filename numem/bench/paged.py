"""`numem bench paged`: one paged continuation, uncached against restored, sample by sample.

A sample starts from empty pages, brings the prompt's rows in (by loading, then computing what is missing), and decodes.
Sums: ready-to-first-token = prefix-load + prompt-completion + first-token; total = ready-to-first-token + the other steps.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numem.bench.machine import machine, summary, threads
from numem.bench.text import tokens
from numem.errors import InputError
from numem.identity.chain import plan
from numem.runtime.continuation import Session
from numem.runtime.restore.kv import Restored, load
from numem.runtime.restore.prefix import lookup
from numem.runtime.sampling import GREEDY
from numem.store.memory import Memory

MODEL = "smollm2-135m-instruct"
PROMPT = 1025


def paged(model: str = MODEL, prompt_tokens: int = PROMPT) -> dict[str, Any]:
    """The benchmark on the real model and a temporary memory; page cache warm, resident pages empty."""
    import torch

    from numem.kernels import native
    from numem.models.lm import load_lm

    torch.set_num_threads(threads())
    native.set_threads(threads())
    lm = load_lm(model)
    with tempfile.TemporaryDirectory(prefix="numem-bench-") as directory, Memory(Path(directory)) as memory:
        result = paged_continuation(
            lm.session(), memory, tokens(lm.tokenizer, prompt_tokens), decode_tokens=8, overlap_decode_tokens=8
        )
    return {"machine": machine(), "model": model, **result}


def paged_continuation(
    session: Session,
    memory: Memory,
    prompt: Sequence[int],
    *,
    iterations: int = 5,
    warmups: int = 1,
    decode_tokens: int = 4,
    overlap_decode_tokens: int = 0,
    tier: str = "ssd",
) -> dict[str, Any]:
    """Measure a prompt uncached, publish it, then measure it restored.

    Args:
        iterations, warmups: measured and discarded samples of each series (the very first one is kept apart).
        decode_tokens: steps per sample, the first token included.
        overlap_decode_tokens: steps to take while the publication runs.
    """
    if not prompt or iterations < 1 or warmups < 0 or decode_tokens < 1:
        raise InputError("bench paged: prompt, iterations and decode_tokens must be positive")
    from numem.kernels import native

    processed = len(prompt) - 1
    began = time.perf_counter()
    chunks = plan(session.identity.scope, prompt, processed)
    preparation = {
        "chunks": len(chunks),
        "pages": session.engine.pool.pages_for(processed),
        "milliseconds": round((time.perf_counter() - began) * 1e3, 4),
    }
    uncached = _series(session, None, prompt, iterations, warmups, decode_tokens, tier)
    checkpoint = _checkpoint(session, memory, prompt, overlap_decode_tokens)
    memory.promote([chunk.id for chunk in chunks], tier)
    restored = _series(session, memory, prompt, iterations, warmups, decode_tokens, tier)
    base = uncached["warm"]["ready-to-first-token"]["median-ms"]
    return {
        "prompt": {"logical-token-count": len(prompt), "processed-token-count": processed},
        "decode-tokens": decode_tokens,
        "attention-execution": f"paged-{native.isa() if native.available() else 'torch'}",
        "block-transfer-preparation": preparation,
        "checkpoint": checkpoint,
        "uncached": uncached,
        "restored": restored,
        "speedup": {
            "first-restored-vs-uncached-warm": round(base / restored["first-measured"]["ready-to-first-token-ms"], 3),
            "warm-restored-vs-uncached-warm": round(base / restored["warm"]["ready-to-first-token"]["median-ms"], 3),
        },
        "cache-stats": memory.stats(),
    }


def _series(
    session: Session, memory: Memory | None, prompt: Sequence[int], iterations: int, warmups: int, steps: int, tier: str
) -> dict[str, Any]:
    first = _sample(session, memory, prompt, steps, tier)
    for _ in range(warmups):
        _sample(session, memory, prompt, steps, tier)
    samples = [_sample(session, memory, prompt, steps, tier) for _ in range(iterations)]
    decode = summary([step["milliseconds"] for sample in samples for step in sample["steps"]])
    return {
        "first-measured": first,
        "warm": {
            "iterations": iterations,
            "warmups": warmups,
            "samples": samples,
            "prompt-completion": summary([s["prompt-completion-ms"] for s in samples]),
            "first-token": summary([s["first-token-ms"] for s in samples]),
            "ready-to-first-token": summary([s["ready-to-first-token-ms"] for s in samples]),
            "decode": {**decode, "tokens-per-second": round(1000 / decode["median-ms"], 3)},
            "total": summary([s["total-ms"] for s in samples]),
            "prefix-load": summary([s["prefix-load-ms"] for s in samples]),
            "prefix-transfer": {
                "samples": [s["prefix-transfer"] for s in samples],
                "totals": {
                    "bytes": sum(s["prefix-transfer"]["bytes"] for s in samples),
                    "read-ms": round(sum(s["prefix-transfer"]["read-ms"] for s in samples), 4),
                    "load-ms": round(sum(s["prefix-transfer"]["load-ms"] for s in samples), 4),
                },
            },
        },
    }


def _sample(session: Session, memory: Memory | None, prompt: Sequence[int], steps: int, tier: str) -> dict[str, Any]:
    engine = session.engine
    route = engine.pool.allocate()
    moved = Restored()
    try:
        began = time.perf_counter()
        if memory is not None:
            with lookup(memory, session.identity.scope, prompt, tier=tier) as match:
                route, moved = load(memory, engine, route, match, tier=tier)
        loaded = time.perf_counter()
        cached = route.length
        rest = list(prompt[cached:-1])
        if rest:
            engine.append([(route, rest)], logits="none")
        completed = time.perf_counter()
        taken = []
        token = prompt[-1]
        for index in range(steps):
            at = time.perf_counter()
            position = route.length
            (logits,) = engine.append([(route, [token])])
            token = GREEDY.choose(logits, position, engine.vocab)
            taken.append(
                {
                    "index": index,
                    "position": position,
                    "context-token-count": route.length,
                    "token": token,
                    "milliseconds": round((time.perf_counter() - at) * 1e3, 4),
                }
            )
    finally:
        engine.release(route)
    load_ms, completion_ms = (loaded - began) * 1e3, (completed - loaded) * 1e3
    first_ms = float(taken[0]["milliseconds"])
    decode_ms = sum(float(step["milliseconds"]) for step in taken)
    ready_ms = load_ms + completion_ms + first_ms
    return {
        "prefix-load-ms": round(load_ms, 4),
        "cached-token-count": cached,
        "prefix-transfer": {
            "bytes": moved.bytes,
            "read-ms": round(moved.read_ms, 4),
            "load-ms": round(moved.load_ms, 4),
        },
        "prompt-completion-ms": round(completion_ms, 4),
        "first-token-ms": first_ms,
        "ready-to-first-token-ms": round(ready_ms, 4),
        "decode-ms": round(decode_ms, 4),
        "total-ms": round(ready_ms + decode_ms - first_ms, 4),
        "steps": taken,
    }


def _checkpoint(session: Session, memory: Memory, prompt: Sequence[int], overlap: int) -> dict[str, Any]:
    """Publish the prompt's rows, decoding beside the publication if asked."""
    engine = session.engine
    before = memory.usage()
    with session.start(prompt) as continuation:
        began = time.perf_counter()
        published = continuation.publish(memory)
        submitted = time.perf_counter()
        latencies, early = [], 0
        for _ in range(min(overlap, engine.max_position - continuation.processed)):
            early += not all(future.done() for future in published.captured)
            at = time.perf_counter()
            continuation.step()
            latencies.append((time.perf_counter() - at) * 1e3)
        for future in published.captured:
            future.result()
        captured = time.perf_counter()
        published.wait()
        done = time.perf_counter()
        at = time.perf_counter()
        with engine.pool.lease(continuation.route) as lease:
            exported = engine.storage.save(lease.pages, 0, len(prompt) - 1).nbytes
        export_ms = (time.perf_counter() - at) * 1e3
    after = memory.usage()
    return {
        "submission-ms": round((submitted - began) * 1e3, 4),
        "capture-drain-ms": round((captured - submitted) * 1e3, 4),
        "capture-total-ms": round((captured - began) * 1e3, 4),
        "publication-drain-ms": round((done - captured) * 1e3, 4),
        "chunks": len(published.tickets),
        "stored-bytes": sum(after.values()) - sum(before.values()),
        "inference-overlap": {
            "maximum-steps": overlap,
            "steps-started-before-capture-complete": early,
            "step-latency": summary(latencies) if latencies else None,
        },
        "transfer": {"bytes": exported, "milliseconds": round(export_ms, 4)},
    }
