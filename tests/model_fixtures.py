"""Small models for tests: random Hugging Face directories, a tokenizer, and a GGUF file that holds both."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = ("t h", "th e", "Ġ t", "Ġ a", "i n")

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    shard: str | None = None,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write a random model with transformers; norms and biases are random too, so that none hides behind 1 or 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SHAPE, **config}
    if family == "mistral":
        settings.setdefault("sliding_window", None)
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + noise if "norm" in name else noise)
    model.save_pretrained(directory, **({} if shard is None else {"max_shard_size": shard}))
    if tokenizer:
        tiny_tokenizer(directory)
    return directory


def byte_characters() -> list[str]:
    """The 256 characters of the byte-level alphabet, sorted."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny_vocabulary() -> list[str]:
    """Three control tokens, 256 bytes and five merged tokens."""
    return [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_tokenizer(directory: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json of a byte-level tokenizer with 264 ids."""
    vocab = {token: i for i, token in enumerate(tiny_vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(m.split(" ")[0], m.split(" ")[1]) for m in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "unk_token": SPECIAL[0],
        "chat_template": TEMPLATE,
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def edit_json(path: Path, **values: Any) -> None:
    """Set keys of a JSON object; a value of `...` removes its key."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    document |= values
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}), encoding="utf-8")


def raw_safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a file with any header: an object, or bytes taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF name of a transformers tensor of the llama family."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"


def tiny_gguf(path: Path, model: Path, **metadata: Any) -> Path:
    """Write a GGUF of a `tiny_model` of the llama family: matrices in float16, norms in float32, q and k interleaved.

    `metadata` adds or replaces string, bool, int or float keys; dots are written as double underscores.
    """
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    tokens = tiny_vocabulary()
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        add: dict[type, Any] = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add[type(value)](key.replace("__", "."), value)
    for name, tensor in sorted(load_file(model / "model.safetensors").items()):
        values = tensor.numpy()
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if projection in name:
                # half-split pairs (i, i + d/2) of a head become neighbours (2i, 2i + 1)
                rows = values.reshape(config[heads], 2, config["head_dim"] // 2, -1)
                values = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))
        writer.add_tensor(gguf_name(name), values.astype(np.float16 if values.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
