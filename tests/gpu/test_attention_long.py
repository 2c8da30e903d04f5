"""Many tiles: merged by the last program or by a launch of their own, a window's tiles counted from its first."""

import pytest
import torch

from numem.kernels.cuda import attention
from tests.gpu.test_attention import Case, Shape, _equal


@pytest.mark.parametrize("window", [0, 300])
def test_merges(window: int, device: torch.device, dtypes: list[torch.dtype]) -> None:
    n = 1180  # more tiles than are loaded together
    for dtype in dtypes:
        case = Case(Shape(3, 1, 16, window=window), [n], dtype, device, seed=window)
        whole = case.prefill()[0]
        for apart in (False, True):
            for split in ((1, 1), (4, 2)):
                out = torch.full((1, 48), torch.nan).to(dtype).to(device)
                scratch = attention.Scratch.of(1, 3, 16, 10, device)
                scratch.a.fill_(torch.nan)
                attention.decode(
                    case.qkv[0][-1:], case.norms, case.cos, case.sin, case.k, case.v, case.tables,
                    torch.tensor([n - 1]).to(device), out, scratch, **case.shape.sizes, scale=case.scale,
                    window=window, tiles=10, split=split, warps=4, apart=apart,
                )  # fmt: skip
                _equal(device)(out[0], whole[-1])
                assert not scratch.count.any()
