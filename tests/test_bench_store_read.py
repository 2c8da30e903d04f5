"""The measurements of restores run, compare what they read, and report ratios with quartiles."""

from numem.bench.store_read import COUNT, NBYTES, quartiles, restoring


def test_restores_are_measured_in_pairs_against_preadv() -> None:
    result = restoring(pairs=2)
    assert set(result) == {"restore_vs_pread_warm", "restore_vs_pread_cold"}
    for figure in result.values():
        assert figure["pairs"] == 2 and figure["bytes"] == COUNT * NBYTES
        assert 0 < figure["q1"] <= figure["median"] <= figure["q3"]
    assert quartiles([1.0, 2.0, 3.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "pairs": 3}
