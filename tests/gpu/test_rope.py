"""Norms and rotation by head and the write to pages: against torch, and the same bits whatever the tile and warps."""

import pytest
import torch

from numem.kernels.cuda import rotary
from numem.kernels.cuda.rotary import HeadNorms


@pytest.mark.parametrize(("heads", "kv", "d", "half", "norms"), [(6, 2, 32, 16, True), (3, 1, 24, 4, False)])
def test_rows(
    heads: int, kv: int, d: int, half: int, norms: bool, device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    """Idle rows and rows without a slot write nothing; other warps and rows alone give the same bits."""
    for dtype in dtypes:
        _check(heads, kv, d * 8 if big else d, half * 8 if big else half, norms, 300 if big else 21, device, dtype)


def _check(
    heads: int, kv: int, d: int, half: int, norms: bool, m: int, device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(d)
    qkv = torch.randn((m, (heads + 2 * kv) * d), generator=generator).to(dtype).to(device)
    angle = torch.rand((64, half), generator=generator) * 6.3
    cos, sin = torch.cos(angle).to(device), torch.sin(angle).to(device)
    weights = [torch.rand(d, generator=generator).to(device) for _ in range(2)]
    norm = HeadNorms(weights[0], weights[1], 1e-6, 0.5) if norms else None
    positions = torch.randint(0, 64, (m,), generator=generator).to(device)
    slots = torch.randperm(m, generator=generator).to(device)
    positions[3], slots[5] = -1, -1
    shape = (m // 16 + 1, kv, 16, d)

    def run(rows: slice, warps: int) -> list[torch.Tensor]:
        out = [torch.full(shape, torch.nan).to(dtype).to(device) for _ in range(2)]
        q = torch.full((m, heads * d), torch.nan).to(dtype).to(device)
        rotary.rope_write(
            qkv[rows], norm, cos, sin, positions[rows], slots[rows], out[0], out[1], q[rows],
            heads=heads, kv_heads=kv, head_dim=d, warps=warps,
        )  # fmt: skip
        return [q, *out]

    whole = run(slice(0, m), 4)
    live = (positions >= 0) & (slots >= 0)
    wanted = rotary.reference(qkv[live], norm, cos, sin, positions[live], heads, kv)
    k, v = (t[slots[live] // 16, :, slots[live] % 16] for t in whole[1:])
    close = 2.0**-7 if dtype is torch.bfloat16 else 1e-5  # a rounding to DT; a few float32 steps
    for got, want in zip((whole[0][live].view(-1, heads, d), k, v), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=close, atol=close)
    assert whole[0][3].isnan().all() and not whole[0][5].isnan().any()
    assert int((~whole[1][..., 0].isnan()).sum()) == int(live.sum()) * kv
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    for warps in (1, 8):
        for a, b in zip(run(slice(0, m), warps), whole, strict=True):
            assert torch.equal(a.view(bits), b.view(bits))
    alone = run(slice(7, 8), 2)
    assert torch.equal(alone[0][7].view(bits), whole[0][7].view(bits))


def test_sum_of_squares_of_small_and_large_heads(device: torch.device) -> None:
    """Heads of size 1e-15 to 1e15 are normalised to size 1; zeros stay zeros."""
    sizes = torch.tensor([1e-15, 1.0, 1e15, 0.0]).to(device)
    x = torch.randn((4, 16), generator=torch.Generator().manual_seed(1)).to(device) * sizes[:, None]
    qkv = torch.cat((x, x, x), 1).contiguous()
    ones, table = torch.ones(16, device=device), torch.ones((1, 0), device=device)
    pages = torch.full((1, 1, 16, 16), torch.nan, device=device)
    q = torch.full_like(x, torch.nan)
    at = torch.zeros(4, dtype=torch.int64, device=device)
    norm = HeadNorms(ones, ones, 1e-36, 0.0)
    rotary.rope_write(
        qkv, norm, table, table, at, torch.arange(4, device=device), pages, pages.clone(), q,
        heads=1, kv_heads=1, head_dim=16,
    )  # fmt: skip
    torch.testing.assert_close(q[:3].square().mean(1), torch.ones(3, device=device), rtol=1e-4, atol=1e-4)
    assert not q[3].any()
