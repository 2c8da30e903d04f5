"""What families of models share and where they differ, as data.

A family listed in FAMILIES runs. One listed in REFUSED is recognised, and refused by the feature that it needs.
"""

from dataclasses import dataclass, field

_LAYER = "model.layers.{layer}."

# Role -> tensor name. A bias has its weight's role with "_bias" appended and its weight's name with "bias" for "weight".
LLAMA_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attn_norm": _LAYER + "input_layernorm.weight",
    "attn_q": _LAYER + "self_attn.q_proj.weight",
    "attn_k": _LAYER + "self_attn.k_proj.weight",
    "attn_v": _LAYER + "self_attn.v_proj.weight",
    "attn_o": _LAYER + "self_attn.o_proj.weight",
    "attn_q_norm": _LAYER + "self_attn.q_norm.weight",
    "attn_k_norm": _LAYER + "self_attn.k_norm.weight",
    "ffn_norm": _LAYER + "post_attention_layernorm.weight",
    "ffn_gate": _LAYER + "mlp.gate_proj.weight",
    "ffn_up": _LAYER + "mlp.up_proj.weight",
    "ffn_down": _LAYER + "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder family: the llama block with the differences below.

    Attributes:
        model_type, architecture: the names in config.json.
        qk_norm: RMSNorm over each head of q and k before rotation.
        qkv_bias: q, k and v always carry a bias (o never does); else `attention_bias` of the config decides for all
            four where `bias_keys` is set.
        bias_keys: whether `attention_bias` and `mlp_bias` of the config are honoured.
        window: "none"; "all" (every layer slides over `sliding_window` keys unless it is null); or "layers"
            (`use_sliding_window`, `max_window_layers`, `layer_types`).
        head_dim: the family's head size where config.json gives none; None for hidden / heads.
    """

    model_type: str
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    bias_keys: frozenset[str] = frozenset()
    window: str = "none"
    head_dim: int | None = None
    names: dict[str, str] = field(default_factory=lambda: dict(LLAMA_NAMES))


# Buffers that old checkpoints carry and no engine reads.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", bias_keys=frozenset({"attention_bias", "mlp_bias"})),
        Family("mistral", "MistralForCausalLM", window="all"),
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window="layers"),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            qk_norm=True,
            bias_keys=frozenset({"attention_bias"}),
            window="layers",
            head_dim=128,
        ),
    )
}

REFUSED = {
    "bert": "an encoder with absolute positions",
    "cohere": "parallel blocks with LayerNorm",
    "cohere2": "parallel blocks with LayerNorm",
    "deepseek_v2": "latent attention and mixture of experts",
    "deepseek_v3": "latent attention and mixture of experts",
    "falcon": "parallel blocks with LayerNorm",
    "gemma": "zero-centred norms and a scaled embedding",
    "gemma2": "zero-centred norms, soft caps and sandwich norms",
    "gemma3": "vision input beside the text model",
    "gemma3_text": "zero-centred norms, sandwich norms and two rotary bases",
    "glm": "partial interleaved rotation",
    "glm4": "partial interleaved rotation",
    "gpt2": "learned positions and LayerNorm",
    "gpt_neox": "parallel blocks with LayerNorm",
    "gpt_oss": "mixture of experts and attention sinks",
    "granite": "scaled embedding, residual and logits",
    "llama4": "mixture of experts and chunked attention",
    "llama4_text": "mixture of experts and chunked attention",
    "mamba": "a state-space model",
    "mixtral": "mixture of experts",
    "moonshine": "an audio encoder-decoder",
    "olmo2": "norms after the blocks",
    "phi": "parallel blocks with LayerNorm",
    "phi3": "fused projections",
    "qwen2_moe": "mixture of experts",
    "qwen2_vl": "vision input and multi-axis positions",
    "qwen3_asr": "audio input",
    "qwen3_moe": "mixture of experts",
    "smollm3": "layers without rotation",
    "stablelm": "LayerNorm and partial rotation",
    "starcoder2": "LayerNorm",
    "t5": "an encoder-decoder",
    "whisper": "an audio encoder-decoder",
}

# Settings that would change the numbers of a family that runs; any of them not null, empty or neutral is refused.
REFUSED_SETTINGS = {
    "quantization_config": "quantised weights are not read; use the float checkpoint",
    "num_local_experts": "mixture of experts is not run",
    "num_experts": "mixture of experts is not run",
    "attn_logit_softcapping": "soft caps are not run",
    "final_logit_softcapping": "soft caps are not run",
    "no_rope_layers": "layers without rotation are not run",
    "query_pre_attn_scalar": "another attention scale is not run",
    "residual_multiplier": "scaled residuals are not run",
    "embedding_multiplier": "scaled embeddings are not run",
    "logits_scaling": "scaled logits are not run",
}
