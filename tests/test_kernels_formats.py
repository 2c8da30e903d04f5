"""Formats of quantised weights: bytes, error bounds, grids that come back as they were, adversarial rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import CheckpointError, InputError
from numem.kernels import formats, grids, native
from numem.kernels.formats import FORMATS, Format

NAMES = list(FORMATS)
SHAPES = [(1, 1), (33, 31), (64, 33), (5, 576), (3, 640)]


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(1000 * n + k + seed))


def back(weight: Tensor, name: str) -> Tensor:
    return formats.dequantise(formats.quantise(weight, name), name, *weight.shape)


def bound(weight: Tensor, name: str) -> Tensor:
    """The stated bound of each weight, from the stored scales, mins and codes: float64 [N, K]."""
    f = FORMATS[name]
    n, k = weight.shape
    planes = formats.quantise(weight, name)
    grid = formats.unpack(planes["records"], f)
    scale, low = (None if t is None else t.double() for t in grid.effective())
    assert scale is not None
    each = scale.abs().repeat_interleave(f.block, 1)
    codes = grid.codes.long()
    ends = (codes == (1 if name == "q8" else 0)) | (codes == (1 << f.code) - 1)
    allowed = each * (0.5 if name == "q8" else torch.where(ends, 1.0, 0.5))
    # the float16 of scales and mins, in a block's own size and in its row's
    allowed += 2.0**-10 * each * (1 << f.code) + 128 * 2.0**-25
    if low is not None:
        allowed += 2.0**-10 * low.abs().repeat_interleave(f.block, 1)
    if f.nested:
        allowed += grid.quantum().double().repeat_interleave(f.block, 1)
    return (allowed * planes["units"].double()[:, None])[:n, :k]


def test_the_formats_are_what_the_documentation_says() -> None:
    table = {f.name: (f.bits, f.record, f.head, f.span) for f in FORMATS.values()}
    assert table == {
        "q8": (8.5, 1088, 0, 32),
        "q4": (4.5, 576, 0, 32),
        "q4a": (5.0, 640, 0, 32),
        "q4k": (4.625, 576, 128, 256),
        "q6k": (6.5625, 832, 64, 256),
    }
    assert [FORMATS["q8"].fits(k) for k in (576, 640, 33)] == [True, True, False]
    assert [FORMATS["q4k"].fits(k) for k in (768, 640)] == [True, False]
    with pytest.raises(InputError, match="'q5' is unknown; use one of q8, q4, q4a, q4k, q6k"):
        formats.quantise(normal(1, 1), "q5")


@pytest.mark.parametrize("name", NAMES)
def test_packing_is_undone_by_unpacking_and_reaches_every_bit(name: str) -> None:
    f = FORMATS[name]
    shape, seeded = (2, 3, f.head + f.span // 32 * f.record), torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded)
    grid = formats.unpack(raw, f)
    assert torch.equal(formats.pack(grid, f), raw)
    assert int(grid.codes.max()) == (1 << f.code) - 1


def place(f: Format, column: int, i: int) -> tuple[int, int]:
    """(byte of the record, lowest bit of its four, where there are more than eight in all) as documented."""
    half, lane, group = column // 16, column % 16 * 4 + i % 4, i // 4
    if f.code == 8:
        return half * 512 + group * 64 + lane, 0
    if f.code == 4:
        return half * 256 + group % 4 * 64 + lane, group // 4 * 4
    return half * 256 + (group // 4 * 2 + group % 2) * 64 + lane, group % 4 // 2 * 4


@pytest.mark.parametrize("name", NAMES)
def test_each_code_lies_at_its_documented_place(name: str) -> None:
    f = FORMATS[name]
    weight = normal(32, f.span)
    records = formats.quantise(weight, name)["records"]
    codes = formats.unpack(records, f).codes
    record = records[0, 0, f.head : f.head + f.record]
    for column in range(32):
        for i in range(32):
            byte, low = place(f, column, i)
            want = int(record[byte]) >> low & (255 if f.code == 8 else 15)
            if f.code == 6:
                pair = int(record[512 + column // 16 * 128 + i // 16 * 64 + column % 16 * 4 + i % 4])
                want |= (pair >> i // 4 % 4 * 2 & 3) << 4
            assert int(codes[column, i]) == want


def test_the_golden_block_of_signed_largest_over_eight() -> None:
    """w_j = (j - 16) / 8: d = 0.25; half-even differs from the published half-up bytes at j = 1, 5, 9, ..., 29."""
    w = (torch.arange(32.0) - 16) / 8
    codes = grids.Search(w[:, None], -8, 7).codes(w[:1] / -8, None)
    published = bytes.fromhex("809191a2a2b3b3c4c4d5d5e6e6f7f7f8")
    half_up = [b & 15 for b in published] + [b >> 4 for b in published]
    got = [int(q) + 8 for q in codes[:, 0]]
    assert got == [q - (j % 4 == 1) for j, q in enumerate(half_up)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_within_its_bound(name: str, shape: tuple[int, int]) -> None:
    """Clamped codes too (ds4 and kin: a bound of d / 2 fails on the extreme opposite to the largest)."""
    heavy = normal(*shape) / normal(*shape, seed=1).abs().clamp_(min=0.05)
    for weight in (normal(*shape), heavy, normal(*shape) + 3.0, -normal(*shape).abs()):
        off = (back(weight, name).double() - weight.double()).abs()
        assert bool((off <= bound(weight, name)).all())
        assert formats.error(weight, name) <= (0.52 if name == "q8" else 2.0)


def f16(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.float16))


def on_grid(kind: str, rng: np.random.Generator) -> Tensor:
    """Random blocks as ggml has them, dequantised and rounded to float16: [64, 512]."""
    d = (rng.uniform(0.5, 2.0, (64, 16, 1)) * 0.01).astype(np.float16).astype(np.float32)
    if kind == "q8_0":
        return f16((d / 16 * rng.integers(-127, 128, (64, 16, 32))).reshape(64, 512))
    if kind == "q5_0":
        return f16((d * (rng.integers(0, 32, (64, 16, 32)) - 16)).reshape(64, 512))
    if kind == "q4_0":
        q = rng.integers(0, 16, (64, 16, 32)) - 8
        q[..., 3] = -8
        return f16((d * q).reshape(64, 512))
    if kind == "q4_1":
        m = (-8 * d * rng.uniform(0.8, 1.2, d.shape)).astype(np.float16).astype(np.float32)
        return f16((d * rng.integers(0, 16, (64, 16, 32)) + m).reshape(64, 512))
    top = (rng.uniform(0.5, 2.0, (64, 2, 1, 1)) * 0.001).astype(np.float16).astype(np.float32)
    if kind == "q4_k":
        sc, mn = rng.integers(8, 64, (64, 2, 8, 1)), rng.integers(8, 64, (64, 2, 8, 1))
        sc[:, :, 3], mn[:, :, 5] = 63, 63
        q = rng.integers(0, 16, (64, 2, 8, 32))
        q[..., 7], q[..., 9] = 0, 15
        return f16((top * sc * q - 8 * top * mn).reshape(64, 512))
    sc = rng.integers(16, 128, (64, 2, 16, 1))
    sc[:, :, 11] = -128
    q = rng.integers(-31, 32, (64, 2, 16, 16))
    q[..., 7] = -32
    return f16((top * sc * q).reshape(64, 512))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("q8_0", "q8"),
        ("q5_0", "q8"),
        ("q4_0", "q4"),
        ("q4_1", "q4a"),
        ("q4_k", "q4k"),
        ("q4_k", "q4a"),
        ("q6_k", "q6k"),
    ],
)
def test_weights_that_were_quantised_before_come_back(kind: str, name: str) -> None:
    """What is left is the float16 of the given weights, a small part of a step."""
    weight = on_grid(kind, np.random.default_rng(5))
    assert formats.error(weight, name) < 0.1
    relative = float((back(weight, name) - weight).norm() / weight.float().norm())
    assert relative < 5e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-8, 1e30, 1e-30])
def test_rows_of_any_size_keep_their_relative_error(name: str, scale: float) -> None:
    """slime#2256, torchao#4762: a float16 scale neither overflows nor vanishes; a zero row stays zero."""
    weight = normal(8, 640)
    weight[2] *= scale
    weight[5] = 0.0
    got = back(weight, name)
    worst = {"q8": 0.007, "q6k": 0.03}.get(name, 0.12)
    for row in (0, 2, 7):
        want = weight[row].double()
        assert float((got[row].double() - want).norm() / want.norm()) < worst
    assert bool((got[5] == 0).all()) and bool(torch.isfinite(got).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_block_beside_others_is_exactly_zero(name: str) -> None:
    """auto-round#1908: the scale of an all-zero block is zero, and nothing is divided by it."""
    weight = normal(3, 512)
    weight[1, 96:128] = 0.0
    assert bool((back(weight, name)[1, 96:128] == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(bad: float) -> None:
    weight = normal(70, 64).to(torch.bfloat16)
    weight[68, 3] = bad
    with pytest.raises(CheckpointError, match=r"layers\.3\.up: row 68 has a NaN or infinite weight"):
        formats.quantise(weight, "q8", "layers.3.up")


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_mixed_types_equal_the_stacked_matrix(name: str) -> None:
    parts = [normal(5, 96), normal(70, 96, 1).half(), normal(2, 96, 2).bfloat16()]
    want = formats.quantise(torch.cat([p.float() for p in parts]), name)
    got = formats.quantise(parts, name)
    assert all(torch.equal(got[plane], want[plane]) for plane in want) and got.keys() == want.keys()
    with pytest.raises(InputError, match="not matrices of one width"):
        formats.quantise([parts[0], normal(2, 64)], name)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_search_gives_the_bytes_of_the_reference(name: str, isa: str) -> None:
    """On every instruction set and any number of threads, for each type of weights, odd sizes, zeros and tiny rows."""
    before, threads = native.isa(), native.threads()
    heavy = normal(70, 289) / normal(70, 289, 1)
    heavy[:, ::3], heavy[0], heavy[1], heavy[2] = 0.0, 0.0, -0.0, heavy[2] * 1e-36
    heavy[:, 100:140] *= 1e-6
    grid = torch.randint(-3, 4, (40, 289), generator=torch.Generator().manual_seed(3)) * -0.25
    parts = [heavy, normal(33, 289).half(), heavy.bfloat16(), normal(289, 5).T, grid]
    try:
        native.use("torch")
        want = formats.quantise(parts, name)
        native.use(isa)
        for count in (1, 2):
            native.set_threads(count)
            got = formats.quantise(parts, name)
            assert all(got[plane].numpy().tobytes() == want[plane].numpy().tobytes() for plane in want)
            heavy_only = formats.quantise(heavy[:, 3:40], name)
            native.use("torch")
            same = formats.quantise(heavy[:, 3:40], name)
            native.use(isa)
            assert all(torch.equal(heavy_only[plane], same[plane]) for plane in same)
        broken = heavy.half()
        broken[65, 288], broken[69, 0] = float("inf"), float("nan")
        with pytest.raises(CheckpointError, match="w: row 65 has"):
            formats.quantise([broken], name, "w")
    finally:
        native.use(before)
        native.set_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bytes_among_other_rows(name: str) -> None:
    weight = normal(900, 320)
    all_units = formats.quantise(weight, name)
    got = formats.dequantise(all_units, name, 900, 320)
    for row in (0, 500, 899):
        assert torch.equal(back(weight[row : row + 1], name)[0], got[row])
