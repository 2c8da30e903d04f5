"""`numem bench store`: the fields of its figures on tiny sizes, and the report made of them; no figure is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest

from numem.bench import traces as traces_module
from numem.bench.pairs import figure, interleaved, judged, ratios
from numem.bench.report import render
from numem.bench.store_catalog import appending, lookups
from numem.bench.store_lmcache import against_lmcache
from numem.bench.store_read import restoring
from numem.bench.store_s3 import s3_restoring
from numem.bench.store_write import overhead, publishing

PAIR = {"median", "q1", "q3", "pairs"}
JUDGED = PAIR | {"bar", "verdict"}


def test_verdicts() -> None:
    quartiles = {"median": 0.8, "q1": 0.7, "q3": 0.9, "pairs": 15}
    assert judged(quartiles, least=0.7) == {"bar": ">= 0.7", "verdict": "met"}
    assert judged(quartiles, least=0.8)["verdict"] == "straddled"
    assert judged(quartiles, least=1)["verdict"] == "missed"
    assert judged(quartiles, most=0.9) == {"bar": "<= 0.9", "verdict": "met"}
    assert judged(quartiles, most=0.8)["verdict"] == "straddled"
    assert judged(quartiles, most=0.5)["verdict"] == "missed"
    assert figure([1.0, 2.0, 3.0], ms=4.0) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "pairs": 3, "ms": 4.0}
    assert ratios([1.0, 3.0], [2.0, 1.0]) == [0.5, 3.0]


def test_pairs_take_turns_and_the_first_round_is_dropped() -> None:
    calls: list[str] = []
    seconds = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, lambda: calls.append("-")
    )
    assert "".join(calls) == "-a-b" + "-b-a" + "-a-b" + "-b-a"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return {
        **restoring(pairs=2),
        **publishing(pairs=2, count=2, nbytes=1 << 16),
        **overhead(chunks=2, small=50, chunk_bytes=1 << 20),
        **lookups(pairs=2, rows=120, found=20),
        **appending(blocks=2, appends=3, early=3, late=6),
    }


def test_the_fields_of_the_figures(figures: dict[str, Any]) -> None:
    assert set(figures) == {
        "restore_vs_pread_warm",
        "restore_vs_pread_cold",
        "publish_vs_hash_write_fsync",
        "disk_overhead",
        "lookup_200_hot_ms",
        "lookup_200_fresh_ms",
        "append_p95_2000_vs_50",
    }
    for name in ("publish_vs_hash_write_fsync", "lookup_200_hot_ms", "lookup_200_fresh_ms", "append_p95_2000_vs_50"):
        assert set(figures[name]) >= JUDGED and figures[name]["pairs"] == 2
    for disk in figures["disk_overhead"].values():
        assert disk["ratio"] == round(disk["tier_bytes"] / disk["logical_bytes"], 4)
        assert disk["with_catalog"] > disk["ratio"] > 1
    assert figures["disk_overhead"]["chunks"]["logical_bytes"] == 2 << 20
    assert figures["disk_overhead"]["small_pieces"]["logical_bytes"] == 50 * 256
    json.dumps(figures, allow_nan=False)


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any]) -> None:
    monkeypatch.setattr("numem.bench.s3server.shutil.which", lambda name: None)
    monkeypatch.setattr("numem.bench.s3server.os.access", lambda path, mode: False)
    skipped = {**s3_restoring(pairs=1), **against_lmcache(pairs=1, count=1, nbytes=1 << 12)}
    assert "weed" in skipped["s3_restore_vs_obstore"]["skipped"]
    assert set(skipped["restore_vs_lmcache"]) >= {"skipped"} or set(skipped["restore_vs_lmcache"]) >= PAIR
    restored = {
        name: {**figure, "bar": ">= 0.8", "verdict": "met"} for name, figure in figures.items() if "pread" in name
    }
    report = render({"store": {"machine": {"cpu": "x"}, **figures, **restored, **skipped}})
    assert "## Durable plane" in report and "not measured" in report


@pytest.mark.s3
def test_an_object_store_is_measured() -> None:
    figures = s3_restoring(pairs=2, count=2, nbytes=1 << 16)
    assert set(figures["s3_restore_vs_obstore"]) >= JUDGED | {"ms", "peer_ms", "bytes"}


def test_traces_are_replayed_where_they_are_and_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    with gzip.open(tmp_path / "conversation.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"hash_ids": [1, 2, number % 7]}) + "\n" for number in range(40))
    monkeypatch.setenv("NUMEM_TRACES", str(tmp_path))
    results = traces_module.traces()
    found = results["conversation"]
    assert (found["requests"], found["references"], found["blocks"]) == (40, 120, 7)
    assert set(found["second_touch"]) == {"unbounded", "small"}
    assert "synthetic.jsonl.gz" in results["synthetic"]["skipped"]
    report = render({"machine": {"machine": {"cpu": "x"}}, "trace": results})
    assert "## Eviction on request traces" in report and "synthetic: not replayed" in report
