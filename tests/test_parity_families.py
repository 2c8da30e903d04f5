"""Parity with transformers on tiny random models of every family that runs: norms and biases random, float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem import load_lm
from tests.model_fixtures import tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "mistral-windowed": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "qwen3-untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Largest logits error 1e-4 of a scale of about 10, and 48 equal greedy tokens."""
    from transformers import AutoModelForCausalLM

    directory = tiny_model(tmp_path / "m", name.split("-")[0], **FAMILIES[name])
    lm = load_lm(directory)
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train(False)
    ids = [int(t) for t in np.random.default_rng(1).integers(3, 250, 100)]
    batch = torch.tensor([ids])
    with torch.inference_mode():
        theirs = peer(batch).logits[0].numpy()
        out = peer.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=48,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    engine = lm.session().engine
    (ours,) = engine.append([(engine.pool.allocate(), ids)], logits="all")
    assert float(np.abs(ours - theirs).max()) <= 1e-4
    assert lm.generate_ids(ids, 48, ignore_eos=True) == out[0, len(ids) :].tolist()


def test_a_window_of_w_sees_w_keys(tmp_path: Path) -> None:
    """transformers#39408, #40163, vllm#3385: the key at q - 3 changes the logits, the one at q - 4 does not."""
    directory = tiny_model(tmp_path / "m", "mistral", sliding_window=4, num_hidden_layers=1)
    engine = load_lm(directory).session().engine
    ids = [5, 6, 7, 8, 9, 10, 11, 12]

    def last(tokens: list[int]) -> bytes:
        (logits,) = engine.append([(engine.pool.allocate(), tokens)])
        return logits.tobytes()

    base = last(ids)
    assert last([*ids[:3], 99, *ids[4:]]) == base
    assert last([*ids[:4], 99, *ids[5:]]) != base
