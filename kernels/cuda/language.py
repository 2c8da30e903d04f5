"""What kernels in Triton share: the compiler's entry, and programmatic dependent launch.

A kernel that is launched with the dependent attribute may start while those before it still run, several of them: what it
reads before `wait`, no kernel of a step may write but the last one (weights, positions, tables, keys and values of earlier
steps). Every kernel waits, so that when a wait is over all that came before has ended.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Python on CPU tensors (TRITON_INTERPRET=1 before the first import of triton)."""

PDL_AVAILABLE: bool = (
    not INTERPRETED
    and torch.cuda.is_available()
    and all(torch.cuda.get_device_capability(gpu)[0] >= 9 for gpu in range(torch.cuda.device_count()))
)
"""Whether every GPU here has programmatic dependent launch."""

DESCRIPTORS: bool = INTERPRETED or PDL_AVAILABLE
"""Whether every GPU here has a unit that copies blocks of matrices by descriptors."""


def tile_keys(head_dim: int) -> int:
    """Keys of an attention tile, at absolute multiples: part of the numeric policy.

    Keys and values of a tile are 64 KiB in two bytes a number, whatever the head: what one multiprocessor loads and hands
    to its tensor cores in about a microsecond.
    """
    return 128 if head_dim <= 128 else 64


def describable(matrix: Tensor) -> bool:
    """Whether blocks of a contiguous matrix [N, K] are copied by descriptors: rows must begin at multiples of 16 bytes.
    Threads then have nothing to do but to multiply."""
    return DESCRIPTORS and matrix.shape[1] * matrix.element_size() % 16 == 0


MULTIPROCESSORS = 132
"""Of an H100 or H200: it decides how products are cut, and no bit."""

NORM_WARPS = 8
"""Warps of every kernel that sums the squares of a row: part of the numeric policy."""

IN_PYTHON = tl.constexpr(INTERPRETED)

LOG2E = tl.constexpr(1.4426950408889634)

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes 5 us where it is called outside of kernels, which launches wait for."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, which has no types."""
    return triton.jit(kernel)


@jit
def let_next_start(PDL: tl.constexpr):
    """When all programs of a kernel have said so, the next kernel may start.

    First thing in a kernel, that the next one may ask for what it can; where the programs of the next one would crowd this
    one's, when its loads are done.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait(PDL: tl.constexpr):
    """Until every kernel before this one has ended and its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def launch(pdl: bool) -> dict[str, Any]:
    """Launch options of a kernel of the decode step."""
    return {"PDL": True, "launch_pdl": True} if pdl and PDL_AVAILABLE else {"PDL": False}


ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3}
"""Numbers of the activations in kernels; 0 is none."""

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of kernels whose elementwise arithmetic stands in several kernels: a product and a sum are fused where
the source says so, and nowhere else."""


def precision(dtype: torch.dtype) -> str:
    """Input precision of products: float32 stays float32."""
    return "ieee" if dtype is torch.float32 else "tf32"


@jit
def act(x, ACT: tl.constexpr):
    """silu, or gelu by tanh or erf, of float32."""
    if ACT == 1:
        return x / (1.0 + tl.exp(-x))
    elif ACT == 2:
        u = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        return x / (1.0 + tl.exp(-2.0 * u))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@jit
def ended(result, up, bias, n, N, BIAS: tl.constexpr, ACT: tl.constexpr, DT: tl.constexpr):
    """Sums of rows n [BN] of a matrix, with its bias; with ACT they are the gates, `up` the sums of rows n + N, and both
    are rounded to DT before they meet."""
    if BIAS:
        result += tl.load(bias + n)[:, None]
    if ACT != 0:
        if BIAS:
            up += tl.load(bias + n + N)[:, None]
        result = act(result.to(DT).to(tl.float32), ACT) * up.to(DT).to(tl.float32)
    return result


@jit
def softcap(x, cap):
    """cap * tanh(x / cap), the hyperbolic tangent by the exponential."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (x / cap))))


@jit
def opaque(x, DT: tl.constexpr):
    """x, in a way that the compiler does not see where it comes from.

    It would otherwise permute k for operands that come from narrow integers, and with it the order of the sum.
    """
    if DT == tl.bfloat16 and not IN_PYTHON:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    else:
        return x
