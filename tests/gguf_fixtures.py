"""Small GGUF files of every importable architecture, written by the gguf library from a random model."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.model_fixtures import MERGES, SPECIAL, gguf_name, tiny_vocabulary

# transformers stem -> GGUF stem where it differs from the llama family's.
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_QK_NORM = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def family_gguf(path: Path, model: Path, architecture: str, **metadata: Any) -> Path:
    """Write a GGUF of a `tiny_model` whose rows of q and k keep their order: matrices in float32, norms too.

    `metadata` adds or replaces keys, None removes one; dots are written as double underscores.
    """
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tokens = tiny_vocabulary()
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    rope = config["rope_parameters"]
    values: dict[str, Any] = {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{architecture}.rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 5 if t.startswith("[PAD") else 1 for t in tokens],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.eos_token_id": 2,
    }
    if config.get("head_dim") is not None:
        values[f"{architecture}.attention.key_length"] = config["head_dim"]
    if architecture == "gemma3":
        values["gemma3.attention.sliding_window"] = config["sliding_window"]
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    offset = np.float32(1 if architecture == "gemma3" else 0)
    tensors = {}
    for name, tensor in sorted(load_file(model / "model.safetensors").items()):
        array = tensor.float().numpy()
        tensors[family_name(name, architecture)] = array + offset if name.endswith("norm.weight") else array
    return write_gguf(path, architecture, values, tensors)


def family_name(name: str, architecture: str) -> str:
    """GGUF name of a transformers tensor."""
    stem, _, kind = name.rpartition(".")
    rest = stem.split(".", 3)[-1]
    own = (_GEMMA if architecture == "gemma3" else {}) | _QK_NORM
    if rest in own:
        return f"blk.{stem.split('.')[2]}.{own[rest]}.{kind}"
    return gguf_name(f"{stem}.weight").removesuffix("weight") + kind


def write_gguf(path: Path, architecture: str, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Write a GGUF of plain values and float tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Any] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
