"""`numem bench core`: the figures numem is held to, each against its peer in the same run."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numem.bench.machine import alternate, machine, summary, threads, timed
from numem.bench.text import tokens
from numem.identity.chain import plan
from numem.identity.digest import content_id
from numem.models.lm import LM, load_lm
from numem.runtime.paging.pages import kv_spec
from numem.runtime.restore.chunks import chunk_node
from numem.runtime.restore.prefix import lookup
from numem.store.memory import Memory

MODEL = "smollm2-135m-instruct"
CONTEXT = 1024
NEW = 32
RESTORE = 4096
LOOKUP = 8192


def core(model: str = MODEL) -> dict[str, Any]:
    """Decode and prefill against transformers (float32 and bfloat16), restore against recompute, fork, lookup, import."""
    import torch

    from numem.kernels import native

    torch.set_num_threads(threads())
    native.set_threads(threads())
    result: dict[str, Any] = {"machine": machine(), "model": model, "context": CONTEXT}
    for dtype in ("float32", "bfloat16"):
        lm = load_lm(model, dtype=dtype)
        suffix = "" if dtype == "float32" else "_bf16"
        for name, values in against_transformers(lm, dtype).items():
            result[name + suffix] = values
        if dtype == "float32":
            result.update(forking(lm))
            result.update(restoring(lm))
        del lm
    result.update(looking_up())
    result.update(importing())
    return result


def against_transformers(lm: LM, dtype: str, repetitions: int = 5) -> dict[str, Any]:
    """Decode tokens/s at the context and prefill tokens/s of its tokens, both engines taking turns; all warm."""
    import torch
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(lm.directory, dtype=getattr(torch, dtype)).train(False)
    ids = tokens(lm.tokenizer, CONTEXT)
    batch = torch.tensor([ids])
    session = lm.session()

    def ours() -> tuple[float, float]:
        route = session.engine.pool.allocate()
        prefill = timed(lambda: session.engine.append([(route, ids)]))
        token = [0]

        def steps() -> None:
            for _ in range(NEW):
                (logits,) = session.engine.append([(route, token)])
                token[0] = int(logits.argmax())

        decode = timed(steps)
        session.engine.release(route)
        return prefill, decode

    def theirs() -> tuple[float, float]:
        with torch.inference_mode():
            prefill = timed(lambda: peer(batch, logits_to_keep=1, use_cache=True))
            # generate(1 + NEW) less generate(1) leaves NEW decode steps of the same loop.
            kwargs = {
                "do_sample": False,
                "pad_token_id": 0,
                "eos_token_id": None,
                "attention_mask": torch.ones_like(batch),
            }
            first = timed(lambda: peer.generate(batch, max_new_tokens=1, **kwargs))
            whole = timed(lambda: peer.generate(batch, max_new_tokens=1 + NEW, **kwargs))
        return prefill, whole - first

    ours(), theirs()
    samples: list[list[tuple[float, float]]] = [[], []]
    for _ in range(repetitions):
        samples[0].append(ours())
        samples[1].append(theirs())
    mine = [summary([s[i] for s in samples[0]]) for i in range(2)]
    peers = [summary([s[i] for s in samples[1]]) for i in range(2)]
    return {
        "decode_vs_transformers": round(peers[1]["median-ms"] / mine[1]["median-ms"], 3),
        "decode_tokens_per_s": round(NEW / mine[1]["median-ms"] * 1e3, 2),
        "decode_tokens_per_s_transformers": round(NEW / peers[1]["median-ms"] * 1e3, 2),
        "decode": {"numem": mine[1], "transformers": peers[1], "new_tokens": NEW},
        "prefill_vs_transformers": round(peers[0]["median-ms"] / mine[0]["median-ms"], 3),
        "prefill_tokens_per_s": round(CONTEXT / mine[0]["median-ms"] * 1e3, 1),
        "prefill_tokens_per_s_transformers": round(CONTEXT / peers[0]["median-ms"] * 1e3, 1),
        "prefill": {"numem": mine[0], "transformers": peers[0]},
    }


@contextmanager
def temporary_memory() -> Iterator[Memory]:
    """A memory in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="numem-bench-") as directory, Memory(Path(directory)) as memory:
        yield memory


def restoring(lm: LM, repetitions: int = 3) -> dict[str, Any]:
    """First token of a prompt of RESTORE + 1 tokens: recomputed, and restored from the warm ssd tier into empty pages."""
    ids = tokens(lm.tokenizer, RESTORE + 1)
    session = lm.session(pages=RESTORE // 16 + 8)
    with temporary_memory() as memory:
        with session.start(ids) as first:
            first.publish(memory).wait()
        memory.promote([chunk.id for chunk in plan(lm.identity.scope, ids, RESTORE)], "ssd")
        restored_bytes = []

        def recompute() -> float:
            def call() -> None:
                with session.start(ids) as c:
                    c.step()

            return timed(call)

        def restore() -> float:
            def call() -> None:
                with session.restore(memory, ids, tier="ssd") as c:
                    c.step()
                    restored_bytes.append(c.restored.bytes)

            return timed(call)

        restore()
        slow, fast = alternate([recompute, restore], repetitions)
        fast += [restore() for _ in range(2 * repetitions)]
    mine, theirs = summary(fast), summary(slow)
    return {
        "restore_vs_recompute": round(theirs["median-ms"] / mine["median-ms"], 2),
        "restore_ttft_ms": mine["median-ms"],
        "recompute_ttft_ms": theirs["median-ms"],
        "restore": {
            "tokens": RESTORE,
            "bytes": restored_bytes[-1],
            "restored": mine,
            "recomputed": theirs,
            "warm": "page cache of the ssd tier warm, resident pages empty",
        },
    }


def forking(lm: LM, repetitions: int = 50) -> dict[str, Any]:
    """Fork of a continuation of 2,048 processed tokens, and of one that ends inside a page; pages copied by both writes."""
    session = lm.session(pages=2 * (2048 // 16) + 16)
    out: dict[str, Any] = {}
    copied = 0
    for processed in (2048, 2040):
        ids = tokens(lm.tokenizer, processed + 1)
        with session.start(ids) as parent:
            samples, writes = [], []
            for _ in range(repetitions):
                began = session.engine.page_copies
                at = time.perf_counter()
                child = parent.fork()
                forked = time.perf_counter()
                reservation = session.engine.reserve(child.route, 1)
                samples.append((forked - at) * 1e3)
                writes.append((time.perf_counter() - forked) * 1e3)
                session.engine.pool.abort([reservation])
                copied = max(copied, session.engine.page_copies - began)
                child.close()
        out[str(processed)] = {"fork": summary(samples), "first-write": summary(writes)}
    return {
        "fork_ms": max(v["fork"]["median-ms"] for v in out.values()),
        "fork_pages_copied": copied,
        "fork": out,
    }


def looking_up(repetitions: int = 50) -> dict[str, Any]:
    """Lookup of an 8,192-token prefix (32 chunks) in an open memory; the cost does not depend on payload sizes."""
    import numpy as np

    ids = [(7 * n) % 49152 for n in range(LOOKUP + 1)]
    spec = kv_spec(1, 1, 16, "float32")
    scope = bytes(range(32))
    with temporary_memory() as memory:
        for chunk in plan(scope, ids, LOOKUP):
            payload = np.full(chunk.count * spec.row_bytes, chunk.index, dtype=np.uint8)
            memory.publish(chunk_node(chunk, scope, spec, [content_id(payload)], {}), [payload])
        memory.flush()
        found = []

        def once() -> None:
            with lookup(memory, scope, ids) as match:
                found.append(match.tokens)

        samples = [timed(once) for _ in range(repetitions)]
    if set(found) != {LOOKUP}:
        raise RuntimeError(f"lookup matched {set(found)} tokens of {LOOKUP}")
    result = summary(samples)
    return {"lookup_ms": result["median-ms"], "lookup": result}


def importing(repetitions: int = 5) -> dict[str, Any]:
    """`import numem` in a fresh interpreter, less the interpreter's own start."""

    def start(code: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    bare, full = alternate([lambda: start("pass"), lambda: start("import numem")], repetitions)
    difference = [max(0.0, b - a) for a, b in zip(bare, full, strict=True)]
    return {"import_ms": summary(difference)["median-ms"], "import": summary(difference)}
