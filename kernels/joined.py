"""Runs of operations joined into one call of the extension.

A decode step is a few hundred kernel calls of a few microseconds: what the interpreter spends between them would be a
good part of it. The joined form calls the same functions with the same arguments, so its bits are those of the
operations one by one; these stay the form without a compiler, and they state what is wrong when a call is refused.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from numem.errors import CapacityError, InputError
from numem.kernels import native
from numem.kernels import operations as op
from numem.kernels.activation import ACTIVATIONS
from numem.kernels.attention import HEAD_DIMS
from numem.kernels.linear import PackedLinear
from numem.kernels.program import Call, Op, Part
from numem.kernels.quantised import QuantisedLinear
from numem.kernels.rope import check_layer

_run = native.function("nm_run")

_EMBED, _ADD_ROWS, _ADD, _NORM, _MATMUL, _ROPE_WRITE, _ATTEND, _GATE, _ACTIVATE = range(9)  # as in csrc/program.c


def joined(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The same operations, neighbours that the extension knows joined; as they are where it is not built."""
    out: list[Op] = []
    run: list[tuple[Op, native.Op]] = []
    for each in ops:
        known = _native_of(each) if native.active else None
        if known is not None:
            run.append((each, known))
            continue
        if run:
            out.append(Joined(run))
            run = []
        out.append(each)
    if run:
        out.append(Joined(run))
    return tuple(out)


class Joined:
    """Operations that run in one call."""

    def __init__(self, ops: Sequence[tuple[Op, native.Op]]) -> None:
        self.ops = tuple(each for each, _ in ops)  # holds what the native forms point to
        self._native = (native.Op * len(ops))(*(known for _, known in ops))
        self._address = ctypes.addressof(self._native)
        kinds = {known.kind for _, known in ops}
        self._tokens, self._slots = _EMBED in kinds, _ROPE_WRITE in kinds
        self._pages = {(known.kv_heads, known.head_dim) for _, known in ops if known.kind in (_ROPE_WRITE, _ATTEND)}
        self._layers = max((known.layer + 1 for _, known in ops), default=0)
        self._lengths = any(known.kind == _ATTEND and known.choice for _, known in ops)
        self._dense = {at for _, known in ops if known.kind in (_GATE, _ACTIVATE) for at in (known.x, known.out)}
        self._parts: list[Tensor] | None = None
        self._addresses: ctypes.Array[ctypes.c_void_p]
        self._strides: ctypes.Array[ctypes.c_int64]

    def run(self, call: Call) -> None:
        """All of them, in order."""
        if not native.active:
            for each in self.ops:
                each.run(call)
            return
        rows = len(call.positions)
        self._check(call, rows)
        if call.parts is not self._parts:
            self._take(call.parts)
        pages = call.k.shape[0] > 0
        arguments = native.Call(
            ctypes.addressof(self._addresses),
            ctypes.addressof(self._strides),
            rows,
            call.tokens.data_ptr(),
            call.positions.data_ptr(),
            call.slots.data_ptr(),
            call.lane.data_ptr(),
            call.tables.data_ptr(),
            None if call.lengths is None else call.lengths.data_ptr(),
            len(call.tables),
            call.tables.shape[1],
            call.k.data_ptr(),
            call.v.data_ptr(),
            call.k.stride(0) * call.k.element_size() if pages else 0,
            call.k.shape[1],
            call.k.dtype is torch.bfloat16,
        )
        refused = _run(self._address, len(self.ops), ctypes.addressof(arguments))
        if refused:
            each = self.ops[refused - 1]
            each.run(call)  # says what is wrong with its arguments
            raise CapacityError(f"{type(each).__name__}: no memory for its working buffers; lower the batch")

    def _check(self, call: Call, rows: int) -> None:
        """What the extension takes on trust."""
        wide, narrow = [call.positions], [call.lane]
        wide += [call.tokens] if self._tokens else []
        wide += [call.slots] if self._slots else []
        lengths = [] if call.lengths is None else [call.lengths]
        for tensors, dtype in ((wide, torch.int64), (narrow, torch.int32)):
            for tensor in tensors:
                if tensor.shape != (rows,) or tensor.dtype is not dtype or not tensor.is_contiguous():
                    raise InputError(
                        f"program: {tuple(tensor.shape)} {tensor.dtype} must be contiguous {dtype} [{rows}], as are "
                        "the tokens, positions, slots and lanes of a call"
                    )
        for tensor in (call.tables, *lengths):
            if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or len(tensor) != len(call.tables):
                raise InputError("program: block tables and lengths must be contiguous int32, one row a lane")
        if self._lengths and call.lengths is None:
            raise InputError("program: rows that see what follows them need the lengths of their lanes")
        if (
            call.k.shape[0] < self._layers
            or call.v.shape[0] < self._layers
            or (self._layers and call.k.stride(0) != call.v.stride(0))
        ):
            raise InputError(f"program: pages {tuple(call.k.shape)}, {tuple(call.v.shape)} of {self._layers} layers")
        for kv_heads, head_dim in self._pages:
            check_layer("program", call.k[0], call.v[0], kv_heads, head_dim)

    def _take(self, parts: list[Tensor]) -> None:
        for at in self._dense:
            if not parts[at].is_contiguous():
                raise InputError(f"program: part {at} of a gate or an activation must be a whole buffer")
        self._addresses = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        self._strides = (ctypes.c_int64 * len(parts))(*(part.stride(0) for part in parts))
        self._parts = parts


def _native_of(each: Op) -> native.Op | None:
    form = _FORMS.get(type(each))
    return None if form is None else form(each)


def _form(kind: int, x: Part | None, out: Part | None, residual: Part | None = None, **fields: object) -> native.Op:
    places = {"x": x, "out": out, "residual": residual}
    return native.Op(kind=kind, **{k: -1 if p is None else p.index for k, p in places.items()}, **fields)


def _matrix(linear: op.Linear, width: int) -> dict[str, Any] | None:
    if not isinstance(linear, PackedLinear | QuantisedLinear) or linear.handle is None or width != linear.in_features:
        return None
    return {"object": linear.handle, "quantised": isinstance(linear, QuantisedLinear)}


def _embed(each: op.Embed) -> native.Op | None:
    matrix = _matrix(each.table, each.out.width)
    if matrix is None:
        return None
    return _form(_EMBED, None, each.out, width=each.out.width, scale=each.scale, **matrix)


def _matmul(each: op.Matmul) -> native.Op | None:
    matrix = _matrix(each.linear, each.x.width)
    residual = each.out.width if each.residual is None else each.residual.width
    fits = each.out.width == each.linear.out_features == residual
    return None if matrix is None or not fits else _form(_MATMUL, each.x, each.out, each.residual, **matrix)


def _norm(each: op.RmsNorm | op.LayerNorm) -> native.Op | None:
    width = len(each.weight)
    bias = each.bias if isinstance(each, op.LayerNorm) else None
    residual = each.residual if isinstance(each, op.RmsNorm) else None
    vectors = [each.weight] if bias is None else [each.weight, bias]
    parts = [each.x, each.out] if residual is None else [each.x, each.out, residual]
    if each.x.width % width or any(p.width != each.x.width for p in parts) or not all(_plain(v, 1) for v in vectors):
        return None
    return _form(
        _NORM, each.x, each.out, residual, object=each.weight.data_ptr(),
        other=None if bias is None else bias.data_ptr(), width=width, groups=each.x.width // width,
        choice=isinstance(each, op.LayerNorm), eps=each.eps, offset=each.offset,
    )  # fmt: skip


def _add_rows(each: op.AddPositions) -> native.Op | None:
    if not _plain(each.table, 2) or each.table.shape[1] != each.x.width:
        return None
    return _form(
        _ADD_ROWS, each.x, None, object=each.table.data_ptr(), width=each.x.width, limit=len(each.table)
    )  # fmt: skip


def _add(each: op.Add) -> native.Op | None:
    if not each.x.width == each.residual.width == each.out.width:
        return None
    return _form(_ADD, each.x, each.out, each.residual, width=each.x.width)


def _rope_write(each: op.RopeWrite) -> native.Op | None:
    half = each.cos.shape[1]
    fits = each.qkv.width == (each.heads + 2 * each.kv_heads) * each.head_dim and 2 * half <= each.head_dim
    if not fits or each.cos.shape != each.sin.shape or not _plain(each.cos, 2) or not _plain(each.sin, 2):
        return None
    return _form(
        _ROPE_WRITE, each.qkv, None, object=each.cos.data_ptr(), other=each.sin.data_ptr(), limit=len(each.cos),
        half=half, layer=each.layer, heads=each.heads, kv_heads=each.kv_heads, head_dim=each.head_dim,
    )  # fmt: skip


def _attend(each: op.Attend) -> native.Op | None:
    width = each.heads * each.head_dim
    if each.q.width != width or each.out.width != width or each.heads % each.kv_heads:
        return None
    if each.head_dim not in HEAD_DIMS or each.window < 0 or each.right < -1:
        return None
    return _form(
        _ATTEND, each.q, each.out, layer=each.layer, heads=each.heads, kv_heads=each.kv_heads,
        head_dim=each.head_dim, window=each.window, choice=not each.causal, right=each.right, scale=each.scale,
        softcap=each.softcap,
    )  # fmt: skip


def _gate(each: op.Gate) -> native.Op | None:
    if each.act not in ACTIVATIONS or each.gate_up.width != 2 * each.out.width:
        return None
    return _form(_GATE, each.gate_up, each.out, width=each.out.width, choice=ACTIVATIONS.index(each.act))


def _activate(each: op.Activate) -> native.Op | None:
    if each.act not in ACTIVATIONS:
        return None
    return _form(_ACTIVATE, each.x, each.x, width=each.x.width, choice=ACTIVATIONS.index(each.act))


def _plain(tensor: Tensor, dimensions: int) -> bool:
    return tensor.ndim == dimensions and tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.is_cpu


_FORMS: dict[type, Callable[..., native.Op | None]] = {
    op.Embed: _embed,
    op.AddPositions: _add_rows,
    op.Add: _add,
    op.RmsNorm: _norm,
    op.LayerNorm: _norm,
    op.Matmul: _matmul,
    op.RopeWrite: _rope_write,
    op.Attend: _attend,
    op.Gate: _gate,
    op.Activate: _activate,
}
