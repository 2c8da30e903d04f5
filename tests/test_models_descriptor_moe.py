"""Descriptors of mixtures of experts: which layers, how many, and where their tensors are."""

from typing import Any

import pytest

from numem.errors import CheckpointError, ModelError
from numem.models.architecture.descriptor import Moe, Source
from numem.models.architecture.reading import read_descriptor
from tests.family_fixtures import config_of, names_of


def moe_names(layers: list[bool], experts: int, fused: bool = False) -> list[str]:
    config = {"num_hidden_layers": len(layers)}
    names = names_of(config, "self_attn.q_norm.weight", "self_attn.k_norm.weight")
    for layer, sparse in enumerate(layers):
        if sparse:
            at = f"model.layers.{layer}.mlp."
            names = [n for n in names if not n.startswith(at)] + [f"{at}gate.weight"]
            parts = ("gate_proj", "up_proj", "down_proj")
            each = [f"{at}experts.{e}.{part}.weight" for e in range(experts) for part in parts]
            names += [f"{at}experts.gate_up_proj", f"{at}experts.down_proj"] if fused else each
    return names


def moe_config(**values: Any) -> dict[str, Any]:
    base = {"num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return config_of("qwen3_moe", **{**base, **values})


SPARSE: list[tuple[dict[str, Any], list[bool]]] = [
    ({}, [True, True, True, True]),
    ({"decoder_sparse_step": 2}, [False, True, False, True]),
    ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
    ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False]),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("values", "layers"), SPARSE)
def test_which_layers_are_mixtures(values: dict[str, Any], layers: list[bool], fused: bool) -> None:
    d = read_descriptor(moe_config(**values), moe_names(layers, 5, fused))
    assert d.moe == Moe(5, 2, 24, False, tuple(layers))
    assert d.layers_of("moe_router") == [i for i, sparse in enumerate(layers) if sparse]
    assert ("ffn_gate" in d.names) == (not all(layers))
    at = "model.layers.1.mlp.experts."
    if fused:
        assert d.source("expert_gate", 1, 4) == Source(f"{at}gate_up_proj", (4, slice(0, 24)))
        assert d.source("expert_up", 1, 4) == Source(f"{at}gate_up_proj", (4, slice(24, 48)))
        assert d.source("expert_down", 1, 4) == Source(f"{at}down_proj", (4,))
        assert (d.shapes()[f"{at}gate_up_proj"], d.shapes()[f"{at}down_proj"]) == ((5, 48, 64), (5, 64, 24))
    else:
        assert d.source("expert_up", 1, 4) == Source(f"{at}4.up_proj.weight")
        assert d.shapes()[f"{at}4.down_proj.weight"] == (64, 24)
    assert d.source("attn_q", 2) == Source("model.layers.2.self_attn.q_proj.weight")


def test_mixtures_of_settings_are_checked() -> None:
    for values, message in (
        ({"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ({"num_local_experts": 6}, "num_experts 5 and num_local_experts 6 disagree"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_descriptor(moe_config(**values), moe_names([True] * 4, 5))
    dense = read_descriptor(moe_config(num_experts=0), moe_names([False] * 4, 0))
    assert dense.moe is None and "moe_router" not in dense.names and "ffn_gate" in dense.names
    assert read_descriptor(moe_config(norm_topk_prob=True), moe_names([True] * 4, 5)).moe == Moe(
        5, 2, 24, True, (True,) * 4
    )


def test_a_switch_slides_every_layer() -> None:
    """qwen3_moe has no max_window_layers of its own: where the switch is on, all layers slide."""
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    d = read_descriptor(moe_config(**on), moe_names([True] * 4, 5))
    assert (d.window, d.layer_kinds) == (8, ("sliding",) * 4)
    off = read_descriptor(moe_config(**{**on, "use_sliding_window": False}), moe_names([True] * 4, 5))
    assert (off.window, off.layer_kinds) == (0, ("full",) * 4)


def test_no_config_makes_anything_but_a_typed_error() -> None:
    names = moe_names([True] * 4, 5)
    junk: list[Any] = [None, [], {}, "x", -1, 0, 1.5, True, [1], [True], {"a": {}}, float("nan"), 10**400]
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step")
    for key in (*keys, "norm_topk_prob", "num_local_experts"):
        for value in junk:
            try:
                read_descriptor(moe_config(**{key: value}), names)
            except ModelError as error:
                assert "\n" not in str(error)
