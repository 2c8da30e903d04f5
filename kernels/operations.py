"""The operations of a program: each one call of a kernel, with the sizes and weights it takes."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels.activation import activate, gated, softcap
from numem.kernels.attention import paged_attention
from numem.kernels.linear import Peaks
from numem.kernels.norm import layer_norm, rms_norm
from numem.kernels.program import Call, Part
from numem.kernels.rope import rope_write


class Linear(Protocol):
    """A weight matrix in the form of its kernel; see `numem.kernels.linear.PackedLinear`."""

    out_features: int
    in_features: int

    def __call__(
        self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None, peaks: Peaks | None = None
    ) -> Tensor:
        """`x @ weight.T (+ bias) (+ residual)`."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` of the weight as float32."""


@dataclass(frozen=True, slots=True)
class Embed:
    """out = rows of the table, times `scale`."""

    table: Linear
    out: Part
    scale: float

    def run(self, call: Call) -> None:
        out = call.parts[self.out.index].copy_(self.table.rows(call.tokens))
        if self.scale != 1.0:
            out *= self.scale


@dataclass(frozen=True, slots=True)
class AddPositions:
    """x += a row of the table, float32 [P, width], by position."""

    x: Part
    table: Tensor

    def run(self, call: Call) -> None:
        call.parts[self.x.index].add_(self.table[call.positions])


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = (residual +) x / rms(x) * (offset + weight), per head where the weight is narrower than x."""

    x: Part
    weight: Tensor
    eps: float
    offset: float
    out: Part
    residual: Part | None = None

    def run(self, call: Call) -> None:
        parts = call.parts
        residual = None if self.residual is None else parts[self.residual.index]
        rms_norm(parts[self.x.index], self.weight, self.eps, parts[self.out.index], self.offset, residual)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """out = (x - mean) / deviation(x) * (offset + weight) (+ bias)."""

    x: Part
    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float
    out: Part

    def run(self, call: Call) -> None:
        parts = call.parts
        layer_norm(parts[self.x.index], self.weight, self.bias, self.eps, parts[self.out.index], self.offset)


@dataclass(frozen=True, slots=True)
class Matmul:
    """out = x @ weight.T (+ bias) (+ residual)."""

    linear: Linear
    x: Part
    out: Part
    residual: Part | None = None

    def run(self, call: Call) -> None:
        parts = call.parts
        residual = None if self.residual is None else parts[self.residual.index]
        self.linear(parts[self.x.index], parts[self.out.index], residual)


@dataclass(frozen=True, slots=True)
class RopeWrite:
    """Rotate queries and keys in place by the tables, and write keys and values to the layer's pages."""

    qkv: Part
    cos: Tensor
    sin: Tensor
    layer: int
    heads: int
    kv_heads: int
    head_dim: int

    def run(self, call: Call) -> None:
        rope_write(
            call.parts[self.qkv.index], self.cos, self.sin, call.positions, call.k[self.layer], call.v[self.layer],
            call.slots, self.heads, self.kv_heads, self.head_dim,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attend:
    """out = attention of q over the layer's pages, in the terms of `paged_attention`.

    Where not causal, rows see the keys after their own too, up to `right` of them (-1: all of the text).
    """

    q: Part
    out: Part
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    causal: bool = True
    right: int = -1
    softcap: float = 0.0

    def run(self, call: Call) -> None:
        paged_attention(
            call.parts[self.q.index],
            call.k[self.layer],
            call.v[self.layer],
            call.tables,
            call.lane,
            call.positions,
            call.parts[self.out.index],
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            lengths=None if self.causal else call.lengths,
            right=self.right,
        )


@dataclass(frozen=True, slots=True)
class Gate:
    """out = act(gate) * up, of gate_up [gate | up]."""

    gate_up: Part
    out: Part
    act: str

    def run(self, call: Call) -> None:
        gated(call.parts[self.gate_up.index], call.parts[self.out.index], self.act)


@dataclass(frozen=True, slots=True)
class Activate:
    """x = act(x)."""

    x: Part
    act: str

    def run(self, call: Call) -> None:
        x = call.parts[self.x.index]
        activate(x, x, self.act)


@dataclass(frozen=True, slots=True)
class Add:
    """out = residual + x."""

    x: Part
    residual: Part
    out: Part

    def run(self, call: Call) -> None:
        parts = call.parts
        torch.add(parts[self.residual.index], parts[self.x.index], out=parts[self.out.index])


@dataclass(frozen=True, slots=True)
class Look:
    """Show a part to the tap of the call, which may replace it."""

    point: str
    layer: int
    part: Part

    def run(self, call: Call) -> None:
        if call.tap is None:
            return
        part = call.parts[self.part.index].numpy()
        changed = call.tap(self.point, self.layer, part.copy())
        if changed is None:
            return
        if not isinstance(changed, np.ndarray) or changed.shape != part.shape or changed.dtype != part.dtype:
            shape = list(changed.shape) if isinstance(changed, np.ndarray) else ""
            raise InputError(
                f"tap: {self.point} of layer {self.layer} was given {getattr(changed, 'dtype', type(changed).__name__)} "
                f"{shape}; it takes a float32 array {list(part.shape)}"
            )
        part[:] = changed


@dataclass(frozen=True, slots=True)
class Head:
    """The call's out = logits of x, soft-capped where `cap` is not None; the largest of each row is noted in its peaks."""

    linear: Linear
    x: Part
    cap: float | None

    def run(self, call: Call) -> None:
        # A cap may make different logits equal, so the largest are those of the capped ones.
        peaks = call.peaks if self.cap is None else None
        call.out = self.linear(call.parts[self.x.index], call.out, peaks=peaks)
        if self.cap is not None:
            softcap(call.out, self.cap, call.peaks)
