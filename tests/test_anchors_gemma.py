"""Gemma 3 270M base: real weights under Google's terms, fetched only where NUMEM_ACCEPT_GEMMA_TERMS=1 says that they are
accepted. Without it these tests are reported as not asked for, by name."""

import os

import pytest

from numem import LM, load_lm
from tests.anchor_fixtures import loss, text_ids, text_logits

MODEL = "gemma-3-270m"
REFERENCE = 4.13569  # transformers, float32 arithmetic on the same bfloat16 file

pytestmark = [
    pytest.mark.anchors,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("NUMEM_ACCEPT_GEMMA_TERMS") != "1",
        reason="gemma-3-270m: not asked for; its terms are accepted by NUMEM_ACCEPT_GEMMA_TERMS=1",
    ),
]


@pytest.fixture(scope="module")
def lm() -> LM:
    return load_lm(MODEL, max_position=1024)


def test_tokenizer(lm: LM) -> None:
    assert lm.tokenizer.encode("Year 2018, hello") == [
        2, 16431, 236743, 236778, 236771, 236770, 236828, 236764, 29104,
    ]  # fmt: skip
    assert text_ids(lm)[:4] == [2, 43643, 236743, 236770]


def test_reference_outputs(lm: LM) -> None:
    """Up to the first step at which the reference's two best logits lie within 0.05."""
    france = [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488, 3207, 528, 7001]
    assert lm.generate_ids([2, 818, 5279, 529, 7001, 563], 15, ignore_eos=True) == france
    story = [2268, 3953, 7489]
    assert lm.generate_ids([2, 14946, 3324, 496, 990, 236764, 993, 691, 496], 3, ignore_eos=True) == story


def test_loss_of_the_reference_text(lm: LM) -> None:
    logits = text_logits(lm)
    assert round(loss(lm, logits), 4) == pytest.approx(4.1357, abs=1e-9)
    assert int(logits[-1].argmax()) == 107


def test_the_formats_of_the_grid_keep_the_loss() -> None:
    """Its matrices lie on grids of 4, 5, 6 and 8 bits."""
    assert abs(quantised("native") - REFERENCE) <= 1e-3


@pytest.mark.parametrize(("quantise", "most"), [("q8", 0.01), ("q4", 0.06), ("q4a", 0.06), ("q4k", 0.06)])
def test_other_formats_lose_little(quantise: str, most: float) -> None:
    assert abs(quantised(quantise) / REFERENCE - 1) <= most


def quantised(quantise: str) -> float:
    lm = load_lm(MODEL, quantise=quantise, max_position=1024)
    return loss(lm, text_logits(lm))
