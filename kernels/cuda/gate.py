"""The gate of a feed-forward block of many rows; of few rows it is part of the product before it."""

import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import language as nl
from numem.kernels.cuda.language import jit


@jit
def gate_kernel(gate_up, out, F, BLOCK: tl.constexpr, ACT: tl.constexpr, DT: tl.constexpr, PDL: tl.constexpr):
    nl.let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    nl.wait(PDL)
    gate = tl.load(gate_up + row * 2 * F + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + i, (nl.act(gate, ACT) * up).to(DT), mask=inside)


def gate(gate_up: Tensor, out: Tensor, act: str, *, pdl: bool = False) -> None:
    """out [M, F] = DT(act(gate) * up) of gate_up DT [M, 2 F], gate first; `act` of `nl.ACTIVATIONS`."""
    rows, width = out.shape
    block = min(2048, nl.next_power_of_2(width))
    gate_kernel[(rows, nl.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, ACT=nl.ACTIVATIONS[act], DT=nl.TYPES[out.dtype], num_warps=4,
        **nl.EXACT, **nl.launch(pdl),
    )  # fmt: skip
