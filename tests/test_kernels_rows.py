"""Row kernels: rotary embedding with its page writes, moves between pages and payload."""

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native
from numem.kernels.pages import PAGE, gather_rows, new_pools, scatter_rows
from numem.kernels.rope import rope_write
from tests.kernel_fixtures import ISAS, PATHS, bits, needs_native, randn, restored

__all__ = ["restored"]

DTYPES = [torch.float32, torch.bfloat16]


# ---- rotary embedding and page writes ----

HEADS, KV, DIM = 4, 2, 16


def rope_case(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, cosines, sines, key pages, value pages; the pages hold 0xFF bytes."""
    k, v = new_pools(1, 6, KV, DIM, dtype)
    k.view(torch.uint8).fill_(255)
    v.view(torch.uint8).fill_(255)
    angle = torch.outer(torch.arange(64).double(), 1e4 ** -(torch.arange(DIM // 2) / (DIM // 2)).double())
    return randn(rows, (HEADS + 2 * KV) * DIM), angle.cos().float(), angle.sin().float(), k[0], v[0]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = len(cos)
    a, b = x[:half], x[half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[2 * half :]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [0, 3, DIM // 2])
def test_rope_rotates_in_place_and_writes_only_its_slots(path: str, dtype: torch.dtype, half: int) -> None:
    """Idle rows and rows without a slot write to no page (vLLM#37442, vLLM#38436); components past the tables stay."""
    native.use(path)
    qkv, cos, sin, k, v = rope_case(5, dtype)
    cos, sin = cos[:, :half].contiguous(), sin[:, :half].contiguous()
    before = qkv.clone()
    positions = torch.tensor([0, 63, -1, 17, 5])
    slots = torch.tensor([5 * 16 + 3, 2 * 16, 7, 95, -1])
    rope_write(qkv, cos, sin, positions, k, v, slots, HEADS, KV, DIM)
    want_k, want_v = (new_pools(1, 6, KV, DIM, dtype)[i][0] for i in (0, 1))
    want_k.view(torch.uint8).fill_(255)
    want_v.view(torch.uint8).fill_(255)
    for row, (p, s) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        heads = before[row].view(-1, DIM)
        want = heads.clone()
        if p >= 0:
            for h in range(HEADS + KV):
                want[h] = rotated(heads[h], cos[p], sin[p])
        assert bits(qkv[row]) == bits(want.view(-1))
        if p >= 0 and s >= 0:
            want_k[s // 16, :, :, s % 16] = want[HEADS : HEADS + KV].to(dtype)
            want_v[s // 16, :, s % 16] = want[HEADS + KV :].to(dtype)
    assert bits(k) == bits(want_k) and bits(v) == bits(want_v)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [0, 5, DIM // 2])
def test_rope_bits_are_equal_on_all_builds_and_threads(dtype: torch.dtype, half: int) -> None:
    results = set()
    for isa in ISAS:
        native.use(isa)
        for threads in (1, 2):
            native.set_threads(threads)
            qkv, cos, sin, k, v = rope_case(64, dtype)
            cos, sin = cos[:, :half].contiguous(), sin[:, :half].contiguous()
            rope_write(qkv, cos, sin, torch.arange(64), k, v, torch.arange(64) + 20, HEADS, KV, DIM)
            results.add(bits(qkv) + bits(k) + bits(v))
    assert len(results) == 1


@needs_native
def test_bfloat16_pages_round_to_nearest_even() -> None:
    """Ties, overflow to infinity, NaN and subnormal numbers as torch rounds them."""
    qkv, cos, sin, k, v = rope_case(1, torch.bfloat16)
    raw = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFFC00001, 0x00018000, 0x80008000, 0x7F800000] * 2
    qkv[0, (HEADS + KV) * DIM : (HEADS + KV + 1) * DIM] = torch.from_numpy(np.array(raw, np.uint32).view(np.float32))
    row = qkv[0, (HEADS + KV) * DIM :].clone()
    rope_write(qkv, cos, sin, torch.tensor([0]), k, v, torch.tensor([0]), HEADS, KV, DIM)
    want = row.to(torch.bfloat16).view(KV, DIM)
    assert torch.equal(v[0, :, 0].nan_to_num(nan=-7.0), want.nan_to_num(nan=-7.0))
    assert bool(v[0, 0, 0].isnan().equal(want[0].isnan()))


@pytest.mark.parametrize("path", PATHS)
def test_rope_refuses_positions_past_the_table_before_writing(path: str) -> None:
    """pegainfer#220, vLLM#17924: never a value from outside the table."""
    native.use(path)
    for position, slot in ((64, 0), (0, 6 * 16)):
        qkv, cos, sin, k, v = rope_case(3, torch.float32)
        before = bits(qkv) + bits(k) + bits(v)
        with pytest.raises(InputError, match="row 1"):
            rope_write(qkv, cos, sin, torch.tensor([0, position, 1]), k, v, torch.tensor([0, slot, 1]), HEADS, KV, DIM)
        assert bits(qkv) + bits(k) + bits(v) == before


def test_rope_refuses_tables_wider_than_a_head() -> None:
    qkv, cos, _, k, v = rope_case(1, torch.float32)
    wide = torch.cat((cos, cos), 1)
    with pytest.raises(InputError, match="up to 8"):
        rope_write(qkv, wide, wide, torch.tensor([0]), k, v, torch.tensor([0]), HEADS, KV, DIM)


# ---- moves ----


@pytest.mark.parametrize("path", [*ISAS[:1], "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 16), (3, 10), (15, 2), (16, 256), (100, 37), (5, 0), (0, 288)])
def test_scatter_then_gather_returns_the_bytes_and_touches_nothing_else(
    path: str, dtype: torch.dtype, start: int, n: int
) -> None:
    """Raw moves: any bit pattern survives, NaN payloads included; other rows and pages keep their bytes."""
    native.use(path)
    layers, pool, kv, dim = 3, 40, 2, 32
    g = torch.Generator().manual_seed(start * 300 + n)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (2 * layers * n * kv * dim * size,), dtype=torch.uint8, generator=g)
    payload = raw.view(dtype).view(2, layers, n, kv * dim)
    route = torch.randperm(pool, generator=g)[: 288 // PAGE].int()
    k, v = new_pools(layers, pool, kv, dim, dtype)
    k.view(torch.uint8).fill_(0xA5)
    v.view(torch.uint8).fill_(0xA5)
    scatter_rows(payload, k, v, route, start)
    assert bits(gather_rows(k, v, route, start, n)) == bits(payload)
    everything = gather_rows(k, v, route, 0, 288)
    for i, keys in enumerate(everything[0, 0]):
        if not start <= i < start + n:
            assert set(bits(keys)) == {0xA5}
    touched = sum(int((t.view(torch.uint8) != 0xA5).sum()) for t in (k, v))
    assert touched == int((raw != 0xA5).sum())
    if n:
        token = start + n - 1
        page, at = int(route[token // PAGE]), token % PAGE
        assert bits(k[1, page, :, :, at].reshape(-1)) == bits(payload[0, 1, -1])
        assert bits(v[1, page, :, at].reshape(-1)) == bits(payload[1, 1, -1])


@pytest.mark.parametrize("path", [*ISAS[:1], "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("some", [[2], [0, 3], [3, 1], [0, 1, 2, 3]])
def test_moves_of_some_layers_touch_no_other(path: str, dtype: torch.dtype, some: list[int]) -> None:
    native.use(path)
    pool, kv, dim, start, n = 8, 2, 32, 11, 50
    g = torch.Generator().manual_seed(len(some))
    route = torch.randperm(pool, generator=g)[:4].int()
    k, v = new_pools(4, pool, kv, dim, dtype)
    whole = torch.randn((2, 4, n, kv * dim), generator=g).to(dtype)
    scatter_rows(whole[:, some].contiguous(), k, v, route, start, layers=some)
    others = [layer for layer in range(4) if layer not in some]
    assert not bool(k[others].any()) and not bool(v[others].any())
    assert bits(gather_rows(k, v, route, start, n, layers=some)) == bits(whole[:, some].contiguous())
    scatter_rows(whole, k, v, route, start)
    assert bits(gather_rows(k, v, route, start, n, layers=some)) == bits(whole[:, some].contiguous())
    for bad in ([], [4], [-1], [1, 1]):
        with pytest.raises(InputError, match="distinct"):
            gather_rows(k, v, route, start, n, layers=bad)


@pytest.mark.parametrize("path", [*ISAS[:1], "torch"])
def test_moves_refuse_wrong_routes_before_writing(path: str) -> None:
    native.use(path)
    k, v = new_pools(1, 4, 1, 16, torch.float32)
    payload = torch.ones(2, 1, 20, 16)
    with pytest.raises(InputError, match="page 4 at index 1"):
        scatter_rows(payload, k, v, torch.tensor([0, 4], dtype=torch.int32), 0)
    with pytest.raises(InputError, match="outside the route"):
        scatter_rows(payload, k, v, torch.tensor([0, 1], dtype=torch.int32), 13)
    with pytest.raises(InputError, match="payload"):
        scatter_rows(payload.bfloat16(), k, v, torch.tensor([0, 1], dtype=torch.int32), 0)
    assert not bool(k.any()) and not bool(v.any())
