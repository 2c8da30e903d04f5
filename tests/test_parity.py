"""Parity with transformers on the same safetensors, on the real pretrained weights."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem import LM, load_lm

pytestmark = pytest.mark.anchors

MODEL = "smollm2-135m-instruct"
TEXT = Path(__file__).parent / "data" / "moby_dick_head.txt"  # the opening of Moby-Dick (1851), public domain

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):",
    "The three states of matter are",
    "In 1969, the first man walked on",
    "Water boils at a temperature of",
    "To be, or not to be, that is",
    "The quick brown fox",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "The largest planet in the solar system is",
    "A recipe for bread needs flour,",
    "The theory of evolution was proposed by",
    "import numpy as np\n\nx = np.",
    "She opened the door and saw",
    "The stock market fell today because",
    "Mount Everest is located in",
    "Q: What is 7 times 8?\nA:",
)


@pytest.fixture(scope="module")
def lm() -> LM:
    return load_lm(MODEL)


@pytest.fixture(scope="module")
def peer(lm: LM) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(lm.directory, dtype=torch.float32).train(False)


@pytest.fixture(scope="module")
def text_ids(lm: LM) -> list[int]:
    ids = lm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:1024]
    assert ids[:5] == [5229, 41958, 216, 33, 30] and len(ids) == 1024
    return ids


@pytest.fixture(scope="module")
def logits(lm: LM, text_ids: list[int]) -> np.ndarray:
    engine = lm.session().engine
    route = engine.pool.allocate()
    (rows,) = engine.append([(route, text_ids)], logits="all")
    return rows


def test_logits_are_as_near_to_float64_as_those_of_transformers(
    lm: LM, peer: Any, text_ids: list[int], logits: np.ndarray
) -> None:
    from transformers import AutoModelForCausalLM

    exact_model = AutoModelForCausalLM.from_pretrained(lm.directory, dtype=torch.float64).train(False)
    batch = torch.tensor([text_ids])
    with torch.inference_mode():
        exact = exact_model(batch).logits[0].numpy()
        theirs = peer(batch).logits[0].double().numpy()
    our_error = float(np.abs(logits.astype(np.float64) - exact).max())
    their_error = float(np.abs(theirs - exact).max())
    print(f"largest logits error over 1,024 tokens: numem {our_error:.3e}, transformers {their_error:.3e}")
    assert our_error <= 1.5 * their_error


def test_nll_of_the_reference_text(text_ids: list[int], logits: np.ndarray) -> None:
    rows = torch.from_numpy(logits[:-1]).double().log_softmax(dim=-1)
    nll = -rows[torch.arange(1023), torch.tensor(text_ids[1:])].mean().item()
    assert round(nll, 4) == pytest.approx(4.1110, abs=1e-9)
    assert int(np.argmax(logits[-1])) == 99


def test_twenty_prompts_of_64_greedy_tokens(lm: LM, peer: Any) -> None:
    """A difference is accepted only where the reference's own top two logits lie within 1e-3, and is listed.

    The reference sees prompt and our tokens at once: where each is its first choice after those before it, its own greedy
    generation is the same.
    """
    listed = []
    for prompt in PROMPTS:
        ids = lm.tokenizer.encode(prompt)
        ours = lm.generate_ids(ids, 64, ignore_eos=True)
        with torch.inference_mode():
            rows = peer(torch.tensor([ids + ours[:-1]]), logits_to_keep=64).logits[0]
        differing = (rows.argmax(dim=-1) != torch.tensor(ours)).nonzero().flatten().tolist()
        if not differing:
            continue
        step = differing[0]  # what follows continues another text
        top = rows[step].topk(2).values
        gap = float(top[0] - top[1])
        listed.append(f"{prompt!r} step {step}: gap {gap:.2e}")
        assert gap < 1e-3, f"{prompt!r} differs at step {step} where the reference's gap is {gap:.3e}"
    print("accepted differences:", listed or "none")


def test_reference_outputs(lm: LM) -> None:
    """Outputs recorded for these weights in float32."""
    paris = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33]
    assert lm.generate_ids([504, 3575, 282, 4649, 314], 24, ignore_eos=True) == paris
    assert lm.generate_text("The capital of France is", 24) == " Paris.\n\nThe answer is: 2018-01-22 12:1"
    chat = lm.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert len(chat) == 37
    assert lm.generate_ids(chat, 64) == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert lm.chat([{"role": "user", "content": "What is the capital of France?"}]) == "The capital of France is Paris."


def test_bfloat16_stays_near_float32(lm: LM, text_ids: list[int], logits: np.ndarray) -> None:
    """bfloat16 weights carry 8 bits: NLL moves by less than 1 %, not by a wrong layer's worth."""
    half = load_lm(MODEL, dtype="bfloat16")
    engine = half.session().engine
    (rows,) = engine.append([(engine.pool.allocate(), text_ids)], logits="all")
    losses = []
    for values in (logits, rows):
        table = torch.from_numpy(values[:-1]).double().log_softmax(dim=-1)
        losses.append(-table[torch.arange(1023), torch.tensor(text_ids[1:])].mean().item())
    assert math.isclose(losses[0], losses[1], rel_tol=1e-2)
    assert half.identity.scope != lm.identity.scope
