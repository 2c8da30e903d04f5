"""Norms of the residual stream and the gate: against torch, and a row's bits whatever stands beside it."""

import pytest
import torch
from torch import Tensor

from numem.kernels.cuda import gate, norm
from tests.gpu.matrix_fixtures import bits, rows_of

FORMS = ("plain", "branch", "branch through a norm")


def _inputs(
    form: str, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """x, branch, weight of its norm, weight; rows of very different sizes."""
    generator = torch.Generator().manual_seed(width)
    sizes = 10.0 ** torch.arange(rows).remainder(7).sub(3)[:, None]
    x = (rows_of(generator, rows, width) * sizes).to(device)
    y = None if form == "plain" else rows_of(generator, rows, width).to(dtype).to(device)
    post = rows_of(generator, width).to(device) if form == FORMS[2] else None
    return x, y, post, rows_of(generator, width).to(device)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_norm_is_that_of_torch(
    form: str, offset: float, device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    """Widths that are no powers of two; x_out apart from x, and the same tensor."""
    for dtype in dtypes:
        for width in (640, 1024, 4096) if big else (96, 128):
            x, y, post, weight = _inputs(form, 9, width, dtype, device)
            out = torch.full((9, width), torch.nan, dtype=dtype, device=device)
            x_out = torch.full_like(x, torch.nan)
            norm.add_norm(x, y, post, weight, out, x_out, eps=1e-6, offset=offset)
            total, expected = norm.reference(x, y, post, weight, eps=1e-6, offset=offset)
            if y is not None:
                # a sum of two terms, one of them through three products: a few roundings of the larger term
                torch.testing.assert_close(x_out, total, rtol=2e-6, atol=2e-6 * float(total.abs().max()))
            close = 2.0**-7 if dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(out.float(), expected, rtol=close, atol=close)
            again, kept = torch.full_like(out, torch.nan), x.clone()
            norm.add_norm(kept, y, post, weight, again, kept, eps=1e-6, offset=offset)
            assert torch.equal(bits(again), bits(out))
            assert y is None or torch.equal(bits(kept), bits(x_out))


def _normed(x: Tensor, y: Tensor | None, post: Tensor | None, weight: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The norm, and where there is a branch x with it."""
    out = torch.full(x.shape, torch.nan, dtype=dtype, device=x.device)
    x_out = torch.full_like(x, torch.nan)
    norm.add_norm(x, y, post, weight, out, x_out, eps=1e-5)
    return [out] if y is None else [out, x_out]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_alone(form: str, device: torch.device, dtypes: list[torch.dtype], big: bool) -> None:
    """vllm#53247: a row has the same bytes alone, among others, and where the others hold NaN."""
    for dtype in dtypes:
        x, y, post, weight = _inputs(form, 5, 640 if big else 96, dtype, device)
        together = _normed(x, y, post, weight, dtype)
        for row in range(5):
            one = slice(row, row + 1)
            alone = _normed(x[one], None if y is None else y[one], post, weight, dtype)
            poisoned = torch.full_like(x, torch.nan)
            poisoned[one] = x[one]
            beside = _normed(poisoned, y, post, weight, dtype)
            for a, b, c in zip(together, alone, beside, strict=True):
                assert torch.equal(bits(a[one]), bits(b)) and torch.equal(bits(a[one]), bits(c[one]))


def test_a_sum_without_a_norm(device: torch.device, dtypes: list[torch.dtype]) -> None:
    for dtype in dtypes:
        x, y, _, _ = _inputs("branch", 3, 96, dtype, device)
        assert y is not None
        expected = x + y.float()
        norm.add_norm(x, y, None, None, None, x, eps=1e-6)
        assert torch.equal(x, expected)


# far below zero the exponential of silu is infinite and the quotient zero, as it should be
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu"])
def test_gate_is_that_of_torch(act: str, device: torch.device, dtypes: list[torch.dtype], big: bool) -> None:
    """Large arguments saturate and give no NaN."""
    generator = torch.Generator().manual_seed(9)
    width = 3072 if big else 80
    for dtype in dtypes:
        both = rows_of(generator, 4, 2 * width)
        both[0, :4] = torch.tensor([-200.0, -30.0, 30.0, 200.0])
        both = both.to(dtype).to(device)
        out = torch.full((4, width), torch.nan, dtype=dtype, device=device)
        gate.gate(both, out, act)
        g, up = both.double().view(4, 2, width).unbind(1)
        approximate = "tanh" if act == "gelu_tanh" else "none"
        value = torch.nn.functional.silu(g) if act == "silu" else torch.nn.functional.gelu(g, approximate=approximate)
        close = 2.0**-8 if dtype is torch.bfloat16 else 2e-6
        torch.testing.assert_close(out.double(), value * up, rtol=close, atol=close)
