"""Parity with transformers on tiny random models of every family: norms and biases random, float32, both dialects.

True widths are in test_parity_families_true.
"""

from pathlib import Path

import pytest
import torch

from numem import load_lm
from numem.errors import InputError
from numem.models.architecture.descriptor import Norm
from numem.models.architecture.families import FAMILIES, Family
from numem.models.architecture.reading import read_descriptor
from numem.models.transformer import Transformer
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.loader import Weights
from numem.runtime.engine import Engine
from tests.family_fixtures import CASES, Case, family_model, old_dialect
from tests.model_fixtures import edit_json, tiny_model
from tests.parity_fixtures import error, generated, logits, peer_of, prompt

DECODERS = [name for name, case in CASES.items() if case.kind == "lm"]
ENCODERS = [name for name, case in CASES.items() if case.kind == "body"]


@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Largest logits error 1e-4, 64 equal greedy tokens; a sharded copy in the other dialect has the same bits."""
    directory = family_model(tmp_path / "one", CASES[name])
    lm, ids = load_lm(directory), prompt(100)
    tokens = lm.generate_ids(ids, 64, ignore_eos=True)
    ours = logits(lm, ids + tokens)
    assert error(peer_of(directory), ids, tokens, ours) <= 1e-4
    sharded = family_model(tmp_path / "many", CASES[name], shard="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    old_dialect(sharded)
    other = load_lm(sharded)
    assert logits(other, ids + tokens).tobytes() == ours.tobytes()
    assert other.identity.fingerprint == lm.identity.fingerprint


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("dialect", ["new", "old"])
def test_hidden_states_of_encoders(name: str, dialect: str, tmp_path: Path) -> None:
    """A short text beside one longer than the window, each as transformers has it alone."""
    from transformers import AutoModel

    directory = family_model(tmp_path / "m", CASES[name])
    peer = AutoModel.from_pretrained(directory, dtype=torch.float32).train(False)
    if dialect == "old":
        old_dialect(directory)
    checkpoint = Checkpoint(directory)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    weights = Weights(checkpoint, descriptor, dtype="float32")
    texts = [prompt(5), prompt(90), prompt(1)]
    found = Transformer(descriptor, weights, dtype="float32", max_position=128).encode(texts)
    for text, rows in zip(texts, found, strict=True):
        with torch.inference_mode():
            expected = peer(torch.tensor([text])).last_hidden_state[0]
        assert float((rows - expected).abs().max()) <= 1e-4


def test_fused_experts_are_the_same_model(tmp_path: Path) -> None:
    """transformers can save experts as it holds them, in one tensor per layer: the bits are the same."""
    from transformers import AutoModelForCausalLM

    for name in ("mixtral", "qwen3_moe-sparse"):
        directory = family_model(tmp_path / name, CASES[name])
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        fused = family_model(tmp_path / f"{name}-fused", CASES[name])
        model.save_pretrained(fused, save_original_format=False)
        assert any(key.endswith("experts.gate_up_proj") for key in Checkpoint(fused).names)
        assert logits(load_lm(fused), prompt(20)).tobytes() == logits(load_lm(directory), prompt(20)).tobytes()


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_a_head_in_the_file_is_used_whatever_the_flag_says(flag: bool, present: bool, tmp_path: Path) -> None:
    """vllm#51665, vllm#51063, transformers#38870, sglang#1508: tied exactly when the file has no head."""
    directory = tiny_model(tmp_path / "m", tie_word_embeddings=not present)
    peer, ids = peer_of(directory), prompt(12)
    edit_json(directory / "config.json", tie_word_embeddings=flag)
    lm = load_lm(directory)
    assert error(peer, ids, *generated(lm, ids, 8)) <= 1e-4
    assert lm.descriptor.tied_head is not present


def test_a_window_of_w_sees_w_keys(tmp_path: Path) -> None:
    """transformers#39408, transformers#40163, vllm#3385: the key at q - 3 changes the logits, that at q - 4 does not."""
    engine = load_lm(tiny_model(tmp_path / "m", "mistral", sliding_window=4, num_hidden_layers=1)).session().engine
    ids = [5, 6, 7, 8, 9, 10, 11, 12]

    def last(tokens: list[int]) -> bytes:
        (found,) = engine.append([(engine.pool.allocate(), tokens)])
        return found.tobytes()

    base = last(ids)
    assert last([*ids[:3], 99, *ids[4:]]) == base
    assert last([*ids[:4], 99, *ids[5:]]) != base


def test_a_family_that_is_only_data_runs(tmp_path: Path) -> None:
    """The first Gemma is not in the list of families: described here as data, it runs without code of its own."""
    family = Family(
        "gemma",
        ("GemmaForCausalLM",),
        defaults={"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 256},
        norm=Norm(offset=1.0, cast_before_weight=False),
        embed_scaled=True,
    )
    directory = family_model(tmp_path / "m", Case("gemma"))
    checkpoint = Checkpoint(directory)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names, {**FAMILIES, "gemma": family})
    weights = Weights(checkpoint, descriptor, dtype="float32")
    engine = Engine(Transformer(descriptor, weights, dtype="float32", max_position=128), pages=16)
    (ours,) = engine.append([(engine.pool.allocate(), prompt(60))], logits="all")
    with torch.inference_mode():
        theirs = peer_of(directory)(torch.tensor([prompt(60)])).logits[0]
    assert float((torch.from_numpy(ours) - theirs).abs().max()) <= 1e-4


def test_float16_is_refused(tmp_path: Path) -> None:
    """transformers#36822, transformers#39972: before anything is computed."""
    directory = family_model(tmp_path / "m", CASES["gemma3_text"])
    with pytest.raises(InputError, match="residual stream of gemma3_text overflows"):
        load_lm(directory, dtype="float16")
