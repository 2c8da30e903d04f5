"""The self-test whose digest is part of a numeric policy: what the kernels compute at a model's own shapes.

Inputs come from a BLAKE3 stream, outputs go into a BLAKE3 digest: two builds share a digest only if they compute the
same bits. It also proves that a row's bits do not depend on the other rows.
"""

from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from numem.errors import InputError, ModelError
from numem.identity.digest import blake3_of
from numem.kernels.attention import paged_attention
from numem.kernels.linear import PackedLinear
from numem.kernels.mlp import silu_mul
from numem.kernels.norm import rms_norm
from numem.kernels.pages import PAGE, new_pools
from numem.kernels.rope import rope_write

_ROWS = 33  # more than one tile of every build, and not a multiple of any
_HEAD_COLUMNS = 1024  # columns of the head that are tested


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a decoder that its kernels meet.

    Attributes:
        hidden, inter: widths of the residual stream and of the feed-forward block.
        heads, kv_heads, head_dim: attention heads.
        vocab: columns of the head.
        dtype: of weights and pages, "float32" or "bfloat16".
    """

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str = "float32"


class _Stream:
    """Deterministic inputs: consecutive parts of one BLAKE3 output stream."""

    def __init__(self) -> None:
        self._hasher = blake3(b"numem/self-test/v1")
        self._at = 0

    def _take(self, n: int, dtype: torch.dtype, size: int) -> Tensor:
        raw = bytearray(self._hasher.digest(length=n * size, seek=self._at))
        self._at += n * size
        return torch.frombuffer(raw, dtype=dtype)

    def values(self, *shape: int) -> Tensor:
        """Float32 in [-1, 1) with full significands: a lost or extra rounding shows."""
        n = torch.Size(shape).numel()
        return self._take(n, torch.int32, 4).float().mul_(2.0**-31).view(shape)

    def weights(self, *shape: int) -> Tensor:
        """Float32 in [-1, 1) / 8 of 16 significant bits (half the stream bytes)."""
        n = torch.Size(shape).numel()
        return self._take(n, torch.int16, 2).float().mul_(2.0**-18).view(shape)


def self_test(shapes: Shapes) -> bytes:
    """BLAKE3-256 of what every kernel computes at these shapes, 32 bytes.

    Raises:
        ModelError: a row computed alone differs from the same row among others: the state of this build could not
            be shared between prefill and decode.
    """
    if shapes.dtype not in ("float32", "bfloat16"):
        raise InputError(f"self-test: dtype {shapes.dtype!r} is not float32 or bfloat16")
    dtype = torch.float32 if shapes.dtype == "float32" else torch.bfloat16
    stream = _Stream()
    outputs: list[Tensor] = []
    width = (shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim
    inner = shapes.heads * shapes.head_dim
    linears = (
        (width, shapes.hidden),
        (shapes.hidden, inner),
        (2 * shapes.inter, shapes.hidden),
        (shapes.hidden, shapes.inter),
        (min(shapes.vocab, _HEAD_COLUMNS), shapes.hidden),
    )
    x = rms_norm(stream.values(_ROWS, shapes.hidden), stream.values(shapes.hidden), 1e-5)
    outputs.append(x)
    for n, k in linears:
        layer = PackedLinear(stream.weights(n, k).to(dtype), stream.values(n))
        rows, residual = stream.values(_ROWS, k), stream.values(_ROWS, n)
        y = layer(rows, residual=residual)
        for row in (0, _ROWS // 2, _ROWS - 1):
            one = slice(row, row + 1)
            _require_equal(layer(rows[one], residual=residual[one]), y[one], f"linear {n} x {k}")
        outputs += [y, layer.rows(torch.tensor([0, n - 1]))]
    # Sums near the smallest normal number, and weights below it: builds that flush denormals differ here.
    tiny = PackedLinear((stream.weights(64, 128) * 2.0**-62).to(dtype))
    below = PackedLinear((stream.weights(64, 128) * 2.0**-128).to(dtype))
    outputs += [tiny(stream.values(_ROWS, 128) * 2.0**-63), below(stream.values(_ROWS, 128))]
    outputs.append(silu_mul(stream.values(_ROWS, 2 * shapes.inter).mul_(8.0)))
    outputs += _attention(stream, shapes, dtype)
    # bfloat16 pages travel as their bytes
    return blake3_of(t.contiguous().view(torch.uint8).numpy() for t in outputs)


def _attention(stream: _Stream, shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
    """Rows of one lane after a prefix that crosses a split, over pages in reverse order; with and without a window."""
    heads, kv_heads, dim = shapes.heads, shapes.kv_heads, shapes.head_dim
    start = 500
    pages = -(-(start + _ROWS) // PAGE)
    k, v = new_pools(1, pages, kv_heads, dim, dtype)
    k.copy_(stream.weights(*k.shape).mul_(8.0))
    v.copy_(stream.weights(*v.shape).mul_(8.0))
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).unsqueeze(0)
    qkv = stream.values(_ROWS, (heads + 2 * kv_heads) * dim).mul_(2.0)
    angles = stream.values(start + _ROWS, dim // 2)
    positions = torch.arange(start, start + _ROWS)
    slots = table[0, positions // PAGE].long() * PAGE + positions % PAGE
    # not a rotation, but the same arithmetic, with nothing taken from a library's cosine
    rope_write(qkv, angles, 1.0 - angles.abs(), positions, k[0], v[0], slots, heads, kv_heads, dim)
    outputs = [qkv, k, v]
    lanes = torch.zeros(_ROWS, dtype=torch.int32)
    queries = qkv[:, : heads * dim]
    for window in (0, 100):

        def attend(rows: slice, window: int = window) -> Tensor:
            return paged_attention(
                queries[rows], k[0], v[0], table, lanes[rows], positions[rows],
                heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, window=window,
            )  # fmt: skip

        y = attend(slice(None))
        for row in (0, _ROWS // 2, _ROWS - 1):
            one = slice(row, row + 1)
            _require_equal(attend(one), y[one], f"attention {heads} x {kv_heads} x {dim}, window {window}")
        outputs.append(y)
    return outputs


def _require_equal(a: Tensor, b: Tensor, what: str) -> None:
    if not torch.equal(a.view(torch.int32), b.contiguous().view(torch.int32)):
        raise ModelError(
            f"self-test: {what}: a row alone differs from the same row among {_ROWS}; these kernels are not exact "
            "here, rebuild the extension or report this machine"
        )
