"""Activations of feed-forward blocks and caps of logits, on numem's own exponential.

Natively every function is made of correctly rounded operations in a fixed order, so that bits are equal on every
instruction set. Formulas: silu x / (1 + e^-x); "gelu_tanh" x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3), which
is its usual form x (1 + tanh u) / 2 rewritten; "gelu" x P(x), P the normal distribution function, within 1e-7 of x.
"""

import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native
from numem.kernels.linear import Peaks

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # in the order of csrc/api.h

_gated = native.function("nm_gated")
_activate = native.function("nm_activate")
_softcap = native.function("nm_softcap")
_exp = native.function("nm_exp")


def gated(gate_up: Tensor, out: Tensor | None = None, act: str = "silu") -> Tensor:
    """`act(gate) * up`.

    Args:
        gate_up: float32 [M, 2 I], contiguous: the gate columns, then the up columns.
        out: float32 [M, I] to write, contiguous; must not overlap `gate_up`.
        act: one of `ACTIVATIONS`.
    """
    rows, width = gate_up.shape
    if gate_up.dtype is not torch.float32 or width % 2 or not gate_up.is_contiguous() or not gate_up.is_cpu:
        raise InputError(
            f"gated: input {tuple(gate_up.shape)} {gate_up.dtype} must be contiguous float32 [rows, 2 x inner]"
        )
    inner = width // 2
    out = _place("gated", out, rows, inner)
    index = _index("gated", act)
    if not native.active:
        return reference(gate_up[:, :inner], gate_up[:, inner:], out, act)
    _gated(gate_up.data_ptr(), out.data_ptr(), rows, inner, index)
    return out


def activate(x: Tensor, out: Tensor | None = None, act: str = "silu") -> Tensor:
    """`act(x)` of contiguous float32 rows [M, I]; `out` may be `x`."""
    rows, width = x.shape
    if x.dtype is not torch.float32 or not x.is_contiguous() or not x.is_cpu:
        raise InputError(f"activate: input {tuple(x.shape)} {x.dtype} must be contiguous float32 rows on the CPU")
    out = _place("activate", out, rows, width)
    index = _index("activate", act)
    if not native.active:
        return reference(x, None, out, act)
    _activate(x.data_ptr(), out.data_ptr(), rows, width, index)
    return out


def softcap(x: Tensor, cap: float, peaks: Peaks | None = None) -> Tensor:
    """`cap * tanh(x / cap)` in place, of float32 rows [M, N] that are contiguous each; the relative error is within
    3 ulp, near zero too.

    Args:
        peaks: where the largest of each row is noted (a cap may make different numbers equal).
    """
    rows, width = x.shape
    if x.dtype is not torch.float32 or x.stride(1) != 1 or not x.is_cpu:
        raise InputError(f"softcap: input {tuple(x.shape)} {x.dtype} must be float32 rows on the CPU")
    if not 0.0 < cap < float("inf"):
        raise InputError(f"softcap: cap {cap} is not a positive number")
    if peaks is not None:
        peaks.check(rows, width)
    if not native.active:
        for row in x:
            row.copy_(torch.tanh(row.clone() / cap) * cap)
        if peaks is not None:
            peaks.find(x)
        return x
    _softcap(
        x.data_ptr(),
        x.stride(0),
        rows,
        width,
        cap,
        0 if peaks is None else peaks.limit,
        None if peaks is None else peaks.index.data_ptr(),
        None if peaks is None else peaks.value.data_ptr(),
    )
    return x


def reference(x: Tensor, factor: Tensor | None, out: Tensor, act: str) -> Tensor:
    """The torch form; a value's bits may depend on its place in a row, never on the other rows."""
    for at, target in enumerate(out):
        row = x[at].clone()
        if act == "silu":
            y = row / (1.0 + torch.exp(-row))
        else:
            y = torch.nn.functional.gelu(row, approximate="tanh" if act == "gelu_tanh" else "none")
        target.copy_(y if factor is None else y * factor[at])
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


def _place(what: str, out: Tensor | None, rows: int, width: int) -> Tensor:
    if out is None:
        return torch.empty((rows, width), dtype=torch.float32)
    if out.shape != (rows, width) or out.dtype is not torch.float32 or not out.is_contiguous() or not out.is_cpu:
        raise InputError(f"{what}: output {tuple(out.shape)} {out.dtype} must be contiguous float32 {(rows, width)}")
    return out


def _index(what: str, act: str) -> int:
    if act not in ACTIVATIONS:
        raise InputError(f"{what}: activation {act!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(act)
