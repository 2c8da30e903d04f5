"""What each importable GGUF architecture is called, holds and leaves out, as data.

A new architecture is a row of RECIPES.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# GGUF stem -> transformers stem; {layer} stands for the block number.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _stems(*blocks: Mapping[str, str]) -> dict[str, str]:
    merged = {name: stem for block in blocks for name, stem in block.items()}
    return _OUTER | {f"blk.{{layer}}.{name}": f"model.layers.{{layer}}.{stem}" for name, stem in merged.items()}


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding layers, of which the file gives the window only.

    Attributes:
        pattern: every so-manieth layer sees everything.
        theta: rotary base of the sliding layers, which scaling never touches.
    """

    pattern: int
    theta: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a GGUF architecture becomes a Hugging Face model.

    Attributes:
        model_type, architecture: the names in config.json.
        stems: GGUF tensor stem -> transformers stem.
        biased: projections that carry a bias.
        interleaved: the rows of q and k were reordered into neighbouring pairs and return to half-split order.
        norm_offset: what the file adds to every norm's weight.
        dtype: of the weights that are written: "F16", or "BF16" where activations of the family pass 65,504.
        act: config.json's name of the activation, and its value.
        settings: values of config.json that no file holds.
        optional: metadata keys (without the architecture) that are taken over where present, to their names in
            config.json.
        window: sliding layers, if the architecture has them.
        wide_scale: number of layers -> the model of that size divides its queries by sqrt(hidden / heads).
    """

    model_type: str
    architecture: str
    stems: Mapping[str, str] = field(repr=False)
    biased: frozenset[str] = frozenset()
    interleaved: bool = False
    norm_offset: float = 0.0
    dtype: str = "F16"
    act: tuple[str, str] = ("hidden_act", "silu")
    settings: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    window: Window | None = None
    wide_scale: frozenset[int] | None = None


RECIPES = {
    "llama": Recipe(
        "llama",
        "LlamaForCausalLM",
        _stems(_BLOCK),
        interleaved=True,
        settings={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Recipe(
        "qwen2",
        "Qwen2ForCausalLM",
        _stems(_BLOCK),
        biased=frozenset({"q_proj", "k_proj", "v_proj"}),
        settings={"use_sliding_window": False},
    ),
    "qwen3": Recipe(
        "qwen3",
        "Qwen3ForCausalLM",
        _stems(_BLOCK, _QK_NORM),
        settings={"attention_bias": False, "use_sliding_window": False},
    ),
    "gemma3": Recipe(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _stems(_BLOCK, _QK_NORM, _SANDWICH),
        norm_offset=1.0,
        dtype="BF16",
        act=("hidden_activation", "gelu_pytorch_tanh"),
        settings={"attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        optional={"final_logit_softcapping": "final_logit_softcapping"},
        window=Window(pattern=6, theta=10000.0),
        wide_scale=frozenset({62}),
    ),
}

# Llama 3's frequency scaling leaves only its factors in a file (`rope_freqs.weight`); these are the parameters that
# were published: Llama 3.1, and Llama 3.2.
LLAMA3_ROPES = tuple(
    {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)

# Control tokens that end a turn; one that a chat template writes joins the ids at which generation stops.
END_OF_TURN = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")
