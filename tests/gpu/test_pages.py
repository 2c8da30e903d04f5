"""Moves between pages and payloads: every byte, NaNs included, against torch; and digests against numpy."""

import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import pages


def _kind(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def _bits(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *size: int) -> Tensor:
    """Any bits, those of NaNs too."""
    low, high = (-(2**15), 2**15) if dtype.itemsize == 2 else (-(2**31), 2**31)
    return torch.randint(low, high, size, generator=generator).to(_kind(dtype)).view(dtype).to(device)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(_kind(a.dtype)), b.view(_kind(b.dtype)))


@pytest.mark.parametrize("layers", [None, [2, 0]])
@pytest.mark.parametrize("heads", [(8, 128), (3, 64), (1, 96)])
def test_scatter_and_gather(
    layers: list[int] | None,
    heads: tuple[int, int],
    device: torch.device,
    dtypes: list[torch.dtype],
    big: bool,
) -> None:
    kv, d = heads if big else (heads[0] // 3 + 1, heads[1] // 8)
    shape = (3, 40 if big else 9, kv, 16, d)
    members = 3 if layers is None else len(layers)
    generator = torch.Generator().manual_seed(1)
    which = None if layers is None else torch.tensor(layers, dtype=torch.int32, device=device)
    for dtype in dtypes:
        table = torch.randperm(shape[1], generator=generator)[:7].to(torch.int32).to(device)
        for start, n, skip in ((0, 16, 0), (5, 90, 0), (30, 61, 7), (17, 1, 0), (3, 4, 4), (16, 32, 16), (-5, 30, 9)):
            k, v, payload = (_bits(generator, dtype, device, *size) for size in (shape, shape, (2, members, n, kv * d)))
            k2, v2 = k.clone(), v.clone()
            pages.move(payload, k, v, table, start, layers=which, skip=skip, gather=False)
            pages.reference(payload, k2, v2, table, start, layers=which, skip=skip, gather=False)
            assert _equal(k, k2) and _equal(v, v2)
            back = _bits(generator, dtype, device, *payload.shape)
            pages.move(back, k, v, table, start, layers=which, skip=0, gather=True)
            assert _equal(back[:, :, skip:].contiguous(), payload[:, :, skip:].contiguous())


def test_pools_beyond_two_gibibytes(device: torch.device, big: bool) -> None:
    """Offsets are 64 bits wide."""
    if not big:
        pytest.skip("needs the memory of a GPU")
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.zeros((2, 100000, 8, 16, 128), dtype=torch.bfloat16, device=device) for _ in range(2))
    last = torch.tensor([99999, 7], dtype=torch.int32, device=device)
    payload = _bits(generator, torch.bfloat16, device, 2, 2, 20, 1024)
    pages.scatter_rows(payload, k, v, last, 3)
    back = torch.empty_like(payload)
    pages.gather_rows(k, v, last, 3, 20, back)
    assert _equal(back, payload)
    assert _equal(k[1, 99999, 0, 3], payload[0, 1, 0, :128]) and not k[0, 0].any()
    pages.copy_page(k, v, 99999, 50000)
    assert _equal(k[1, 50000], k[1, 99999]) and torch.equal(*pages.digest(k, v, [99999, 50000]))


def test_copies(device: torch.device, dtypes: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(3)
    for dtype in dtypes:
        k, v = (_bits(generator, dtype, device, 2, 6, 3, 16, 24) for _ in range(2))
        expected = k.clone(), v.clone()
        for source, target in ((1, 4), (0, 5)):
            for pool in expected:
                pool[:, target] = pool[:, source]
        listed = k.clone(), v.clone()
        pages.copy_pages(*listed, torch.tensor([[1, 4], [0, 5]], dtype=torch.int32, device=device))
        pages.copy_page(k, v, 1, 4)
        pages.copy_page(k, v, 0, 5)
        for one, two, right in zip((k, v), listed, expected, strict=True):
            assert _equal(one, right) and _equal(two, right)


def test_digests(device: torch.device, dtypes: list[torch.dtype], big: bool) -> None:
    """Equal to numpy's; and other bytes, other order, another layer or side give another one."""
    generator = torch.Generator().manual_seed(4)
    shape = (32, 5, 8, 16, 128) if big else (2, 5, 3, 16, 24)
    for dtype in dtypes:
        k, v = (_bits(generator, dtype, device, *shape) for _ in range(2))
        before = pages.digest(k, v, [0, 1, 2, 3])
        index = torch.arange(4, dtype=torch.int32, device=device)
        assert torch.equal(pages.hashes(k, v, index).cpu(), pages.digest_reference(k, v, index))
        assert len({x for row in before.tolist() for x in row}) == 8
        pages.copy_page(k, v, 1, 4)
        assert torch.equal(pages.digest(k, v, torch.tensor([4], device=device)), before[1:2])
        raw = k.view(_kind(dtype))
        raw[1, 4, 1, 15, 15] ^= 1
        changed = pages.digest(k, v, [4])
        assert (changed != before[1:2]).all()
        raw[0, 0] = raw[0, 0].flip(-1)
        k[:, 2] = k[:, 2].flip(0)
        swapped = k[:, 3].clone()
        k[:, 3] = v[:, 3]
        v[:, 3] = swapped
        assert (pages.digest(k, v, [0, 2, 3]) != before[[0, 2, 3]]).all()
        pages.fill(k, v, torch.tensor([2], device=device))
        assert all((pool[:, 2].contiguous().view(torch.uint8) == 255).all() for pool in (k, v))


def test_what_is_refused(device: torch.device) -> None:
    k, v = (torch.zeros((2, 4, 3, 16, 8), device=device) for _ in range(2))
    table = torch.tensor([2, 0], dtype=torch.int32, device=device)
    payload = torch.randn((2, 2, 5, 24), device=device)
    with pytest.raises(InputError, match=r"scatter_rows: positions \[28, 33\) lie outside the route's 2 pages"):
        pages.scatter_rows(payload, k, v, table, 28)
    with pytest.raises(InputError, match="payload .* must be contiguous"):
        pages.scatter_rows(payload[:, :1], k, v, table, 0)
    with pytest.raises(InputError, match="do not belong together"):
        pages.gather_rows(k, v[:1], table, 0, 5, payload)
    with pytest.raises(InputError, match="must be a contiguous int32 vector"):
        pages.gather_rows(k, v, table.long(), 0, 5, payload)
    with pytest.raises(InputError, match="must have 4 rows"):
        pages.gather_rows(k, v, table, 0, 4, payload)
    with pytest.raises(InputError, match="page 4 is outside the pool of 4"):
        pages.copy_page(k, v, 0, 4)
    with pytest.raises(InputError, match="must be contiguous int32"):
        pages.copy_pages(k, v, table)
    assert not k.any() and not v.any()
