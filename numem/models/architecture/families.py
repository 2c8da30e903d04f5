"""What families of models share and where they differ, as data.

A family listed in FAMILIES runs: it is the llama block with the differences written here, and no code is its own.
Families that are recognised and refused are in `refused`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numem.models.architecture import names
from numem.models.architecture.descriptor import Norm


@dataclass(frozen=True, slots=True)
class MoeKeys:
    """Where a family's config.json keeps its mixture of experts.

    Attributes:
        inter: key of the width of an expert.
        experts: how many there are where config.json does not say.
        norm_topk: None where the weights of the chosen experts always sum to one, else the key that decides it.
        sparse: whether `mlp_only_layers` and `decoder_sparse_step` leave layers dense.
    """

    inter: str
    experts: int
    norm_topk: str | None = None
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    Attributes:
        model_type: config.json's model_type.
        architectures: classes with an output head, as config.json's architectures names them.
        bare: classes without one.
        names, roots, variants: see `numem.models.architecture.names`.
        ignored: prefixes of tensors that belong to parts which are not run.
        text: key of the part of config.json that describes the text model, in a family that wraps one.
        defaults: what the family assumes where config.json lacks a key.
        norm: its normalisation, with eps read from the key `eps`.
        norms: where norms stand; see `Descriptor.norms`.
        act: key of the activation.
        biased: roles that always carry a bias.
        bias_keys: whether `attention_bias` and `mlp_bias` of the config are honoured.
        window: "none"; "all" (every layer slides over `sliding_window` keys unless it is null); "switch" (the same where
            `use_sliding_window`); "flag" (`use_sliding_window`, `max_window_layers`, `layer_types`); or "pattern"
            (`layer_types`, else every `pattern`-th layer is full).
        pattern, pattern_keys: that period, and the keys that replace it.
        local_theta: base of a second rotation, for sliding layers; None for one rotation.
        partial: whether `partial_rotary_factor` is honoured.
        runs: settings honoured here and refused elsewhere; see `numem.models.architecture.refused`.
        positions, causal: as in the descriptor.
    """

    model_type: str
    architectures: tuple[str, ...]
    bare: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=lambda: names.LLAMA)
    roots: tuple[tuple[str, str], ...] = (("model.", ""), ("", ""))
    variants: tuple[Mapping[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    text: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm: Norm = field(default_factory=Norm)
    eps: str = "rms_norm_eps"
    norms: tuple[str, ...] = ("input", "pre_ffn")
    act: str = "hidden_act"
    gated: bool = True
    biased: frozenset[str] = frozenset()
    bias_keys: frozenset[str] = frozenset()
    embed_scaled: bool = False
    window: str = "none"
    pattern: int = 1
    pattern_keys: tuple[str, ...] = ()
    theta: float = 10000.0
    local_theta: float | None = None
    partial: bool = False
    moe: MoeKeys | None = None
    runs: frozenset[str] = frozenset()
    positions: str = "rope"
    causal: bool = True


_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_QWEN = {"max_window_layers": 28, "sliding_window": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_LLAMA = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
# The stored weight is zero-centred, and multiplies in float32 before the row is rounded.
_GEMMA_NORM = Norm(offset=1.0, cast_before_weight=False)
_SANDWICH = ("input", "post_attn", "pre_ffn", "post_ffn")
_GEMMA_RUNS = frozenset(
    {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "use_bidirectional_attention",
    }
)


def _gemma3(model_type: str, architectures: tuple[str, ...], **changes: Any) -> Family:
    return Family(
        model_type,
        architectures,
        names=names.LLAMA | names.QK_NORM | names.SANDWICH,
        defaults=_GEMMA3,
        norm=_GEMMA_NORM,
        norms=_SANDWICH,
        act="hidden_activation",
        bias_keys=frozenset({"attention_bias"}),
        embed_scaled=True,
        window="pattern",
        pattern=6,
        pattern_keys=("sliding_window_pattern", "_sliding_window_pattern"),
        theta=1_000_000.0,
        local_theta=10_000.0,
        runs=_GEMMA_RUNS,
        **changes,
    )


_ALL = (
    Family(
        "llama",
        ("LlamaForCausalLM",),
        ("LlamaModel",),
        defaults=_LLAMA,
        bias_keys=frozenset({"attention_bias", "mlp_bias"}),
    ),
    Family(
        "mistral",
        ("MistralForCausalLM",),
        ("MistralModel",),
        defaults=_LLAMA | {"sliding_window": 4096},
        window="all",
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), ("Qwen2Model",), defaults=_QWEN, biased=_QKV, window="flag"),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        ("Qwen3Model",),
        names=names.LLAMA | names.QK_NORM,
        defaults=_QWEN | {"head_dim": 128},
        bias_keys=frozenset({"attention_bias"}),
        window="flag",
    ),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        ("Qwen3MoeModel",),
        names=names.LLAMA | names.QK_NORM | names.QWEN_EXPERTS,
        variants=(names.FUSED_EXPERTS,),
        defaults=_QWEN | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
        bias_keys=frozenset({"attention_bias"}),
        window="switch",
        moe=MoeKeys("moe_intermediate_size", 128, norm_topk="norm_topk_prob", sparse=True),
        runs=frozenset({"num_experts", "num_local_experts"}),
    ),
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        ("MixtralModel",),
        names=names.LLAMA | names.MIXTRAL_EXPERTS,
        variants=(names.FUSED_EXPERTS,),
        defaults=_LLAMA | {"rms_norm_eps": 1e-5, "sliding_window": None, "num_experts_per_tok": 2},
        window="all",
        theta=1_000_000.0,
        moe=MoeKeys("intermediate_size", 8),
        runs=frozenset({"num_experts", "num_local_experts"}),
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        ("Gemma2Model",),
        names=names.LLAMA | names.SANDWICH,
        defaults=_GEMMA2,
        norm=_GEMMA_NORM,
        norms=_SANDWICH,
        act="hidden_activation",
        bias_keys=frozenset({"attention_bias"}),
        embed_scaled=True,
        window="pattern",
        pattern=2,
        runs=_GEMMA_RUNS - {"use_bidirectional_attention"},
    ),
    _gemma3("gemma3_text", ("Gemma3ForCausalLM",), bare=("Gemma3TextModel",)),
    _gemma3(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        roots=(("language_model.model.", "language_model."), ("model.language_model.", "")),
        ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        text="text_config",
    ),
    Family(
        "bert",
        (),
        ("BertModel", "BertForMaskedLM"),
        names=names.BERT,
        roots=(("", ""), ("bert.", "")),
        variants=(names.BERT_GAMMA,),
        ignored=("embeddings.position_ids", "pooler.", "cls.", "bert.embeddings.position_ids", "bert.pooler."),
        defaults={"hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12},
        norm=Norm("layer", bias=True),
        eps="layer_norm_eps",
        norms=("after_attn", "after_ffn"),
        gated=False,
        biased=_QKV | {"attn_o", "ffn_up", "ffn_down"},
        positions="learned",
        causal=False,
    ),
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
