"""The gate of a feed-forward block: silu(gate) * up, with numem's own exponential."""

import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native

_silu_mul = native.function("nm_silu_mul")
_exp = native.function("nm_exp")


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """`(gate / (1 + exp(-gate))) * up`.

    Args:
        gate_up: float32 [M, 2 I], contiguous: the gate columns, then the up columns.
        out: float32 [M, I] to write, contiguous; must not overlap `gate_up`.
    """
    rows, width = gate_up.shape
    if gate_up.dtype is not torch.float32 or width % 2 or not gate_up.is_contiguous() or not gate_up.is_cpu:
        raise InputError(
            f"silu_mul: input {tuple(gate_up.shape)} {gate_up.dtype} must be contiguous float32 [rows, 2 x inner]"
        )
    inner = width // 2
    if out is None:
        out = torch.empty((rows, inner), dtype=torch.float32)
    elif out.shape != (rows, inner) or out.dtype is not torch.float32 or not out.is_contiguous() or not out.is_cpu:
        raise InputError(f"silu_mul: output {tuple(out.shape)} {out.dtype} must be contiguous float32 {(rows, inner)}")
    if not native.active:
        return reference(gate_up, out)
    _silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, inner)
    return out


def reference(gate_up: Tensor, out: Tensor) -> Tensor:
    """The torch form; a value's bits may depend on its place in a row, never on the other rows."""
    inner = out.shape[1]
    for row, target in zip(gate_up, out, strict=True):
        gate = row[:inner].clone()
        target.copy_(gate / (1.0 + torch.exp(-gate)) * row[inner:])
    return out


def exp(x: Tensor) -> Tensor:
    """e^x of a contiguous float32 tensor: within 1 ulp, 0 below x = -87, equal bits on every instruction set."""
    if x.dtype is not torch.float32 or not x.is_contiguous() or not x.is_cpu:
        raise InputError(f"exp: input {tuple(x.shape)} {x.dtype} must be a contiguous float32 tensor on the CPU")
    if not native.active:
        return torch.exp(x)
    out = torch.empty_like(x)
    _exp(x.data_ptr(), out.data_ptr(), x.numel())
    return out
