"""Small embedding models for tests, in the layout of sentence-transformers, and what transformers makes of their texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.model_fixtures import edit_json, tiny_tokenizer

TEXTS = (
    "A man is eating food.",
    "",
    "a",
    "The quick brown fox jumps over the lazy dog, and does it again and again until the evening comes.",
    "Quarterly interest rates rose by 25 points; nobody knew why!",
    "x" * 7 + " " + "the theory in the end " * 12,
    "A man is eating a piece of bread.",
)

MODULES = "sentence_transformers.models."


def write_modules(directory: Path, pooling: str, *more: str, prefix: str = MODULES, hidden: int = 64) -> Path:
    """Write modules.json and the pooling; `more` names further modules, for example "Normalize"."""
    flags = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    names = ["Transformer", "Pooling", *more]
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": prefix + name}
        for i, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (directory / "1_Pooling").mkdir(exist_ok=True)
    config = {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
    edit_json(directory / "1_Pooling" / "config.json", word_embedding_dimension=hidden, **config)
    return directory


def write_dense(
    directory: Path, folder: str, shape: tuple[int, int], *, bias: bool = False, activation: str = "linear.Identity"
) -> Path:
    """Write a random Dense module of [out, in]."""
    out, inner = shape
    path = directory / folder
    path.mkdir()
    values = torch.Generator().manual_seed(out * 1000 + inner)
    tensors = {"linear.weight": torch.randn(shape, generator=values) / inner**0.5}
    if bias:
        tensors["linear.bias"] = torch.randn(out, generator=values)
    save_file(tensors, path / "model.safetensors")
    edit_json(
        path / "config.json",
        in_features=inner,
        out_features=out,
        bias=bias,
        activation_function=f"torch.nn.modules.{activation}",
    )
    return path


def random_model(directory: Path, family: str, seed: int = 0, **config: Any) -> Path:
    """Write a random bare model with transformers; norms and biases are random too."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    auto: Any = AutoModel
    model = auto.from_config(AutoConfig.for_model(family, **config), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.1
            one = "norm" in name.lower() and name.endswith("weight") and not family.startswith("gemma")
            parameter.copy_(1 + noise if one else noise)
    model.save_pretrained(directory)
    return directory


def wordpiece_tokenizer(directory: Path, **config: Any) -> Path:
    """Write a lower-case WordPiece tokenizer of letters, digits and a few words, with the limits of a training run."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["the", "man", "is", "eating", "food", "##ing", "##s", ".", ",", "!", ";"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters), *words]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(tokens[:5])
    # As the packaged MiniLM has it: a limit and padding that nobody asked for.
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(directory / "tokenizer.json"))
    edit_json(directory / "tokenizer_config.json", model_max_length=512, **config)
    return directory


def ends_tokenizer(directory: Path, before: Sequence[str], after: Sequence[str], **config: Any) -> Path:
    """Write the byte-level tokenizer with tokens before and after every text."""
    tiny_tokenizer(directory, **config)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if before or after:
        ids = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join([*before, "$A", *after]), special_tokens=ids
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def bert(directory: Path, *, pooling: str = "mean", **config: Any) -> Path:
    """A random BERT with WordPiece, pooling and normalisation; a limit of 40 tokens."""
    shape = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    random_model(directory, "bert", **{**shape, **config})
    wordpiece_tokenizer(directory)
    edit_json(directory / "sentence_bert_config.json", max_seq_length=40, do_lower_case=False)
    return write_modules(directory, pooling, "Normalize", hidden=config.get("hidden_size", 64))


def qwen3_embedding(directory: Path, *, after: Sequence[str] = ("<|endoftext|>",), **config: Any) -> Path:
    """A random Qwen3 that pools the last token, with its names as a bare decoder has them."""
    shape = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    random_model(directory, "qwen3", **{**shape, **config})
    edit_json(directory / "config.json", architectures=["Qwen3ForCausalLM"])
    ends_tokenizer(directory, (), after)
    prompt = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    edit_json(directory / "config_sentence_transformers.json", prompts={"query": prompt, "document": ""})
    return write_modules(directory, "last", "Normalize")


def gemma_embedding(directory: Path, **config: Any) -> Path:
    """A random bidirectional Gemma3 with a window, BOS and EOS, two dense heads and its own prompts."""
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 512,
        "sliding_window": 32,
        "use_bidirectional_attention": True,
    }
    random_model(directory, "gemma3_text", **{**shape, **config})
    # Saved, the window would be halved once more by older readers: it is written as the original files have it.
    edit_json(directory / "config.json", sliding_window=config.get("sliding_window", 32))
    ends_tokenizer(directory, ("<|im_start|>",), ("<|im_end|>",))
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    edit_json(directory / "config_sentence_transformers.json", prompts=prompts)
    write_dense(directory, "2_Dense", (64, 32))
    write_dense(directory, "3_Dense", (32, 64))
    return write_modules(directory, "mean", "Dense", "Dense", "Normalize", hidden=32)


def reference(directory: Path, ids: Sequence[Sequence[int]], pooling: str, dense: Sequence[str] = ()) -> np.ndarray:
    """Vectors by transformers' hidden states of each text alone, in float32, and pooling in float64."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32).train(False)
    out = []
    for text in ids:
        batch = torch.tensor([list(text)])
        with torch.inference_mode():
            rows = model(input_ids=batch, attention_mask=torch.ones_like(batch)).last_hidden_state[0].double().numpy()
        vector = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[pooling]
        for folder in dense:
            tensors = load_file(directory / folder / "model.safetensors")
            vector = tensors["linear.weight"].double().numpy() @ vector
            if "linear.bias" in tensors:
                vector = vector + tensors["linear.bias"].double().numpy()
            if "Tanh" in (directory / folder / "config.json").read_text():
                vector = np.tanh(vector)
        out.append(vector / np.linalg.norm(vector))
    return np.stack(out)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each row with its counterpart."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    result: np.ndarray = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    return result
