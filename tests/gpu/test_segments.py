"""Products of few rows: against torch, and bit for bit against the form for many rows, whatever stands beside a row."""

import pytest
import torch
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda import norm, segments
from numem.kernels.cuda.matrix import Matrix
from tests.gpu.matrix_fixtures import bits, packed, rows_of

SHAPES = [(160, 50), (640, 64), (1024, 32), (1536, 80)]
TRUE_SHAPES = [(640, 1536), (1024, 640), (640, 4096), (2048, 640), (1024, 4096), (3072, 1024), (576, 960), (1536, 576)]


@pytest.fixture
def shapes(big: bool) -> list[tuple[int, int]]:
    return TRUE_SHAPES if big else SHAPES


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(1, keepdim=True) + eps) * weight


def test_few_rows_equal_torch_and_many_rows(
    device: torch.device, dtypes: list[torch.dtype], shapes: list[tuple[int, int]]
) -> None:
    """On the GPU every bit of the two forms is equal; the interpreter's products follow the library's own order."""
    generator = torch.Generator().manual_seed(3)
    for dtype in dtypes:
        for k, n in shapes:
            weight = (rows_of(generator, n, k) * 0.05).to(dtype).to(device)
            bias = rows_of(generator, n).to(device)
            h = rows_of(generator, 40, k).to(dtype).to(device)
            many = torch.full((40, n), torch.nan, dtype=dtype, device=device)
            segments.many_rows(weight, bias, h, many)
            exact = h.double() @ weight.double().T + bias.double()
            close = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-18
            assert ((many.double() - exact).abs() <= close * exact.abs().max()).all()
            for rows in (slice(0, 1), slice(39, 40), slice(5, 8), slice(0, 11), slice(3, 35)):
                for tile in (16, 32) if k <= 1024 else (16,):
                    few = torch.full_like(many[rows], torch.nan)
                    segments.few_rows(Matrix.dense(weight, bias), few, h=h[rows].contiguous(), tile=tile)
                    if device.type == "cuda":
                        assert torch.equal(bits(few), bits(many[rows])), (dtype, k, n, rows, tile)
                    else:
                        torch.testing.assert_close(few, many[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("k", "n", "described"), [(576, 96, True), (640, 200, False), (102, 40, True), (3072, 72, True)]
)
def test_many_rows_in_any_tile(
    k: int, n: int, described: bool, device: torch.device, big: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it change a bit who copies the blocks; rows of 102 numbers are copied by threads."""
    generator = torch.Generator().manual_seed(5)
    dtype, rows = (torch.bfloat16, 300) if big else (torch.float32, 70)
    weight = (rows_of(generator, n, k) * 0.05).to(dtype).to(device)
    h = rows_of(generator, rows, k).to(dtype).to(device)
    assert nl.describable(weight) is (nl.DESCRIPTORS and k != 102)
    monkeypatch.setattr(segments, "DESCRIBED", 1 if described else rows + 1)
    few = torch.full((3, n), torch.nan, dtype=dtype, device=device)
    segments.few_rows(Matrix.dense(weight), few, h=h[-3:].contiguous())
    for config in ((128, 128, 128, 8, 3), (64, 128, 64, 4, 3), (64, 64, 128, 4, 4), (64, 32, 128, 4, 6)):
        many = torch.full((rows, n), torch.nan, dtype=dtype, device=device)
        segments.many_rows(weight, None, h, many, config=config)
        if device.type == "cuda":
            assert torch.equal(bits(many[-3:]), bits(few)), config
        else:
            torch.testing.assert_close(many[-3:], few, rtol=1e-5, atol=1e-5)


def test_settings_of_many_rows() -> None:
    """Large tiles where there are enough of them, small ones of few rows, and memory for no more than a device has."""
    wide, narrow = (torch.empty((n, 1024), dtype=torch.bfloat16, device="meta") for n in (6144, 1024))
    assert segments.settings(wide, 8192)[:2] == (128, 128) and segments.settings(narrow, 8192)[:2] == (128, 128)
    assert segments.settings(narrow, 1024)[:2] == (64, 128) and segments.settings(wide, 64)[:2] == (64, 64)
    assert segments.settings(narrow, 64)[:2] == (64, 32)
    for rows in (33, 64, 100, 512, 8192):
        for weight in (wide, narrow):
            bm, bn, bk, _, stages = segments.settings(weight, rows)
            assert (bm + bn) * bk * 2 * stages <= 227 << 10


@pytest.mark.parametrize("name", ["q8", "q4", "q4a"])
def test_packed_weights_are_their_dense_ones(
    name: str, device: torch.device, dtypes: list[torch.dtype], shapes: list[tuple[int, int]]
) -> None:
    """Unpacking in registers gives the bits of the dense layer of the same weights."""
    generator = torch.Generator().manual_seed(4)
    for dtype in dtypes:
        for k, n in shapes:
            matrix = packed(rows_of(generator, n, k), name, dtype, device)
            dense = Matrix.dense(matrix.reference())
            for rows in (1, 3, 16):
                h = rows_of(generator, rows, k).to(dtype).to(device)
                a, b = (torch.full((rows, n), torch.nan, dtype=dtype, device=device) for _ in range(2))
                segments.few_rows(dense, b, h=h)
                for tile in (16, 32) if rows < 16 and k <= 1024 else (16,):
                    segments.few_rows(matrix, a.fill_(torch.nan), h=h, tile=tile)
                    assert torch.equal(bits(a), bits(b)), (dtype, k, n, rows, tile)


def test_columns_of_a_program() -> None:
    """Two rows of sixteen where programs of sixteen are more than multiprocessors and both have room."""
    dense, long = (Matrix.dense(torch.zeros((8, k), dtype=torch.bfloat16)) for k in (1024, 3072))
    codes = packed(torch.randn((32, 1024)), "q8", torch.bfloat16, torch.device("cpu"))
    assert segments.columns(dense, 2112, 8, False) == 16 and segments.columns(dense, 2113, 8, False) == 32
    assert segments.columns(dense, 4096, 8, True) == 32 and segments.columns(dense, 4096, 16, False) == 16
    assert segments.columns(codes, 4096, 8, False) == 32 and segments.columns(codes, 4096, 8, True) == 16
    assert segments.columns(long, 4096, 8, False) == 16


def _act(x: Tensor, act: str) -> Tensor:
    if act == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


@pytest.mark.parametrize("act", [None, "silu", "gelu_tanh", "gelu"])
def test_norm_and_gate_in_a_product(act: str | None, device: torch.device, dtypes: list[torch.dtype]) -> None:
    """x joins its branch through a norm, is normalised and multiplied; rows do not depend on their companions."""
    generator = torch.Generator().manual_seed(5)
    k, n = 640, 96
    for dtype in dtypes:
        matrix = Matrix.dense((rows_of(generator, n, k) * 0.05).to(dtype).to(device))
        x, y = rows_of(generator, 4, k).to(device), rows_of(generator, 4, k).to(dtype).to(device)
        weight, post = rows_of(generator, k).to(device), rows_of(generator, k).to(device)
        for branch, after in ((None, None), (y, None), (y, post)):
            x_out = torch.full_like(x, torch.nan)
            out = torch.full((4, n if act is None else n // 2), torch.nan, dtype=dtype, device=device)
            given = segments.Norm(x, x_out, branch, after, weight, 1e-6, 1.0)
            segments.few_rows(matrix, out, norm=given, act=act)
            joined = x if branch is None else x + (y.float() if after is None else _norm(y.float(), 1 + post, 1e-6))
            if branch is not None:
                torch.testing.assert_close(x_out, joined, rtol=1e-5, atol=1e-5)
            product = _norm(joined, 1 + weight, 1e-6).to(dtype).float() @ matrix.weights.float().T
            if act is not None:
                rounded = product.to(dtype).float()
                product = _act(rounded[:, : n // 2], act) * rounded[:, n // 2 :]
            close = 2.0**-6 if dtype is torch.bfloat16 else 1e-4
            torch.testing.assert_close(out.float(), product, rtol=close, atol=close * float(product.abs().max()))
            for row in range(4):
                one = slice(row, row + 1)
                alone, x_alone = torch.full_like(out[one], torch.nan), torch.full_like(x[one], torch.nan)
                cut = segments.Norm(x[one], x_alone, None if branch is None else y[one], after, weight, 1e-6, 1.0)
                segments.few_rows(matrix, alone, norm=cut, act=act)
                if device.type == "cuda":
                    assert torch.equal(bits(alone), bits(out[one]))
                    assert branch is None or torch.equal(bits(x_alone), bits(x_out[one]))


def test_a_norm_in_a_product_is_that_of_a_launch_of_its_own(
    device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    """The sum of squares of a joined row runs in one order in both kernels, at every width."""
    generator = torch.Generator().manual_seed(6)
    for dtype in dtypes:
        for k in (640, 1152, 1536, 2048, 2560, 3072, 3584) if big else (160,):
            matrix = Matrix.dense((rows_of(generator, 64, k) * 0.05).to(dtype).to(device))
            x, y = rows_of(generator, 4, k).to(device), rows_of(generator, 4, k).to(dtype).to(device)
            weight, post = rows_of(generator, k).to(device), rows_of(generator, k).to(device)
            for after in (None, post):
                x_out, x_own, h = torch.empty_like(x), torch.empty_like(x), torch.empty_like(y)
                fused, own = (torch.empty((4, 64), dtype=dtype, device=device) for _ in range(2))
                segments.few_rows(matrix, fused, norm=segments.Norm(x, x_out, y, after, weight, 1e-6))
                norm.add_norm(x, y, after, weight, h, x_own, eps=1e-6)
                segments.few_rows(matrix, own, h=h)
                if big:
                    assert torch.equal(bits(x_out), bits(x_own)) and torch.equal(bits(fused), bits(own)), k
                else:
                    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-4)
