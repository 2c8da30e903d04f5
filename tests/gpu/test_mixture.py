"""Mixtures: against torch and the CPU's rule of choice; a row's bits by themselves, in both forms."""

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels.cuda import mixture
from numem.kernels.cuda.matrix import Matrix, Stack
from numem.kernels.cuda.mixture import Scratch
from numem.kernels.mixture import route
from tests.gpu.matrix_fixtures import bits, packed, rows_of


class Model:
    """Random experts."""

    def __init__(
        self, experts: int, top_k: int, hidden: int, inner: int, name: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(experts + hidden)
        self.experts, self.top_k, self.inner = experts, top_k, inner
        self.router = (rows_of(generator, experts, hidden) * hidden**-0.5).to(device)

        def stack(n: int, k: int) -> Stack:
            weights = [rows_of(generator, n, k) * k**-0.5 for _ in range(experts)]
            if name == "dense":
                return Stack.of([Matrix.dense(weight.to(dtype).to(device)) for weight in weights])
            return Stack.of([packed(weight, name, dtype, device) for weight in weights])

        self.gate_up, self.down = stack(2 * inner, hidden), stack(hidden, inner)

    def __call__(self, h: Tensor, norm_topk: bool = True, act: str = "silu") -> tuple[Tensor, Scratch]:
        y = torch.full_like(h, torch.nan)
        scratch = Scratch.of(len(h) + 1, self.experts, self.top_k, self.inner, h.shape[1], h.dtype, h.device)
        for part in (scratch.weights, scratch.inner, scratch.outer):
            part.fill_(torch.nan)
        mixture.mixture(
            h, self.router, self.gate_up, self.down, y,
            top_k=self.top_k, norm_topk=norm_topk, act=act, scratch=scratch,
        )  # fmt: skip
        return y, scratch

    def reference(self, h: Tensor, norm_topk: bool = True, act: str = "silu") -> Tensor:
        return mixture.reference(
            h, self.router, self.gate_up, self.down,
            top_k=self.top_k, norm_topk=norm_topk, act=act,
        )  # fmt: skip


@pytest.mark.parametrize("name, norm_topk, act", [("dense", True, "silu"), ("q8", False, "gelu"), ("q4", True, "silu")])
def test_equal_torch_and_a_row_by_itself(
    name: str, norm_topk: bool, act: str, device: torch.device, dtypes: list[torch.dtype], big: bool
) -> None:
    """One row, few rows and tiles of rows of an expert give the same bits on the GPU."""
    shapes = [(128, 8, 2048, 768), (8, 2, 4096, 1536), (60, 4, 1024, 4096)] if big else [(5, 2, 160, 32)]
    generator = torch.Generator().manual_seed(1)
    for dtype in dtypes:
        for shape in shapes:
            if big and (dtype is torch.float32 or name != "dense") and shape != shapes[0]:
                continue
            model = Model(*shape, name, dtype, device)
            h = rows_of(generator, 600 if big else 34, shape[2]).to(dtype).to(device)
            whole, _ = model(h, norm_topk, act)
            expected = model.reference(h, norm_topk, act)
            # roundings to DT of the inner row, of each expert's row and of the sum
            close = (2.0**-6 if dtype is torch.bfloat16 else 2.0**-17) * expected.abs().max()
            assert ((whole.float() - expected.float()).abs() <= close).all()
            for cut in (
                (slice(0, 1), slice(3, 5)) if not big else (slice(0, 1), slice(3, 34), slice(599, 600), slice(9, 60))
            ):
                part, _ = model(h[cut].contiguous(), norm_topk, act)
                if big:
                    assert torch.equal(bits(part), bits(whole[cut])), (shape, dtype, cut)
                else:
                    torch.testing.assert_close(part, whole[cut], rtol=1e-4, atol=1e-5)


def test_choice_is_that_of_the_cpu(device: torch.device, dtypes: list[torch.dtype], big: bool) -> None:
    """Experts and weights, equals by lowest id: rows of the router that are equal make equal shares."""
    shape = (128, 8, 256, 32) if big else (6, 3, 160, 32)
    generator = torch.Generator().manual_seed(2)
    for dtype in dtypes:
        model = Model(*shape, "dense", dtype, device)
        model.router[4] = model.router[1]
        model.router[3] = model.router[0]
        h = rows_of(generator, 20 if big else 6, shape[2]).to(dtype).to(device)
        h[1] = 0.0  # all equal
        for norm_topk in (False, True):
            _, scratch = model(h, norm_topk)
            logits = h.float().cpu() @ model.router.cpu().T
            logits[:, 4], logits[:, 3] = logits[:, 1], logits[:, 0]
            ids, weights = route(logits, model.top_k, norm_topk=norm_topk)
            order = np.argsort(ids, axis=1, kind="stable")
            rows = len(h)
            assert np.array_equal(scratch.ids[:rows].cpu().numpy(), np.take_along_axis(ids, order, 1))
            # sums over k and over the experts run in another order than on the CPU
            found = scratch.weights[:rows].cpu().numpy()
            np.testing.assert_allclose(found, np.take_along_axis(weights, order, 1), rtol=3e-5)
            assert scratch.ids[1].tolist() == list(range(model.top_k))
            assert scratch.weights[rows].isnan().all()  # what no row owns is not written


def test_a_damaged_row_spoils_no_other(device: torch.device, dtypes: list[torch.dtype]) -> None:
    for dtype in dtypes:
        model = Model(5, 2, 160, 32, "dense", dtype, device)
        h = rows_of(torch.Generator().manual_seed(3), 3, 160).to(dtype).to(device)
        right, _ = model(h)
        h[1, 7] = torch.nan
        y, _ = model(h)
        assert torch.equal(bits(y[::2].contiguous()), bits(right[::2].contiguous())) and y[1].isnan().all()


def test_what_is_refused(device: torch.device) -> None:
    model = Model(4, 2, 64, 32, "dense", torch.float32, device)
    h = torch.randn((2, 64), device=device)
    model.top_k = 5
    with pytest.raises(InputError, match=r"top_k 5 in \[1, 4\]"):
        model(h)
    model.top_k, model.gate_up = 2, model.down
    with pytest.raises(InputError, match=r"gate_up 4 x \(64, 32\) must be 4 x \(64, 64\)"):
        model(h)
