"""Mixture of experts: routing by exact values, sums in order of expert ids, rows that do not feel their companions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem import load_lm
from numem.kernels.linear import PackedLinear
from numem.kernels.mixture import Mixture, route
from numem.kernels.program import Buffers, Call
from tests.model_fixtures import tiny_model

HIDDEN, INTER, EXPERTS = 48, 40, 6


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_ties_go_to_the_lowest_expert() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, 1.0]])
    ids, weights = route(logits, 2, norm_topk=True)
    assert ids.tolist() == [[1, 2], [0, 1], [1, 3]]
    assert weights.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("norm_topk", [False, True])
def test_weights_are_a_softmax_over_all_experts(norm_topk: bool) -> None:
    """Without `norm_topk` the kept weights sum to less than one, which a softmax over the kept logits would not."""
    logits = random(50, EXPERTS, seed=1) * 3
    ids, weights = route(logits, 2, norm_topk=norm_topk)
    exact = torch.softmax(logits.double(), -1)
    kept, order = exact.topk(2)
    if norm_topk:
        kept = kept / kept.sum(-1, keepdim=True)
    assert ids.tolist() == order.tolist()
    np.testing.assert_allclose(weights, kept.numpy(), rtol=1e-6)
    sums = weights.sum(axis=1)
    assert np.allclose(sums, 1.0) if norm_topk else sums.min() < 0.9 and sums.max() < 1.0


class Block:
    """A mixture with random weights, and how it is run."""

    def __init__(self, norm_topk: bool = True) -> None:
        buffers = Buffers()
        self.x, self.out = buffers.new(HIDDEN), buffers.new(HIDDEN)
        self.router = random(EXPERTS, HIDDEN, seed=2)
        self.gate_up = [random(2 * INTER, HIDDEN, seed=10 + e) * 0.2 for e in range(EXPERTS)]
        self.down = [random(HIDDEN, INTER, seed=20 + e) * 0.2 for e in range(EXPERTS)]
        gate_up, down = [PackedLinear(each) for each in self.gate_up], [PackedLinear(each) for each in self.down]
        self.op = Mixture(PackedLinear(self.router), gate_up, down, 2, norm_topk, "silu", self.x, self.out)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        nothing = torch.empty(0)
        call = Call(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
        call.parts = [x, torch.full_like(x, torch.nan)]
        self.op.run(call)
        return call.parts[self.out.index]

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The formula in float64, every expert on every row."""
        x = x.double()
        likely = torch.softmax(x @ self.router.double().T, -1)
        kept, ids = likely.topk(2)
        kept = kept / kept.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, up = (x @ self.gate_up[expert].double().T).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ self.down[expert].double().T
            out += y * (kept * (ids == expert)).sum(-1, keepdim=True)
        return out


def test_output_is_the_weighted_sum() -> None:
    block, x = Block(), random(40, HIDDEN, seed=3)
    np.testing.assert_allclose(block(x).numpy(), block.exact(x).numpy(), atol=2e-5)


def test_a_row_does_not_feel_its_companions() -> None:
    """Alone, among others in any order, and where every other row crowds into its experts."""
    block, x = Block(), random(40, HIDDEN, seed=4)
    together = block(x)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    assert block(x[order]).numpy().tobytes() == together[order].numpy().tobytes()
    for row in range(0, 40, 7):
        crowd = x[row].repeat(33, 1)
        crowd[:3] = x[:3]
        assert block(x[row : row + 1]).numpy().tobytes() == together[row].numpy().tobytes()
        assert block(crowd)[-1].numpy().tobytes() == together[row].numpy().tobytes()


def test_bits_do_not_depend_on_threads() -> None:
    from numem.kernels import native

    block, x, before = Block(), random(64, HIDDEN, seed=6), native.threads()
    found = set()
    try:
        for threads in (1, 2):
            native.set_threads(threads)
            found.add(block(x).numpy().tobytes())
    finally:
        native.set_threads(before)
    assert len(found) == 1


def test_a_router_that_gives_no_number_spoils_its_own_row_alone() -> None:
    block, x = Block(), random(8, HIDDEN, seed=7)
    together = block(x)
    x[3, 5] = torch.nan
    found = block(x)
    assert found[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert found[others].numpy().tobytes() == together[others].numpy().tobytes()


def test_the_routing_joins_the_policy_of_a_mixture_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from numem.models import numerics

    dense = load_lm(tiny_model(tmp_path / "dense")).identity.policy
    settings: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    model = tiny_model(tmp_path / "mixture", "mixtral", **settings)
    mixture = load_lm(model).identity.policy

    def off_by_one_bit(logits: torch.Tensor, top_k: int, *, norm_topk: bool) -> tuple[np.ndarray, np.ndarray]:
        ids, weights = route(logits, top_k, norm_topk=norm_topk)
        weights[0, 0] = np.nextafter(weights[0, 0], np.float32(1))
        return ids, weights

    monkeypatch.setattr(numerics, "route", off_by_one_bit)
    assert load_lm(model).identity.policy != mixture
    assert load_lm(tmp_path / "dense").identity.policy == dense
