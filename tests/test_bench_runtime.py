"""The fields and the arithmetic of `numem bench runtime`, on a tiny model with tiny counts; no figure is asserted."""

import json

from numem import LM
from numem.bench import NAMES
from numem.bench.report import render
from numem.bench.runtime import Shape, measure
from numem.bench.runtime_restore import LENGTHS, SPEEDS, simulated_mixes

TINY = Shape(
    pairs=1,
    long_pairs=1,
    prompt=40,
    steps=3,
    stream=9,
    new=4,
    prefix=96,
    questions=6,
    answer=2,
    alone=3,
    restore=300,
    pool=(64, 20),
)
KEYS = {
    "lanes8_vs_1",
    "one_lane_vs_core",
    "step_overhead_us",
    "shared_prefix_speedup",
    "publish_cost",
    "two_ended_worst_ratio",
    "two_ended_worst_ratio_real",
    "policy_regret",
    "pool_op_us",
}


def test_every_figure_is_a_number_with_its_bar_and_details(tiny_lm: LM) -> None:
    result = measure(tiny_lm, TINY)
    assert set(result) == KEYS | {"details"}
    assert json.loads(json.dumps(result)) == result
    details = result["details"]
    for key in KEYS:
        found = details[key]
        assert result[key] == found["median"] and found["q1"] <= found["median"] <= found["q3"]
        assert found["verdict"] in ("met", "straddled", "missed") and found["bar"]
    assert result["lanes8_vs_1"] > 0 and 0 < result["step_overhead_us"] < 1e6 and 0 < result["pool_op_us"] < 1e5
    assert -10 < result["publish_cost"] < 1 and result["policy_regret"] < 1
    prefix = details["shared_prefix_speedup"]
    assert prefix["shared_tokens"] >= 5 * 96, "every question but the first finds the prefix"
    assert "3 of 6" in prefix["computed_note"] and "2" in prefix["computed_note"]
    assert len(details["two_ended_worst_ratio"]["mixes"]) == 20
    real = details["two_ended_worst_ratio_real"]["mixes"]
    assert [mix["tokens"] for mix in real] == [300, 300, 300, 600]
    for mix in real:
        assert set(mix["ms"]) == {"recompute", "restore", "two-ended", "measured"} and len(mix["choices"]) == 1
    assert set(details["pool_op_us"]["operations"]) >= {"fork", "reserve", "commit", "lease", "release_last"}
    report = render({"runtime": {"machine": {"cpu": "x"}, "model": "tiny", **result}})
    assert "## Resident plane" in report and "NaN" not in report


def test_the_simulated_mixes_cover_both_sides_and_two_ended_is_never_the_worst() -> None:
    mixes = simulated_mixes(1024)
    assert len(mixes) == len(LENGTHS) * len(SPEEDS) == 20
    assert all(0 < mix["ratio"] <= 1.05 for mix in mixes)
    assert any(mix["restore_ms"] < mix["recompute_ms"] for mix in mixes)
    assert any(mix["restore_ms"] > mix["recompute_ms"] for mix in mixes)
    assert min(mix["ratio"] for mix in mixes) < 0.75, "where both are equally fast, both at once are nearly twice so"


def test_it_is_one_of_the_benchmarks() -> None:
    assert "runtime" in NAMES
