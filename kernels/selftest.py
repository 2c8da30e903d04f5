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
from numem.kernels.activation import activate, gated, softcap
from numem.kernels.attention import paged_attention
from numem.kernels.linear import PackedLinear
from numem.kernels.norm import layer_norm, rms_norm
from numem.kernels.pages import PAGE, new_pools
from numem.kernels.quantised import QuantisedLinear
from numem.kernels.rope import rope_write

_ROWS = 33  # more than one tile of every build, and not a multiple of any
_HEAD_COLUMNS = 1024  # columns of the head that are tested
_QUANTISED_COLUMNS = 80  # columns of quantised layers that are tested: not whole panels


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a decoder that its kernels meet.

    Attributes:
        hidden, inter: widths of the residual stream and of the feed-forward block.
        heads, kv_heads, head_dim: attention heads.
        vocab: columns of the head.
        dtype: of weights and pages, "float32" or "bfloat16".
        act, gated: activation of the feed-forward block, and whether it gates.
        centred: layer norms (RMS norms else).
        sandwich: norms whose residual is added by the kernel.
        offset: added to the weights of norms.
        attn_softcap, final_softcap: caps of scores and of logits, 0 for none.
        causal: whether rows see only what is before them.
        quantised: formats that layers are kept in.

    What is named from `act` on is tested only where it is not as it is by default: models that do without keep their
    digest when a kernel joins.
    """

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str = "float32"
    act: str = "silu"
    gated: bool = True
    centred: bool = False
    sandwich: bool = False
    offset: float = 0.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    causal: bool = True
    quantised: tuple[str, ...] = ()


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
    outputs.append(gated(stream.values(_ROWS, 2 * shapes.inter).mul_(8.0)))
    outputs += _attention(stream, shapes, dtype)
    outputs += _forms(stream, shapes)
    for name in shapes.quantised:
        outputs += _quantised(stream, name, shapes)
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
    forms: list[tuple[int, float, Tensor | None]] = [(0, 0.0, None), (100, 0.0, None)]
    if shapes.attn_softcap or not shapes.causal:
        length = None if shapes.causal else torch.tensor([start + _ROWS], dtype=torch.int32)
        forms += [(window, shapes.attn_softcap, length) for window in (0, 100)]
    for window, cap, lengths in forms:

        def attend(rows: slice, window: int = window, cap: float = cap, lengths: Tensor | None = lengths) -> Tensor:
            return paged_attention(
                queries[rows], k[0], v[0], table, lanes[rows], positions[rows],
                heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, window=window, softcap=cap,
                lengths=lengths, right=-1 if lengths is None else window - 1,
            )  # fmt: skip

        y = attend(slice(None))
        for row in (0, _ROWS // 2, _ROWS - 1):
            one = slice(row, row + 1)
            _require_equal(attend(one), y[one], f"attention {heads} x {kv_heads} x {dim}, window {window}")
        outputs.append(y)
    return outputs


def _forms(stream: _Stream, shapes: Shapes) -> list[Tensor]:
    """What only some families use."""
    outputs: list[Tensor] = []
    if shapes.act != "silu" or not shapes.gated:
        x = stream.values(_ROWS, 2 * shapes.inter).mul_(8.0)
        outputs.append(gated(x, act=shapes.act) if shapes.gated else activate(x, act=shapes.act))
    if shapes.centred or shapes.sandwich or shapes.offset:
        x, weight, other = (stream.values(*shape, shapes.hidden) for shape in ((_ROWS,), (), (_ROWS,)))
        if shapes.centred:
            outputs.append(layer_norm(x, weight, other[0], 1e-12, offset=shapes.offset))
        outputs.append(rms_norm(x, weight, 1e-6, offset=shapes.offset, residual=other if shapes.sandwich else None))
    if shapes.final_softcap:
        logits = stream.values(_ROWS, min(shapes.vocab, _HEAD_COLUMNS)).mul_(2.0 * shapes.final_softcap)
        outputs.append(softcap(logits, shapes.final_softcap))
    return outputs


def _quantised(stream: _Stream, name: str, shapes: Shapes) -> list[Tensor]:
    """Layers in one format: the bytes that the quantiser finds, rows and outputs."""
    outputs: list[Tensor] = []
    for n, k in ((_QUANTISED_COLUMNS, shapes.hidden), (_QUANTISED_COLUMNS, shapes.inter)):
        layer = QuantisedLinear(stream.weights(n, k), name, stream.values(n))
        rows, residual = stream.values(_ROWS, k), stream.values(_ROWS, n)
        y = layer(rows, residual=residual)
        for row in (0, _ROWS // 2, _ROWS - 1):
            one = slice(row, row + 1)
            _require_equal(layer(rows[one], residual=residual[one]), y[one], f"{name} linear {n} x {k}")
        outputs += [*layer.planes().values(), y, layer.rows(torch.tensor([0, n - 1]))]
    return outputs


def _require_equal(a: Tensor, b: Tensor, what: str) -> None:
    if not torch.equal(a.view(torch.int32), b.contiguous().view(torch.int32)):
        raise ModelError(
            f"self-test: {what}: a row alone differs from the same row among {_ROWS}; these kernels are not exact "
            "here, rebuild the extension or report this machine"
        )
