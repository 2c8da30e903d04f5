"""Tiles are merged by the last program, by a launch of their own or by the product that follows, with the same bits."""

import pytest
import torch

from numem.errors import InputError
from numem.kernels.cuda import attention, segments
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.cuda.merging import Parts
from tests.gpu.test_attention import Case, Shape, _equal

LEFT = (Shape(3, 1, 128), Shape(2, 1, 256))


@pytest.mark.parametrize("window", [0, 300])
def test_merges(window: int, device: torch.device, dtypes: list[torch.dtype]) -> None:
    """Of more tiles than are loaded together, a window's counted from its first; beside a lane of one tile and an idle one."""
    lengths = [1180, 90, 1]
    for dtype in dtypes:
        case = Case(Shape(3, 1, 16, window=window), lengths, dtype, device, seed=window)
        whole = case.prefill()
        rows = [lengths[0] - 1, lengths[1] - 1, -1]
        qkv = torch.stack([case.qkv[lane][max(row, 0)] for lane, row in enumerate(rows)])
        for merge in ("last", "apart"):
            for split in ((1, 1), (4, 2)):
                out = torch.full((3, 48), torch.nan).to(dtype).to(device)
                scratch = attention.Scratch.of(3, 3, 16, 10, device)
                scratch.a.fill_(torch.nan)
                attention.decode(
                    qkv, case.norms, case.cos, case.sin, case.k, case.v, case.tables, torch.tensor(rows).to(device), out,
                    scratch, **case.shape.sizes, scale=case.scale, window=window, tiles=10, split=split, warps=4,
                    merge=merge,
                )  # fmt: skip
                for lane in (0, 1):
                    _equal(device)(out[lane], whole[lane][rows[lane]])
                assert out[2].isnan().all() and not scratch.count.any()


def test_more_rows_than_are_prepared_one_by_one(device: torch.device, dtypes: list[torch.dtype]) -> None:
    """They take what the last program merged: a product that was handed their tiles would find no rows."""
    matrix = Matrix.dense(torch.zeros((8, 256), dtype=dtypes[0], device=device))
    assert segments.merges(matrix, 4, 128, 1) and not segments.merges(matrix, 5, 128, 1)
    assert not segments.merges(matrix, 1, 96, 1) and not segments.merges(matrix, 1, 128, 17)
    words, a = torch.zeros(10, dtype=torch.int64, device=device), torch.zeros((10, 128), device=device)
    parts = Parts(words, a, 1, torch.zeros(5, dtype=torch.int64, device=device), 2, 128, 0, 1)
    with pytest.raises(InputError, match="5 rows"):
        segments.few_rows(matrix, torch.empty((5, 8), dtype=dtypes[0], device=device), parts=parts)


@pytest.mark.parametrize("shape", LEFT, ids=lambda s: f"{s.heads}x{s.head_dim}")
@pytest.mark.parametrize("window", [0, 150])
def test_the_next_product_merges(
    shape: Shape, window: int, device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    lengths, width = [250, 1, 130], shape.heads * shape.head_dim
    for dtype in dtypes:
        case = Case(Shape(shape.heads, shape.kv_heads, shape.head_dim, window=window), lengths, dtype, device, seed=9)
        case.prefill()
        matrix = Matrix.dense(torch.randn((40, width), device=device).div(width**0.5).to(dtype))
        for lanes in (1, 3):
            rows = [[249], [249, -1, 129]][lanes > 1]
            tiles = 250 // nl.tile_keys(shape.head_dim) + 1
            assert segments.merges(matrix, lanes, shape.head_dim, attention.seen_tiles(tiles, window, shape.head_dim))
            found = []
            for merge in ("last", "next"):
                out = torch.full((lanes, width), torch.nan).to(dtype).to(device)
                scratch = attention.Scratch.of(lanes, shape.heads, shape.head_dim, tiles, device)
                scratch.words.fill_(-1)
                scratch.a.fill_(torch.nan)
                parts = attention.decode(
                    torch.stack([case.qkv[lane][max(row, 0)] for lane, row in enumerate(rows)]), case.norms, case.cos,
                    case.sin, case.k, case.v, case.tables, torch.tensor(rows).to(device), out, scratch,
                    **case.shape.sizes, scale=case.scale, window=window, tiles=tiles, merge=merge,
                )  # fmt: skip
                product = torch.full((lanes, 40), torch.nan).to(dtype).to(device)
                if merge == "next":
                    assert parts is not None and out.isnan().all() and not scratch.count.any()
                    segments.few_rows(matrix, product, parts=parts)
                else:
                    assert parts is None
                    segments.few_rows(matrix, product, h=out)
                found.append(product)
            for lane, row in enumerate(rows):
                if row >= 0:
                    _equal(device)(found[1][lane], found[0][lane])
                    assert found[1][lane].isfinite().all()
                else:
                    assert not found[1][lane].any()
