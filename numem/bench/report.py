"""docs/benchmarks.md, written from the figures of a run."""

from collections.abc import Mapping
from typing import Any

from numem.bench.report_models import models_section
from numem.bench.report_runtime import runtime_section
from numem.bench.report_store import store_section, table, trace_section

HEADER = """# Benchmarks

Written by `make bench` (`numem bench all --write docs/benchmarks.md`). Every ratio compares two sides measured in turns
in one run of one process; figures are nearest-rank medians with [min, max]. The machine is a shared virtual machine and
noisy: read ratios, not absolute values. `numem bench NAME --json` prints all samples.
"""


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of the results of `numem.bench.run`, keyed by benchmark."""
    machine = next(result["machine"] for result in results.values() if "machine" in result)
    where = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items())
    parts = [HEADER, f"Machine: {where}.\n"]
    if "core" in results:
        parts.append(_core(results["core"]))
    if "paged" in results:
        parts.append(_paged(results["paged"]))
    if "store" in results:
        parts.append(store_section(results["store"]))
    if "trace" in results:
        parts.append(trace_section(results["trace"]))
    if "runtime" in results:
        parts.append(runtime_section(results["runtime"]))
    if "models" in results:
        parts.append(models_section(results["models"]))
    return "\n".join(parts)


def _spread(s: Mapping[str, Any]) -> str:
    return f"{s['median-ms']:.4g} ms [{s['min-ms']:.4g}, {s['max-ms']:.4g}]"


def _core(r: Mapping[str, Any]) -> str:
    rows = []
    for suffix, dtype in (("", "float32"), ("_bf16", "bfloat16")):
        for what, target, key in (("decode", "≥ 2", "decode"), ("prefill", "≥ 1.2", "prefill")):
            sides = r[key + suffix]
            rows.append(
                [
                    f"{what}, {dtype}",
                    f"{r[f'{key}_tokens_per_s{suffix}']} tokens/s",
                    f"{r[f'{key}_tokens_per_s_transformers{suffix}']} tokens/s (transformers)",
                    f"{r[f'{key}_vs_transformers{suffix}']}x",
                    target,
                    f"{_spread(sides['numem'])} / {_spread(sides['transformers'])}",
                ]
            )
    restore = r["restore"]
    rows.append(
        [
            f"first token of {restore['tokens'] + 1:,} tokens",
            f"{r['restore_ttft_ms']} ms restored",
            f"{r['recompute_ttft_ms']} ms recomputed",
            f"{r['restore_vs_recompute']}x",
            "≥ 30",
            f"{_spread(restore['restored'])} / {_spread(restore['recomputed'])}",
        ]
    )
    rows.append(
        ["fork of 2,048 tokens", f"{r['fork_ms']} ms", f"{r['fork_pages_copied']} pages copied", "", "< 1 ms, ≤ 1 page",
         _spread(r["fork"]["2048"]["fork"])]
    )  # fmt: skip
    rows.append(["lookup of 8,192 tokens", f"{r['lookup_ms']} ms", "", "", "< 3 ms", _spread(r["lookup"])])
    rows.append(["import numem", f"{r['import_ms']} ms", "", "", "< 300 ms", _spread(r["import"])])
    notes = (
        f"\nModel {r['model']}, context {r['context']:,}, decode of {r['decode']['new_tokens']} tokens after it. Warm: "
        f"weights loaded and touched by one discarded repetition of each side. Restore: {restore['warm']}; "
        f"{restore['bytes']:,} bytes. Decode of transformers is `generate(1 + N)` less `generate(1)`.\n"
    )
    return "## Core\n\n" + table(["what", "numem", "peer", "ratio", "target", "median [min, max]"], rows) + notes


def _paged(r: Mapping[str, Any]) -> str:
    rows = []
    for name in ("uncached", "restored"):
        warm = r[name]["warm"]
        rows.append(
            [
                name,
                f"{r[name]['first-measured']['ready-to-first-token-ms']:.4g} ms",
                _spread(warm["ready-to-first-token"]),
                _spread(warm["prefix-load"]),
                _spread(warm["prompt-completion"]),
                f"{warm['decode']['tokens-per-second']} tokens/s",
            ]
        )
    c = r["checkpoint"]
    overlap = c["inference-overlap"]
    notes = (
        f"\nPrompt of {r['prompt']['logical-token-count']:,} tokens, attention {r['attention-execution']}. Publication of "
        f"{c['chunks']} chunks: submission {c['submission-ms']} ms, capture {c['capture-total-ms']} ms, drain "
        f"{c['publication-drain-ms']} ms, {c['stored-bytes']:,} bytes on disk, "
        f"{overlap['maximum-steps']} decode steps beside it. Speed-up of the restored first token: "
        f"{r['speedup']['warm-restored-vs-uncached-warm']}x.\n"
    )
    head = ["series", "first measured", "ready to first token", "prefix load", "prompt completion", "decode"]
    return "## Paged continuation\n\n" + table(head, rows) + notes
