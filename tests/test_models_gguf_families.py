"""GGUF import of each architecture: the same tensors and the same descriptor as the model that was packed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem.errors import CheckpointError, ModelError, UnsupportedModelError
from numem.models.architecture.descriptor import Descriptor
from numem.models.architecture.reading import read_descriptor
from numem.models.architecture.rope import Rope
from numem.models.gguf.architectures import LLAMA3_ROPES, RECIPES
from numem.models.gguf.importer import import_gguf
from numem.models.text.tokenizer import Tokenizer
from numem.models.weights.checkpoint import Checkpoint
from tests.gguf_fixtures import family_gguf, write_gguf
from tests.model_fixtures import TEMPLATE, tiny_gguf, tiny_model

GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2": {"head_dim": 16},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3": {
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "sliding_window": 8,
        "rope_parameters": GEMMA_ROPE,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
}
SCALING: dict[str, Any] = {"gemma3__rope__scaling__type": "linear", "gemma3__rope__scaling__factor": 8.0}


def packed(root: Path, architecture: str) -> tuple[Path, Path]:
    """A random model and its GGUF."""
    model = tiny_model(root / "model", RECIPES[architecture].model_type, **SETTINGS[architecture])
    return model, family_gguf(root / "model.gguf", model, architecture, **(SCALING if architecture == "gemma3" else {}))


def descriptor_of(directory: Path) -> Descriptor:
    checkpoint = Checkpoint(directory)
    return read_descriptor(checkpoint.config, checkpoint.names)


@pytest.mark.parametrize("architecture", sorted(SETTINGS))
def test_an_import_is_the_model_that_was_packed(architecture: str, tmp_path: Path) -> None:
    model, path = packed(tmp_path, architecture)
    out = import_gguf(path, tmp_path / "out")
    original, imported = Checkpoint(model), Checkpoint(out)
    assert imported.names == original.names
    dtype = torch.bfloat16 if architecture == "gemma3" else torch.float16
    for name in original.names:
        tensor = original.tensor(name).float()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1 - 1  # as the file stores it
        assert imported.dtype(name) == dtype and torch.equal(imported.tensor(name), tensor.to(dtype)), name
    assert descriptor_of(out).canonical() == descriptor_of(model).canonical()
    assert Tokenizer(out).vocab_size == 264 and Tokenizer(out).padded_vocab_size == 320


@pytest.mark.parametrize("architecture", sorted(SETTINGS))
def test_transformers_reads_the_same_from_the_file_itself(architecture: str, tmp_path: Path) -> None:
    """Its own reading of the file, and its reading of the directory that we make of it, are one model."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    _, path = packed(tmp_path, architecture)
    auto: Any = AutoModelForCausalLM
    mine = auto.from_pretrained(import_gguf(path, tmp_path / "out"), dtype=torch.float32)
    load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    theirs = load(str(path), return_tensors=True, model_to_load=mine)
    tensors = {name: tensor for name, tensor in mine.state_dict().items() if name in theirs["tensors"]}
    assert len(tensors) == len(theirs["tensors"]) == len(Checkpoint(tmp_path / "out").names)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, theirs["tensors"][name], rtol=2**-8, atol=2**-9)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(mine.config, key) == pytest.approx(theirs["config"][key], rel=1e-6)


def test_gemma_layers_follow_their_pattern_and_the_head_of_62_layers_its_width(tmp_path: Path) -> None:
    _, path = packed(tmp_path, "gemma3")
    config = json.loads((import_gguf(path, tmp_path / "out") / "config.json").read_text())
    assert config["layer_types"] == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert config["rope_parameters"] == GEMMA_ROPE
    assert (config["sliding_window"], config["query_pre_attn_scalar"], config["dtype"]) == (8, 32, "bfloat16")
    assert config["hidden_activation"] == "gelu_pytorch_tanh" and config["final_logit_softcapping"] is None
    assert RECIPES["gemma3"].wide_scale == frozenset({62})


def test_a_qwen2_model_keeps_its_biases_and_its_own_head(tmp_path: Path) -> None:
    _, path = packed(tmp_path, "qwen2")
    checkpoint = Checkpoint(import_gguf(path, tmp_path / "out"))
    assert "model.layers.2.self_attn.k_proj.bias" in checkpoint.names and "lm_head.weight" in checkpoint.names
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    assert descriptor.attn_bias.q and not descriptor.attn_bias.o and not descriptor.tied_head


@pytest.mark.parametrize(
    ("eos", "template", "expected"),
    [(0, TEMPLATE, [0, 2]), (2, TEMPLATE, 2), (None, TEMPLATE, 2), (0, "no turns", 0), (None, None, ...)],
)
def test_the_ends_of_turns_end_a_text(eos: int | None, template: str | None, expected: Any, tmp_path: Path) -> None:
    """lighteval#1279: Gemma's file names <eos>, and its turns end with <end_of_turn>."""
    model = tiny_model(tmp_path / "model", "qwen3", **SETTINGS["qwen3"])
    values = {"tokenizer__ggml__eos_token_id": eos, "tokenizer__chat_template": template}
    out = import_gguf(family_gguf(tmp_path / "x.gguf", model, "qwen3", **values), tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text()).get("eos_token_id", ...) == expected


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_ROPES[1]}


def with_factors(root: Path, factors: np.ndarray) -> Path:
    """A llama GGUF with the factors of its frequencies as a tensor, which is all that converters write of them."""
    model = tiny_model(root / "model", rope_parameters=LLAMA3, max_position_embeddings=512)
    import gguf

    reader = gguf.GGUFReader(tiny_gguf(root / "plain.gguf", model))
    values = {f.name: f.contents() for f in reader.fields.values() if not f.name.startswith(("GGUF.", "general."))}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    return write_gguf(root / "model.gguf", "llama", values, {**tensors, "rope_freqs.weight": factors})


def test_llama3_scaling_is_known_by_its_factors(tmp_path: Path) -> None:
    """transformers#25104, tiny-vllm#1: llama3 scaling is never left out."""
    plain = Rope("default", 500000.0, 32).inv_freq()
    factors = (plain / Rope("llama3", 500000.0, 32, params=LLAMA3_ROPES[1]).inv_freq()).astype(np.float32)
    out = import_gguf(with_factors(tmp_path, factors), tmp_path / "out")
    assert descriptor_of(out).rope == descriptor_of(tmp_path / "model").rope
    assert not any("rope" in name for name in Checkpoint(out).names)


@pytest.mark.parametrize("factors", [np.full(16, 2, np.float32), np.ones(8, np.float32)])
def test_factors_that_no_config_makes_are_refused(factors: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight is not what Llama 3's scaling"):
        import_gguf(with_factors(tmp_path, factors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    out = import_gguf(with_factors(tmp_path, np.ones(16, np.float32)), tmp_path / "out")
    rope = descriptor_of(out).rope
    assert rope is not None and rope.kind == "default"


REFUSED: list[tuple[str, dict[str, Any], type[ModelError], str]] = [
    ("qwen3", {"qwen3__attention__sliding_window": 8}, UnsupportedModelError, "sliding windows of qwen3"),
    ("qwen3", {"qwen3__attention__value_length": 64}, UnsupportedModelError, "another length"),
    ("qwen3", {"qwen3__rope__scaling__type": "longrope"}, UnsupportedModelError, "'longrope'"),
    ("gemma3", {"gemma3__attention__sliding_window": None}, CheckpointError, "lacks gemma3.attention.sliding_window"),
    ("gemma3", {"gemma3__attention__sliding_window_pattern": 0}, CheckpointError, "pattern is 0"),
]


@pytest.mark.parametrize(("architecture", "metadata", "error", "message"), REFUSED)
def test_what_an_architecture_cannot_have_is_refused(
    architecture: str, metadata: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", RECIPES[architecture].model_type, **SETTINGS[architecture])
    path = family_gguf(tmp_path / "x.gguf", model, architecture, **metadata)
    with pytest.raises(error, match=message) as caught:
        import_gguf(path, tmp_path / "out")
    assert "x.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", sorted(SETTINGS))
def test_more_layers_than_tensors_are_refused_at_once(architecture: str, tmp_path: Path) -> None:
    """A count of four thousand millions, as one damaged byte makes it, would be a list of as many kinds of layers."""
    model = tiny_model(tmp_path / "model", RECIPES[architecture].model_type, **SETTINGS[architecture])
    path = family_gguf(tmp_path / "x.gguf", model, architecture, **{f"{architecture}__block_count": 0xFF000007})
    with pytest.raises(CheckpointError, match="block_count is 4278190087, but there are"):
        import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_header_is_another_model_or_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    _, path = packed(tmp_path, "gemma3")
    data = path.read_bytes()
    damaged, out = tmp_path / "damaged.gguf", tmp_path / "out"
    made = 0
    for at in range(4, 1024, 3):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            shutil.rmtree(import_gguf(damaged, out))
            made += 1
        except ModelError as error:
            assert "damaged.gguf" in str(error) and "\n" not in str(error) and not out.exists()
    assert 0 < made < 60


def test_a_tensor_of_another_architecture_has_no_place(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "qwen2", head_dim=16)
    path = family_gguf(tmp_path / "x.gguf", model, "qwen3")
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_k\.bias has no place in a qwen3 model"):
        import_gguf(path, tmp_path / "out")
