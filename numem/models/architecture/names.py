"""Tensor names of the families, and which of them a checkpoint has.

A template has {layer} and {expert} where the tensor has one per layer and expert. Templates of the body are written
without the prefix of the model class that saved them; `resolve` finds that prefix in the checkpoint.
"""

from collections.abc import Collection, Mapping

_LAYER = "layers.{layer}."

# A bias has its weight's role with "_bias" appended and its weight's name with "bias" for "weight".
LLAMA = {
    "embed": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "lm_head": "lm_head.weight",
    "attn_norm": _LAYER + "input_layernorm.weight",
    "attn_q": _LAYER + "self_attn.q_proj.weight",
    "attn_k": _LAYER + "self_attn.k_proj.weight",
    "attn_v": _LAYER + "self_attn.v_proj.weight",
    "attn_o": _LAYER + "self_attn.o_proj.weight",
    "ffn_norm": _LAYER + "post_attention_layernorm.weight",
    "ffn_gate": _LAYER + "mlp.gate_proj.weight",
    "ffn_up": _LAYER + "mlp.up_proj.weight",
    "ffn_down": _LAYER + "mlp.down_proj.weight",
}

QK_NORM = {
    "attn_q_norm": _LAYER + "self_attn.q_norm.weight",
    "attn_k_norm": _LAYER + "self_attn.k_norm.weight",
}

SANDWICH = {
    "attn_post_norm": _LAYER + "post_attention_layernorm.weight",
    "ffn_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "ffn_post_norm": _LAYER + "post_feedforward_layernorm.weight",
}

QWEN_EXPERTS = {
    "moe_router": _LAYER + "mlp.gate.weight",
    "expert_gate": _LAYER + "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": _LAYER + "mlp.experts.{expert}.up_proj.weight",
    "expert_down": _LAYER + "mlp.experts.{expert}.down_proj.weight",
}

MIXTRAL_EXPERTS = {
    "moe_router": _LAYER + "block_sparse_moe.gate.weight",
    "expert_gate": _LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
    "expert_up": _LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
    "expert_down": _LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
}

# One tensor [experts, 2 * inter, hidden] with gate above up, and one [experts, hidden, inter].
FUSED_EXPERTS = {
    "expert_gate": _LAYER + "mlp.experts.gate_up_proj",
    "expert_up": _LAYER + "mlp.experts.gate_up_proj",
    "expert_down": _LAYER + "mlp.experts.down_proj",
    "moe_router": _LAYER + "mlp.gate.weight",
}

_BERT_LAYER = "encoder.layer.{layer}."

BERT = {
    "embed": "embeddings.word_embeddings.weight",
    "position_embed": "embeddings.position_embeddings.weight",
    "type_embed": "embeddings.token_type_embeddings.weight",
    "embed_norm": "embeddings.LayerNorm.weight",
    "attn_q": _BERT_LAYER + "attention.self.query.weight",
    "attn_k": _BERT_LAYER + "attention.self.key.weight",
    "attn_v": _BERT_LAYER + "attention.self.value.weight",
    "attn_o": _BERT_LAYER + "attention.output.dense.weight",
    "attn_post_norm": _BERT_LAYER + "attention.output.LayerNorm.weight",
    "ffn_up": _BERT_LAYER + "intermediate.dense.weight",
    "ffn_down": _BERT_LAYER + "output.dense.weight",
    "ffn_post_norm": _BERT_LAYER + "output.LayerNorm.weight",
}

# LayerNorms of files that were converted from TensorFlow.
BERT_GAMMA = {
    f"{role}{suffix}": BERT[role].removesuffix("weight") + word
    for role in ("embed_norm", "attn_post_norm", "ffn_post_norm")
    for suffix, word in (("", "gamma"), ("_bias", "beta"))
}


def resolve(
    names: Mapping[str, str],
    roots: tuple[tuple[str, str], ...],
    variants: tuple[Mapping[str, str], ...],
    biased: Collection[str],
    first_layer: Mapping[str, int],
    present: Collection[str],
) -> dict[str, str]:
    """Full templates of the roles as this checkpoint spells them.

    Args:
        names: role -> template without prefix.
        roots: (prefix of the body, prefix of the head) in the order in which they are looked for; the one under which
            the embedding lies is taken, or the first.
        variants: other spellings of some roles; one is taken where the tensor of its first role is in the checkpoint.
        biased: roles that carry a bias.
        first_layer: first layer that has the role, where that is not 0.
        present: names in the checkpoint.
    """
    body, head = next((root for root in roots if root[0] + names["embed"] in present), roots[0])
    out = dict(names)
    out.update({f"{role}_bias": names[role].removesuffix("weight") + "bias" for role in biased})
    for variant in variants:
        role, template = next(iter(variant.items()))
        if role in out and body + template.format(layer=first_layer.get(role, 0), expert=0) in present:
            out.update({key: name for key, name in variant.items() if key in out})
    return {role: (head if role == "lm_head" else body) + name for role, name in out.items()}
