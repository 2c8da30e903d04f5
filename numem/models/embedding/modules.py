"""What an embedding model does with the transformer's rows, from the files of a sentence-transformers directory.

    modules.json                          [{"idx", "name", "path", "type"}], in the order in which they are applied
    1_Pooling/config.json                 how the rows of a text become one vector
    N_Dense/config.json, *.safetensors    a linear layer on that vector
    N_Normalize/                          its length becomes 1

The first module is the transformer, in the directory itself; the second is the pooling. `type` is the path of a Python
class: it is compared, never imported. A directory without modules.json does not say how it pools, and pooling by the
wrong rule gives plausible vectors, so it is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from numem.errors import CheckpointError, UnsupportedModelError
from numem.identity.digest import blake3_of
from numem.models.embedding.files import ModelFiles

MODULES_FILE = "modules.json"

_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
# A path in modules.json names a directory beside it, and nothing else.
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")

# The rules that are run, under their name in `pooling_mode`; older files have a flag for each rule instead.
_POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
}

# Settings that would change numbers, with the one value of each that is run; null stands for it too.
_POOLING_SETTINGS = {"include_prompt": True}
_VECTOR_SETTINGS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
_DENSE_SETTINGS = {**_VECTOR_SETTINGS, "use_residual": False}


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer on the pooled vector.

    Attributes:
        weight: [out, in], as stored.
        bias: [out], or None.
        activation: "identity" or "tanh".
        digest: BLAKE3-256 of names, dtypes, shapes and bytes.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str
    digest: bytes

    def describe(self) -> dict[str, Any]:
        """Plain values for the fingerprint."""
        return {"activation": self.activation, "kind": "dense", "weights": self.digest.hex()}


@dataclass(frozen=True, slots=True)
class Normalize:
    """The vector is divided by its Euclidean length."""

    def describe(self) -> dict[str, Any]:
        """Plain values for the fingerprint."""
        return {"kind": "normalize"}


@dataclass(frozen=True, slots=True)
class Modules:
    """What follows the transformer.

    Attributes:
        pooling: "mean" (of every token of a text, prompt and special tokens included), "cls" (the first) or "last".
        heads: applied to the pooled vector, in order.
        dim: components of the result.
    """

    pooling: str
    heads: tuple[Dense | Normalize, ...]
    dim: int

    def describe(self) -> dict[str, Any]:
        """Plain values for the fingerprint."""
        return {"heads": [head.describe() for head in self.heads], "pooling": self.pooling}


def read_modules(files: ModelFiles, hidden: int) -> Modules:
    """Read the modules of a model whose transformer gives rows of `hidden` components.

    Raises:
        CheckpointError: missing, malformed or contradictory files.
        UnsupportedModelError: a module or setting that is not run, by name.
    """
    if not files.has(MODULES_FILE):
        raise CheckpointError(
            f"{files.directory}: no {MODULES_FILE}, so how the model pools its tokens is unknown; add {MODULES_FILE} "
            "and 1_Pooling/config.json as sentence-transformers writes them, or load what writes text by numem.load_lm"
        )
    where = files.directory / MODULES_FILE
    listed = [_module(f"{where}", entry) for entry in files.json_list(MODULES_FILE)]
    kinds = [kind for kind, _ in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= {"Dense", "Normalize"}:
        raise UnsupportedModelError(
            f"{where}: the order {', '.join(kinds) or 'of no modules'} is not run; Transformer, Pooling, then Dense and "
            "Normalize is"
        )
    pooling = _pooling(files, listed[1][1], hidden)
    heads: list[Dense | Normalize] = []
    width = hidden
    for kind, folder in listed[2:]:
        if kind == "Dense":
            heads.append(dense := _dense(files, folder, width))
            width = dense.weight.shape[0]
        else:
            name = f"{folder}/config.json"  # only newer releases write one
            _refuse_others(files, name, files.optional(name), _VECTOR_SETTINGS)
            heads.append(Normalize())
    return Modules(pooling, tuple(heads), width)


def _module(where: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and folder of an entry of modules.json."""
    name, folder = entry.get("type"), entry.get("path", "")
    if not isinstance(name, str) or not isinstance(folder, str):
        raise CheckpointError(f"{where}: a module has type {name!r} and path {folder!r}; both must be text")
    package, _, kind = name.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers" or kind not in _KINDS:
        raise UnsupportedModelError(f"{where}: module {name!r} is not run; known: {', '.join(_KINDS)}")
    if kind == "Transformer":
        if folder:
            raise UnsupportedModelError(
                f"{where}: the transformer lies in {folder!r}; move its files beside {MODULES_FILE} and set its path to ''"
            )
    elif not _FOLDER.fullmatch(folder):
        raise CheckpointError(f"{where}: path {folder!r} of {kind} is not the name of a directory beside it")
    return kind, folder


def _refuse_others(files: ModelFiles, name: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for key, run in settings.items():
        if config.get(key) not in (None, run):
            raise UnsupportedModelError(f"{files.directory / name}: {key} {config[key]!r} is not run; only {run!r}")


def _pooling(files: ModelFiles, folder: str, hidden: int) -> str:
    name = f"{folder}/config.json"
    config, path = files.json(name), files.directory / name
    _refuse_others(files, name, config, _POOLING_SETTINGS)
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if config.get(key, hidden) != hidden:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, but the transformer's rows have {hidden}")
    flagged = sorted(mode for flag, mode in _FLAGS.items() if config.get(flag))
    named = config.get("pooling_mode", flagged)
    modes = sorted(map(str, named)) if isinstance(named, list) else [str(named)]
    if flagged and modes != flagged:
        raise CheckpointError(f"{path}: pooling_mode is {named!r}, but its flags say {', '.join(flagged)}")
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModelError(
            f"{path}: pooling {' + '.join(modes) or 'by no rule'} is not run; one of {', '.join(_POOLINGS)} is"
        )
    return _POOLINGS[modes[0]]


def _dense(files: ModelFiles, folder: str, width: int) -> Dense:
    name = f"{folder}/config.json"
    config, path = files.json(name), files.directory / name
    _refuse_others(files, name, config, _DENSE_SETTINGS)
    activation = config.get("activation_function")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{path}: activation_function {activation!r} is not run; known: {', '.join(_ACTIVATIONS)}"
        )
    stored = f"{folder}/model.safetensors"
    if not files.has(stored):
        raise CheckpointError(f"{files.directory / stored}: missing; the weights of a Dense module are read from it")
    weights = files.weights(stored)
    out, inner = config.get("out_features"), config.get("in_features")
    shapes = {key: info.shape for key, info in sorted(weights.tensors.items())}
    expected = {"linear.bias": (out,)} if config.get("bias", True) else {}
    if shapes != {**expected, "linear.weight": (out, inner)}:
        raise CheckpointError(
            f"{files.directory / stored}: holds {_listed(shapes)}, but config.json beside it calls for "
            f"{_listed({**expected, 'linear.weight': (out, inner)})}"
        )
    if inner != width:
        raise CheckpointError(f"{path}: in_features is {inner}, but the module before it gives {width}")
    parts: list[Any] = [b"numem/dense/v1"]
    for key, info in sorted(weights.tensors.items()):
        values = weights.tensor(key)
        if not values.is_floating_point() or not values.isfinite().all():
            raise CheckpointError(
                f"{files.directory / stored}: {key} ({info.dtype}) has values that are no finite numbers"
            )
        parts += [f"{key} {info.dtype} {list(info.shape)}".encode(), weights.buffer(key)]
    bias = weights.tensor("linear.bias") if expected else None
    return Dense(weights.tensor("linear.weight"), bias, _ACTIVATIONS[activation], blake3_of(parts))


def _listed(shapes: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "no tensors"
