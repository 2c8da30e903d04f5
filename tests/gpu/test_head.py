"""Logits and the largest of a row: the bits of the layers' products, whatever stands beside a row."""

import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import chain, head, segments, step
from numem.kernels.cuda.matrix import Matrix
from tests.gpu.matrix_fixtures import bits, packed, rows_of


def _logits(matrix: Matrix, h: Tensor, limit: int, cap: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(h)
    out = torch.full((rows, matrix.out_features), torch.nan, device=h.device)
    index = torch.full((rows,), -7, dtype=torch.int64, device=h.device)
    value = torch.full((rows,), torch.nan, device=h.device)
    head.logits_peaks(h, matrix, out, limit, index, value, cap=cap)
    expected = head.reference(out, limit)
    assert torch.equal(index, expected[0]) and torch.equal(value, expected[1])
    return out, index, value


def _matrix(name: str, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Matrix:
    weight = rows_of(torch.Generator().manual_seed(n + k), n, k) * 0.05
    return Matrix.dense(weight.to(dtype).to(device)) if name == "dense" else packed(weight, name, dtype, device)


@pytest.mark.parametrize("name", ["dense", "q8", "q4", "q4a"])
def test_logits_are_those_of_the_products(
    name: str, device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    """Segments (also such that k fills not whole ones) and one chain; on the GPU every bit, the interpreter's products
    follow the library's own order."""
    shapes = [(640, 5000), (1024, 4097), (1536, 999), (2560, 700), (4096, 3001)] if big else [(160, 90), (1536, 40)]
    if not big and name == "dense":
        shapes.append((4096, 40))
    generator = torch.Generator().manual_seed(1)
    for dtype in dtypes:
        for k, n in shapes:
            matrix = _matrix(name, n, k, dtype, device)
            h = rows_of(generator, 70 if big else 3, k).to(dtype).to(device)
            out, _, _ = _logits(matrix, h, n - 3)
            exact = h.double() @ matrix.reference().double().T
            # sums of k products in float32, in some order
            assert ((out.double() - exact).abs() <= k**0.5 * 2.0**-22 * exact.abs().max()).all()
            few = torch.full_like(out[:8], torch.nan)
            if segments.serves(matrix):
                segments.few_rows(matrix, few[: len(h)], h=h[:8])
            else:
                chain.few_rows(matrix, h[:8], few[: len(h)])
            if big:
                assert torch.equal(bits(few), bits(out[:8])), (k, n, dtype)
            else:
                torch.testing.assert_close(few[:3], out, rtol=1e-4, atol=1e-4)


def test_a_row_depends_on_itself_alone(device: torch.device, dtypes: list[torch.dtype], big: bool) -> None:
    """Every number of rows and every size of a program gives the same bits."""
    generator = torch.Generator().manual_seed(2)
    counts = [1, 3, 8, 9, 16, 17, 33, 65, 200] if big else [1, 9]
    for dtype in dtypes:
        matrix = _matrix("dense", 1000 if big else 70, 640, dtype, device)
        h = rows_of(generator, max(counts), 640).to(dtype).to(device)
        whole, _, _ = _logits(matrix, h, matrix.out_features)
        for count in counts:
            part, _, _ = _logits(matrix, h[-count:].contiguous(), matrix.out_features)
            if big:
                assert torch.equal(bits(part), bits(whole[-count:])), count
            else:
                torch.testing.assert_close(part, whole[-count:], rtol=1e-4, atol=1e-4)
        if big and dtype is torch.bfloat16:
            one = torch.full_like(whole[:1], torch.nan)
            for config in ((32, 128, 4, 4), (64, 128, 4, 5), (128, 128, 4, 3), (128, 128, 8, 3), (64, 64, 4, 4)):
                head.logits_parts(h[:1], matrix, one, 5, config=config)
                assert torch.equal(bits(one), bits(whole[:1])), config


def test_soft_cap_and_bias(device: torch.device, dtypes: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(3)
    for dtype in dtypes:
        bare = _matrix("dense", 70, 160, dtype, device)
        bias = rows_of(generator, 70).to(device)
        h = rows_of(generator, 2, 160).to(dtype).to(device) * 20
        plain, _, _ = _logits(bare, h, 70)
        capped, _, _ = _logits(Matrix.dense(bare.weights, bias), h, 70, cap=30.0)
        expected = 30.0 * torch.tanh((plain + bias) / 30.0)
        # the hyperbolic tangent is made of an exponential and a quotient
        torch.testing.assert_close(capped, expected, rtol=1e-5, atol=3e-5)


def test_the_largest_of_a_row(device: torch.device, big: bool) -> None:
    """Equals, zeros of both signs, infinities, NaN after infinity, ids from the limit on."""
    width = 150001 if big else 9000
    logits = torch.randn((7, width), generator=torch.Generator().manual_seed(4)).clamp(-6, 6).to(device)
    logits[0, [8000, 77, 4096]] = 7.0
    logits[1] = -0.0
    logits[1, 50] = 0.0
    logits[2, 900] = torch.inf
    logits[2, 5000] = torch.nan
    logits[3, [4500, 4400]] = torch.nan
    logits[4, width - 1] = 99.0
    logits[5] = -torch.inf
    logits[6, 30] = torch.inf
    logits[6, 20] = -torch.nan
    for limit in (width, width - 1, 4097, 4096, 1):
        index = torch.full((7,), -7, dtype=torch.int64, device=device)
        value = torch.full((7,), -7.0, device=device)
        head.peaks(logits, limit, index, value)
        expected = head.reference(logits, limit)
        assert torch.equal(index, expected[0]), limit
        assert torch.equal(value.view(torch.int32), expected[1].view(torch.int32))
        if limit == width:
            assert index.tolist() == [77, 0, 5000, 4400, width - 1, 0, 20]


def test_greedy_steps(device: torch.device, dtypes: list[torch.dtype]) -> None:
    """One launch does what finding the largest and advancing do, for idle lanes and rows that are not finite too."""
    matrix = _matrix("dense", 90, 160, dtypes[0], device)
    h = rows_of(torch.Generator().manual_seed(5), 4, 160).to(dtypes[0]).to(device)
    h[2] = torch.nan
    states = []
    for fused in (True, False):
        tokens = torch.tensor([5, 6, 7, 8], device=device)
        positions = torch.tensor([3, -1, 9, 0], device=device)
        history = torch.full((2, 4), -7, dtype=torch.int64, device=device)
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        out = torch.full((4, 90), torch.nan, device=device)
        index, value = torch.empty(4, dtype=torch.int64, device=device), torch.empty(4, device=device)
        for _ in range(3):
            if fused:
                step.finish_greedy(head.logits_parts(h, matrix, out, 80), tokens, positions, history, counter)
            else:
                head.logits_peaks(h, matrix, out, 80, index, value)
                step.advance(index, value, tokens, positions, history, counter)
        states.append([x.tolist() for x in (tokens, positions, history, counter)])
        best = out[:, :80].argmax(1).tolist()
        assert states[-1][0] == [best[0], 6, 0, best[3]] and states[-1][1] == [6, -1, 12, 3]
        assert states[-1][2] == [[best[0], -1, -1, best[3]]] * 2 and states[-1][3] == [3]
    assert states[0] == states[1]


def test_what_is_refused(device: torch.device) -> None:
    matrix = Matrix.dense(torch.randn((64, 128), device=device))
    out = torch.empty((2, 64), device=device)
    with pytest.raises(InputError, match="h .* must be contiguous"):
        head.logits_parts(torch.randn((2, 64), device=device), matrix, out, 64)
    with pytest.raises(InputError, match="logits .* must be contiguous float32"):
        head.logits_parts(torch.randn((2, 128), device=device), matrix, out[:, :32], 32)
    with pytest.raises(InputError, match=r"limit 65 must lie in \[1, 64\]"):
        head.logits_parts(torch.randn((2, 128), device=device), matrix, out, 65)
