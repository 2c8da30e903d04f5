"""Identity of a model's state: every axis by itself makes a miss, and comparing the two names it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from numem import LM, Memory, load_lm
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.job.complete import complete
from numem.models import lm as lm_module
from numem.models import numerics
from numem.models.architecture.reading import read_descriptor
from numem.models.weights.checkpoint import Checkpoint
from tests.family_fixtures import CASES, family_model
from tests.model_fixtures import edit_json, tiny_model
from tests.test_models_adapters import tiny_adapter

TOKENS = [3 + i % 200 for i in range(80)]
ROPE = {"rope_type": "default", "rope_theta": 50000.0}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path / "cache"))
    return tiny_model(tmp_path / "model", "mistral", sliding_window=64, num_hidden_layers=2)


def weights(directory: Path) -> None:
    """ds4#805, osaurus#1989, MemOS#2300, aprender#3971: one value in place, in a file of the same name and size."""
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 2.0**-6
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["model"]["merges"].pop()
    path.write_text(json.dumps(document), encoding="utf-8")


def rope(directory: Path) -> None:
    edit_json(directory / "config.json", rope_parameters={**ROPE, "rope_theta": 50001.0})


def window(directory: Path) -> None:
    edit_json(directory / "config.json", sliding_window=65)


CHANGES: list[tuple[Callable[[Path], None], set[str], set[str]]] = [
    (weights, {"semantic.weights"}, set()),
    (tokenizer, {"semantic.tokenizer"}, set()),
    (rope, {"semantic.architecture.rope.theta"}, {"policy.self_test"}),
    (window, {"semantic.architecture.window"}, {"semantic.kv.groups", "semantic.kv.windows"}),
]


def assert_missed(memory: Memory, made: LM, other: LM, named: set[str], besides: set[str]) -> None:
    """Nothing is restored, and the comparison names the axis (and nothing but what follows from it)."""
    assert complete(memory, other, TOKENS, 1).restored_tokens == 0
    fields = set(made.identity.compare(other.identity).fields)
    assert named <= fields <= named | besides


@pytest.mark.parametrize(("change", "named", "besides"), CHANGES, ids=[c[0].__name__ for c in CHANGES])
def test_a_change_of_the_files_is_a_miss_that_names_it(
    model: Path, memory: Memory, change: Callable[[Path], None], named: set[str], besides: set[str]
) -> None:
    made = load_lm(model)
    complete(memory, made, TOKENS, 1)
    assert complete(memory, load_lm(model), TOKENS, 1).restored_tokens > 0
    change(model)
    assert_missed(memory, made, load_lm(model), named, besides)


SETTINGS: list[tuple[dict[str, Any], set[str], set[str]]] = [
    ({"dtype": "bfloat16"}, {"semantic.weight_dtype", "semantic.kv.dtype"}, {"policy.self_test"}),
    ({"salt": b"a tenant's secret"}, {"salt"}, set()),
]


@pytest.mark.parametrize(("settings", "named", "besides"), SETTINGS, ids=["dtype", "salt"])
def test_another_setting_is_a_miss_that_names_it(
    model: Path, memory: Memory, settings: dict[str, Any], named: set[str], besides: set[str]
) -> None:
    """lmcache#1856: a store shared by two dtypes."""
    made = load_lm(model)
    complete(memory, made, TOKENS, 1)
    assert_missed(memory, made, load_lm(model, **settings), named, besides)


def test_an_adapter_is_a_miss_that_names_it(model: Path, memory: Memory, tmp_path: Path) -> None:
    made = load_lm(model)
    complete(memory, made, TOKENS, 1)
    adapter = tiny_adapter(tmp_path / "adapter", model)
    assert_missed(memory, made, load_lm(model, adapters=[adapter]), {"semantic.adapters"}, set())


def test_a_quantisation_is_a_miss_that_names_it(model: Path, memory: Memory) -> None:
    made = load_lm(model)
    complete(memory, made, TOKENS, 1)
    other = load_lm(model, quantise="q8")
    assert complete(memory, other, TOKENS, 1).restored_tokens == 0
    fields = made.identity.compare(other.identity).fields
    assert {".".join(field.split(".")[:2]) for field in fields} == {"semantic.quantisation", "policy.self_test"}


def test_the_sizes_of_pages_and_chunks_and_the_policy_are_misses_that_name_them(
    model: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load_lm(model)
    complete(memory, made, TOKENS, 1)
    changes: list[tuple[ModuleType, str, Any, str]] = [
        (lm_module, "PAGE_TOKENS", 32, "semantic.page_tokens"),
        (lm_module, "CHUNK_TOKENS", 512, "semantic.chunk_tokens"),
        (numerics, "policy_name", lambda *arguments: "cpu-other-v1", "policy.name"),
    ]
    for module, name, value, field in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            other = load_lm(model)
        assert_missed(memory, made, other, {field}, set())


def test_what_changes_no_number_changes_no_identity(model: Path, memory: Memory, tmp_path: Path) -> None:
    """The directory, how far positions go, special ids and settings of sampling."""
    made = load_lm(model)
    complete(memory, made, TOKENS, 1)
    model.rename(tmp_path / "moved")
    edit_json(tmp_path / "moved" / "generation_config.json", temperature=0.3)
    edit_json(tmp_path / "moved" / "config.json", torch_dtype="bfloat16", dtype=...)
    other = load_lm(tmp_path / "moved", max_position=128)
    assert other.identity == made.identity
    assert complete(memory, other, TOKENS, 1).restored_tokens > 0


def rotations(**changes: float) -> dict[str, Any]:
    """Those of Gemma 3 with some bases changed."""
    bases = {"full_attention": 1e6, "sliding_attention": 1e4} | changes
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()}


AXES: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3_text", {"rope_parameters": rotations(full_attention=2e6)}, "rope.theta"),
    ("gemma3_text", {"rope_parameters": rotations(sliding_attention=2e4)}, "rope_local.theta"),
    ("gemma3_text", {"sliding_window": 25}, "window"),
    ("gemma3_text", {"query_pre_attn_scalar": 25}, "attn_scale"),
    ("gemma3_text", {"rms_norm_eps": 1e-5}, "norm.eps"),
    (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 5},
        "layer_kinds",
    ),
    ("gemma2", {"attn_logit_softcapping": 49.0}, "attn_softcap"),
    ("gemma2", {"final_logit_softcapping": 29.0}, "final_softcap"),
    ("gemma2", {"hidden_activation": "silu"}, "act"),
    ("qwen3_moe", {"num_experts_per_tok": 2}, "moe.top_k"),
    ("qwen3_moe", {"norm_topk_prob": False}, "moe.norm_topk"),
]


@pytest.mark.parametrize(("name", "change", "field"), AXES, ids=[f"{a[0]}-{a[2]}" for a in AXES])
def test_every_axis_of_an_architecture_is_named(tmp_path: Path, name: str, change: dict[str, Any], field: str) -> None:
    checkpoint = Checkpoint(family_model(tmp_path, CASES[name]))
    policy = NumericPolicy("cpu-fma-v1", bytes(32))
    first, second = (
        Identity({"architecture": read_descriptor(config, checkpoint.names).canonical()}, policy, "cpu")
        for config in (checkpoint.config, checkpoint.config | change)
    )
    assert first.scope != second.scope
    assert first.compare(second).fields == (f"semantic.architecture.{field}",)
