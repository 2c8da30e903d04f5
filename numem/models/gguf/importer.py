"""Import of a GGUF file into an ordinary Hugging Face directory of float16 safetensors.

The file is read and dequantised by the gguf library; names, the order of q and k rows, configuration and tokenizer
are put back into the form that transformers and numem load. The llama family with the `smollm` pre-tokenizer is known.
"""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from numem.errors import CheckpointError, InputError, ModelError, UnsupportedModelError
from numem.models.architecture.descriptor import Descriptor, read_descriptor
from numem.models.gguf.tokenizer import write_tokenizer
from numem.models.hub.sources import IMPORTER
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import Lock, new_directory, sha256_file, write_json
from numem.models.weights.safetensors_file import write_safetensors

WEIGHTS = "model.safetensors"

# GGUF stem -> transformers stem; {layer} stands for the block number.
_STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.{layer}.attn_q": "model.layers.{layer}.self_attn.q_proj",
    "blk.{layer}.attn_k": "model.layers.{layer}.self_attn.k_proj",
    "blk.{layer}.attn_v": "model.layers.{layer}.self_attn.v_proj",
    "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.o_proj",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}


def import_gguf(
    path: str | PathLike[str], out_dir: str | PathLike[str], *, source: Mapping[str, Any] | None = None
) -> Path:
    """Write `out_dir` from a GGUF file and return it.

    The directory appears whole or not at all: it is built as `<out_dir>.partial`, made durable and renamed; a partial
    directory that an interrupted import left is discarded. Call it from one process at a time per `out_dir`.

    Args:
        path: the GGUF file.
        out_dir: a directory that does not exist yet.
        source: origin recorded in the lock file; the file's name and SHA-256 where None.

    Raises:
        InputError: `path` is not a file or `out_dir` exists.
        CheckpointError: a malformed GGUF, or tensors that its metadata contradicts.
        UnsupportedModelError: another architecture, tokenizer or rope scaling, named.
    """
    path, out_dir = Path(path), Path(out_dir)
    if not path.is_file():
        raise InputError(f"{path}: no such GGUF file")
    if out_dir.exists():
        raise InputError(f"{out_dir}: exists; remove it or import into another directory")
    reader = _open(path)
    values = _Values(path, reader.fields)
    config = _config(values, reader)
    by_name = {_rename(path, tensor.name, config["num_hidden_layers"]): tensor for tensor in reader.tensors}
    try:
        descriptor = read_descriptor(config, by_name.keys())
        descriptor.check_shapes({name: _shape(tensor) for name, tensor in by_name.items()})
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error

    origin = source or {"kind": "gguf", "file": path.name, "sha256": sha256_file(path), "importer": IMPORTER}
    layout = {name: ("F16", _shape(by_name[name])) for name in sorted(by_name)}
    with new_directory(out_dir) as partial:
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", _generation_config(config))
        write_tokenizer(partial, values)
        digests = {item.name: sha256_file(item) for item in sorted(partial.iterdir())}
        digests[WEIGHTS] = write_safetensors(
            partial / WEIGHTS, layout, _payloads(path, by_name, descriptor), {"format": "pt"}
        )
        Lock(origin, digests, Checkpoint(partial).digest().hex()).write(partial)
    return out_dir


class _Values:
    """Typed access to the metadata of a GGUF file; errors name file and key."""

    def __init__(self, path: Path, fields: Mapping[str, gguf.ReaderField]) -> None:
        self.path = path
        self._fields = fields

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None, *, required: bool = False) -> Any:
        if key not in self._fields:
            if required:
                raise CheckpointError(f"{self.path}: metadata lacks {key}")
            return default
        value = self._fields[key].contents()
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.path}: metadata {key} is a {type(value).__name__}")
        return value


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not a readable GGUF file, or cut short: {reason}") from error


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    # GGUF lists the fastest-varying dimension first.
    return tuple(int(n) for n in reversed(tensor.shape))


def _config(values: _Values, reader: gguf.GGUFReader) -> dict[str, Any]:
    architecture = values.get("general.architecture", str, required=True)
    if architecture != "llama":
        raise UnsupportedModelError(f"{values.path}: GGUF architecture {architecture!r} is not imported; known: llama")
    scaling = values.get("llama.rope.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModelError(f"{values.path}: GGUF rope scaling {scaling!r} is not imported")
    rows = {tensor.name: _shape(tensor) for tensor in reader.tensors}
    if "rope_freqs.weight" in rows:
        raise UnsupportedModelError(f"{values.path}: rope_freqs.weight (llama3 rope scaling) is not imported")
    if len(rows.get("token_embd.weight", ())) != 2:
        raise CheckpointError(f"{values.path}: token_embd.weight is missing or not a matrix")
    if values.get("llama.expert_count", int, 0):
        raise UnsupportedModelError(f"{values.path}: mixture of experts is not imported")
    hidden = values.get("llama.embedding_length", int, required=True)
    heads = values.get("llama.attention.head_count", int, required=True)
    head_dim = values.get("llama.attention.key_length", int, hidden // max(heads, 1))
    if values.get("llama.rope.dimension_count", int, head_dim) != head_dim:
        raise UnsupportedModelError(f"{values.path}: partial rotation is not imported")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": values.get("llama.rope.freq_base", float, 10000.0)}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": values.get("llama.rope.scaling.factor", float, required=True)}
    ids = {name: values.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in _SPECIAL.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_size": hidden,
        "intermediate_size": values.get("llama.feed_forward_length", int, required=True),
        "num_hidden_layers": values.get("llama.block_count", int, required=True),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.get("llama.context_length", int, required=True),
        "vocab_size": rows["token_embd.weight"][0],
        "hidden_act": "silu",
        "rms_norm_eps": _round_float32(values.get("llama.attention.layer_norm_rms_epsilon", float, required=True)),
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in rows,
        **{f"{name}_token_id": value for name, value in ids.items() if name != "unk"},
    }


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config[key] is not None}


def _round_float32(value: float) -> float:
    """The shortest decimal that has this float32 value: 9.999999747378752e-06 becomes 1e-05."""
    return float(str(np.float32(value)))


def _rename(path: Path, name: str, layers: int) -> str:
    stem, dot, kind = name.rpartition(".")
    parts = stem.split(".")
    layer = parts[1] if parts[0] == "blk" and len(parts) > 2 else None
    if layer is not None:
        stem = ".".join(["blk", "{layer}", *parts[2:]])
    if not dot or kind != "weight" or stem not in _STEMS or (layer is not None and not layer.isdigit()):
        raise UnsupportedModelError(f"{path}: tensor {name} has no place in a llama model of {layers} layers")
    return _STEMS[stem].format(layer=layer) + ".weight"


def _payloads(
    path: Path, tensors: Mapping[str, gguf.ReaderTensor], descriptor: Descriptor
) -> Iterator[tuple[str, memoryview]]:
    """(name, float16 bytes) in sorted order, one tensor in memory at a time."""
    for name in sorted(tensors):
        tensor = tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (ValueError, NotImplementedError) as error:
            raise UnsupportedModelError(f"{path}: {tensor.name} has type {tensor.tensor_type.name}: {error}") from error
        values = values.reshape(_shape(tensor))
        if name.endswith(".q_proj.weight"):
            values = unpermute(values, descriptor.heads)
        elif name.endswith(".k_proj.weight"):
            values = unpermute(values, descriptor.kv_heads)
        # A value beyond float16 becomes an infinity, which the test below reports.
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(values, dtype="<f2")
        if not np.isfinite(half).all():
            raise CheckpointError(f"{path}: tensor {tensor.name} has values that are not finite in float16")
        yield name, half.data.cast("B")


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of q or k back from interleaved pairs (GGUF, llama) into half-split order (transformers).

    New row j * (head_dim / 2) + i of a head is old row 2 i + j.

    Args:
        rows: [heads * head_dim, hidden].
        heads: heads of this projection (key-value heads for k).
    """
    total, hidden = rows.shape
    half = total // heads // 2
    return rows.reshape(heads, half, 2, hidden).swapaxes(1, 2).reshape(total, hidden)
