"""Quantisation on real weights. SmolLM2's packaged weights were quantised once (Q4_1) and dequantised: they lie on a
4-bit grid, which the asymmetric 4-bit format holds as it is; the other formats are judged off that grid."""

import pytest

from numem import load_lm
from numem.models.lm import LM
from tests.anchor_fixtures import loss, text_logits

pytestmark = pytest.mark.anchors

MODEL = "smollm2-135m-instruct"
REFERENCE = 4.11098  # transformers, float32, of the same file


def nll(quantise: str | None) -> float:
    lm = load_lm(MODEL, quantise=quantise, max_position=1024)
    return loss(lm, text_logits(lm))


@pytest.mark.parametrize("quantise", ["q4a", "native"])
def test_the_format_of_the_grid_keeps_the_loss(quantise: str) -> None:
    assert abs(nll(quantise) - REFERENCE) <= 1e-3


@pytest.mark.parametrize(("quantise", "most"), [("q8", 0.01), ("q4", 0.06), ("q4k", 0.06)])
def test_other_formats_lose_little(quantise: str, most: float) -> None:
    """q8 within 1 %, symmetric 4 bits and the K-quant of the other anchor (Gemma's) within 6 %."""
    assert abs(nll(quantise) / REFERENCE - 1) <= most


def test_greedy_text_of_the_grid_format() -> None:
    """The recorded output up to where the reference's two best tokens lie near each other (its last step)."""
    lm: LM = load_lm(MODEL, quantise="q4a", max_position=256)
    paris = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42]
    assert lm.generate_ids([504, 3575, 282, 4649, 314], 23, ignore_eos=True) == paris
