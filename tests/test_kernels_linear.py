"""Linear layers: the chain definition, equal bits on all builds, row and thread invariance, error bound."""

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native
from numem.kernels.linear import PackedLinear, Peaks
from tests.kernel_fixtures import ISAS, bits, needs_native, restored

__all__ = ["restored"]

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 33, 64, 300)
# N and K that are whole panels, odd, tiny, and one column past a panel or a half panel
SHAPES = [(96, 64), (33, 57), (1, 1), (17, 16), (48, 130), (65, 3), (130, 200)]


def case(n: int, k: int, dtype: torch.dtype, rows: int = 300) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, bias, inputs, residual."""
    g = torch.Generator().manual_seed(n * 1000 + k)
    return (
        torch.randn((n, k), generator=g).to(dtype),
        torch.randn(n, generator=g),
        torch.randn((rows, k), generator=g),
        torch.randn((rows, n), generator=g),
    )


SEGMENT = 64  # steps of one chain; part of the numeric policy


def entering(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as they enter a layer: rounded to its dtype."""
    return x.to(dtype).float()


def fmaf_chain(x: np.ndarray, w: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The definition: fused multiply-add chains from +0 over 64 steps each, added in order, by the C library's fmaf.

    A bfloat16 layer takes k in pairs, the odd one first (an odd width has a zero at its end).
    """
    if dtype is torch.bfloat16:
        x, w = (np.pad(m, ((0, 0), (0, m.shape[1] % 2))) for m in (x, w))
        order = np.arange(x.shape[1]).reshape(-1, 2)[:, ::-1].reshape(-1)
        x, w = x[:, order], w[:, order]
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    out = np.zeros((len(x), len(w)), np.float32)
    for i, row in enumerate(x.tolist()):
        for j, column in enumerate(w.tolist()):
            total = None
            for start in range(0, len(row), SEGMENT):
                acc = 0.0
                for a, b in zip(row[start : start + SEGMENT], column[start : start + SEGMENT], strict=True):
                    acc = fmaf(a, b, acc)
                total = np.float32(acc) if total is None else total + np.float32(acc)
            out[i, j] = total
    return out


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [41, 64, 65, 128, 200])
def test_output_is_segments_of_fma_chains_then_bias_then_residual(isa: str, dtype: torch.dtype, k: int) -> None:
    native.use(isa)
    weight, bias, x, residual = case(35, k, dtype, 14)
    want = fmaf_chain(entering(x, dtype).numpy(), weight.float().numpy(), dtype)
    assert bits(PackedLinear(weight)(x)) == want.tobytes()
    want = want + bias.numpy()
    assert bits(PackedLinear(weight, bias)(x)) == want.tobytes()
    assert bits(PackedLinear(weight, bias)(x, residual=residual)) == (want + residual.numpy()).tobytes()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_equal_on_all_builds_rows_and_threads(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A row's bits depend neither on the row count nor on threads nor on the instruction set (vLLM#5543 and kin)."""
    weight, bias, x, residual = case(*shape, dtype)
    native.use(ISAS[0])
    native.set_threads(1)
    want = PackedLinear(weight, bias)(x, residual=residual)
    for isa in ISAS:
        native.use(isa)
        layer = PackedLinear(weight, bias)
        for threads in (1, 2, 3):
            native.set_threads(threads)
            for m in ROWS:
                got = layer(x[:m], residual=residual[:m])
                assert bits(got) == bits(want[:m]), (isa, threads, m)
            last = layer(x[-1:], residual=residual[-1:])
            assert bits(last) == bits(want[-1:])


@pytest.mark.parametrize("path", [*ISAS, "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_float64_is_within_the_bound_of_a_chain(path: str, dtype: torch.dtype) -> None:
    """|error| <= (K + 2) 2^-24 (sum |x w| + |bias| + |residual|): one rounding a step, two more at the end."""
    native.use(path)
    for n, k in SHAPES:
        weight, bias, x, residual = case(n, k, dtype, 20)
        got = PackedLinear(weight, bias)(x, residual=residual).double()
        wide = [t.double() for t in (weight, bias, entering(x, dtype), residual)]
        want = wide[2] @ wide[0].T + wide[1] + wide[3]
        size = wide[2].abs() @ wide[0].abs().T + wide[1].abs() + wide[3].abs()
        assert bool(((got - want).abs() <= (k + 2) * 2.0**-24 * size).all())


def test_the_torch_reference_is_row_invariant_too() -> None:
    native.use("torch")
    weight, bias, x, residual = case(130, 200, torch.float32)
    layer = PackedLinear(weight, bias)
    want = layer(x, residual=residual)
    for m in ROWS:
        assert bits(layer(x[:m], residual=residual[:m])) == bits(want[:m])
    for row in (1, 15, 16, 299):
        assert bits(layer(x[row : row + 1], residual=residual[row : row + 1])) == bits(want[row : row + 1])


@pytest.mark.parametrize("path", [*ISAS, "torch"])
def test_strided_rows_and_output_in_place_of_the_residual(path: str) -> None:
    native.use(path)
    weight, _, x, residual = case(48, 130, torch.float32, 30)
    layer = PackedLinear(weight)
    want = layer(x, residual=residual)
    wide_x, wide_out = torch.zeros(30, 400), torch.full((30, 100), 7.0)
    wide_x[:, 100:230] = x
    wide_out[:, 20:68] = residual
    out = layer(wide_x[:, 100:230], out=wide_out[:, 20:68], residual=wide_out[:, 20:68])
    assert bits(out) == bits(want)
    assert bool((wide_out[:, :20] == 7).all()) and bool((wide_out[:, 68:] == 7).all())


@pytest.mark.parametrize("path", [*ISAS, "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_out_of_the_panels(path: str, dtype: torch.dtype) -> None:
    native.use(path)
    weight = case(130, 57, dtype)[0]
    ids = torch.tensor([0, 129, 31, 32, 33, 5, 5, 64, 127, 128])
    assert bits(PackedLinear(weight).rows(ids)) == bits(weight.float()[ids])
    assert PackedLinear(weight).rows(ids[:0]).shape == (0, 57)


def test_no_rows_is_no_work() -> None:
    assert PackedLinear(torch.ones(3, 2))(torch.empty(0, 2)).shape == (0, 3)


def test_the_weight_is_not_aliased() -> None:
    for path in [*ISAS, "torch"]:
        native.use(path)
        weight, bias = torch.ones(3, 2), torch.ones(3)
        layer = PackedLinear(weight, bias)
        weight.zero_(), bias.zero_()
        assert layer(torch.ones(1, 2)).tolist() == [[3.0, 3.0, 3.0]]


def test_nan_and_infinity_stay_in_their_row() -> None:
    weight, _, x, _ = case(33, 57, torch.float32, 13)
    layer = PackedLinear(weight)
    clean = layer(x)
    x[5, 3], x[7, 0] = torch.nan, torch.inf
    out = layer(x)
    assert bool(out[5].isnan().all()) and not bool(out[7].isfinite().any())
    others = [i for i in range(13) if i not in (5, 7)]
    assert bits(out[others]) == bits(clean[others])


@pytest.mark.parametrize("path", [*ISAS[:1], "torch"])
def test_wrong_arguments_are_refused(path: str) -> None:
    native.use(path)
    layer = PackedLinear(torch.ones(3, 2))
    for wrong in (torch.ones(1, 3), torch.ones(1, 2).double(), torch.ones(2, 4)[:, ::2]):
        with pytest.raises(InputError, match="linear: input"):
            layer(wrong)
    with pytest.raises(InputError, match="linear: output"):
        layer(torch.ones(1, 2), out=torch.ones(2, 3))
    with pytest.raises(InputError, match="linear: residual"):
        layer(torch.ones(1, 2), residual=torch.ones(1, 4))
    for bad in ([3], [0, -1]):
        with pytest.raises(InputError, match="outside \\[0, 3\\)"):
            layer.rows(torch.tensor(bad))
    with pytest.raises(InputError, match="weight"):
        PackedLinear(torch.ones(3, 2).half())
    with pytest.raises(InputError, match="bias"):
        PackedLinear(torch.ones(3, 2), torch.ones(2))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-62, 2.0**-64, 2.0**-66])
def test_tiny_numbers_have_equal_bits_on_all_builds(dtype: torch.dtype, scale: float) -> None:
    """Products and sums around the smallest normal number, and denormal weights: the bfloat16 instruction flushes them."""
    g = torch.Generator().manual_seed(5)
    rows = torch.randn((40, 192), generator=g) * scale
    weights = [torch.randn((64, 192), generator=g) * scale, torch.randn((64, 192), generator=g) * 2.0**-127]
    for weight in weights:
        found = set()
        for isa in ISAS:
            native.use(isa)
            layer = PackedLinear(weight.to(dtype))
            for threads in (1, 2):
                native.set_threads(threads)
                found.add(bits(layer(rows)))
                found.add(bits(torch.cat([layer(rows[i : i + 1]) for i in range(len(rows))])))
        assert len(found) == 1


@needs_native
def test_a_host_that_flushes_denormals_changes_nothing() -> None:
    """torch.set_flush_denormal sets a mode of the calling thread only; rows must not depend on which thread ran them."""
    g = torch.Generator().manual_seed(6)
    layer = PackedLinear(torch.randn((512, 64), generator=g) * 1e-20)
    rows = torch.randn((300, 64), generator=g) * 1e-20
    want = bits(layer(rows))
    try:
        torch.set_flush_denormal(True)
        assert {bits(layer(rows)) for _ in range(20)} == {want}
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("isa", [*ISAS, "torch"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [1, 15, 16, 33, 320, 4099])
def test_the_largest_of_each_row_is_noted_as_numpy_finds_it(isa: str, threads: int, n: int) -> None:
    """Of equals the first, and the first that is not a number; columns from the limit on do not count."""
    native.use(isa)
    native.set_threads(threads)
    g = torch.Generator().manual_seed(n)
    layer = PackedLinear(torch.randint(-1, 2, (n, 24), generator=g).float())
    for rows in (1, 3, 8, 12, 13, 30):
        for poison in (0.0, float("nan"), float("inf"), -float("inf")):
            x = torch.randint(-1, 2, (rows, 24), generator=g).float()
            x[-1, 0] += poison
            limit = max(1, n - 5)
            peaks = Peaks.of(rows, limit)
            y = layer(x, peaks=peaks).numpy()[:, :limit]
            index = y.argmax(axis=1)
            assert peaks.index.numpy().tolist() == index.tolist()
            assert peaks.value.numpy().tobytes() == y[np.arange(rows), index].tobytes()


def test_peaks_that_do_not_fit_are_refused() -> None:
    layer = PackedLinear(torch.randn(33, 24))
    for peaks in (Peaks.of(2, 33), Peaks.of(3, 34), Peaks.of(3, 0)):
        with pytest.raises(InputError, match="peaks"):
            layer(torch.randn(3, 24), peaks=peaks)


@pytest.mark.parametrize("path", [*ISAS[:1], "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 31, 57, 64, 130])
def test_parts_of_any_dtype_are_the_stacked_and_rounded_weight(path: str, dtype: torch.dtype, k: int) -> None:
    native.use(path)
    g = torch.Generator().manual_seed(k)
    wide = torch.randn((7, k + 5), generator=g)
    parts = [
        torch.randn((40, k), generator=g),
        torch.randn((3, k), generator=g).half() * 2.0**-14,  # denormal ones among them
        torch.randn((65, k), generator=g).bfloat16(),
        wide[:, 2 : k + 2],  # rows of a wider matrix
        torch.randn((k, 9), generator=g).half().T,  # columns of one
    ]
    bias = torch.randn(124, generator=g)
    x = torch.randn((5, k), generator=g)
    whole = PackedLinear(torch.cat([part.to(dtype) for part in parts]), bias)
    layer = PackedLinear.of_parts(parts, dtype, bias)
    assert (layer.out_features, layer.in_features, layer.nbytes) == (124, k, whole.nbytes)
    assert bits(layer(x)) == bits(whole(x))
    assert bits(layer.rows(torch.arange(124))) == bits(whole.rows(torch.arange(124)))
    before = bits(layer(x))
    for part in parts:
        part.zero_()
    assert bits(layer(x)) == before


@needs_native
def test_every_half_and_the_ties_of_single_convert_as_torch_does() -> None:
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    halves = halves[~halves.isnan()].unsqueeze(0)
    raw = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00018000, 0x80008000, 0x7F800000, 0x00000001]
    singles = torch.from_numpy(np.array([raw], np.uint32).view(np.float32))
    for dtype in DTYPES:
        for part in (halves, singles):
            layer = PackedLinear.of_parts([part], dtype)
            assert bits(layer.rows(torch.tensor([0]))) == bits(part.to(dtype).float())


def test_parts_that_do_not_fit_are_refused() -> None:
    for parts in ([], [torch.ones(2, 3), torch.ones(2, 4)], [torch.ones(2, 3).double()], [torch.ones(0, 3)]):
        with pytest.raises(InputError, match="weight"):
            PackedLinear.of_parts(parts, torch.float32)
    with pytest.raises(InputError, match="float16"):
        PackedLinear.of_parts([torch.ones(2, 3)], torch.float16)
    with pytest.raises(InputError, match="bias"):
        PackedLinear.of_parts([torch.ones(2, 3), torch.ones(1, 3)], torch.float32, torch.ones(2))
