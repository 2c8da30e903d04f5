"""LoRA adapters of a PEFT directory, merged into the float32 weights of a model while it is loaded.

    adapter_config.json         peft_type "LORA", r, lora_alpha, target_modules, use_rslora, rank_pattern, alpha_pattern
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in], ....lora_B.weight [out, r]

    W' = W + (scale * alpha / r) * B @ A        alpha / sqrt(r) where use_rslora is set

The product is made by the project's own linear kernel, so that its bits depend neither on threads nor on how many rows
are merged at a time. What would change the numbers in another way (DoRA, saved modules, ...) is refused by name.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numem.errors import CheckpointError, InputError, UnsupportedModelError
from numem.identity.canonical import canonical_json
from numem.identity.digest import blake3_of
from numem.kernels.linear import PackedLinear
from numem.models.weights.lockfile import read_json
from numem.models.weights.safetensors_file import SafetensorsFile

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_FLOATS = frozenset({"F32", "F16", "BF16"})
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")

# Settings that change what the adapter computes, with what each needs.
_REFUSED = {
    "use_dora": "DoRA scales the rows of the merged weight",
    "modules_to_save": "it replaces whole modules",
    "fan_in_fan_out": "the weights of its model are transposed",
    "lora_bias": "it has biases of its own",
    "layer_replication": "it repeats layers",
    "target_parameters": "it changes fused expert weights",
    "trainable_token_indices": "it replaces rows of the embedding",
    "alora_invocation_tokens": "it is switched on by tokens",
    "use_qalora": "its inputs are pooled",
    "use_bdlora": "its factors are block diagonal",
    "megatron_config": "its layers are split",
}
# Ways of initialising that leave the base weights alone; the others train against a changed base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")

Given = str | Path | tuple[str | Path, float]


@dataclass(frozen=True, slots=True)
class Update:
    """One matrix's change: `factor * b @ a`; a float32 [r, in], b float32 [out, r]."""

    a: Tensor
    b: Tensor
    factor: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in memory.

    Attributes:
        directory: where it was read.
        scale: multiplies alpha / r.
        digest: BLAKE3-256 over names, shapes, bytes and factors, 32 bytes.
        updates: module path, as the adapter names it -> update, without `scale`.
    """

    directory: Path
    scale: float
    digest: bytes
    updates: Mapping[str, Update] = field(repr=False)

    def describe(self) -> dict[str, Any]:
        """What joins the fingerprint."""
        return {"digest": self.digest.hex(), "scale": self.scale}


class Merge:
    """Some adapters, applied in order to the tensors of a checkpoint.

    Args:
        adapters: directories, or (directory, scale).
        shapes: of the model's tensors that an adapter may change.

    Raises:
        CheckpointError: damaged files, or shapes that do not fit the model.
        UnsupportedModelError: a setting that is not run.
        InputError: a scale that is not finite.
    """

    def __init__(self, adapters: Sequence[Given], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.adapters = tuple(read_adapter(*_given(each)) for each in _listed(adapters))
        self._updates: dict[str, list[tuple[PackedLinear, Tensor]]] = {}
        for adapter in self.adapters:
            seen: dict[str, str] = {}
            for module, update in adapter.updates.items():
                name = _target(adapter, module, update, shapes)
                if seen.setdefault(name, module) != module:
                    raise CheckpointError(f"adapter {adapter.directory}: {seen[name]} and {module} are both {name}")
                b = update.b * (adapter.scale * update.factor)
                if not bool(torch.isfinite(b).all()):
                    raise InputError(f"adapter {adapter.directory}: scale {adapter.scale:g} overflows {module}")
                made = (PackedLinear(update.a.t().contiguous()), b)
                self._updates.setdefault(name, []).append(made)

    def changes(self, name: str) -> bool:
        """Whether a tensor is changed at all."""
        return name in self._updates

    def rows(self, name: str, weight: Tensor, start: int) -> Tensor:
        """Rows [start, start + len(weight)) of a merged matrix, float32, from those rows of the stored one."""
        merged = weight.to(torch.float32)
        for product, b in self._updates.get(name, ()):
            merged = product(b[start : start + len(weight)], residual=merged.contiguous())
        return merged

    def describe(self) -> list[dict[str, Any]]:
        """What joins the fingerprint."""
        return [adapter.describe() for adapter in self.adapters]


def _listed(adapters: Sequence[Given]) -> Sequence[Given]:
    if isinstance(adapters, str | bytes):
        raise InputError(f"adapters: {adapters!r} is one directory; give a list of them")
    return adapters


def _given(each: Given) -> tuple[str | Path, float]:
    pair = each if isinstance(each, tuple) else (each, 1.0)
    if len(pair) != 2 or not isinstance(pair[0], str | Path):
        raise InputError(f"adapters: {each!r} is neither a directory nor (directory, scale)")
    return pair


def read_adapter(directory: str | Path, scale: float = 1.0) -> Adapter:
    """Read a PEFT LoRA directory.

    Raises:
        CheckpointError, UnsupportedModelError, InputError.
    """
    path = Path(directory)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise InputError(f"adapter {path}: scale {scale!r} is not a finite number")
    for name in (CONFIG, TENSORS):
        if not (path / name).is_file():
            hint = (
                "; adapter_model.bin is not read, save it as safetensors"
                if (path / "adapter_model.bin").exists()
                else ""
            )
            raise CheckpointError(f"adapter {path}: no {name}; give a PEFT LoRA directory{hint}")
    config = read_json(path / CONFIG)
    _check_config(path, config)
    file = SafetensorsFile(path / TENSORS)
    pairs = _pairs(path, file)
    updates: dict[str, Update] = {}
    for module, sides in sorted(pairs.items()):
        a, b = (file.tensor(sides[side]).to(torch.float32, copy=True) for side in "AB")
        expected = _pattern(path, config, "rank_pattern", module, _number(path, "r", config.get("r")))
        if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == expected:
            raise CheckpointError(
                f"adapter {path}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; "
                f"{CONFIG} gives it rank {expected:g}"
            )
        for side, tensor in (("A", a), ("B", b)):
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"adapter {path}: {module}.lora_{side} holds a NaN or an infinity")
        alpha = _pattern(path, config, "alpha_pattern", module, _number(path, "lora_alpha", config.get("lora_alpha")))
        updates[module] = Update(a, b, alpha / (math.sqrt(expected) if config.get("use_rslora") else expected))
    _check_targets(path, config.get("target_modules"), updates)
    layout = [[m, list(u.a.shape), list(u.b.shape), u.factor] for m, u in updates.items()]
    parts = [t.numpy() for u in updates.values() for t in (u.a, u.b)]
    digest = blake3_of([b"numem/adapter/v1", canonical_json(layout), *parts])
    return Adapter(path, float(scale), digest, updates)


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"adapter {path}: peft_type {config.get('peft_type')!r} is not run; only LORA")
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise UnsupportedModelError(f"adapter {path}: {key} is not run: {reason}")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"adapter {path}: bias {config['bias']!r} is not run; only 'none'")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        raise UnsupportedModelError(
            f"adapter {path}: init_lora_weights {config['init_lora_weights']!r} changes the base weights; convert it to "
            "a plain LoRA first"
        )


def _pairs(path: Path, file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Module path -> {"A": tensor name, "B": tensor name}."""
    pairs: dict[str, dict[str, str]] = {}
    for name, info in file.tensors.items():
        found = _KEY.fullmatch(name.removeprefix(_PREFIX))
        if found is None or not name.startswith(_PREFIX):
            raise UnsupportedModelError(
                f"adapter {path}: tensor {name} is not run; only {_PREFIX}<module>.lora_A.weight and lora_B.weight"
            )
        if info.dtype not in _FLOATS:
            raise CheckpointError(f"adapter {path}: tensor {name} is {info.dtype}; expected F32, F16 or BF16")
        sides = pairs.setdefault(found["module"], {})
        if sides.setdefault(found["side"], name) != name:
            raise CheckpointError(f"adapter {path}: {sides[found['side']]} and {name} are the same matrix")
    if not pairs:
        raise CheckpointError(f"adapter {path}: {TENSORS} holds no tensors")
    for module, sides in pairs.items():
        if len(sides) != 2:
            raise CheckpointError(f"adapter {path}: {module} has lora_{min(sides)} alone; both A and B are needed")
    return pairs


def _check_targets(path: Path, targets: Any, modules: Iterable[str]) -> None:
    """Every module that the config lists must be there; a pattern in one string is not compared."""
    if targets is None or isinstance(targets, str):
        return
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"adapter {path}: target_modules is {targets!r}, not names")
    for target in targets:
        if not any(_is(module, target) for module in modules):
            raise CheckpointError(f"adapter {path}: target_modules names {target}, for which there are no tensors")
    for module in modules:
        if not any(_is(module, target) for target in targets):
            raise CheckpointError(f"adapter {path}: {module} has tensors, but target_modules does not name it")


def _target(adapter: Adapter, module: str, update: Update, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The model's tensor that an update changes."""
    candidates = (f"{module}.weight", f"{module.removeprefix('model.')}.weight", f"model.{module}.weight")
    name = next((candidate for candidate in candidates if candidate in shapes), None)
    if name is None:
        raise CheckpointError(
            f"adapter {adapter.directory}: changes {module}, which is not a matrix of this model; it was made for another"
        )
    shape = (update.b.shape[0], update.a.shape[1])
    if shape != tuple(shapes[name]):
        raise CheckpointError(
            f"adapter {adapter.directory}: changes {module} by {list(shape)}, but the model has {list(shapes[name])}"
        )
    return name


def _is(module: str, target: str) -> bool:
    return module == target or module.endswith("." + target)


def _pattern(path: Path, config: Mapping[str, Any], key: str, module: str, default: float) -> float:
    """The entry of rank_pattern or alpha_pattern for a module; keys are names, or "^" and a whole path."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"adapter {path}: {key} is {patterns!r}, not an object")
    for pattern, value in patterns.items():
        name = pattern.replace("\\.", ".")
        whole = name.startswith("^")
        name = name.removeprefix("^").removesuffix("$")
        if not re.fullmatch(r"[\w.]+", name):
            raise UnsupportedModelError(f"adapter {path}: {key} has the expression {pattern!r}; only names are read")
        if module == name if whole else _is(module, name):
            return _number(path, key, value)
    return default


def _number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"adapter {path}: {key} is {value!r}, not a positive number")
    return float(value)
