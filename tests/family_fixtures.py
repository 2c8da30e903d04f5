"""Tiny models of every family: made by transformers, in either dialect of config.json, or as names and values only."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from numem.models.architecture.descriptor import Descriptor
from numem.models.architecture.reading import read_descriptor
from tests.model_fixtures import SHAPE, tiny_tokenizer


@dataclass(frozen=True, slots=True)
class Case:
    """A model to make: its model_type, its settings over SHAPE, and the class ("lm" has a head, "body" has none)."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "lm"


GEMMA = {
    "num_hidden_layers": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "head_dim": 32}
MIXTURE = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Short of the 256 positions of SHAPE, so that the factor is not 1; the tests stay below it.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + pair / 8 for pair in range(16)],
    "long_factor": [2.0 + pair for pair in range(16)],
    "original_max_position_embeddings": 200,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

CASES: dict[str, Case] = {
    "llama": Case("llama", GROUPED),
    "llama-llama3": Case("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": Case("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-longrope": Case("llama", {"rope_parameters": LONGROPE}),
    "llama-proportional": Case("llama", {"rope_parameters": PROPORTIONAL}),
    "llama-biased": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral-windowed": Case("mistral", {"sliding_window": 24}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windowed": Case("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": Case("qwen3"),
    "qwen3-untied": Case("qwen3", {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "qwen3_moe": Case("qwen3_moe", {"num_experts": 5, "norm_topk_prob": True, **MIXTURE}),
    "qwen3_moe-sparse": Case(
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            **MIXTURE,
        },
    ),
    "qwen3_moe-windowed": Case(
        "qwen3_moe",
        {"num_experts": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2, **MIXTURE},
    ),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-windowed": Case("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 24}),
    "gemma2": Case("gemma2", {**GEMMA, "num_hidden_layers": 4, "rope_parameters": SHAPE["rope_parameters"]}),
    "gemma2-uncapped": Case(
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 24, **GROUPED},
    ),
    "gemma3_text": Case("gemma3_text", {**GEMMA, **GROUPED}),
    "gemma3_text-linear": Case("gemma3_text", {**GEMMA, "rope_parameters": LINEAR, "sliding_window_pattern": 3}),
    "gemma3_text-bidirectional": Case(
        "gemma3_text", {**GEMMA, "use_bidirectional_attention": True, "num_hidden_layers": 3}, "body"
    ),
    "gemma3": Case("gemma3", {**GEMMA, "rope_parameters": LINEAR}),
    "bert": Case("bert", {"head_dim": ..., "rope_parameters": ..., "num_key_value_heads": ...}, "body"),
}

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def family_config(case: Case, **changes: Any) -> Any:
    """transformers' configuration of a case."""
    from transformers import AutoConfig

    settings = {k: v for k, v in {**SHAPE, **case.settings, **changes}.items() if v is not ...}
    if case.model_type == "gemma3":
        return AutoConfig.for_model(
            "gemma3", text_config=settings, vision_config=_VISION, mm_tokens_per_image=4, tie_word_embeddings=True
        )
    return AutoConfig.for_model(case.model_type, **settings)


def randomise(model: Any, seed: int, scale: float) -> Any:
    """Fill every parameter with seeded noise: matrices of the given scale, vectors of 0.2, norms around 1.

    Norms whose weight is zero-centred lie around 0. With their defaults of 1 and 0 a norm or bias that is left out, or
    taken for another, would not show.
    """
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if "gemma" in model.config.model_type else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator).mul_(scale if parameter.dim() > 1 else 0.2)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(centre)
    return model.train(False)


def family_model(
    directory: Path, case: Case, *, seed: int = 0, scale: float = 0.2, shard: str | None = None, **changes: Any
) -> Path:
    """Write a random model of a case, with a tokenizer of a few hundred ids."""
    from transformers import AutoModel, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM if case.kind == "lm" else AutoModel
    model = randomise(auto.from_config(family_config(case, **changes), dtype=torch.float32), seed, scale)
    model.save_pretrained(directory, **({} if shard is None else {"max_shard_size": shard}))
    return tiny_tokenizer(directory)


def old_dialect(directory: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it: rope_theta, rope_scaling, rope_local_base_freq, torch_dtype."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["torch_dtype"] = config.pop("dtype", "float32")
    text = config.get("text_config", config)
    rope = text.pop("rope_parameters", None)
    if rope is not None:
        local = rope.get("sliding_attention")
        main = dict(rope.get("full_attention", rope))
        text["rope_theta"] = main.pop("rope_theta")
        if local is not None:
            text["rope_local_base_freq"] = local["rope_theta"]
            # Older files of this family give the period, not the list.
            kinds = text.pop("layer_types")
            text.pop("_sliding_window_pattern", None)
            text["sliding_window_pattern"] = kinds.index("full_attention") + 1 if "full_attention" in kinds else 99
        kind = main.pop("rope_type")
        text["rope_scaling"] = None if kind == "default" else {"type": kind, **main}
    path.write_text(json.dumps(config), encoding="utf-8")


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
