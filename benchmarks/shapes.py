"""The shapes of real models with random weights, made on the device: speed depends on the shape alone.

Weights are normal with variance 1 / fan-in, norms the identity, so that activations stay of order one.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from numem.kernels.cuda.matrix import BLOCK, STEP, WORDS, Matrix, Stack, tiled
from numem.models.architecture.descriptor import FULL, SLIDING, Descriptor
from numem.models.architecture.reading import read_descriptor
from numem.models.forward import Experts, Feed, LayerWeights, ModelWeights, NormWeights

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "270m": {  # Gemma 3 270M
        "model_type": "gemma3_text",
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768, "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "tie_word_embeddings": True,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": _DEFAULT_ROPE,
        },
    },
    "0.6b": {  # Qwen3 0.6B
        "model_type": "qwen3",
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 151936,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "8b": {  # Llama 3.1 8B
        "model_type": "llama",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "vocab_size": 128256,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "30b": {  # Qwen3 30B A3B, a mixture of experts
        "model_type": "qwen3_moe",
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960, "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip

TITLES = {
    "270m": "Gemma-3-270M shape",
    "0.6b": "Qwen3-0.6B shape",
    "8b": "Llama-3.1-8B shape",
    "30b": "Qwen3-30B-A3B shape",
}


def config_of(shape: str, *, dry: bool = False) -> dict[str, Any]:
    """config.json of a shape; of a tiny model of the same family in a dry run."""
    config = dict(CONFIGS[shape])
    if dry:
        config |= {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 32,
            "num_attention_heads": 4, "num_key_value_heads": 1 if shape == "270m" else 2,
        }  # fmt: skip
        if "num_experts" in config:
            config |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        if "layer_types" in config:
            config |= {"layer_types": config["layer_types"][4:6], "sliding_window": 32, "query_pre_attn_scalar": 32}
    return config


def descriptor_of(config: dict[str, Any]) -> Descriptor:
    """The descriptor that a checkpoint of this config would have."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    each = [
        *norms,
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *_feed_names(config),
        *(["self_attn.q_norm", "self_attn.k_norm"] if config["model_type"] != "llama" else []),
    ]
    names = {f"model.layers.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in each}
    names |= {"model.embed_tokens.weight", "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names.add("lm_head.weight")
    return read_descriptor(config, names)


def _feed_names(config: dict[str, Any]) -> list[str]:
    parts = ("gate", "up", "down")
    if "num_experts" not in config:
        return [f"mlp.{p}_proj" for p in parts]
    return ["mlp.gate", *(f"mlp.experts.{e}.{p}_proj" for e in range(config["num_experts"]) for p in parts)]


@dataclass(frozen=True, slots=True)
class Random:
    """A maker of random weights on a device.

    Attributes:
        form: "bf16" (DT dense), "q8" or "q4" (codes of blocks of 32).
        dtype: DT.
    """

    form: str
    dtype: torch.dtype
    device: torch.device

    def matrix(self, n: int, k: int) -> Any:
        """[n, k] of variance 1 / k."""
        if self.form == "bf16":
            weight = torch.empty((n, k), dtype=self.dtype, device=self.device).normal_(std=k**-0.5)
            return Matrix.dense(weight)
        bits = {"q8": 8, "q4": 4}[self.form]
        zero, blocks = 1 << (bits - 1), -(-k // BLOCK)
        words = torch.randint(
            -(1 << 31), (1 << 31) - 1, (n, blocks * BLOCK * bits // 32), dtype=torch.int32, device=self.device
        )
        # codes are uniform: their deviation is the range / sqrt(12)
        scale = k**-0.5 * 12**0.5 / (1 << bits)
        spread = torch.rand((n, blocks * (BLOCK // STEP)), device=self.device) * 0.5 + 0.75
        scales = tiled((spread * scale).half(), BLOCK // STEP)
        return Matrix(n, k, tiled(words, WORDS), bits, self.dtype, scales=scales, zero=zero)

    def norm(self, width: int, offset: float) -> Tensor:
        """A norm's weight, as the kernel reads it with `offset`."""
        return torch.full((width,), 1.0 - offset, device=self.device)


def weights_of(d: Descriptor, make: Random, max_position: int) -> ModelWeights:
    """Random weights of a descriptor, on the device."""
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim

    def norm(width: int = d.hidden) -> NormWeights:
        return NormWeights(make.norm(width, d.norm.offset), None)

    def feed() -> Feed | Experts:
        if d.moe is None:
            return Feed(make.matrix(2 * d.inter, d.hidden), make.matrix(d.hidden, d.inter))
        router = torch.empty((d.moe.experts, d.hidden), device=make.device).normal_(std=d.hidden**-0.5)
        stacks = [
            Stack(make.matrix(d.moe.experts * n, k), d.moe.experts)
            for n, k in ((2 * d.moe.inter, d.hidden), (d.hidden, d.moe.inter))
        ]
        return Experts(cast(Any, Matrix.dense(router)), *cast(Any, stacks))

    def layer() -> LayerWeights:
        head = make.norm(d.head_dim, d.norm.offset) if d.qk_norm else None
        return LayerWeights(
            norms={place: norm() for place in d.norms},
            qkv=make.matrix(q + 2 * kv, d.hidden),
            q_norm=head,
            k_norm=head,
            attn_out=make.matrix(d.hidden, q),
            feed=feed(),
        )

    embed = make.matrix(d.vocab, d.hidden)
    tables = {FULL: d.rope_tables(max_position), SLIDING: d.local_rope_tables(max_position)}
    return ModelWeights(
        embed=embed,
        head=embed if d.tied_head else make.matrix(d.vocab, d.hidden),
        embed_norm=None,
        final_norm=norm(),
        layers=tuple(layer() for _ in range(d.layers)),
        positions=None,
        tables={kind: (c.to(make.device), s.to(make.device)) for kind, (c, s) in tables.items()},
    )


def bytes_per_token(d: Descriptor, weights: Any) -> int:
    """Bytes of weights that one token reads: every matrix once, of a mixture the share that a token uses, of an embedding
    that is not the head one row."""

    def feed(one: Any) -> int:
        if isinstance(one, Experts):
            assert d.moe is not None
            stacks = sum(cast(Stack, stack).matrix.nbytes for stack in (one.gate_up, one.down))
            return cast(Matrix, one.router).nbytes + stacks * d.moe.top_k // d.moe.experts
        return int(one.up.nbytes + one.down.nbytes)

    layers = sum(one.qkv.nbytes + one.attn_out.nbytes + feed(one.feed) for one in weights.layers)
    return int(layers + weights.head.nbytes)


def kv_bytes(d: Descriptor, context: int, itemsize: int = 2) -> int:
    """Bytes of keys and values that one token at position `context` reads, windows observed."""
    seen = sum(min(context, d.window) if kind == SLIDING and d.window else context for kind in d.layer_kinds)
    return 2 * seen * d.kv_heads * d.head_dim * itemsize


def flops(d: Descriptor, tokens: int) -> tuple[float, float]:
    """Operations of a prefill of `tokens`: of the products (the head for one row), and of attention, causal and with
    windows observed; one multiply-add is two."""
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    layer = d.hidden * (q + 2 * kv) + q * d.hidden + 3 * d.hidden * d.inter
    products = 2 * layer * d.layers * tokens + 2 * d.hidden * d.vocab
    scores = 0
    for kind in d.layer_kinds:
        span = min(d.window, tokens) if kind == SLIDING and d.window else tokens
        scores += span * (span + 1) // 2 + (tokens - span) * span
    return float(products), float(4 * scores * d.heads * d.head_dim)
