"""Section of docs/benchmarks.md about models: quantised decoding, products at memory speed, embeddings."""

from collections.abc import Mapping
from typing import Any

from numem.bench.models_shape import DECODERS
from numem.bench.report_store import table

_ROWS = {
    "decode_q8_vs_llamacpp": "decode, 8 bits / llama.cpp Q8_0",
    "decode_q4_vs_llamacpp": "decode, 4 bits / llama.cpp",
    "prefill_vs_llamacpp": "prefill, 4 bits / llama.cpp",
    "prefill_q8_vs_llamacpp": "prefill, 8 bits / llama.cpp Q8_0",
}


def models_section(r: Mapping[str, Any]) -> str:
    """Figures of `numem.bench.models.models`."""
    details = r["details"]
    rows, notes = [], []
    for key in DECODERS:
        found = details[key]
        if "skipped" in found:
            notes.append(f"{key} was not measured: {found['skipped']}.")
            continue
        for name, what in _ROWS.items():
            one = found[name]
            speeds = f"{one['tokens_per_s']:g} / {one['tokens_per_s_peer']:g} tokens/s ({one['format']})"
            rows.append([f"{key}: {what}", *_judged(one), speeds])
        notes.append(f"{key}: {found['peer']}, bfloat16 cache against float16.")
    for name, one in details["gemv_vs_bandwidth"]["formats"].items():
        rows.append([f"one row, {name}: bytes/s / read bandwidth", *_judged(one), f"{one['gb_per_s']:g} GB/s"])
    embed = details["embed"]
    if "skipped" in embed:
        notes.append(f"Embeddings were not measured: {embed['skipped']}.")
    else:
        for name, what in (("embed_vs_sentence_transformers", "float32"), ("embed_q8_vs_sentence_transformers", "q8")):
            one = embed[name]
            speeds = f"{one['texts_per_s']:g} / {one['texts_per_s_peer']:g} texts/s"
            rows.append([f"{embed['texts']:,} short texts, {what} / sentence-transformers", *_judged(one), speeds])
        notes.append(
            f"Embeddings: MiniLM, {embed['words']:g} words a text in the mean, {embed['peer']} in float32; least cosine "
            f"between the two sides {embed['embed_vs_sentence_transformers']['least_cosine']:g} (float32) and "
            f"{embed['embed_q8_vs_sentence_transformers']['least_cosine']:g} (q8)."
        )
    machine = r["machine"]
    notes.insert(
        0,
        f"Measured {machine['date']} on {machine['cpu']}, {machine['threads']} threads, kernels {machine['kernels']}.",
    )
    head = ["what", "figure", "bar", "verdict", "absolute"]
    return "## Models\n\n" + table(head, rows) + "\n" + " ".join(notes) + "\n"


def _judged(found: Mapping[str, Any]) -> list[str]:
    return [f"{found['median']:g} [{found['q1']:g}, {found['q3']:g}]", found["bar"], found["verdict"]]
