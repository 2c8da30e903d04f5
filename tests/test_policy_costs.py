"""Online measurements: exact averages, live over configured, predictions over positions, and a file that may be damaged."""

import json
from typing import Any

import pytest

from numem.errors import InputError
from numem.policy.costs import Configured, Costs, Series, TierCost

MIB = 1 << 20


def test_an_average_moves_by_a_fifth_of_the_difference() -> None:
    """Seed §1.13: EWMA of alpha 0.2 with count, ewma, minimum, maximum and last."""
    series = Series()
    for value in (10.0, 20.0, 5.0):
        series.add(value)
    assert series.ewma == pytest.approx(10.6)
    assert (series.count, series.minimum, series.maximum, series.last) == (3, 5.0, 20.0, 5.0)
    for value in (float("nan"), float("inf"), -1.0):
        series.add(value)
    assert series.count == 3


def test_a_measured_value_replaces_a_configured_one_after_its_first_sample() -> None:
    costs = Costs(Configured(2.0, 30.0, 7.0, 1000.0, {"ssd": TierCost(3.0, 500.0)}))
    assert (costs.prefill_ms(0, 10), costs.decode_ms, costs.capture_ms) == (20.0, 30.0, 7.0)
    assert (costs.load_ms("ssd", 1000, 2), costs.page_ms(3000)) == (8.0, 3.0)
    assert not costs.measured("ssd") and not costs.prefill_measured
    costs.observe_prefill(0, 100, 50.0)
    costs.observe_decode(11.0)
    costs.observe_capture(4.0)
    costs.observe_page(4 * MIB, 4.0)
    assert (costs.prefill_ms(0, 10), costs.decode_ms, costs.capture_ms) == (5.0, 11.0, 4.0)
    assert costs.page_ms(MIB) == pytest.approx(1.0)
    # A long read tells of the bytes; the fixed cost stays the configured one.
    costs.observe_load("ssd", 8 * MIB, 1, 3.0 + 16.0)
    assert costs.load_ms("ssd", MIB) == pytest.approx(3.0 + 2.0)
    # A short one tells of the fixed cost.
    costs.observe_load("ssd", 1024, 1, 9.0 + 2 / 1024)
    assert costs.load_ms("ssd", MIB) == pytest.approx(9.0 + 2.0)


def test_parts_add_up() -> None:
    costs = Costs(Configured(tiers={"object": TierCost(10.0, 100.0)}))
    assert costs.load_ms("object", 600, 3) == 3 * 10 + 6
    assert sum(costs.load_ms("object", n) or 0 for n in (100, 200, 300)) == costs.load_ms("object", 600, 3)


def test_an_unknown_tier_has_no_cost_until_it_is_read() -> None:
    costs = Costs()
    assert costs.load_ms("ssd", 100) is None
    for useless in ((0, 1, 1.0), (100, 0, 1.0), (100, 1, float("nan"))):
        costs.observe_load("ssd", *useless)
    assert costs.load_ms("ssd", 100) is None
    costs.observe_load("ssd", 2 * MIB, 2, 4.0)
    assert costs.load_ms("ssd", MIB) == pytest.approx(2.0) and costs.measured("ssd")


def test_a_prefill_is_the_sum_over_buckets_of_position() -> None:
    costs = Costs()
    costs.observe_prefill(0, 256, 256 * 1.0)
    costs.observe_prefill(256, 256, 256 * 2.0)
    costs.observe_prefill(512, 512, 512 * 4.0)
    assert costs.prefill_ms(0, 256) == 256
    assert costs.prefill_ms(200, 112) == 56 * 1 + 56 * 2
    assert costs.prefill_ms(0, 1024) == 256 + 512 + 2048
    assert costs.prefill_ms(5, 0) == 0


def test_positions_without_a_measurement_lie_on_the_line_of_the_nearest() -> None:
    """Attention grows with what lies before it; an unmeasured long context is not taken for a short one."""
    costs = Costs()
    costs.observe_prefill(0, 256, 256 * 1.0)
    assert costs.prefill_ms(2048, 10) == 10
    costs.observe_prefill(256, 256, 256 * 1.5)
    # Half a ms more for 256 positions: 1.5 + 0.5 * (2048 - 256) / 256 at the start of its bucket.
    assert costs.prefill_ms(2048, 10) == pytest.approx(10 * (1.5 + 0.5 * 7))
    # Noise never makes later rows cheaper than earlier ones.
    costs = Costs()
    costs.observe_prefill(0, 256, 256 * 2.0)
    costs.observe_prefill(256, 256, 256 * 1.0)
    assert costs.prefill_ms(4096, 1) == 1.0


def test_a_span_over_several_buckets_is_spread_as_predicted() -> None:
    costs = Costs()
    costs.observe_prefill(0, 256, 256 * 1.0)
    costs.observe_prefill(256, 256, 256 * 3.0)
    costs.observe_prefill(0, 512, 2048.0)  # predicted 1,024: everything took twice as long
    assert costs.prefill_ms(0, 256) == pytest.approx(256 * 1.2)
    assert costs.prefill_ms(256, 256) == pytest.approx(256 * 3.6)


def test_measurements_survive_as_plain_json() -> None:
    costs = Costs()
    costs.observe_prefill(0, 700, 70.0)
    costs.observe_load("ssd", 4 * MIB, 1, 2.0)
    costs.observe_load("object", 1000, 1, 2.0)
    costs.observe_page(MIB, 0.5)
    costs.observe_decode(9.0)
    costs.observe_capture(3.0)
    document = json.loads(json.dumps(costs.to_json()))
    again = Costs.from_json(document)
    assert again.to_json() == costs.to_json() == document
    assert again.prefill_ms(100, 600) == costs.prefill_ms(100, 600)
    assert again.load_ms("object", 5000, 2) == costs.load_ms("object", 5000, 2)


def damaged(**values: Any) -> dict[str, Any]:
    costs = Costs()
    costs.observe_prefill(0, 256, 256.0)
    return costs.to_json() | values


SERIES = {"count": 1, "ewma": 1.0, "minimum": 1.0, "maximum": 1.0, "last": 1.0}


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        damaged(version=2),
        damaged(prefill=[]),
        damaged(prefill={"x": SERIES}),
        damaged(page={}),
        damaged(page=SERIES | {"ewma": float("nan")}),
        damaged(page=SERIES | {"ewma": -1.0}),
        damaged(page=SERIES | {"count": 1.5}),
        damaged(page=SERIES | {"count": True}),
        damaged(page=SERIES | {"more": 1}),
        damaged(fixed={"ssd": 3}),
        {k: v for k, v in damaged().items() if k != "decode"},
    ],
)
def test_damaged_measurements_are_refused(document: Any) -> None:
    with pytest.raises(InputError, match="costs"):
        Costs.from_json(document)
