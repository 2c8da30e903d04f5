"""Norms: the documented sums, equal bits on all builds, row and thread invariance, float64 error."""

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native
from numem.kernels.norm import layer_norm, rms_norm
from tests.kernel_fixtures import ISAS, PATHS, bits, needs_native, randn, restored

__all__ = ["restored"]

ROWS = (1, 2, 3, 5, 7, 12, 13, 33, 64, 300)


def normed(kind: str, x: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
    width = x.shape[1]
    weight, bias = randn(width, seed=1), randn(width, seed=2)
    if kind == "rms":
        return rms_norm(x, weight, 1e-5, out, 1.0)
    if kind == "rms + residual":
        return rms_norm(x, weight, 1e-5, out, 0.5, residual)
    return layer_norm(x, weight, bias if kind == "layer + bias" else None, 1e-5, out, 0.25)


KINDS = ["rms", "rms + residual", "layer", "layer + bias"]


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 576, 577])
def test_norm_bits_are_equal_on_all_builds_rows_and_threads(width: int, kind: str) -> None:
    x, residual = randn(300, width), randn(300, width, seed=3)
    want = normed(kind, x, residual)
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            for m in ROWS:
                assert bits(normed(kind, x[:m], residual[:m])) == bits(want[:m]), (isa, m)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_may_write_over_its_input_or_its_residual(path: str, kind: str) -> None:
    native.use(path)
    x, residual = randn(20, 77), randn(20, 77, seed=3)
    want = bits(normed(kind, x, residual))
    over = x.clone()
    assert bits(normed(kind, over, residual, over)) == want
    over = residual.clone()
    assert bits(normed(kind, x, over, over)) == want


@needs_native
def test_the_residual_is_added_to_the_rounded_norm() -> None:
    x, residual, weight = randn(9, 77), randn(9, 77, seed=1), randn(77, seed=2)
    assert bits(rms_norm(x, weight, 1e-6, residual=residual)) == bits(residual + rms_norm(x, weight, 1e-6))


@needs_native
def test_layer_norm_sums_in_sixteen_accumulators_and_a_tree() -> None:
    """The definition, step by step, of numbers whose centred squares and their sums are exact."""
    x = (torch.arange(40) % 11).float().unsqueeze(0)
    x[0, 0] += float(-x[0].sum() % 40)  # integers, and a mean that is one
    padded = np.zeros(48, np.float32)

    def tree(values: np.ndarray) -> np.float32:
        padded[:40] = values
        lanes = padded.reshape(3, 16).sum(0, dtype=np.float32)
        for half in (8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half : 2 * half]
        return np.float32(lanes[0] / np.float32(40))

    centred = x[0].numpy() - tree(x[0].numpy())
    scale = np.float32(1) / np.sqrt(tree(centred * centred) + np.float32(1e-6))
    weight, bias = randn(40), randn(40, seed=1)
    want = (centred * scale) * (np.float32(0.5) + weight.numpy()) + bias.numpy()
    assert bits(layer_norm(x, weight, bias, 1e-6, offset=0.5)) == want.tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_layer_norm_against_float64(path: str) -> None:
    """A large mean too: the squares are of centred values, so nothing cancels."""
    native.use(path)
    for shift in (0.0, 100.0):
        x, weight, bias = randn(33, 80) + shift, randn(80, seed=1), randn(80, seed=2)
        wide = x.double() - x.double().mean(1, keepdim=True)
        want = wide / (wide.square().mean(1, keepdim=True) + 1e-12).sqrt() * weight.double() + bias.double()
        error = (layer_norm(x, weight, bias, 1e-12).double() - want).abs().max()
        assert error < (2e-6 if shift == 0 else 1e-4)


def test_layer_norm_refuses_a_bias_of_another_width() -> None:
    with pytest.raises(InputError, match="layer_norm: bias"):
        layer_norm(randn(2, 8), randn(8), randn(7), 1e-5)
    with pytest.raises(InputError, match="rms_norm: residual"):
        rms_norm(randn(2, 8), randn(8), 1e-5, residual=randn(3, 8))


@needs_native
def test_norm_sums_squares_in_sixteen_accumulators_and_a_tree() -> None:
    """The definition, step by step; each fma is emulated by one float64 product and sum, exact for these values."""
    x = (torch.arange(48).float() - 20).unsqueeze(0) / 8  # squares and their sums are exact
    lanes = x[0].square().view(3, 16).sum(0).numpy()
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    mean = lanes[0] / np.float32(48)
    scale = np.float32(1) / np.sqrt(mean + np.float32(1e-6))
    weight = randn(48)
    want = (x.numpy() * scale) * (np.float32(0.5) + weight.numpy())
    assert bits(rms_norm(x, weight, 1e-6, offset=0.5)) == want.tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_norm_against_float64_in_place_and_per_head(path: str) -> None:
    native.use(path)
    x, weight = randn(33, 80), randn(80, seed=1)
    wide = x.double()
    want = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = rms_norm(x, weight, 1e-5)
    assert torch.allclose(got.double(), want, rtol=2e-6, atol=1e-7)
    again = x.clone()
    assert rms_norm(again, weight, 1e-5, again) is again and bits(again) == bits(got)
    rows = torch.zeros(33, 100)
    rows[:, 10:90] = x
    assert bits(rms_norm(rows[:, 10:90], weight, 1e-5)) == bits(got)


@pytest.mark.parametrize("path", PATHS)
def test_norm_per_head_of_wider_rows_in_place(path: str) -> None:
    native.use(path)
    x, weight = randn(300, 200), randn(16, seed=1)
    want = x.clone()
    heads = x[:, 48:128].reshape(-1, 16)
    want[:, 48:128] = rms_norm(heads, weight, 1e-5).view(300, 80)
    rms_norm(x[:, 48:128], weight, 1e-5, x[:, 48:128])
    assert bits(x) == bits(want)
    with pytest.raises(InputError, match="divides 80"):
        rms_norm(x[:, 48:128], randn(17), 1e-5)


def test_the_torch_norms_are_row_invariant_too() -> None:
    native.use("torch")
    x, residual = randn(300, 577), randn(300, 577, seed=3)
    for kind in KINDS:
        want = normed(kind, x, residual)
        for m in ROWS:
            assert bits(normed(kind, x[:m], residual[:m])) == bits(want[:m])
        assert bits(normed(kind, x[299:], residual[299:])) == bits(want[299:])
