"""Rotary embeddings: both dialects, every kind against transformers, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from numem.errors import CheckpointError, ContextLengthError, InputError, UnsupportedModelError
from numem.models.architecture.descriptor import Descriptor
from numem.models.architecture.families import FAMILIES, Family
from numem.models.architecture.rope import Rope
from numem.models.architecture.rope_reading import read_ropes
from tests.family_fixtures import read
from tests.model_fixtures import SHAPE

PARTIAL = Family("made-up", (), partial=True)


def rope_of(descriptor: Descriptor) -> Rope:
    assert descriptor.rope is not None
    return descriptor.rope


def read_one(config: dict[str, Any], head_dim: int = 32, max_pos: int = 256) -> Rope:
    rope, local = read_ropes(config, PARTIAL, head_dim, max_pos)
    assert rope is not None and local is None
    return rope


DIALECTS = [
    {"rope_theta": 130000.0, "rope_parameters": ...},
    {"rope_theta": 130000, "rope_scaling": None, "rope_parameters": ...},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 130000.0}},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 130000.0}},
    {"rope_theta": 130000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 130000.0}},
    {"rope_theta": 130000.0, "rope_scaling": {"type": "default"}, "rope_parameters": None},
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_both_rope_dialects_give_one_theta(dialect: dict[str, Any]) -> None:
    """A null rope_theta beside rope_parameters must not fall back to 10000 (cases-engine row 7)."""
    rope = rope_of(read(**dialect))
    assert (rope.kind, rope.theta, rope.dim) == ("default", 130000.0, 32)


def test_theta_defaults_only_where_nothing_mentions_it() -> None:
    assert rope_of(read(rope_parameters=...)).theta == 10000.0
    with pytest.raises(CheckpointError, match="rope_theta is null"):
        read(rope_theta=None, rope_parameters=...)


LINEAR = {"rope_type": "linear", "factor": 4.0}
SHORT = {"rope_type": "longrope", "short_factor": [1.0] * 16}
CONFLICTS = [
    ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 130000.0}}, "rope_theta is 10000.0"),
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type"),
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 1e4}}, "'linear' and rope_parameters 'default'"),
    ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 8.0}}, "factor is 4.0"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "type 'linear' and rope_type 'yarn'"),
    ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "not a finite number"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, "not a finite number"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "must be positive"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "greater than 1"),
    ({"rope_parameters": 7}, "not an object"),
    ({"rope_parameters": SHORT}, "long_factor does not list 16 factors"),
    ({"rope_parameters": {**SHORT, "long_factor": [0.0] * 16}}, "long_factor has a factor that is not positive"),
]


@pytest.mark.parametrize(("values", "message"), CONFLICTS)
def test_rope_conflicts_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**values)


@pytest.mark.parametrize("kind", ["dynamic", "su", "mrope", "foo"])
def test_rope_kinds_that_cannot_be_restored_are_refused_by_name(kind: str) -> None:
    """vllm#41236, vllm#5093, transformers#25104: dynamic bases and unknown kinds are refused."""
    with pytest.raises(UnsupportedModelError, match=repr(kind)):
        read(rope_scaling={"type": kind, "factor": 2.0}, rope_parameters=...)
    with pytest.raises(UnsupportedModelError, match=repr(kind)):
        read(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 16.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "yarn-given": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 8 for i in range(16)],
        "long_factor": [2.0 + i for i in range(16)],
        "original_max_position_embeddings": 64,
    },
    "longrope-given": {
        "rope_type": "longrope",
        "rope_theta": 50000.0,
        "factor": 16.0,
        "short_factor": [1.3] * 16,
        "long_factor": [9.0] * 16,
        "original_max_position_embeddings": 128,
    },
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
        "factor": 2.0,
    },
}


def reference(rope: dict[str, Any], **values: Any) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor that transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**{**SHAPE, "rope_parameters": dict(rope), **values})
    plain: Any = LlamaRotaryEmbedding.compute_default_rope_parameters
    frequencies, factor = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], plain)(config)
    return frequencies.numpy(), factor


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dialect", ["old", "new"])
def test_frequencies_match_transformers(name: str, dialect: str) -> None:
    """tiny-vllm#1 and others: llama3 scaling left out. Both dialects of each kind have transformers' frequencies."""
    values: dict[str, Any] = {"rope_parameters": ROPES[name]}
    if dialect == "old":
        scaling = {key: value for key, value in ROPES[name].items() if key != "rope_theta"}
        scaling["type"] = scaling.pop("rope_type")
        values = {"rope_theta": ROPES[name]["rope_theta"], "rope_scaling": scaling}
    rope = read_one(values)
    expected, factor = reference(ROPES[name])
    found = rope.inv_freq()
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0)
    assert float(np.abs(found - expected).max()) <= 1e-7
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn", "longrope"])
def test_tables_are_cos_and_sin_of_transformers_angles(name: str) -> None:
    """Angles are formed in float32 as there: at 63 radians an ulp of an angle is 4e-6."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = read_one({"rope_parameters": ROPES[name]}).tables(64)
    assert cos.shape == sin.shape == (64, 16) and cos.dtype == torch.float32
    peer = LlamaRotaryEmbedding(LlamaConfig(**{**SHAPE, "rope_parameters": dict(ROPES[name])}))
    expected_cos, expected_sin = peer(torch.zeros(1, 1), torch.arange(64)[None])
    torch.testing.assert_close(cos, expected_cos[0, :, :16], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0, :, :16], atol=1e-5, rtol=0)


def test_tables_are_those_of_float32_angles() -> None:
    """Frequencies and angles are rounded to float32 as in the reference; cos and sin of them are rounded once."""
    cos, sin = read().rope_tables(100)
    exponent = torch.arange(0, 32, 2, dtype=torch.int64).float() / 32
    frequencies = (1.0 / (50000.0**exponent)).numpy()
    assert np.array_equal(rope_of(read()).inv_freq(), frequencies)
    angles = (np.arange(100, dtype=np.float32)[:, None] * frequencies[None]).astype(np.float64)
    assert np.array_equal(cos.numpy(), np.cos(angles).astype(np.float32))
    assert np.array_equal(sin.numpy(), np.sin(angles).astype(np.float32))
    assert torch.equal(read().rope_tables(10)[0], cos[:10])


def test_tables_end_where_the_model_does() -> None:
    """pegainfer#220, vllm#17924: positions past the table are an error, never values from outside it."""
    assert read().position_limit == 256
    with pytest.raises(ContextLengthError, match="257"):
        read().rope_tables(257)
    with pytest.raises(InputError):
        read().rope_tables(0)


def test_longrope_serves_its_short_list_and_refuses_to_switch() -> None:
    """Past the pretraining length the other list would hold for keys that are already cached: that is refused."""
    descriptor = read(rope_parameters=ROPES["longrope"])
    assert (descriptor.max_pos, descriptor.position_limit) == (256, 64)
    cos, _ = descriptor.rope_tables(64)
    assert cos[0, 0] == np.float32(math.sqrt(1 + math.log(4) / math.log(64)))
    with pytest.raises(UnsupportedModelError, match=r"cannot be restored exactly.*max_position 64"):
        descriptor.rope_tables(65)
    # The length may stand at the top level, which wins as in transformers.
    moved = {key: value for key, value in ROPES["longrope"].items() if key != "original_max_position_embeddings"}
    assert read(rope_parameters=moved, original_max_position_embeddings=64).canonical() == descriptor.canonical()


def test_partial_rotation_turns_the_leading_components() -> None:
    """dim = int(head_dim * factor); in a proportional rotation the rest has frequency 0 instead."""
    rope = read_one({"rope_theta": 10000.0, "partial_rotary_factor": 0.5})
    assert (rope.dim, rope.tables(8)[0].shape) == (16, (8, 8))
    assert np.array_equal(rope.inv_freq(), Rope("default", 10000.0, 16).inv_freq())
    for name in ("linear", "llama3", "yarn"):
        config = {"rope_parameters": {**ROPES[name], "partial_rotary_factor": 0.5}}
        expected, _ = reference({**ROPES[name], "partial_rotary_factor": 0.5})
        np.testing.assert_allclose(read_one(config).inv_freq(), expected, rtol=3e-7, atol=0)
    still = read_one({"rope_parameters": ROPES["proportional"]})
    assert still.dim == 32 and np.count_nonzero(still.inv_freq()) == 4
    for share, message in ((0.3, "makes no pairs"), (0.0, "at most 1"), (1.5, "at most 1")):
        with pytest.raises(CheckpointError, match=message):
            read_one({"partial_rotary_factor": share}, head_dim=30)


def gemma(**config: Any) -> tuple[Rope, Rope]:
    rope, local = read_ropes(config, FAMILIES["gemma3_text"], 32, 256)
    assert rope is not None and local is not None
    return rope, local


FULL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
NESTED = {"full_attention": FULL, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": NESTED},
        {"rope_parameters": {"full_attention": FULL}},
        {"rope_theta": None, "rope_parameters": NESTED, "rope_local_base_freq": None},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": NESTED, "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_a_linear_factor_of_two_rotations_belongs_to_full_layers_only(config: dict[str, Any]) -> None:
    """mlx-vlm#1709, mlxcel#1340, ferrox#39: sliding layers keep their own base, unscaled."""
    full, local = gemma(**config)
    assert full == Rope("linear", 1e6, 32, params={"factor": 8.0})
    assert local == Rope("default", 1e4, 32)


def test_two_rotations_that_disagree_are_refused() -> None:
    for config, message in (
        ({"rope_local_base_freq": 2e4, "rope_parameters": NESTED}, "rope_theta is 20000.0"),
        ({"rope_theta": 1e5, "rope_parameters": NESTED}, "rope_theta is 100000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": NESTED}, "factor is 4.0"),
        ({"rope_parameters": FULL}, "must hold full_attention and sliding_attention"),
        ({"rope_parameters": {**NESTED, "chunked_attention": {}}}, "must hold"),
    ):
        with pytest.raises(CheckpointError, match=message):
            gemma(**config)
    with pytest.raises(UnsupportedModelError, match="'dynamic'"):
        gemma(rope_parameters={"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}})


def test_equal_rotations_are_one() -> None:
    one = {"rope_type": "default", "rope_theta": 1e4}
    config = {"rope_parameters": {"full_attention": one, "sliding_attention": one}}
    assert read_ropes(config, FAMILIES["gemma3_text"], 32, 256) == (Rope("default", 1e4, 32), None)


LISTS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 1}, "whole number of at least 2"),
        ({"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 0.5}, "whole number of at least 2"),
        ({"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 64.5}, "whole number of at least 2"),
        ({"rope_type": "longrope", **LISTS, "attention_factor": -1.0}, "attention_factor -1.0 must be positive"),
        ({"rope_type": "longrope", **LISTS, "short_factor": [1e-38] * 16}, "not finite"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}, "attention_factor 0.0 must be positive"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1e299, "mscale_all_dim": 1e-299}, "not finite"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate is 'no'"),
        ({"rope_type": "linear", "factor": 1e-290}, "not finite"),
    ],
)
def test_values_at_the_edge_are_refused(block: dict[str, Any], message: str) -> None:
    """Nothing divides by log(1), and no table holds an infinity."""
    with pytest.raises(CheckpointError, match=message):
        read_one({"rope_parameters": {"rope_theta": 1e4, **block}})
