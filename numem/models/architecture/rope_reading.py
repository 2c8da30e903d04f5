"""What a config.json says about rotation, in either dialect.

    old dialect:  rope_theta, rope_scaling {type | rope_type, factor, ...}, rope_local_base_freq
    new dialect:  rope_parameters {rope_type, rope_theta, ...}, or one such object per layer type

Both may be present; where they disagree the config is refused, because either choice gives fluent but wrong text.
Kinds whose frequencies depend on the length of the sequence so far are refused: keys cached earlier would have been
rotated by another base, so a restored prefix could not equal a recomputed one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.architecture.config import finite
from numem.models.architecture.families import Family
from numem.models.architecture.rope import KINDS, Rope
from numem.models.architecture.rope_kinds import longrope_attention, yarn_attention

_LAYER_TYPES = ("full_attention", "sliding_attention")
# Of an angle: beyond it float32 has none.
_LARGEST = float(np.finfo(np.float32).max)
_PRETRAINED = ("llama3", "yarn", "longrope")

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
    "longrope": {"original_max_position_embeddings": None},
    "proportional": {"partial_rotary_factor": 1.0, "factor": 1.0},
}

_REFUSED = {
    "dynamic": "its base depends on the sequence length, so cached keys cannot be restored exactly",
    "su": "it is an old name of longrope; write longrope with its lists of factors",
    "mrope": "multi-axis positions are not run by this engine",
    "axial": "multi-axis positions are not run by this engine",
}


def read_ropes(
    config: Mapping[str, Any], family: Family, head_dim: int, max_pos: int
) -> tuple[Rope | None, Rope | None]:
    """The rotation of every layer, and that of the sliding layers where the family has another and they differ.

    Raises:
        CheckpointError: the two dialects disagree, or a value is missing or not a number.
        UnsupportedModelError: a kind that is refused or unknown, named.
    """
    if family.positions != "rope":
        return None, None
    old = _block(config, "rope_scaling")
    new = _block(config, "rope_parameters")
    nested = {key: value for key, value in new.items() if isinstance(value, Mapping)}
    if family.local_theta is None:
        if nested:
            raise UnsupportedModelError(
                f"config.json: rope_parameters differ per layer type, but {family.model_type} has one rotation"
            )
        return _read(config, _merge(old, new), "rope_theta", family.theta, family, head_dim, max_pos), None
    if new and (len(nested) != len(new) or not nested.keys() <= set(_LAYER_TYPES)):
        raise CheckpointError(
            f"config.json: rope_parameters of a {family.model_type} model must hold {' and '.join(_LAYER_TYPES)}"
        )
    full, sliding = (_block(new, key, "rope_parameters.") for key in _LAYER_TYPES)
    # A scaling of the old dialect belongs to the full layers only.
    main = _read(config, _merge(old, full), "rope_theta", family.theta, family, head_dim, max_pos)
    local = _read(config, sliding, "rope_local_base_freq", family.local_theta, family, head_dim, max_pos)
    return main, None if local == main else local


def _read(
    config: Mapping[str, Any],
    block: Mapping[str, Any],
    theta_key: str,
    default_theta: float,
    family: Family,
    head_dim: int,
    max_pos: int,
) -> Rope:
    top = {"rope_theta": config[theta_key]} if config.get(theta_key) is not None else {}
    if config.get("partial_rotary_factor") is not None:
        top["partial_rotary_factor"] = config["partial_rotary_factor"]
    merged = _merge(top, block, "top level", "the rope block")

    kind = str(merged.get("rope_type", "default"))
    if kind in _REFUSED:
        raise UnsupportedModelError(f"config.json: rope_type {kind!r} is refused: {_REFUSED[kind]}")
    if kind not in KINDS:
        raise UnsupportedModelError(f"config.json: unknown rope_type {kind!r}; known: {', '.join(KINDS)}")
    if "rope_theta" not in merged and theta_key in config:
        raise CheckpointError(f"config.json: {theta_key} is null and rope_parameters gives no value; set one of them")
    theta = _number(merged, "rope_theta", default_theta)
    if theta <= 1:
        raise CheckpointError(f"config.json: {theta_key} {theta!r} must be greater than 1")
    dim = _rotated(merged, kind, family, head_dim)

    if kind in _PRETRAINED:
        # transformers: the pretraining length may stand at the top level, and falls back to max_position_embeddings.
        if config.get("original_max_position_embeddings") is not None:
            merged = {**merged, "original_max_position_embeddings": config["original_max_position_embeddings"]}
        merged.setdefault("original_max_position_embeddings", max_pos)
    if kind == "yarn" and "factor" not in merged:
        merged["factor"] = max_pos / _number(merged, "original_max_position_embeddings", None)
    params = {name: _number(merged, name, default) for name, default in _PARAMETERS[kind].items()}
    for name, value in params.items():
        if value <= 0:
            raise CheckpointError(f"config.json: rope {name} {value!r} must be positive")
    attention_factor, factors = 1.0, tuple[float, ...]()
    if kind == "llama3" and params["high_freq_factor"] <= params["low_freq_factor"]:
        raise CheckpointError("config.json: rope high_freq_factor must be greater than low_freq_factor")
    given = _given(merged, "attention_factor")
    if kind == "yarn":
        truncate = merged.get("truncate", True)
        if not isinstance(truncate, bool):
            raise CheckpointError(f"config.json: rope truncate is {truncate!r}, not true or false")
        params["truncate"] = float(truncate)
        mscales = _given(merged, "mscale"), _given(merged, "mscale_all_dim")
        attention_factor = yarn_attention(params["factor"], *mscales) if given is None else given
    if kind == "longrope":
        original = params["original_max_position_embeddings"]
        if original < 2 or original % 1:
            raise CheckpointError(
                f"config.json: rope original_max_position_embeddings {original!r} is not a whole number of at least 2"
            )
        factors = _factors(merged, "short_factor", dim)
        _factors(merged, "long_factor", dim)
        factor = _given(merged, "factor")
        made = longrope_attention(max_pos / original if factor is None else factor, original)
        attention_factor = made if given is None else given
    if attention_factor <= 0:
        raise CheckpointError(f"config.json: rope attention_factor {attention_factor!r} must be positive")
    rope = Rope(kind, theta, dim, False, params, attention_factor, factors)
    with np.errstate(all="ignore"):
        largest = float(rope.inv_freq().max()) * max_pos * max(1.0, attention_factor)
    if not largest < _LARGEST:
        raise CheckpointError(f"config.json: the values of rope {kind!r} make angles that are not finite")
    return rope


def _rotated(merged: Mapping[str, Any], kind: str, family: Family, head_dim: int) -> int:
    """Components that take part in the rotation."""
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotation needs pairs")
    share = _number(merged, "partial_rotary_factor", 1.0)
    if not 0 < share <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor {share!r} must be greater than 0 and at most 1")
    if share == 1.0 or kind == "proportional":
        return head_dim
    if not family.partial:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is not 1; {family.model_type} rotates whole heads"
        )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise CheckpointError(f"config.json: partial_rotary_factor {share!r} of head_dim {head_dim} makes no pairs")
    return dim


def _block(config: Mapping[str, Any], key: str, within: str = "") -> dict[str, Any]:
    """One dialect's block without nulls, its `type` renamed to `rope_type`."""
    block = config.get(key)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise CheckpointError(f"config.json: {within}{key} is {block!r}, not an object")
    values = {k: v for k, v in block.items() if v is not None}
    legacy = values.pop("type", None)
    if legacy is not None and values.setdefault("rope_type", legacy) != legacy:
        raise CheckpointError(f"config.json: {within}{key} has type {legacy!r} and rope_type {values['rope_type']!r}")
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
    number = finite(value)
    if number is None:
        raise CheckpointError(f"config.json: rope {key} is {value!r}, not a finite number")
    return number


def _given(values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else _number(values, key, None)


def _factors(values: Mapping[str, Any], key: str, dim: int) -> tuple[float, ...]:
    listed = values.get(key)
    if not isinstance(listed, list) or len(listed) != dim // 2:
        raise CheckpointError(f"config.json: rope {key} does not list {dim // 2} factors, one per rotated pair")
    factors = tuple(_number({key: value}, key, None) for value in listed)
    if min(factors) <= 0:
        raise CheckpointError(f"config.json: rope {key} has a factor that is not positive")
    return factors
