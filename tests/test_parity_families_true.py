"""Parity with transformers at the true widths of published models, with few layers and random weights (slow).

Reduced, to stay within a few GB: layers; the vocabulary of mistral, mixtral, qwen3_moe and gemma2; experts of mixtral
(3 of 8, a quarter as wide) and of qwen3_moe (16 of 128).
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from numem import load_lm
from numem.models.architecture.reading import read_descriptor
from numem.models.transformer import Transformer
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.loader import Weights
from tests.family_fixtures import Case, family_model
from tests.parity_fixtures import error, generated, peer_of, prompt

pytestmark = pytest.mark.slow


def shape(hidden: int, heads: tuple[int, int, int], inter: int, vocab: int, layers: int, **more: Any) -> dict[str, Any]:
    """Settings of a model; heads are (query heads, key-value heads, head_dim)."""
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": inter,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
        **more,
    }


def theta(value: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": value}


TWO_ROPES = {"full_attention": theta(1e6), "sliding_attention": theta(1e4)}

TRUE: dict[str, Case] = {
    "smollm2-135m": Case(
        "llama",
        shape(576, (9, 3, 64), 1536, 49152, 4, rope_parameters=theta(1e5), rms_norm_eps=1e-5, tie_word_embeddings=True),
    ),
    "qwen2-0.5b": Case(
        "qwen2", shape(896, (14, 2, 64), 4864, 151936, 3, rope_parameters=theta(1e6), tie_word_embeddings=True)
    ),
    "qwen3-0.6b": Case(
        "qwen3", shape(1024, (16, 8, 128), 3072, 151936, 3, rope_parameters=theta(1e6), tie_word_embeddings=True)
    ),
    "mistral-7b": Case(
        "mistral", shape(4096, (32, 8, 128), 14336, 4096, 2, rope_parameters=theta(1e6), sliding_window=None)
    ),
    "mixtral-8x7b": Case(
        "mixtral", shape(4096, (32, 8, 128), 3584, 4096, 2, rope_parameters=theta(1e6), num_local_experts=3)
    ),
    "qwen3-30b-a3b": Case(
        "qwen3_moe",
        shape(
            2048,
            (32, 4, 128),
            6144,
            32768,
            2,
            rope_parameters=theta(1e6),
            num_experts=16,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    "gemma2-2b": Case(
        "gemma2", shape(2304, (8, 4, 256), 9216, 32768, 2, rope_parameters=theta(1e4), sliding_window=512)
    ),
    "gemma3-270m": Case(
        "gemma3_text", shape(640, (4, 1, 256), 2048, 262144, 7, rope_parameters=TWO_ROPES, sliding_window=512)
    ),
}

ENCODERS: dict[str, Case] = {
    "all-minilm-l6-v2": Case(
        "bert", {**shape(384, (12, 12, 32), 1536, 30522, 3), "rope_parameters": ..., "head_dim": ...}, "body"
    ),
    "embeddinggemma-300m": Case(
        "gemma3_text",
        shape(
            768,
            (3, 1, 256),
            1152,
            262144,
            7,
            rope_parameters=TWO_ROPES,
            sliding_window=512,
            use_bidirectional_attention=True,
        ),
        "body",
    ),
}


@pytest.mark.parametrize("name", TRUE)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Largest logits error 1e-4 and 64 equal greedy tokens, after a prompt that passes the window of Gemma."""
    case = TRUE[name]
    directory = family_model(tmp_path / "m", case, scale=case.settings["hidden_size"] ** -0.5)
    ids = prompt(540 if "sliding_attention" in case.settings.get("rope_parameters", {}) else 40)
    tokens, ours = generated(load_lm(directory), ids, 64)
    gc.collect()  # one model at a time in memory
    assert error(peer_of(directory), ids, tokens, ours) <= 1e-4


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_of_encoders(name: str, tmp_path: Path) -> None:
    """A short text beside one longer than the window on both sides, each as transformers has it alone."""
    from transformers import AutoModel

    case = ENCODERS[name]
    directory = family_model(tmp_path / "m", case, scale=case.settings["hidden_size"] ** -0.5)
    checkpoint = Checkpoint(directory)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    weights = Weights(checkpoint, descriptor, dtype="float32")
    texts = [prompt(7), prompt(640)]
    found = Transformer(descriptor, weights, dtype="float32", max_position=700).encode(texts)
    peer = AutoModel.from_pretrained(directory, dtype=torch.float32).train(False)
    for text, rows in zip(texts, found, strict=True):
        with torch.inference_mode():
            expected = peer(torch.tensor([text])).last_hidden_state[0]
        assert float((rows - expected).abs().max()) <= 1e-4
