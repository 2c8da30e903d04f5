"""The decoder: one forward pass for every family that a descriptor describes, over pages.

Activations are float32; weights and cache are float32 or bfloat16 (a bfloat16 layer rounds the rows that enter it). Every row of a call is computed as if it were alone.
"""

import threading
from dataclasses import dataclass

import torch

from numem.errors import InputError
from numem.kernels.attention import paged_attention
from numem.kernels.linear import PackedLinear
from numem.kernels.mlp import silu_mul
from numem.kernels.norm import rms_norm
from numem.kernels.rope import rope_write
from numem.models.architecture.descriptor import SLIDING, Descriptor
from numem.models.weights.checkpoint import Checkpoint
from numem.runtime.engine import Rows
from numem.runtime.paging.pages import DTYPES, PageStorage, kv_spec


@dataclass(slots=True)
class _Layer:
    attn_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: PackedLinear
    ffn_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int


class TransformerDecoder:
    """A decoder-only transformer on the CPU.

    Args:
        descriptor: its architecture.
        checkpoint: its weights; read once, straight into their packed place.
        dtype: "float32" or "bfloat16", of weights and cache.
        max_position: positions that may be evaluated.
    """

    def __init__(self, descriptor: Descriptor, checkpoint: Checkpoint, *, dtype: str, max_position: int) -> None:
        if dtype not in DTYPES:
            raise InputError(f"decoder: dtype {dtype!r} is not one of {sorted(DTYPES)}")
        d = descriptor
        descriptor.check_shapes({name: checkpoint.shape(name) for name in checkpoint.names})
        self.descriptor = d
        self.dtype = dtype
        self.max_position = max_position
        self.heads, self.kv_heads, self.head_dim, self.vocab = d.heads, d.kv_heads, d.head_dim, d.vocab
        windows = [d.window if kind == SLIDING else 0 for kind in d.layer_kinds]
        self.spec = kv_spec(d.layers, d.kv_heads, d.head_dim, dtype, windows)
        self.cos, self.sin = d.rope_tables(max_position)
        self._checkpoint = checkpoint
        self._torch_dtype = DTYPES[dtype]
        self.layers = [self._layer(i) for i in range(d.layers)]
        self.final_norm = self._vector("final_norm")
        embed = PackedLinear(self._matrix("embed"))
        self.embed = embed
        self.head = embed if d.tied_head else PackedLinear(self._matrix("lm_head"))
        # The activations of a layer are kept between calls, for one call at a time.
        self._buffers: dict[str, torch.Tensor] = {}
        self._turn = threading.Lock()

    def forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        """Evaluate rows; see `numem.runtime.engine.Decoder`. Sessions in several threads take turns."""
        with self._turn:
            return self._forward(rows, storage)

    def _forward(self, rows: Rows, storage: PageStorage) -> torch.Tensor:
        d = self.descriptor
        m = rows.tokens.shape[0]
        q_width = d.heads * d.head_dim
        kv_width = d.kv_heads * d.head_dim
        eps = d.norm.eps
        x = self.embed.rows(rows.tokens)
        hidden = self._buffer("hidden", m, d.hidden)
        qkv = self._buffer("qkv", m, q_width + 2 * kv_width)
        attended = self._buffer("attended", m, q_width)
        gate_up = self._buffer("gate_up", m, 2 * d.inter)
        inner = self._buffer("inner", m, d.inter)
        for index, layer in enumerate(self.layers):
            k_pages, v_pages = storage.k[index], storage.v[index]
            rms_norm(x, layer.attn_norm, eps, hidden, d.norm.offset)
            layer.qkv(hidden, qkv)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = qkv[:, :q_width], qkv[:, q_width : q_width + kv_width]
                rms_norm(q, layer.q_norm, eps, q, d.norm.offset)
                rms_norm(k, layer.k_norm, eps, k, d.norm.offset)
            rope_write(
                qkv, self.cos, self.sin, rows.positions, k_pages, v_pages, rows.slots, d.heads, d.kv_heads, d.head_dim
            )
            paged_attention(
                qkv[:, :q_width],
                k_pages,
                v_pages,
                rows.tables,
                rows.lane,
                rows.positions,
                attended,
                heads=d.heads,
                kv_heads=d.kv_heads,
                head_dim=d.head_dim,
                scale=d.attn_scale,
                window=layer.window,
            )
            layer.out(attended, x, x)
            rms_norm(x, layer.ffn_norm, eps, hidden, d.norm.offset)
            layer.gate_up(hidden, gate_up)
            silu_mul(gate_up, inner)
            layer.down(inner, x, x)
        if not len(rows.wanted):
            return torch.empty((0, d.vocab))
        last = x if len(rows.wanted) == m else x[rows.wanted]
        return self.head(rms_norm(last, self.final_norm, eps, offset=d.norm.offset), rows.out, peaks=rows.peaks)

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[name] = torch.empty((rows, width))
        return buffer[:rows]

    def _layer(self, index: int) -> _Layer:
        d = self.descriptor
        return _Layer(
            attn_norm=self._vector("attn_norm", index),
            qkv=self._linear(("attn_q", "attn_k", "attn_v"), index),
            q_norm=self._vector("attn_q_norm", index) if d.qk_norm else None,
            k_norm=self._vector("attn_k_norm", index) if d.qk_norm else None,
            out=self._linear(("attn_o",), index),
            ffn_norm=self._vector("ffn_norm", index),
            gate_up=self._linear(("ffn_gate", "ffn_up"), index),
            down=self._linear(("ffn_down",), index),
            window=d.window if d.layer_kinds[index] == SLIDING else 0,
        )

    def _linear(self, roles: tuple[str, ...], layer: int) -> PackedLinear:
        weight = torch.cat([self._matrix(role, layer) for role in roles])
        biases = [
            self._vector(f"{role}_bias", layer) if f"{role}_bias" in self.descriptor.names else None for role in roles
        ]
        if not any(b is not None for b in biases):
            return PackedLinear(weight)
        sizes = [self._checkpoint.shape(self.descriptor.tensor(role, layer))[0] for role in roles]
        filled = [torch.zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)]
        return PackedLinear(weight, torch.cat(filled))

    def _matrix(self, role: str, layer: int = 0) -> torch.Tensor:
        return self._checkpoint.tensor(self.descriptor.tensor(role, layer)).to(self._torch_dtype)

    def _vector(self, role: str, layer: int = 0) -> torch.Tensor:
        return self._checkpoint.tensor(self.descriptor.tensor(role, layer)).to(torch.float32)
