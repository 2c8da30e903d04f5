"""Linear layers: every product that serves a number of rows gives the same bits."""

import pytest
import torch
from triton.runtime.errors import InterpreterError

from numem.errors import InputError
from numem.kernels.cuda import chain, gate, linear, segments
from numem.kernels.cuda.embed import embed
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.cuda.unpack import unpack
from tests.gpu.matrix_fixtures import bits, packed, rows_of


def test_long_rows(device: torch.device, dtypes: list[torch.dtype], big: bool) -> None:
    """One chain over k: few rows, many rows and, where it is proved, the library's product are equal on the GPU."""
    generator = torch.Generator().manual_seed(6)
    shapes = [(4096, 6144), (4096, 4096), (14336, 4096), (4128, 512)] if big else [(4096, 48), (4100, 48)]
    for dtype in dtypes:
        for k, n in shapes:
            if big and dtype is torch.float32:
                continue
            matrix = Matrix.dense((rows_of(generator, n, k) * 0.02).to(dtype).to(device))
            rows = 1100 if big else 37
            h = rows_of(generator, rows, k).to(dtype).to(device)
            out = torch.full((rows, n), torch.nan, dtype=dtype, device=device)
            linear.linear(h, matrix, out)
            exact = h.double() @ matrix.weights.double().T
            close = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-18
            assert ((out.double() - exact).abs() <= close * exact.abs().max()).all()
            for cut in (slice(0, 1), slice(rows - 1, rows), slice(2, 9), slice(0, 16), slice(4, 36)):
                few = torch.full_like(out[cut], torch.nan)
                linear.linear(h[cut].contiguous(), matrix, few)
                if big:
                    assert torch.equal(bits(few), bits(out[cut])), (k, n, cut)
                else:
                    torch.testing.assert_close(few, out[cut], rtol=1e-4, atol=1e-4)
            one = h[:1].contiguous()
            ref = torch.full_like(out[:1], torch.nan)
            linear.linear(one, matrix, ref)
            for config in ((16, 128, 4, 3), (32, 128, 4, 2), (64, 64, 4, 4), (32, 256, 8, 2)) if big else ():
                few = torch.full_like(out[:1], torch.nan)
                chain.few_rows(matrix, one, few, config=config)
                assert torch.equal(bits(few), bits(ref)), config


@pytest.mark.parametrize("name", ["q8", "q4", "q4a"])
def test_packed_layers(name: str, device: torch.device, dtypes: list[torch.dtype], big: bool) -> None:
    """Unpacked whole, in registers or row by row, packed weights are the same weights."""
    generator = torch.Generator().manual_seed(7)
    for dtype in dtypes:
        for k, n in ((4096, 512), (1024, 256)) if big else ((4096, 32), (160, 32)):
            matrix = packed(rows_of(generator, n, k), name, dtype, device)
            whole = torch.full((n, k), torch.nan, dtype=dtype, device=device)
            assert torch.equal(bits(unpack(matrix, whole)), bits(matrix.reference()))
            dense = Matrix.dense(whole)
            for rows in (1, 40):
                h = rows_of(generator, rows, k).to(dtype).to(device)
                a, b = (torch.full((rows, n), torch.nan, dtype=dtype, device=device) for _ in range(2))
                linear.linear(h, matrix, a)
                linear.linear(h, dense, b)
                assert torch.equal(bits(a), bits(b)), (dtype, k, rows)
            ids = torch.tensor([n - 1, 0, 7], device=device)
            x = torch.full((3, k), torch.nan, device=device)
            embed(matrix, ids, x, 3.0)
            assert torch.equal(x, whole[ids].float() * 3.0)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("k", [640, 4096])
def test_gate_in_and_after_a_product(act: str, k: int, device: torch.device, dtypes: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(8)
    for dtype in dtypes:
        matrix = Matrix.dense((rows_of(generator, 96, k) * 0.05).to(dtype).to(device))
        h = rows_of(generator, 5, k).to(dtype).to(device)
        both = torch.full((5, 96), torch.nan, dtype=dtype, device=device)
        after, within = (torch.full((5, 48), torch.nan, dtype=dtype, device=device) for _ in range(2))
        linear.linear(h, matrix, both)
        gate.gate(both, after, act)
        linear.linear(h, matrix, within, act=act)
        if device.type == "cuda":
            assert torch.equal(bits(after), bits(within))
        else:
            torch.testing.assert_close(after, within, rtol=1e-4, atol=1e-4)


def test_an_activation_that_finds_no_room(device: torch.device) -> None:
    """Rows of more than 3,072 columns in four blocks, and many rows, take it in a launch of its own."""
    matrix, h = Matrix.dense(torch.zeros((8, 3584), device=device)), torch.zeros((40, 3584), device=device)
    assert not linear.gates(matrix, 1) and linear.gates(Matrix.dense(torch.zeros(8, 3072)), 32)
    assert linear.gates(Matrix.dense(torch.zeros(8, 4096)), 32) and not linear.gates(
        Matrix.dense(torch.zeros(8, 640)), 33
    )
    for rows in (1, 40):
        with pytest.raises(InputError, match=r"launch `gate.gate`"):
            linear.linear(h[:rows], matrix, torch.empty((rows, 4), device=device), act="silu")
    with pytest.raises(InputError, match=r"launch `gate.gate`"):
        segments.few_rows(matrix, torch.empty((1, 4), device=device), h=h[:1], act="silu")


def test_scales_that_kernels_do_not_multiply_exactly(device: torch.device) -> None:
    codes, units = torch.zeros((2, 32), dtype=torch.uint8), torch.ones(2)
    with pytest.raises(InputError, match="11 bits"):
        Matrix.packed(
            codes, torch.full((2, 1), 1.0 + 2.0**-11), units, zero=8, bits=4, dtype=torch.float32, device=device
        )


def test_which_product_serves(device: torch.device) -> None:
    assert segments.segment(640) == 128 and segments.segment(1024) == 128 and segments.segment(3072) == 384
    assert segments.serves(Matrix.dense(torch.zeros(2, 4095))) and not segments.serves(
        Matrix.dense(torch.zeros(2, 4096))
    )


def test_no_product_of_bfloat16_is_interpreted(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the interpreter's multiplication is not used here")
    weight = torch.ones((16, 160), dtype=torch.bfloat16)
    out = torch.empty((1, 16), dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="product of bfloat16"):
        linear.linear(weight[:1], Matrix.dense(weight), out)
