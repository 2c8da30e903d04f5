"""The benchmarks' own arithmetic and fields, on a tiny model; no figure is asserted."""

import subprocess
import sys

import pytest

from numem import LM, Memory
from numem.bench import run
from numem.bench.core import forking, looking_up
from numem.bench.machine import summary
from numem.bench.paged import paged_continuation
from numem.errors import InputError
from numem.job.reports import nearest_rank, series


def test_nearest_rank() -> None:
    """Median of four is the second value, p95 of five the largest."""
    assert nearest_rank([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert nearest_rank([1.0, 2.0, 3.0, 4.0, 5.0], 0.95) == 5.0
    assert nearest_rank([7.0], 0.95) == 7.0
    none = series([])
    assert (none.median, none.p95, none.n) == (None, None, 0)
    assert summary([3.0, 1.0, 2.0])["median-ms"] == 2.0


def test_paged_fields(tiny_lm: LM, memory: Memory) -> None:
    result = paged_continuation(tiny_lm.session(), memory, [5, 6, 7, 8], iterations=2, decode_tokens=3)
    assert result["prompt"] == {"logical-token-count": 4, "processed-token-count": 3}
    assert result["decode-tokens"] == 3
    for name in ("uncached", "restored"):
        warm = result[name]["warm"]
        assert (warm["iterations"], warm["warmups"], len(warm["samples"])) == (2, 1, 2)
        assert len(warm["decode"]["samples-ms"]) == 6
        for sample in [result[name]["first-measured"], *warm["samples"]]:
            assert [step["context-token-count"] for step in sample["steps"]] == [4, 5, 6]
            assert [step["position"] for step in sample["steps"]] == [3, 4, 5]
            assert sample["cached-token-count"] == (3 if name == "restored" else 0)
            ready = sample["prefix-load-ms"] + sample["prompt-completion-ms"] + sample["first-token-ms"]
            assert sample["ready-to-first-token-ms"] == pytest.approx(ready, abs=1e-3)
    tokens = [[step["token"] for step in result[name]["first-measured"]["steps"]] for name in ("uncached", "restored")]
    assert tokens[0] == tokens[1]
    assert result["checkpoint"]["chunks"] == 1
    assert set(result["speedup"]) == {"first-restored-vs-uncached-warm", "warm-restored-vs-uncached-warm"}


def test_fork_and_lookup_within_orders_of_magnitude(tiny_lm: LM) -> None:
    """A fork copies at most one page; neither is ever ten times its stated bound (1 ms, 3 ms)."""
    fork = forking(tiny_lm, repetitions=5)
    assert fork["fork_pages_copied"] == 1 and fork["fork_ms"] < 10
    assert looking_up(repetitions=5)["lookup_ms"] < 30


def test_import_is_light() -> None:
    code = (
        "import sys, numem; heavy = {'torch', 'lance', 'dagster', 'numpy', 'pydantic'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_benchmark() -> None:
    with pytest.raises(InputError, match="core, paged"):
        run("speed")
