"""LoRA adapters: merged as a reference merges them, identified by content and scale, refused where they do more."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from numem import LM, Memory, load_lm
from numem.errors import CheckpointError, InputError, ModelError, UnsupportedModelError
from numem.models.weights.adapters import Merge, read_adapter
from tests.model_fixtures import edit_json, tiny_model

PROMPT = [5, 17, 40, 9, 200, 31, 8]
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
RANK, ALPHA = 4, 6.0


def tiny_adapter(directory: Path, model: Path, *, seed: int = 0, layers: int = 2, **config: Any) -> Path:
    """Write a random adapter of a `tiny_model` as PEFT does; B is not zero, as after training."""
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for target in TARGETS:
            module = f"model.layers.{layer}.{target}"
            n, k = weights[f"{module}.weight"].shape
            rank = config.get("rank_pattern", {}).get(target.split(".")[1], RANK)
            for side, shape in (("A", (rank, k)), ("B", (n, rank))):
                name = f"base_model.model.{module}.lora_{side}.weight"
                tensors[name] = torch.randn(shape, generator=generator) * 0.1
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": [target.split(".")[1] for target in TARGETS],
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def factors(directory: Path) -> Callable[[str], float]:
    """alpha / r of a module, as PEFT gives it."""
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))

    def factor(module: str) -> float:
        leaf = module.rsplit(".", 1)[1]
        rank = config["rank_pattern"].get(leaf, config["r"])
        alpha = config["alpha_pattern"].get(leaf, config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if config["use_rslora"] else rank))

    return factor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter(tmp_path_factory.mktemp("adapters") / "one", model)


def logits(lm: LM) -> torch.Tensor:
    engine = lm.session().engine
    (rows,) = engine.append([(engine.pool.allocate(), PROMPT)], logits="all")
    return torch.from_numpy(rows.copy())


def reference(model: Path, adapters: list[tuple[Path, float]]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train(False)
    parameters = dict(peer.named_parameters())
    with torch.inference_mode():
        for directory, scale in adapters:
            tensors = load_file(directory / "adapter_model.safetensors")
            factor = factors(directory)
            for name, a in tensors.items():
                if name.endswith("lora_A.weight"):
                    module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    b = tensors[name.replace("lora_A", "lora_B")]
                    parameters[f"{module}.weight"] += scale * factor(module) * (b @ a)
        merged: torch.Tensor = peer(torch.tensor([PROMPT])).logits[0]
    return merged


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"down_proj": 16}},
        {"init_lora_weights": "gaussian", "target_modules": "a pattern that PEFT expanded when it wrote the tensors"},
    ],
    ids=["plain", "rslora", "patterns", "expression"],
)
def test_a_merged_model_equals_transformers_with_the_sum_made_by_hand(
    model: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    directory = tiny_adapter(tmp_path / "adapter", model, **config)
    for scale in (1.0, -0.5):
        expected = reference(model, [(directory, scale)])
        assert (expected - reference(model, [])).abs().max() > 0.1
        assert (logits(load_lm(model, adapters=[(directory, scale)])) - expected).abs().max() <= 1e-4


def test_several_adapters_are_added_in_order(model: Path, adapter: Path, tmp_path: Path) -> None:
    second = tiny_adapter(tmp_path / "second", model, seed=1, layers=1, r=RANK)
    lm = load_lm(model, adapters=[adapter, (second, 2.0)])
    assert (logits(lm) - reference(model, [(adapter, 1.0), (second, 2.0)])).abs().max() <= 1e-4
    assert [entry["scale"] for entry in lm.identity.semantic["adapters"]] == [1.0, 2.0]
    turned = load_lm(model, adapters=[(second, 2.0), adapter])
    assert turned.identity.compare(lm.identity).fields == ("semantic.adapters",)


def test_merged_rows_do_not_depend_on_how_many_are_merged_at_a_time(model: Path, adapter: Path) -> None:
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    merge = Merge([adapter], {n: tuple(t.shape) for n, t in weights.items()})
    whole = merge.rows(name, weights[name], 0)
    for step in (1, 7, 32):
        parts = [merge.rows(name, weights[name][at : at + step], at) for at in range(0, len(whole), step)]
        assert torch.equal(torch.cat(parts), whole)
    assert not merge.changes("model.layers.1.mlp.up_proj.weight")


def test_a_scale_of_zero_changes_no_number_and_has_an_identity_of_its_own(model: Path, adapter: Path) -> None:
    plain, zero = load_lm(model), load_lm(model, adapters=[(adapter, 0.0)])
    assert torch.equal(logits(plain), logits(zero))
    assert plain.identity.compare(zero.identity).fields == ("semantic.adapters",)


def test_state_of_another_scale_or_content_is_never_found(
    model: Path, adapter: Path, tmp_path: Path, memory: Memory
) -> None:
    """llama.cpp#26207: the scale is part of the key; the same prompt under another one is a miss."""
    from numem.job.complete import complete

    tokens = [3 + i % 200 for i in range(80)]
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"][0, 0] += 2.0**-10
    save_file(tensors, changed / "adapter_model.safetensors")

    made = load_lm(model, adapters=[adapter])
    assert complete(memory, made, tokens, 1).restored_tokens == 0
    again = load_lm(model, adapters=[(adapter, 1.0)])
    assert again.identity == made.identity and complete(memory, again, tokens, 1).restored_tokens > 0
    for given in ([(adapter, 0.5)], [changed], [], [adapter, adapter]):
        other = load_lm(model, adapters=given)
        assert complete(memory, other, tokens, 1).restored_tokens == 0
        assert made.identity.compare(other.identity).fields == ("semantic.adapters",)


def test_the_path_and_the_spread_over_names_are_no_part_of_the_identity(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for item in adapter.iterdir():
        (moved / item.name).write_bytes(item.read_bytes())
    assert read_adapter(moved).digest == read_adapter(adapter).digest
    edit_json(moved / "adapter_config.json", lora_alpha=ALPHA * 2)
    assert read_adapter(moved).digest != read_adapter(adapter).digest


REFUSED: list[tuple[dict[str, Any], type[ModelError], str]] = [
    ({"use_dora": True}, UnsupportedModelError, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "modules_to_save"),
    ({"fan_in_fan_out": True}, UnsupportedModelError, "fan_in_fan_out"),
    ({"bias": "all"}, UnsupportedModelError, "bias 'all'"),
    ({"lora_bias": True}, UnsupportedModelError, "lora_bias"),
    ({"peft_type": "IA3"}, UnsupportedModelError, "'IA3'"),
    ({"init_lora_weights": "pissa"}, UnsupportedModelError, "pissa"),
    ({"rank_pattern": {"(q|v)_proj": 4}}, UnsupportedModelError, "only names"),
    ({"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]}, CheckpointError, "o_proj"),
    ({"target_modules": ["q_proj", "v_proj"]}, CheckpointError, "down_proj"),
    ({"target_modules": {"q_proj": 1}}, CheckpointError, "target_modules"),
    ({"r": 8}, CheckpointError, "rank 8"),
    ({"r": 0}, CheckpointError, "r is 0"),
    ({"lora_alpha": None}, CheckpointError, "lora_alpha"),
    ({"alpha_pattern": [1]}, CheckpointError, "alpha_pattern"),
]


@pytest.mark.parametrize(("config", "error", "message"), REFUSED, ids=[next(iter(r[0])) + r[2][:9] for r in REFUSED])
def test_what_would_change_the_numbers_otherwise_is_refused(
    model: Path, adapter: Path, tmp_path: Path, config: dict[str, Any], error: type[ModelError], message: str
) -> None:
    copy = tmp_path / "adapter"
    copy.mkdir()
    for item in adapter.iterdir():
        (copy / item.name).write_bytes(item.read_bytes())
    edit_json(copy / "adapter_config.json", **config)
    with pytest.raises(error, match="adapter") as caught:
        load_lm(model, adapters=[copy])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def change(**tensors: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(held: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            key = "base_model.model." + name.replace("__", ".")
            if tensor is None:
                del held[key]
            else:
                held[key] = tensor

    return apply


Q_A, Q_B = "model__layers__0__self_attn__q_proj__lora_A__weight", "model__layers__0__self_attn__q_proj__lora_B__weight"
TENSORS: list[tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = [
    ("nan", change(**{Q_B: torch.full((128, RANK), math.nan)}), "NaN"),
    ("infinity", change(**{Q_A: torch.full((RANK, 64), math.inf)}), "infinity"),
    ("shape", change(**{Q_A: torch.ones(RANK, 65)}), "[128, 65]"),
    ("rank", change(**{Q_A: torch.ones(RANK + 1, 64)}), "rank 4"),
    ("vector", change(**{Q_A: torch.ones(RANK)}), "lora_A [4]"),
    ("scalar", change(**{Q_A: torch.ones(())}), "lora_A []"),
    ("alone", change(**{Q_A: None}), "lora_B alone"),
    ("whole numbers", change(**{Q_A: torch.ones(RANK, 64, dtype=torch.int64)}), "I64"),
    ("embedding", change(model__embed_tokens__lora_embedding_A=torch.ones(RANK, 320)), "lora_embedding_A"),
    ("magnitude", change(model__layers__0__self_attn__q_proj__lora_magnitude_vector=torch.ones(128)), "magnitude"),
]


@pytest.mark.parametrize(("damage", "message"), [t[1:] for t in TENSORS], ids=[t[0] for t in TENSORS])
def test_tensors_that_do_not_fit_are_refused(
    model: Path, adapter: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    copy = tmp_path / "adapter"
    copy.mkdir()
    (copy / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    damage(tensors)
    save_file(tensors, copy / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="adapter") as caught:
        load_lm(model, adapters=[copy])
    assert message in str(caught.value)


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "one layer", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj, which is not a matrix of this model"):
        load_lm(other, adapters=[adapter])
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        load_lm(other, adapters=[tmp_path / "nothing"])
    for scale in (math.nan, math.inf, "1"):
        with pytest.raises(InputError, match="scale"):
            load_lm(other, adapters=[(adapter, scale)])  # type: ignore[list-item]  # what a caller may pass


def rewritten(adapter: Path, directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    edit_json(directory / "adapter_config.json", **config)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def test_spellings_and_dtypes_of_one_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    """The adapter's name in the tensors, targets as a pattern or "all-linear", and halves that hold the same values."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    expected = load_lm(model, adapters=[adapter]).identity
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    for at, targets in enumerate(("all-linear", r".*\.(q|v|down)_proj")):
        other = rewritten(adapter, tmp_path / f"named{at}", named, target_modules=targets)
        assert load_lm(model, adapters=[other]).identity == expected
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    wide = {name: tensor.float() for name, tensor in halves.items()}
    found = [
        load_lm(model, adapters=[rewritten(adapter, tmp_path / name, held)]).identity
        for name, held in (("halves", halves), ("wide", wide))
    ]
    assert found[0] == found[1] != expected


def test_one_matrix_under_two_names_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    for at, (old, new) in enumerate(((".weight", ".default.weight"), ("model.model.", "model."))):
        twice = {**tensors, **{name.replace(old, new, 1): tensor + 1 for name, tensor in tensors.items()}}
        with pytest.raises(CheckpointError, match="same matrix|are both"):
            load_lm(model, adapters=[rewritten(adapter, tmp_path / str(at), twice)])


def test_a_negative_scale_takes_the_adapter_out_and_one_beyond_float32_is_refused(model: Path, adapter: Path) -> None:
    plain, undone = load_lm(model), load_lm(model, adapters=[adapter, (adapter, -1.0)])
    assert torch.allclose(logits(plain), logits(undone), atol=1e-4)
    with pytest.raises(InputError, match="overflows"):
        load_lm(model, adapters=[(adapter, 1e300)])


def test_adapters_that_are_no_list_of_directories_are_refused(model: Path, adapter: Path) -> None:
    wrong: list[Any] = [str(adapter), [[adapter, 1.0]], [(adapter, 1.0, 2)], [None]]
    for given in wrong:
        with pytest.raises(InputError, match="adapters: "):
            load_lm(model, adapters=given)
