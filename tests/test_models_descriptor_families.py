"""Descriptors of every family: from checkpoints that transformers saves, and from config.json files as published."""

import math
from pathlib import Path
from typing import Any

import pytest

from numem.errors import CheckpointError, InputError, ModelError, UnsupportedModelError
from numem.models.architecture.descriptor import Bias, Descriptor, Norm
from numem.models.architecture.families import Family
from numem.models.architecture.names import LLAMA
from numem.models.architecture.reading import read_descriptor
from numem.models.architecture.rope import Rope
from numem.models.weights.checkpoint import Checkpoint
from tests.family_fixtures import CASES, config_of, family_model, names_of, old_dialect, read


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_that_transformers_saves_is_read_in_both_dialects(name: str, tmp_path: Path) -> None:
    path = family_model(tmp_path / "m", CASES[name])
    checkpoint = Checkpoint(path)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    shapes = {k: v for k, v in checkpoint.shapes().items() if not k.startswith(descriptor.ignored)}
    assert descriptor.shapes() == shapes
    assert descriptor.family == CASES[name].model_type
    assert descriptor.has_head == (CASES[name].kind == "lm")
    old_dialect(path)
    checkpoint = Checkpoint(path)
    assert read_descriptor(checkpoint.config, checkpoint.names) == descriptor


def test_smollm2() -> None:
    """The published config carries rope_interleaved and is_llama_config, which are ignored; 3 query heads a group."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 2,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
    }
    d = read_descriptor(config, names_of(config, head=False))
    assert (d.heads, d.kv_heads, d.head_dim, d.attn_scale) == (9, 3, 64, 0.125)
    assert d.rope == Rope("default", 100000.0, 64) and d.tied_head and d.has_head
    assert d.canonical() == {
        "family": "llama",
        "hidden": 576,
        "layers": 2,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "inter": 1536,
        "vocab": 49152,
        "max_pos": 8192,
        "attn_scale": 0.125,
        "tied_head": True,
        "layer_kinds": ["full", "full"],
        "rope": {"kind": "default", "theta": 100000.0, "dim": 64},
        "norm": {"eps": 1e-05},
    }


def gemma_names(layers: int, prefix: str = "model.", head: bool = False, qk_norm: bool = True) -> list[str]:
    parts = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    parts += [f"self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj")]
    parts += ["self_attn.q_norm", "self_attn.k_norm"] if qk_norm else []
    parts += [f"mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")]
    names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", *(["lm_head.weight"] if head else [])]
    return names + [f"{prefix}layers.{layer}.{part}.weight" for layer in range(layers) for part in parts]


GEMMA_270M: dict[str, Any] = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}


def gemma(**values: Any) -> Descriptor:
    config = {k: v for k, v in {**GEMMA_270M, **values}.items() if v is not ...}
    return read_descriptor(config, gemma_names(config["num_hidden_layers"]))


def test_gemma3_270m() -> None:
    d = gemma()
    assert [i for i, kind in enumerate(d.layer_kinds) if kind == "full"] == [5, 11, 17]
    assert (d.window, d.window_right, d.causal) == (512, 0, True)
    assert d.rope == Rope("default", 1e6, 256) and d.rope_local == Rope("default", 1e4, 256)
    assert d.norm == Norm(eps=1e-6, offset=1.0, cast_before_weight=False)
    assert d.norms == ("input", "post_attn", "pre_ffn", "post_ffn") and d.qk_norm
    assert (d.act, d.gated, d.attn_scale, d.attn_softcap, d.final_softcap) == ("gelu_tanh", True, 1 / 16, None, None)
    assert d.names["ffn_norm"].endswith("pre_feedforward_layernorm.weight")
    assert d.names["attn_post_norm"].endswith("post_attention_layernorm.weight")
    assert (d.tied_head, d.bos, d.eos, d.pad) == (True, 2, (1,), 0)
    full, local = d.rope_tables(16), d.local_rope_tables(16)
    assert full[0].shape == local[0].shape == (16, 128) and not full[0].equal(local[0])


def test_the_embedding_factor_is_rounded_to_the_dtype_of_the_weights() -> None:
    """sqrt(640) = 25.298 is 25.25 in bfloat16, sqrt(1152) = 33.94 is 34."""
    assert gemma().embed_factor("bfloat16") == 25.25
    assert gemma().embed_factor("float32") == pytest.approx(math.sqrt(640), rel=1e-7)
    assert gemma(hidden_size=1152).embed_factor("bfloat16") == 34.0
    assert read().embed_factor("bfloat16") == 1.0


def test_the_attention_scale_is_not_that_of_head_dim() -> None:
    assert gemma(query_pre_attn_scalar=168).attn_scale == 1 / math.sqrt(168)


PATTERNS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [5]),
    ({"_sliding_window_pattern": ..., "sliding_window_pattern": 3}, [2, 5]),
    ({"_sliding_window_pattern": 2}, [1, 3, 5]),
    ({"_sliding_window_pattern": ...}, [5]),
    ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 5}, [0, 1]),
    ({"_sliding_window_pattern": 1}, [0, 1, 2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize(("values", "full"), PATTERNS)
def test_the_pattern_of_layers(values: dict[str, Any], full: list[int]) -> None:
    d = gemma(num_hidden_layers=7, **values)
    assert [i for i, kind in enumerate(d.layer_kinds) if kind == "full"] == full
    assert (d.window, d.rope_local is None) == ((512, False) if len(full) < 7 else (0, True))


def test_patterns_that_disagree_or_are_malformed_are_refused() -> None:
    for values, message in (
        ({"sliding_window_pattern": 3}, "disagree"),
        ({"layer_types": ["full_attention"]}, "does not list 18 layers"),
        ({"_sliding_window_pattern": 0}, "_sliding_window_pattern"),
    ):
        with pytest.raises(CheckpointError, match=message):
            gemma(**values)
    with pytest.raises(UnsupportedModelError, match="'chunked_attention'"):
        gemma(layer_types=["chunked_attention"] * 18)


def test_a_bidirectional_window_reaches_half_its_size_to_both_sides() -> None:
    """EmbeddingGemma: 512 is |q - k| <= 256; names have no prefix and there is no head."""
    config = {
        **GEMMA_270M,
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "hidden_size": 768,
        "num_attention_heads": 3,
        "num_hidden_layers": 6,
    }
    d = read_descriptor(config, gemma_names(6, prefix=""))
    assert (d.causal, d.window, d.window_right, d.heads, d.kv_heads) == (False, 257, 256, 3, 1)
    assert not d.has_head and not d.tied_head and "lm_head" not in d.names
    assert d.tensor("embed") == "embed_tokens.weight"


def test_gemma2() -> None:
    config = {
        **{k: v for k, v in GEMMA_270M.items() if "sliding" not in k and "softcap" not in k and "rope" not in k},
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "sliding_window": 4096,
    }
    names = gemma_names(4, qk_norm=False)
    d = read_descriptor(config, names)
    assert (d.attn_softcap, d.final_softcap, d.window) == (50.0, 30.0, 4096)
    assert d.layer_kinds == ("sliding", "full", "sliding", "full")
    assert d.rope == Rope("default", 1e4, 256) and d.rope_local is None and not d.qk_norm
    capless = read_descriptor({**config, "attn_logit_softcapping": None, "final_logit_softcapping": 12.5}, names)
    assert (capless.attn_softcap, capless.final_softcap) == (None, 12.5)
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        read_descriptor({**config, "use_bidirectional_attention": True}, names)
    with pytest.raises(CheckpointError, match="attn_logit_softcapping"):
        read_descriptor({**config, "attn_logit_softcapping": -1.0}, names)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_beside_a_vision_tower(prefix: str) -> None:
    """As published for 4B: a sparse text_config, text weights under a prefix, a vision tower that is named as ignored."""
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    vision = ["vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"]
    d = read_descriptor(config, gemma_names(34, prefix) + vision)
    assert (d.heads, d.kv_heads, d.head_dim, d.vocab, d.max_pos) == (8, 4, 256, 262208, 131072)
    assert d.rope == Rope("linear", 1e6, 256, params={"factor": 8.0}) and d.rope_local == Rope("default", 1e4, 256)
    assert (d.bos, d.eos, d.tied_head) == (2, (1, 106), True)
    assert d.ignored == ("multi_modal_projector.", "vision_tower.")
    assert d.tensor("attn_q", 3) == f"{prefix}layers.3.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match="does not read, first audio_tower"):
        read_descriptor(config, [*gemma_names(34, prefix), "audio_tower.x.weight"])
    with pytest.raises(CheckpointError, match="text_config"):
        read_descriptor({**config, "text_config": None}, [])
    with pytest.raises(UnsupportedModelError, match="'llama' text model"):
        read_descriptor({**config, "text_config": {"model_type": "llama"}}, [])
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        read_descriptor({**config, "quantization_config": {"bits": 4}}, [])


BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


def bert_names(prefix: str = "", weight: str = "weight", bias: str = "bias") -> list[str]:
    names = [f"embeddings.{table}_embeddings.weight" for table in ("word", "position", "token_type")]
    names += [f"embeddings.LayerNorm.{word}" for word in (weight, bias)] + ["embeddings.position_ids"]
    for layer in range(2):
        at = f"encoder.layer.{layer}."
        linear = [f"attention.self.{part}" for part in ("query", "key", "value")]
        linear += ["attention.output.dense", "intermediate.dense", "output.dense"]
        names += [f"{at}{part}.{word}" for part in linear for word in ("weight", "bias")]
        names += [f"{at}{part}.LayerNorm.{w}" for part in ("attention.output", "output") for w in (weight, bias)]
    return [prefix + name for name in [*names, "pooler.dense.weight", "pooler.dense.bias"]]


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("words", [("weight", "bias"), ("gamma", "beta")])
def test_bert(prefix: str, words: tuple[str, str]) -> None:
    d = read_descriptor(BERT, bert_names(prefix, *words))
    assert (d.positions, d.pos_rows, d.token_types, d.rope) == ("learned", 512, 2, None)
    assert (d.causal, d.gated, d.act, d.head_dim, d.attn_scale) == (False, False, "gelu", 32, 1 / math.sqrt(32))
    assert d.norm == Norm("layer", 1e-12, bias=True) and d.norms == ("after_attn", "after_ffn")
    assert d.attn_bias == Bias(True, True, True, True) and d.mlp_bias and not d.has_head
    assert d.tensor("attn_post_norm_bias", 1) == f"{prefix}encoder.layer.1.attention.output.LayerNorm.{words[1]}"
    assert "final_norm" not in d.names and "ffn_gate" not in d.names
    assert d.rope_tables(512)[0].shape == (512, 0)
    assert d.shapes()[f"{prefix}embeddings.LayerNorm.{words[0]}"] == (384,)
    assert d.shapes()[f"{prefix}encoder.layer.0.intermediate.dense.bias"] == (1536,)
    assert any(p.endswith("pooler.") for p in d.ignored)


def test_bert_is_read_as_an_encoder_only() -> None:
    for values, message in (
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            read_descriptor({**BERT, **values}, bert_names())


def test_architectures_decide_before_model_type() -> None:
    """A model_type of somebody's own beside a class that runs is that class; one that contradicts it is refused."""
    names = names_of(config_of())
    d = read_descriptor(config_of(model_type="my-llama", architectures=["LlamaForCausalLM"]), names)
    assert d.family == "llama"
    assert read_descriptor(config_of(model_type=..., architectures=["LlamaForCausalLM"]), names).family == "llama"
    with pytest.raises(UnsupportedModelError, match="'Qwen3ForCausalLM' is not run for model_type 'llama'"):
        read(architectures=["Qwen3ForCausalLM"])
    bare = read_descriptor(config_of(architectures=["LlamaModel"]), [n for n in names if n != "lm_head.weight"])
    assert not bare.has_head and not bare.tied_head


def test_float16_is_refused_with_its_reason() -> None:
    """transformers#36822, transformers#39972: Gemma's residual stream overflows float16 to inf, then NaN."""
    for d, reason in ((gemma(), "residual stream of gemma3_text overflows"), (read(), "65,504")):
        d.check_dtype("float32")
        d.check_dtype("bfloat16")
        with pytest.raises(InputError, match=reason):
            d.check_dtype("float16")
        with pytest.raises(InputError, match="'int8' is not run; use float32"):
            d.check_dtype("int8")


def test_a_new_family_is_data() -> None:
    """A made-up family: other names, partial rotation, a norm with an offset, an activation; no code of its own."""
    made_up = Family(
        "made_up",
        ("MadeUpForCausalLM",),
        names={**{k: v.replace("self_attn", "attn") for k, v in LLAMA.items()}, "embed": "wte.weight"},
        roots=(("transformer.", "transformer."),),
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu"},
        norm=Norm(offset=1.0),
        biased=frozenset({"attn_v"}),
        window="pattern",
        pattern=2,
        theta=500.0,
        partial=True,
        embed_scaled=True,
    )
    config = {
        **{k: v for k, v in config_of("made_up").items() if k not in ("hidden_act", "rms_norm_eps", "rope_parameters")},
        "architectures": ["MadeUpForCausalLM"],
        "sliding_window": 8,
        "partial_rotary_factor": 0.25,
    }
    with pytest.raises(UnsupportedModelError, match="unknown model_type 'made_up'"):
        read_descriptor(config, [])
    names = [f"transformer.{n.removeprefix('model.')}".replace("self_attn", "attn") for n in names_of(config)]
    names = [n.replace("embed_tokens", "wte") for n in names]
    names += [f"transformer.layers.{layer}.attn.v_proj.bias" for layer in range(3)]
    d = read_descriptor(config, names, {"made_up": made_up})
    assert d.rope == Rope("default", 500.0, 8) and d.norm == Norm(eps=1e-5, offset=1.0)
    assert (d.layer_kinds, d.window, d.act) == (("sliding", "full", "sliding"), 8, "gelu")
    assert d.attn_bias == Bias(v=True) and d.embed_scale == 8.0
    assert set(d.shapes()) == set(names)


JUNK: list[Any] = [None, [], {}, "", "x", -1, 0, 1.5, True, [1], {"a": {}}, float("nan"), 10**400]


@pytest.mark.parametrize("config", [GEMMA_270M, BERT], ids=["gemma3_text", "bert"])
def test_no_config_makes_anything_but_a_typed_error(config: dict[str, Any]) -> None:
    names = bert_names() if config is BERT else gemma_names(18)
    for key in [*config, "rope_parameters", "layer_types", "sliding_window_pattern", "type_vocab_size"]:
        for value in JUNK:
            try:
                read_descriptor({**config, key: value}, names)
            except ModelError as error:
                assert "\n" not in str(error)
