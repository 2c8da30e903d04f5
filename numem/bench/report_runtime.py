"""Section of docs/benchmarks.md about the resident plane."""

from collections.abc import Mapping
from typing import Any

from numem.bench.report_store import table

_ROWS = {
    "lanes8_vs_1": "decode tokens/s of 8 lanes / of 1 lane",
    "one_lane_vs_core": "decode speed of 1 lane / of the loop of `numem bench core`",
    "shared_prefix_speedup": "prompts over one prefix: time without reuse / with it",
    "publish_cost": "part of the time lost to publication while 8 lanes decode",
    "two_ended_worst_ratio": "two-ended restore / the better of restore and recompute, simulated clock, worst of 20 mixes",
    "two_ended_worst_ratio_real": "the same executed on a throttled tier, worst of 4 mixes",
    "policy_regret": "regret of the default policy over the executed alternatives, worst of 4 mixes",
    "step_overhead_us": "a step of 8 lanes outside the forward pass, us",
    "pool_op_us": "slowest operation of the page pool, us",
}


def runtime_section(r: Mapping[str, Any]) -> str:
    """Figures of `numem.bench.runtime.runtime`."""
    details = r["details"]
    rows = []
    for key, what in _ROWS.items():
        found = details[key]
        spread = f"{found['median']:g} [{found['q1']:g}, {found['q3']:g}]"
        rows.append([what, spread, found["bar"], found["verdict"], _absolute(key, found)])
    lanes, prefix, publish = details["lanes8_vs_1"], details["shared_prefix_speedup"], details["publish_cost"]
    notes = (
        f"\nModel {r['model']}, float32. Lanes: prompts of {lanes['prompt']:,} tokens, resident, {lanes['steps']} steps a "
        f"sample, the three sides in turns. Shared prefix: {prefix['prompts']} prompts over {prefix['prefix']:,} tokens, "
        f"{prefix['new_tokens']} new tokens each, pages empty at first; {prefix['computed_note']}. Publication: "
        f"{publish['requests']} requests of {publish['prompt']:,} tokens, each published as it ends. Two-ended: loads of "
        "0.1 to 10 times the time of computing the same rows; executed where they take 0.5, 1 and 2 times as long, to the "
        "first token; costs are learnt anew in each mix. Regret: of what the default took against the best alternative.\n"
    )
    head = ["what", "figure", "bar", "verdict", "absolute"]
    return "## Resident plane\n\n" + table(head, rows) + notes + "\n" + _mixes(details)


def _absolute(key: str, found: Mapping[str, Any]) -> str:
    if key == "lanes8_vs_1":
        return f"{found['tokens_per_s_8']:g} / {found['tokens_per_s_1']:g} tokens/s"
    if key == "one_lane_vs_core":
        return f"core: {found['tokens_per_s_core']:g} tokens/s"
    if key == "shared_prefix_speedup":
        return f"{min(found['computed_s']):g} / {min(found['reused_s']):g} s"
    if key == "publish_cost":
        return f"until durable after the last token: {max(found['drain_ms']):g} ms"
    if key == "step_overhead_us":
        return f"step: {found['step_ms']:g} ms"
    if key == "pool_op_us":
        return f"{found['operation']} at {found['tokens']:,} tokens"
    return ""


def _mixes(details: Mapping[str, Any]) -> str:
    rows = []
    for mix in details["two_ended_worst_ratio_real"]["mixes"]:
        ms = {policy: f"{sorted(values)[len(values) // 2]:,.0f}" for policy, values in mix["ms"].items()}
        chosen = ", ".join(dict.fromkeys(mix["choices"]))
        rows.append([f"{mix['tokens']:,}", f"{mix['load_vs_compute']:g}", *ms.values(), chosen])
    head = ["tokens", "load / compute", "recompute, ms", "restore, ms", "two-ended, ms", "default, ms", "it chose"]
    return table(head, rows)
