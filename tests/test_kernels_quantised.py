"""Layers on quantised weights: the chain's definition, equal bits on all builds, rows and threads, adversarial rows."""

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import CheckpointError, InputError
from numem.kernels import formats, native
from numem.kernels.formats import FORMATS
from numem.kernels.linear import Peaks
from numem.kernels.quantised import QuantisedLinear, quantise_activations
from numem.kernels.selftest import Shapes, self_test
from tests.kernel_fixtures import ISAS, bits, needs_native, restored

__all__ = ["restored"]

NAMES = list(FORMATS)
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 48, 49, 300)
SHAPES = [(96, 64), (33, 57), (1, 1), (17, 576), (48, 640), (65, 31), (300, 33)]


def case(n: int, k: int, rows: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, bias, inputs, residual."""
    g = torch.Generator().manual_seed(n * 1000 + k)
    weight = torch.randn((n, k), generator=g) * torch.exp(3 * torch.randn((n, 1), generator=g))
    return weight, torch.randn(n, generator=g), torch.randn((rows, k), generator=g), torch.randn((rows, n), generator=g)


def chain(x: Tensor, layer: QuantisedLinear) -> np.ndarray:
    """The definition, by the C library's fmaf: float32 [M, N] before bias and residual."""
    f = layer.format
    planes = layer.planes()
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    grid = formats.unpack(planes["records"], f)
    scale, low = grid.effective()
    weights = grid.codes.view(len(scale), -1, f.block).long() - f.zero
    codes, scales, sums = quantise_activations(x, f.span, f.block)
    products = torch.einsum("mbk,nbk->mnb", codes.double(), weights.double()).float()
    out = np.zeros((len(x), layer.out_features), np.float32)
    for i in range(len(x)):
        for j in range(layer.out_features):
            steps = (scale[j] * scales[i]).tolist(), products[i, j].tolist()
            extra = None if low is None else (low[j].tolist(), (scales[i] * sums[i]).tolist())
            acc = 0.0
            for b, (d, whole) in enumerate(zip(*steps, strict=True)):
                acc = fmaf(d, whole, acc)
                if extra is not None:
                    acc = fmaf(extra[0][b], extra[1][b], acc)
            out[i, j] = np.float32(acc) * planes["units"][j].numpy()
    return out


@needs_native
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [31, 64, 320])
def test_output_is_a_chain_over_blocks_then_unit_bias_residual(name: str, k: int) -> None:
    weight, bias, x, residual = case(35, k, 9)
    layer = QuantisedLinear(weight, name, bias)
    want = chain(x, layer) + bias.numpy()
    for isa in ISAS:
        native.use(isa)
        assert bits(QuantisedLinear.of_planes(name, 35, k, layer.planes(), bias)(x)) == want.tobytes()
        assert bits(layer(x, residual=residual)) == (want + residual.numpy()).tobytes()


@needs_native
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_equal_on_all_builds_rows_and_threads(shape: tuple[int, int], name: str) -> None:
    """A row's bits depend neither on the row count nor on threads nor on the instruction set (vLLM#5543 and kin)."""
    weight, bias, x, residual = case(*shape)
    x[3], x[5], x[11] = 0.0, x[5] * 1e-36, x[11] * 1e30
    x[6, 0], x[7, -1] = float("nan"), float("inf")
    native.use(ISAS[0])
    native.set_threads(1)
    layer = QuantisedLinear(weight, name, bias)
    want = layer(x, residual=residual)
    assert bool(torch.isnan(want[6:8]).all()) and bool(torch.isfinite(want[[0, 3, 5, 8, 299]]).all())
    assert torch.equal(want[3], bias + residual[3])
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            for m in ROWS:
                assert bits(layer(x[:m], residual=residual[:m])) == bits(want[:m]), (isa, threads, m)
            assert bits(layer(x[-1:], residual=residual[-1:])) == bits(want[-1:])


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_the_torch_reference_has_the_same_order(name: str) -> None:
    """Equal but where rounding to float64 and then to float32 is not one rounding."""
    for n, k in SHAPES:
        weight, bias, x, residual = case(n, k, 20)
        native.use(ISAS[0])
        layer = QuantisedLinear(weight, name, bias)
        want = layer(x, residual=residual)
        ids = torch.tensor([n - 1, 0, n // 2, 0])
        rows = layer.rows(ids)
        native.use("torch")
        reference = QuantisedLinear.of_planes(name, n, k, layer.planes(), bias)
        torch.testing.assert_close(
            reference(x, residual=residual), want, rtol=1e-6, atol=1e-5 * float(want.abs().max())
        )
        assert bits(reference(x[:1], residual=residual[:1])) == bits(reference(x, residual=residual)[:1])
        assert bits(reference.rows(ids)) == bits(rows)
        assert bits(rows) == bits(formats.dequantise(layer.planes(), name, n, k)[ids])


@pytest.mark.parametrize("path", [*ISAS, "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_the_product_is_near_that_of_the_dequantised_weights(path: str, name: str) -> None:
    """|error| <= sum |w| d over the blocks (a step of the activations) and one rounding a step."""
    native.use(path)
    for n, k in SHAPES:
        weight, _, x, _ = case(n, k, 20)
        layer = QuantisedLinear(weight, name)
        wide = formats.dequantise(layer.planes(), name, n, k).double().abs()
        steps = torch.nn.functional.pad(x, (0, -k % 32)).view(20, -1, 32).abs().amax(2).double() / (127 * 256)
        allowed = steps.repeat_interleave(32, 1)[:, :k] @ wide.T + (k + 9) * 2.0**-22 * (x.double().abs() @ wide.T)
        exact = x.double() @ formats.dequantise(layer.planes(), name, n, k).double().T
        assert bool(((layer(x).double() - exact).abs() <= allowed).all())


def test_activations_have_sixteen_bits_in_two_bytes_within_127() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0, 3.25, *[0.0] * 26, 1e-36, *[0.0] * 31]])
    codes, scales, sums = quantise_activations(x)
    assert codes[0, 0, :6].tolist() == [127 * 256, 127, 2 * 256 - 127, -2 * 256 - 127, -127 * 256, 3 * 256 + 64]
    assert scales[0].tolist() == [2.0**-8, 0.0] and sums[0].tolist() == [127 + 512 - 127 - 512 - 127 + 832, 0]


@pytest.mark.parametrize("path", [*ISAS, "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_strided_rows_output_in_place_of_the_residual_and_peaks(path: str, name: str) -> None:
    native.use(path)
    weight, _, x, residual = case(65, 130, 61)
    layer = QuantisedLinear(weight, name)
    want = layer(x, residual=residual)
    wide_x, wide_out = torch.zeros(61, 400), torch.full((61, 100), 7.0)
    wide_x[:, 100:230], wide_out[:, 20:85] = x, residual
    for rows in (1, 7, 61):
        wide_out[:, 20:85] = residual
        peaks = Peaks.of(rows, 50)
        part = wide_out[:rows, 20:85]
        assert layer(wide_x[:rows, 100:230], out=part, residual=part, peaks=peaks) is part
        assert bits(part) == bits(want[:rows])
        assert peaks.index.tolist() == want[:rows, :50].numpy().argmax(1).tolist()
        assert torch.equal(peaks.value, want[:rows, :50].amax(1))
    assert bool((wide_out[:, :20] == 7).all()) and bool((wide_out[:, 85:] == 7).all())


@pytest.mark.parametrize("path", [*ISAS[:1], "torch"])
@pytest.mark.parametrize("rows", [1, 200])
def test_peaks_take_the_first_of_equals_and_the_first_nan(path: str, rows: int) -> None:
    native.use(path)
    layer = QuantisedLinear(torch.zeros(700, 32), "q8")
    residual = torch.zeros(rows, 700)
    residual[:, 650] = residual[:, 40] = 2.0
    peaks = Peaks.of(rows, 700)
    layer(torch.ones(rows, 32), residual=residual, peaks=peaks)
    assert set(peaks.index.tolist()) == {40}
    residual[:, 600] = residual[:, 660] = float("nan")
    layer(torch.ones(rows, 32), residual=residual, peaks=peaks)
    assert set(peaks.index.tolist()) == {600}


def test_what_does_not_fit_is_refused() -> None:
    layer = QuantisedLinear(torch.ones(3, 40), "q4")
    with pytest.raises(InputError, match="must be float32"):
        layer(torch.ones(1, 39))
    with pytest.raises(InputError, match="output"):
        layer(torch.ones(1, 40), out=torch.ones(1, 4))
    with pytest.raises(InputError, match="row id 3 is outside"):
        layer.rows(torch.tensor([0, 3]))
    with pytest.raises(InputError, match="records .* are not those of a q8 matrix"):
        QuantisedLinear.of_planes("q8", 3, 40, layer.planes())
    with pytest.raises(InputError, match="planes"):
        QuantisedLinear.of_planes("q4", 3, 40, {})
    with pytest.raises(CheckpointError, match="embed: row 1 has a NaN"):
        QuantisedLinear.of_parts([torch.ones(1, 2), torch.full((1, 2), torch.nan)], "q4a", name="embed")


@needs_native
def test_the_self_test_covers_the_formats_and_is_equal_on_all_builds() -> None:
    def digest(*names: str) -> bytes:
        return self_test(Shapes(64, 96, 2, 1, 32, 100, quantised=names))

    assert len({digest(), digest("q8"), digest("q4a"), digest("q8", "q4a")}) == 4
    found = set()
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            found.add(digest(*NAMES))
    assert len(found) == 1


def test_bytes_held_are_those_of_the_format() -> None:
    layer = QuantisedLinear.of_parts([torch.ones(32, 256), torch.ones(32, 256)], "q4k", torch.zeros(64))
    assert layer.nbytes == 64 * 256 * 4.625 // 8 + 64 * 4 + 64 * 4
