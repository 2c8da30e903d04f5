"""Rotary position embeddings: what a config.json says about them, in either dialect, and the tables they make.

    old dialect:  rope_theta, rope_scaling {type | rope_type, factor, ...}
    new dialect:  rope_parameters {rope_type, rope_theta, ...}

Both may be present; where they disagree the config is refused, because either choice gives fluent but wrong text.
Formulas: Su et al. 2021 (default), Chen et al. 2023 (linear), Peng et al. 2023 (yarn), Llama 3.1's published scaling
(llama3). Kinds whose frequencies depend on the length of the sequence so far are refused: keys cached earlier would
have been rotated by another base, so a restored prefix could not equal a recomputed one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from numem.errors import CheckpointError, ContextLengthError, InputError, UnsupportedModelError

DEFAULT_THETA = 10000.0

# Parameters beside theta that change the frequencies, per kind: name -> default (None: required).
_PARAMETERS: dict[str, dict[str, float | None]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
    },
    "yarn": {"factor": None, "original_max_position_embeddings": None, "beta_fast": 32.0, "beta_slow": 1.0},
}

_REFUSED = {
    "dynamic": "its base depends on the sequence length, so cached keys cannot be restored exactly",
    "longrope": "it changes frequency lists in mid-sequence, so cached keys cannot be restored exactly",
    "su": "it changes frequency lists in mid-sequence, so cached keys cannot be restored exactly",
    "proportional": "partial rotation is not run by this engine",
    "mrope": "multi-axis positions are not run by this engine",
}


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding.

    Attributes:
        kind: "default", "linear", "llama3" or "yarn".
        theta: base.
        dim: rotated components per head (even).
        interleaved: True for pairs (2i, 2i+1), False for half-split pairs (i, i + dim/2).
        params: the kind's own parameters as floats.
        attention_factor: multiplies cos and sin.
    """

    kind: str
    theta: float
    dim: int
    interleaved: bool = False
    params: Mapping[str, float] = field(default_factory=dict)
    attention_factor: float = 1.0

    def inv_freq(self) -> np.ndarray:
        """Angle per position of each pair, float32 [dim/2].

        Rounded where the reference implementation rounds: models were trained with these float32 frequencies and
        angles, so "more exact" tables would be tables of another model (at position 1,000 the angles already differ
        by 4e-5). The power is taken in float64 and rounded, so that it does not depend on a vector math library.
        """
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        power = np.array([self.theta**e for e in exponent.tolist()], dtype=np.float64).astype(np.float32)
        base = np.float32(1.0) / power
        if self.kind == "linear":
            return (base / np.float32(self.params["factor"])).astype(np.float32)
        if self.kind == "llama3":
            return _llama3(base.astype(np.float64), self.params).astype(np.float32)
        if self.kind == "yarn":
            return _yarn(base.astype(np.float64), self.theta, self.dim, self.params).astype(np.float32)
        return base

    def tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), float32 [positions, dim/2], of float32 angles; the functions are rounded once."""
        if positions < 1:
            raise InputError(f"rope tables: {positions} positions; ask for at least 1")
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.inv_freq()[None, :]
        wide = angles.astype(np.float64)
        cos = (np.cos(wide) * self.attention_factor).astype(np.float32)
        sin = (np.sin(wide) * self.attention_factor).astype(np.float32)
        return torch.from_numpy(cos), torch.from_numpy(sin)


def check_positions(positions: int, max_pos: int) -> None:
    """Refuse tables beyond what the model was made for."""
    if positions > max_pos:
        raise ContextLengthError(
            f"max_position {positions} exceeds the model's {max_pos} positions; ask for at most {max_pos}"
        )


def read_rope(config: Mapping[str, Any], head_dim: int, max_pos: int) -> Rope:
    """Read the one rotary embedding of a config.json.

    Raises:
        CheckpointError: the two dialects disagree, or a value is missing or not a number.
        UnsupportedModelError: a kind that is refused or unknown, named.
    """
    old = _block(config, "rope_scaling")
    new = _block(config, "rope_parameters")
    if any(isinstance(value, Mapping) for value in new.values()):
        raise UnsupportedModelError("config.json: rope_parameters differ per layer type; this engine runs one rope")
    merged = _merge(old, new)
    top = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    merged = _merge(top, merged, "top level", "the rope block")

    kind = str(merged.get("rope_type", "default"))
    if kind in _REFUSED:
        raise UnsupportedModelError(f"config.json: rope_type {kind!r} is refused: {_REFUSED[kind]}")
    if kind not in _PARAMETERS:
        raise UnsupportedModelError(f"config.json: unknown rope_type {kind!r}; known: {', '.join(_PARAMETERS)}")
    if "rope_theta" not in merged and "rope_theta" in config:
        raise CheckpointError("config.json: rope_theta is null and rope_parameters gives no value; set one of them")
    theta = _number(merged, "rope_theta", DEFAULT_THETA)
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta {theta!r} must be greater than 1")
    if _number(merged, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("config.json: partial_rotary_factor is not 1; partial rotation is not run")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotation needs pairs")

    if kind in ("llama3", "yarn"):
        # transformers: the pretraining length may stand at the top level, and falls back to max_position_embeddings.
        if config.get("original_max_position_embeddings") is not None:
            merged = {**merged, "original_max_position_embeddings": config["original_max_position_embeddings"]}
        merged.setdefault("original_max_position_embeddings", max_pos)
    params = {name: _number(merged, name, default) for name, default in _PARAMETERS[kind].items()}
    for name, value in params.items():
        if value <= 0:
            raise CheckpointError(f"config.json: rope {name} {value!r} must be positive")
    attention_factor = 1.0
    if kind == "llama3" and params["high_freq_factor"] <= params["low_freq_factor"]:
        raise CheckpointError("config.json: rope high_freq_factor must be greater than low_freq_factor")
    if kind == "yarn":
        params["truncate"] = float(bool(merged.get("truncate", True)))
        attention_factor = _yarn_attention(merged, params["factor"])
    return Rope(kind, theta, head_dim, False, params, attention_factor)


def _block(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One dialect's block without nulls, its `type` renamed to `rope_type`."""
    block = config.get(key)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise CheckpointError(f"config.json: {key} is {block!r}, not an object")
    values = {k: v for k, v in block.items() if v is not None}
    legacy = values.pop("type", None)
    if legacy is not None and values.setdefault("rope_type", legacy) != legacy:
        raise CheckpointError(f"config.json: {key} has type {legacy!r} and rope_type {values['rope_type']!r}")
    return values


def _merge(
    a: Mapping[str, Any], b: Mapping[str, Any], a_name: str = "rope_scaling", b_name: str = "rope_parameters"
) -> dict[str, Any]:
    for key in sorted(a.keys() & b.keys()):
        if a[key] != b[key]:
            raise CheckpointError(
                f"config.json: {key} is {a[key]!r} in {a_name} and {b[key]!r} in {b_name}; keep one of them"
            )
    if a and b and b_name == "rope_parameters" and a.get("rope_type", "default") != b.get("rope_type", "default"):
        raise CheckpointError(
            f"config.json: rope_scaling is {a.get('rope_type', 'default')!r} and rope_parameters "
            f"{b.get('rope_type', 'default')!r}; keep one of them"
        )
    return {**a, **b}


def _number(values: Mapping[str, Any], key: str, default: float | None) -> float:
    value = values.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json: the rope block lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"config.json: rope {key} is {value!r}, not a finite number")
    return float(value)


def _llama3(base: np.ndarray, params: Mapping[str, float]) -> np.ndarray:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    original, factor = params["original_max_position_embeddings"], params["factor"]
    wavelength = 2 * math.pi / base
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * base / factor + blend * base
    middle = np.where(wavelength < original / high, base, smooth)
    return np.where(wavelength > original / low, base / factor, middle)


def _yarn(base: np.ndarray, theta: float, dim: int, params: Mapping[str, float]) -> np.ndarray:
    """Interpolate slow pairs, keep fast ones, ramp between the two correction dimensions."""
    original = params["original_max_position_embeddings"]

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(params["beta_fast"]), correction(params["beta_slow"])
    if params["truncate"]:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    span = high - low or 0.001
    keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float64) - low) / span, 0, 1)
    return base / params["factor"] * (1 - keep) + base * keep


def _yarn_attention(values: Mapping[str, Any], factor: float) -> float:
    if values.get("attention_factor") is not None:
        return _number(values, "attention_factor", None)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return scale(_number(values, "mscale", None)) / scale(_number(values, "mscale_all_dim", None))
    return scale(1.0)
