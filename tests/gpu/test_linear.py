"""Linear layers: every product that serves a number of rows gives the same bits."""

from typing import cast

import pytest
import torch
from triton.runtime.errors import InterpreterError

from numem.errors import InputError
from numem.kernels import formats
from numem.kernels.cuda import chain, gate, linear, segments
from numem.kernels.cuda.embed import embed
from numem.kernels.cuda.matrix import Matrix, codes_of, packed_bytes
from numem.kernels.cuda.unpack import unpack
from numem.kernels.formats import FORMATS
from numem.models.weights.device_maker import DeviceMaker
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
    codes = packed(torch.randn((32, 3072)), "q8", torch.float32, device)
    assert not linear.gates(codes, 1) and linear.gates(packed(torch.randn((32, 2048)), "q8", torch.float32, device), 1)
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
    with pytest.raises(InputError, match="zero of 12"):
        Matrix.packed(codes, torch.ones((2, 1)), units, zero=12, bits=4, dtype=torch.float32, device=device)
    for zero in {f.zero for f in FORMATS.values()}:
        Matrix.packed(codes, torch.ones((2, 1)), units, zero=zero, bits=8, dtype=torch.float32, device=device)


@pytest.mark.parametrize("name", ["q8", "q4", "q4a", "q4k"])
def test_a_matrix_that_was_loaded(
    name: str, device: torch.device, dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slabs, some with scales that float16 does not hold; multiplied as the weights that it stands for."""
    monkeypatch.setattr("numem.models.weights.device_maker._SLAB", 1 << 13)
    generator = torch.Generator().manual_seed(6)
    n, k = 77, 512 if name == "q4k" else 160
    weight = rows_of(generator, n, k) * torch.logspace(-6, 3, n)[:, None]
    planes = formats.quantise(weight, name)
    for dtype in dtypes:
        matrix = cast(Matrix, DeviceMaker(device, dtype).quantised(name, n, k, planes, None))
        whole = unpack(matrix, torch.full((n, k), torch.nan, dtype=dtype, device=device))
        exact = formats.dequantise(planes, name, n, k).to(dtype)
        if FORMATS[name].mins:  # rounded once here and twice there
            torch.testing.assert_close(whole.cpu(), exact, rtol=2.0**-7 if dtype is torch.bfloat16 else 2e-6, atol=1e-9)
        else:
            assert torch.equal(bits(whole.cpu()), bits(exact))
        h = rows_of(generator, 3, k).to(dtype).to(device)
        a, b = (torch.full((3, n), torch.nan, dtype=dtype, device=device) for _ in range(2))
        linear.linear(h, matrix, a)
        linear.linear(h, Matrix.dense(whole), b)
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("bits_of_code", [8, 4])
def test_where_codes_lie(bits_of_code: int) -> None:
    """Thread t of four holds columns 16 s + 8 h + 2 t + e together: 16 bytes of 64 columns, or of 128 in 4 bits."""
    codes = torch.randint(0, 1 << bits_of_code, (3, 384), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    held = packed_bytes(codes, bits_of_code)
    assert held.shape == (3, 384 * bits_of_code // 8) and torch.equal(codes_of(held, bits_of_code), codes)
    for column in range(384):
        block, c, s, h, t, e = (
            column // 128,
            column // 64 % 2,
            column // 16 % 4,
            column // 8 % 2,
            column // 2 % 4,
            column % 2,
        )
        if bits_of_code == 8:
            found = held[:, 128 * block + 64 * c + 16 * t + 4 * s + 2 * h + e]
        else:
            found = held[:, 64 * block + 16 * t + 8 * c + 4 * (s // 2) + 2 * h + e] >> 4 * (s % 2) & 15
        assert torch.equal(found, codes[:, column]), column


def test_scales_are_halves_where_those_hold_them(device: torch.device) -> None:
    """float16 where it is exact, also of rows that fill no tile; float32 where units make scales too small for it."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (19, 160), generator=generator).to(torch.uint8)
    scales = (rows_of(generator, 19, 5).abs() + 0.5).half()
    for unit, held in ((1.0, torch.float16), (2.0**-20, torch.float32)):
        units = torch.full((19,), unit)
        matrix = Matrix.packed(codes, scales, units, zero=128, bits=8, dtype=torch.float32, device=device)
        assert matrix.scales is not None and matrix.scales.dtype is held and matrix.scales.shape == (2, 2, 16, 4)
        exact = (codes.float() - 128.0) * (scales.float() * unit).repeat_interleave(32, 1)
        assert torch.equal(matrix.reference().cpu(), exact)
        whole = unpack(matrix, torch.full((19, 160), torch.nan, device=device))
        assert torch.equal(bits(whole.cpu()), bits(exact))


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
