"""What is recognised and not run, with the reason that a person reads."""

REFUSED = {
    "cohere": "parallel blocks with LayerNorm",
    "cohere2": "parallel blocks with LayerNorm",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "distilbert": "another order of an encoder's blocks",
    "falcon": "parallel blocks with LayerNorm",
    "gemma3n": "per-layer embeddings and shared caches",
    "gemma4": "shared caches and per-layer widths",
    "glm": "partial interleaved rotation",
    "glm4": "partial interleaved rotation",
    "gpt2": "transposed fused projections",
    "gpt_neox": "parallel blocks with LayerNorm",
    "gpt_oss": "attention sinks",
    "granite": "scaled residuals and logits",
    "llama4": "chunked attention",
    "llama4_text": "chunked attention",
    "mamba": "a state-space model",
    "moonshine": "an audio encoder-decoder",
    "olmo2": "norms after the blocks",
    "phi": "parallel blocks with LayerNorm",
    "phi3": "fused projections",
    "qwen2_moe": "a shared expert",
    "qwen2_vl": "vision input and multi-axis positions",
    "qwen3_asr": "audio input",
    "roberta": "positions counted from the padding id",
    "smollm3": "layers without rotation",
    "stablelm": "LayerNorm and partial rotation",
    "starcoder2": "LayerNorm before a plain feed-forward",
    "t5": "an encoder-decoder",
    "whisper": "an audio encoder-decoder",
}

# Settings that would change the numbers; any of them not null, empty or neutral is refused where the family does not
# say that it runs it.
REFUSED_SETTINGS = {
    "quantization_config": "quantised weights are not read; use the float checkpoint",
    "num_local_experts": "a mixture of experts is not run in this family",
    "num_experts": "a mixture of experts is not run in this family",
    "attn_logit_softcapping": "soft caps are not run in this family",
    "final_logit_softcapping": "soft caps are not run in this family",
    "query_pre_attn_scalar": "another attention scale is not run in this family",
    "use_bidirectional_attention": "bidirectional attention is not run in this family",
    "no_rope_layers": "layers without rotation are not run",
    "residual_multiplier": "scaled residuals are not run",
    "embedding_multiplier": "scaled embeddings are not run",
    "logits_scaling": "scaled logits are not run",
    "is_decoder": "an encoder is run as an encoder",
    "add_cross_attention": "cross attention is not run",
    "position_embedding_type": "relative positions are not run",
}

NEUTRAL: tuple[object, ...] = (None, False, 0, 1, [], {}, "absolute")
