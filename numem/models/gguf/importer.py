"""Import of a GGUF file into an ordinary Hugging Face directory of half-precision safetensors.

The container is read here and its values are dequantised by the gguf library; names, the order of q and k rows, norms,
configuration and tokenizer are put back into the form that transformers and numem load. What differs between
architectures is data: `numem.models.gguf.architectures`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from numem.errors import CheckpointError, InputError, ModelError, UnsupportedModelError
from numem.models.architecture.reading import read_descriptor
from numem.models.architecture.rope import Rope
from numem.models.gguf.architectures import END_OF_TURN, LLAMA3_ROPES, RECIPES, Recipe
from numem.models.gguf.container import GgufFile
from numem.models.gguf.tokenizer import CONTROL, write_tokenizer
from numem.models.hub.sources import IMPORTER
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import Lock, new_directory, sha256_file, write_json
from numem.models.weights.safetensors_file import write_safetensors

WEIGHTS = "model.safetensors"
ROPE_FACTORS = "rope_freqs.weight"

_SPECIAL = ("bos", "eos", "pad")
# bfloat16 is unknown to NumPy: its bits are held as whole numbers.
_STORED = {"F16": "<f2", "BF16": "<i2"}


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
    file = GgufFile(path)
    recipe = _recipe(file)
    config = _config(file, recipe)
    names = {_rename(file, name, recipe): name for name in sorted(file.tensors) if name != ROPE_FACTORS}
    shapes = {ours: file.tensors[theirs].shape for ours, theirs in names.items()}
    try:
        read_descriptor(config, names.keys()).check_shapes(shapes)
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error

    origin = source or {"kind": "gguf", "file": path.name, "sha256": sha256_file(path), "importer": IMPORTER}
    layout = {name: (recipe.dtype, shapes[name]) for name in sorted(names)}
    with new_directory(out_dir) as aside:
        write_json(aside / "config.json", config)
        write_json(aside / "generation_config.json", _generation_config(file, config))
        write_tokenizer(aside, file, config["max_position_embeddings"])
        digests = {item.name: sha256_file(item) for item in sorted(aside.iterdir())}
        payloads = _payloads(file, recipe, config, names)
        digests[WEIGHTS] = write_safetensors(aside / WEIGHTS, layout, payloads, {"format": "pt"})
        Lock(origin, digests, Checkpoint(aside).digest().hex()).write(aside)
    return out_dir


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


def _recipe(file: GgufFile) -> Recipe:
    name = file.get("general.architecture", str, required=True)
    if name not in RECIPES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {name!r} is not imported; known: {', '.join(RECIPES)}"
        )
    if file.get(f"{name}.expert_count", int, 0):
        raise UnsupportedModelError(f"{file.path}: mixture of experts is not imported")
    return RECIPES[name]


def _config(file: GgufFile, recipe: Recipe) -> dict[str, Any]:
    prefix = file.get("general.architecture", str)

    def value(key: str, kind: type, default: Any = None, *, required: bool = False) -> Any:
        return file.get(f"{prefix}.{key}", kind, default, required=required)

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing or not a matrix")
    hidden = value("embedding_length", int, required=True)
    heads = value("attention.head_count", int, required=True)
    layers = value("block_count", int, required=True)
    if not 0 < layers <= len(file.tensors):  # a list of one entry a layer is made below
        raise CheckpointError(
            f"{file.path}: {prefix}.block_count is {layers}, but there are {len(file.tensors)} tensors"
        )
    head_dim = value("attention.key_length", int, hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, int, head_dim) != head_dim:
            what = "partial rotation" if key.startswith("rope") else "a value of another length than its key"
            raise UnsupportedModelError(f"{file.path}: {what} is not imported ({prefix}.{key})")
    config = {
        "architectures": [recipe.architecture],
        "model_type": recipe.model_type,
        "dtype": {"F16": "float16", "BF16": "bfloat16"}[recipe.dtype],
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length", int, required=True),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length", int, required=True),
        "vocab_size": embedding.shape[0],
        recipe.act[0]: recipe.act[1],
        "rms_norm_eps": _round_float32(value("attention.layer_norm_rms_epsilon", float, required=True)),
        "rope_parameters": _rope(file, prefix, head_dim),
        **recipe.settings,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{f"{name}_token_id": _special_id(file, name) for name in _SPECIAL},
    }
    for key, name in recipe.optional.items():
        found = value(key, float)
        if found:
            config[name] = _round_float32(found)
    if recipe.wide_scale is not None:
        config["query_pre_attn_scalar"] = hidden // heads if layers in recipe.wide_scale else head_dim
    config |= _windows(file, prefix, recipe, config)
    return config


def _windows(file: GgufFile, prefix: str, recipe: Recipe, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of config.json about sliding layers."""
    size = file.get(f"{prefix}.attention.sliding_window", int, 0, required=recipe.window is not None)
    if recipe.window is None:
        if size:
            raise UnsupportedModelError(f"{file.path}: sliding windows of {prefix} models are not imported")
        return {}
    pattern = file.get(f"{prefix}.attention.sliding_window_pattern", int, recipe.window.pattern)
    if pattern < 1:
        raise CheckpointError(f"{file.path}: metadata {prefix}.attention.sliding_window_pattern is {pattern}")
    layers = range(1, config["num_hidden_layers"] + 1)
    theta = file.get(f"{prefix}.rope.freq_base_swa", float, recipe.window.theta)
    return {
        "sliding_window": size,
        "layer_types": ["sliding_attention" if layer % pattern else "full_attention" for layer in layers],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _rope(file: GgufFile, prefix: str, head_dim: int) -> dict[str, Any]:
    """The rope_parameters of config.json."""
    scaling = file.get(f"{prefix}.rope.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModelError(f"{file.path}: GGUF rope scaling {scaling!r} is not imported")
    theta = file.get(f"{prefix}.rope.freq_base", float, 10000.0)
    if scaling == "linear":
        factor = file.get(f"{prefix}.rope.scaling.factor", float, required=True)
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = file.convert(ROPE_FACTORS, "<f4", lambda block: block).reshape(-1)
    plain = Rope("default", theta, head_dim).inv_freq()
    if factors.shape == plain.shape:
        for parameters in LLAMA3_ROPES:
            scaled = Rope("llama3", theta, head_dim, params=parameters).inv_freq()
            if np.allclose(plain / scaled, factors, rtol=1e-5, atol=0):
                return {"rope_type": "llama3", "rope_theta": theta, **parameters}
        if (factors == 1).all():
            return {"rope_type": "default", "rope_theta": theta}
    known = " or ".join(str(parameters["factor"]) for parameters in LLAMA3_ROPES)
    raise UnsupportedModelError(
        f"{file.path}: {ROPE_FACTORS} is not what Llama 3's scaling by {known} makes; no config.json can say it"
    )


def _special_id(file: GgufFile, name: str) -> int | None:
    number: int | None = file.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id", int)
    return number


def _generation_config(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Special ids; the ids that end a text are the file's own and the ends of turns that its chat template writes."""
    out = {f"{name}_token_id": config[f"{name}_token_id"] for name in _SPECIAL}
    template = file.get("tokenizer.chat_template", str, "")
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    types = file.get("tokenizer.ggml.token_type", list, [])
    ends = {
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in END_OF_TURN and token in template
    }
    ends |= {out["eos_token_id"]} - {None}
    if ends:
        out["eos_token_id"] = sorted(ends) if len(ends) > 1 else ends.pop()
    return {key: value for key, value in out.items() if value is not None}


def _round_float32(value: float) -> float:
    """The shortest decimal that has this float32 value: 9.999999747378752e-06 becomes 1e-05."""
    return float(str(np.float32(value)))


def _rename(file: GgufFile, name: str, recipe: Recipe) -> str:
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    layer = parts[1] if parts[0] == "blk" and len(parts) > 2 else None
    if layer is not None:
        stem = ".".join(["blk", "{layer}", *parts[2:]])
    ours = recipe.stems.get(stem) if layer is None or layer.isdecimal() else None
    kinds = ("weight", "bias") if ours and ours.rpartition(".")[2] in recipe.biased else ("weight",)
    if ours is None or kind not in kinds:
        raise UnsupportedModelError(f"{file.path}: tensor {name} has no place in a {recipe.model_type} model")
    return f"{ours.format(layer=layer)}.{kind}"


def _payloads(
    file: GgufFile, recipe: Recipe, config: Mapping[str, Any], names: Mapping[str, str]
) -> Iterator[tuple[str, memoryview]]:
    """(name, little-endian bytes) in sorted order, one tensor in memory at a time."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in sorted(names):
        stem = name.split(".")[-2]
        offset = recipe.norm_offset if stem.endswith("norm") else 0.0
        half = file.convert(names[name], _STORED[recipe.dtype], partial(_half, dtype=recipe.dtype, offset=offset))
        if not _finite(half, recipe.dtype):
            raise CheckpointError(
                f"{file.path}: tensor {names[name]} has values that are not finite in {config['dtype']}"
            )
        if recipe.interleaved and stem in heads:
            half = np.ascontiguousarray(unpermute(half, heads[stem]))
        yield name, half.data.cast("B")


def _half(values: np.ndarray, *, dtype: str, offset: float) -> np.ndarray:
    """Take an offset off float32 values and round them to half precision, to even; beyond it lies infinity."""
    values = values - np.float32(offset) if offset else values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(_STORED[dtype])
    rounded = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy()


def _finite(half: np.ndarray, dtype: str) -> bool:
    exponent = {"F16": 0x7C00, "BF16": 0x7F80}[dtype]
    return not bool(((half.view("<u2") & exponent) == exponent).any())
