"""Descriptors: config.json in both dialects, tied heads, refused kinds, and the tables that follow from them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem.errors import CheckpointError, ContextLengthError, InputError, ModelError, UnsupportedModelError
from numem.identity.canonical import canonical_json
from numem.models.architecture.descriptor import Descriptor, read_descriptor
from numem.models.weights.checkpoint import Checkpoint
from tests.model_fixtures import SHAPE, tiny_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def config_of(family: str = "llama", **values: Any) -> dict[str, Any]:
    base = {"model_type": family, "rms_norm_eps": 1e-5, "hidden_act": "silu", **SHAPE}
    if family == "mistral":
        base["sliding_window"] = None
    return {key: value for key, value in {**base, **values}.items() if value is not ...}


def names_of(config: dict[str, Any], *extra: str, head: bool = True) -> list[str]:
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = ["model.embed_tokens.weight", "model.norm.weight", *(["lm_head.weight"] if head else [])]
    for layer in range(config["num_hidden_layers"]):
        names += [f"model.layers.{layer}.{part}.weight" for part in parts]
        names += [f"model.layers.{layer}.{item}" for item in extra]
    return names


def read(**values: Any) -> Descriptor:
    config = config_of(**values)
    return read_descriptor(config, names_of(config))


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


DIALECTS = [
    {"rope_theta": 130000.0, "rope_parameters": ...},
    {"rope_theta": 130000, "rope_scaling": None, "rope_parameters": ...},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 130000.0}},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 130000.0}},
    {"rope_theta": 130000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 130000.0}},
    {"rope_theta": 130000.0, "rope_scaling": {"type": "default"}, "rope_parameters": None},
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_both_rope_dialects_give_one_theta(dialect: dict[str, Any]) -> None:
    """A null rope_theta beside rope_parameters must not fall back to 10000 (cases-engine row 7)."""
    rope = read(**dialect).rope
    assert (rope.kind, rope.theta, rope.dim) == ("default", 130000.0, 32)


def test_theta_defaults_only_where_nothing_mentions_it() -> None:
    assert read(rope_parameters=...).rope.theta == 10000.0
    with pytest.raises(CheckpointError, match="rope_theta is null"):
        read(rope_theta=None, rope_parameters=...)


LINEAR = {"rope_type": "linear", "factor": 4.0}
CONFLICTS = [
    ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 130000.0}}, "rope_theta is 10000.0"),
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type"),
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 1e4}}, "'linear' and rope_parameters 'default'"),
    ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 8.0}}, "factor is 4.0"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "type 'linear' and rope_type 'yarn'"),
    ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "not a finite number"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "must be positive"),
    ({"rope_parameters": 7}, "not an object"),
]


@pytest.mark.parametrize(("values", "message"), CONFLICTS)
def test_rope_conflicts_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**values)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "mrope", "foo"])
def test_rope_kinds_that_cannot_be_restored_are_refused_by_name(kind: str) -> None:
    """vllm#41236, #5093, transformers#25104: dynamic bases and unknown kinds are refused."""
    with pytest.raises(UnsupportedModelError, match=repr(kind)):
        read(rope_scaling={"type": kind, "factor": 2.0}, rope_parameters=...)
    with pytest.raises(UnsupportedModelError, match=repr(kind)):
        read(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


def test_partial_and_per_layer_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        read(partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModelError, match="per layer type"):
        read(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}})


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 16.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=[str(i) for i in range(len(ROPES))])
@pytest.mark.parametrize("dialect", ["old", "new"])
def test_tables_match_transformers(rope: dict[str, Any], dialect: str) -> None:
    """tiny-vllm#1 and others: llama3 scaling left out. Both dialects of each kind equal transformers' tables."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 256}
    if dialect == "old":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaling["type"] = scaling.pop("rope_type")
        values |= {"rope_parameters": ..., "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    cos, sin = read(**values).rope_tables(256)
    assert cos.shape == sin.shape == (256, 16) and cos.dtype == torch.float32
    reference = LlamaRotaryEmbedding(LlamaConfig(**{**SHAPE, "rope_parameters": dict(rope)}))
    expected_cos, expected_sin = reference(torch.zeros(1, 1), torch.arange(256)[None])
    # transformers forms angles in float32: at 255 radians half a unit in the last place is 8e-6.
    torch.testing.assert_close(cos, expected_cos[0, :, :16], atol=4e-5, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0, :, :16], atol=4e-5, rtol=0)


def test_tables_are_those_of_float32_angles() -> None:
    """Frequencies and angles are rounded to float32 as in the reference; cos and sin of them are rounded once."""
    cos, sin = read().rope_tables(100)
    exponent = torch.arange(0, 32, 2, dtype=torch.int64).float() / 32
    frequencies = (1.0 / (50000.0**exponent)).numpy()
    assert np.array_equal(read().rope.inv_freq(), frequencies)
    angles = (np.arange(100, dtype=np.float32)[:, None] * frequencies[None]).astype(np.float64)
    assert np.array_equal(cos.numpy(), np.cos(angles).astype(np.float32))
    assert np.array_equal(sin.numpy(), np.sin(angles).astype(np.float32))
    assert torch.equal(read().rope_tables(10)[0], cos[:10])


def test_tables_end_where_the_model_does() -> None:
    """pegainfer#220, vllm#17924: positions past the table are an error, never values from outside it."""
    with pytest.raises(ContextLengthError, match="257"):
        read().rope_tables(257)
    with pytest.raises(InputError):
        read().rope_tables(0)


def test_head_dim_comes_from_its_key() -> None:
    assert read(head_dim=16).head_dim == 16
    assert read(head_dim=...).head_dim == 16  # hidden / heads
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
    ({"model_type": "gemma3_text"}, "zero-centred norms"),
    ({"model_type": "mixtral"}, "mixture of experts"),
    ({"model_type": "gpt2"}, "learned positions"),
    ({"model_type": "no-such-thing"}, "unknown model_type 'no-such-thing'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ({"text_config": {}}, "multi-modal"),
    ({"hidden_act": "gelu"}, "'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_local_experts": 8}, "num_local_experts"),
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
