"""Moves between pages and payloads: every byte, NaNs included, against torch."""

import pytest
import torch

from numem.kernels.cuda import pages


@pytest.mark.parametrize("layers", [None, [2, 0]])
def test_scatter_and_gather(
    layers: list[int] | None, device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    shape = (3, 40, 8, 16, 128) if big else (3, 9, 3, 16, 16)
    members = 3 if layers is None else len(layers)
    generator = torch.Generator().manual_seed(1)
    which = None if layers is None else torch.tensor(layers, dtype=torch.int32, device=device)
    for dtype in dtypes:
        kind = torch.int16 if dtype.itemsize == 2 else torch.int32

        def bits(*size: int, kind: torch.dtype = kind, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randint(-30000, 30000, size, generator=generator).to(kind).view(dtype).to(device)

        table = torch.randperm(shape[1], generator=generator)[:7].to(torch.int32).to(device)
        for start, n, skip in ((0, 16, 0), (5, 90, 0), (30, 61, 7), (17, 1, 0), (3, 4, 4)):
            k, v, payload = bits(*shape), bits(*shape), bits(2, members, n, shape[2] * shape[4])
            k2, v2 = k.clone(), v.clone()
            pages.move(payload, k, v, table, start, layers=which, skip=skip, gather=False)
            pages.reference(payload, k2, v2, table, start, layers=which, skip=skip, gather=False)
            assert torch.equal(k.view(kind), k2.view(kind)) and torch.equal(v.view(kind), v2.view(kind))
            back = bits(*payload.shape)
            pages.move(back, k, v, table, start, layers=which, skip=0, gather=True)
            assert torch.equal(back[:, :, skip:].view(kind), payload[:, :, skip:].view(kind))


def test_copy_fill_and_digest(device: torch.device) -> None:
    k, v = (torch.randn((2, 5, 2, 16, 16)).to(device) for _ in range(2))
    before = pages.digest(k, v, [0, 1, 2])
    assert len({tuple(row) for row in before.tolist()}) == 3
    pages.copy_page(k, v, 1, 4)
    assert torch.equal(pages.digest(k, v, [4]), before[1:2])
    k[1, 4, 1, 15, 15] += 1e-3
    assert not torch.equal(pages.digest(k, v, [4]), before[1:2])
    k[0, 0, 0, 0, :2] = k[0, 0, 0, 0, :2].flip(0)
    assert not torch.equal(pages.digest(k, v, [0]), before[:1])
    pages.fill(k, v, torch.tensor([2], device=device))
    assert (k[:, 2].view(torch.int32) == -1).all() and (v[:, 2].view(torch.int32) == -1).all()
