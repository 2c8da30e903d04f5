"""Descriptors: config.json in both dialects, tied heads, refused kinds, and the tables that follow from them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from numem.errors import CheckpointError, ModelError, UnsupportedModelError
from numem.identity.canonical import canonical_json
from numem.models.architecture.reading import read_descriptor
from numem.models.weights.checkpoint import Checkpoint
from tests.family_fixtures import config_of, names_of, read
from tests.model_fixtures import tiny_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_of_a_transformers_checkpoint_is_expected_with_its_shape(
    tmp_path: Path, family: str, tied: bool
) -> None:
    extra: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    path = tiny_model(tmp_path / family, family, tie_word_embeddings=tied, **extra)
    checkpoint = Checkpoint(path)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    assert descriptor.shapes() == checkpoint.shapes()
    descriptor.check_shapes(checkpoint.shapes())
    assert descriptor.tied_head is tied
    assert (descriptor.family, descriptor.head_dim, descriptor.attn_scale) == (family, 32, 1 / math.sqrt(32))
    assert descriptor.qk_norm == (family == "qwen3") == ("attn_q_norm" in descriptor.names)
    assert descriptor.attn_bias.q == (family in ("qwen2", "llama")) == ("attn_q_bias" in descriptor.names)
    assert descriptor.attn_bias.o == (family == "llama")
    assert descriptor.tensor("attn_q", 2) == "model.layers.2.self_attn.q_proj.weight"
    assert (descriptor.bos, descriptor.eos, descriptor.pad) == (1, (2,), 2)


def test_a_checkpoint_saved_without_its_wrapper_is_read(tmp_path: Path) -> None:
    config = config_of()
    names = [name.removeprefix("model.") for name in names_of(config, head=False)]
    descriptor = read_descriptor(config, names)
    assert descriptor.tensor("embed") == "embed_tokens.weight" and descriptor.tied_head


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_the_checkpoint_decides_about_the_tied_head(flag: bool, present: bool) -> None:
    """vllm#51665, transformers#38870: tied exactly when the checkpoint has no head, whatever the flag says."""
    config = config_of(tie_word_embeddings=flag)
    descriptor = read_descriptor(config, names_of(config, head=present))
    assert descriptor.tied_head is not present
    assert ("lm_head" in descriptor.names) is present


def test_head_dim_comes_from_its_key() -> None:
    assert read(head_dim=16).head_dim == 16
    assert read(head_dim=...).head_dim == 16  # hidden / heads
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        read(head_dim=..., num_attention_heads=6)
    config = config_of("qwen3", head_dim=None)
    norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    assert read_descriptor(config, names_of(config, *norms)).head_dim == 128


WINDOWS = [
    ({"family": "mistral", "sliding_window": 8}, 8, ["sliding"] * 3),
    ({"family": "mistral", "sliding_window": None}, 0, ["full"] * 3),
    ({"family": "llama", "sliding_window": 8}, 0, ["full"] * 3),
    ({"family": "qwen3", "sliding_window": 8, "use_sliding_window": False}, 0, ["full"] * 3),
    (
        {"family": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        8,
        ["full", "sliding", "sliding"],
    ),
    (
        {
            "family": "qwen3",
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        8,
        ["full", "sliding", "full"],
    ),
]


@pytest.mark.parametrize(("values", "window", "kinds"), WINDOWS)
def test_windows(values: dict[str, Any], window: int, kinds: list[str]) -> None:
    config = config_of(**values)
    norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if values["family"] == "qwen3" else ()
    descriptor = read_descriptor(config, names_of(config, *norms))
    assert (descriptor.window, list(descriptor.layer_kinds)) == (window, kinds)


REFUSED = [
    ({"model_type": "gpt2"}, "transposed fused projections"),
    ({"model_type": "granite"}, "scaled residuals"),
    ({"model_type": "no-such-thing"}, "unknown model_type 'no-such-thing'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ({"text_config": {}}, "multi-modal"),
    ({"hidden_act": "relu"}, "'relu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "per layer type"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_is_not_run_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(**values)


BAD = [
    ({"model_type": ...}, "model_type"),
    ({"hidden_size": ...}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"vocab_size": "320"}, "vocab_size"),
    ({"num_attention_heads": True}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "multiple of 3"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"head_dim": 33}, "odd"),
    ({"eos_token_id": "2"}, "eos_token_id"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_bad_values_name_their_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(**values)
    assert "\n" not in str(caught.value)


def test_tensors_and_config_must_agree() -> None:
    config = config_of()
    names = names_of(config)
    with pytest.raises(CheckpointError, match=r"lacks 1 of 30 tensors.*model\.layers\.1\.mlp\.up_proj\.weight"):
        read_descriptor(config, [n for n in names if n != "model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(CheckpointError, match=r"does not read, first model\.layers\.0\.self_attn\.q_proj\.bias"):
        read_descriptor(config, [*names, "model.layers.0.self_attn.q_proj.bias"])
    read_descriptor(config, [*names, "model.layers.0.self_attn.rotary_emb.inv_freq"])
    descriptor = read_descriptor(config, names)
    shapes = descriptor.shapes() | {"model.norm.weight": (65,)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[65\].*\[64\]"):
        descriptor.check_shapes(shapes)


def test_canonical_form_follows_the_numbers_and_nothing_else() -> None:
    base = canonical_json(read().canonical())
    assert json.loads(base)["family"] == "llama"
    old = {"rope_theta": 50000.0, "rope_parameters": ...}
    assert canonical_json(read(**old).canonical()) == base
    assert canonical_json(read(eos_token_id=[2, 5], bos_token_id=None, extra_key=1).canonical()) == base
    for change in ({"rms_norm_eps": 1e-6}, {"rope_theta": 50001.0, "rope_parameters": ...}, {"head_dim": 16}):
        assert canonical_json(read(**change).canonical()) != base


def test_no_config_makes_anything_but_a_typed_error() -> None:
    junk: list[Any] = [None, [], {}, "", "x", -1, 0, 1.5, True, [1], {"a": {}}, float("nan"), 10**30]
    config = config_of()
    names = names_of(config)
    for key in [*config, "rope_scaling", "rope_theta", "architectures", "layer_types", "sliding_window"]:
        for value in junk:
            try:
                read_descriptor({**config, key: value}, names)
            except ModelError as error:
                assert "\n" not in str(error)
