"""Exponential, activations and the soft cap: equal bits on all builds, error against float64, edges."""

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native
from numem.kernels.activation import ACTIVATIONS, activate, exp, gated, softcap
from numem.kernels.linear import Peaks
from tests.kernel_fixtures import ISAS, PATHS, bits, needs_native, randn, restored

__all__ = ["restored"]

ROWS = (1, 2, 3, 5, 7, 12, 13, 33, 64, 300)


@needs_native
def test_exp_is_within_one_ulp_and_equal_on_all_builds() -> None:
    """Every 6007th float32 between the cut at -87 and the overflow: within 1 ulp of the float64 exponential."""
    top = np.float32(88.72283).view(np.uint32)
    positive = np.arange(0, int(top), 6007, dtype=np.uint32).view(np.float32)
    x = torch.from_numpy(np.concatenate([positive, -positive[positive < 87]]))
    y = exp(x)
    want = x.double().exp().numpy()
    error = np.abs(y.double().numpy() - want) / np.spacing(want.astype(np.float32)).astype(np.float64)
    assert error.max() < 1.0
    for isa in ISAS:
        native.use(isa)
        assert bits(exp(x[::101].contiguous())) == bits(y[::101].contiguous())


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_exp_at_the_edges(isa: str) -> None:
    native.use(isa)
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([-inf, -1e30, -87.01, 0.0, -0.0, 88.7229, 1e30, inf, nan])
    want = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, inf, inf, inf, nan])
    assert torch.equal(exp(x).nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))


@needs_native
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("inner", [1, 16, 77, 1536])
def test_activation_bits_are_equal_on_all_builds_rows_and_threads(inner: int, act: str) -> None:
    x = randn(300, 2 * inner) * 10
    want, alone = gated(x, act=act), activate(x, act=act)
    assert bits(alone[:, :inner] * x[:, inner:]) == bits(want)
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            for m in ROWS:
                assert bits(gated(x[:m], act=act)) == bits(want[:m]), (isa, m)
                assert bits(activate(x[:m], act=act)) == bits(alone[:m]), (isa, m)


def exact(x: Tensor, act: str) -> Tensor:
    x = x.double()
    if act == "silu":
        return x / (1 + torch.exp(-x))
    if act == "gelu":
        return x * torch.erfc(x * -(0.5**0.5)) / 2
    return x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_against_float64(path: str, act: str) -> None:
    """Every 9001st float32 up to 64: within 1e-7 of 1 + |x| (torch's own erf form reaches 2.3e-7)."""
    native.use(path)
    positive = np.arange(0x20000000, 0x42800000, 9001, dtype=np.uint32).view(np.float32)
    x = torch.from_numpy(np.stack([positive, -positive]))
    error = (activate(x, act=act).double() - exact(x, act)).abs() / (1 + x.double().abs())
    assert error.max() < (1e-7 if path != "torch" else 3e-7)
    if path != "torch":
        small = x.abs() < 1
        relative = (activate(x, act=act).double() - exact(x, act)).abs() / exact(x, act).abs()
        assert relative[small].max() < 7 * 2.0**-23


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_at_the_edges(path: str, act: str) -> None:
    native.use(path)
    edge = torch.tensor([[-1e30, -100.0, -0.0, 0.0, 1e30, torch.nan, torch.inf]])
    y = activate(edge, act=act)[0].tolist()
    assert y[:4] == [0.0, 0.0, 0.0, 0.0] and y[4] == float(np.float32(1e30)) and y[5] != y[5]
    if path != "torch":  # whose vectorised erf makes a NaN of an infinity
        assert y[6] == torch.inf
    same = edge.clone()
    assert activate(same, same, act) is same
    gates = torch.tensor([[-1e30, 1e30, 0.0, 1.0, 1.0, 1.0]])
    assert gated(gates, act=act).tolist() == [[0.0, float(np.float32(1e30)), 0.0]]


def test_the_torch_activations_are_row_invariant_too() -> None:
    native.use("torch")
    x = randn(33, 2 * 77)
    for act in ACTIVATIONS:
        gate, alone = gated(x, act=act), activate(x, act=act)
        for m in (1, 2, 7, 33):
            assert bits(gated(x[:m], act=act)) == bits(gate[:m])
            assert bits(activate(x[:m], act=act)) == bits(alone[:m])


# ---- soft cap ----


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_softcap_against_float64(path: str, cap: float) -> None:
    """Within 4 ulp from numbers so small that only their quotient counts to far past the cap, and odd."""
    native.use(path)
    positive = np.arange(0x05000000, 0x45000000, 9001, dtype=np.uint32).view(np.float32)
    x = torch.from_numpy(np.stack([positive, -positive]))
    y = softcap(x.clone(), cap)
    want = (cap * torch.tanh(x.double() / cap)).numpy()
    error = np.abs(y.double().numpy() - want) / np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    assert error.max() < 4 and torch.equal(y[0], -y[1])


@needs_native
@pytest.mark.parametrize("width", [1, 16, 77, 5000])
def test_softcap_bits_are_equal_on_all_builds_rows_and_threads(width: int) -> None:
    x = randn(40, width) * 60
    want = softcap(x.clone(), 50.0)
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            for m in (1, 2, 40):
                assert bits(softcap(x[:m].clone(), 50.0)) == bits(want[:m])
    wide = torch.full((40, width + 9), 7.0)
    wide[:, 4 : 4 + width] = x
    softcap(wide[:, 4 : 4 + width], 50.0)
    assert bits(wide[:, 4 : 4 + width]) == bits(want) and bool((wide[:, :4] == 7).all() and (wide[:, -5:] == 7).all())


@pytest.mark.parametrize("path", PATHS)
def test_softcap_notes_the_largest_as_capped(path: str) -> None:
    """A cap makes different numbers equal: the first of them is the largest."""
    native.use(path)
    x = torch.tensor([[0.0, 900.0, 1000.0, 5000.0], [-4.0, -2.0, torch.nan, 9.0], [3.0, 2.0, 2.5, 99.0]])
    peaks = Peaks.of(3, 3)
    softcap(x, 10.0, peaks)
    assert peaks.index.tolist() == [1, 2, 0] and float(x[0, 1]) == 10.0
    assert bits(peaks.value) == bits(x[range(3), peaks.index])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="relu"):
        activate(randn(2, 8), act="relu")
    with pytest.raises(InputError, match="relu"):
        gated(randn(2, 8), act="relu")
    with pytest.raises(InputError, match="output"):
        activate(randn(2, 8), randn(2, 9))
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="cap"):
            softcap(randn(2, 8), cap)
    with pytest.raises(InputError, match="peaks"):
        softcap(randn(2, 8), 1.0, Peaks.of(2, 9))
