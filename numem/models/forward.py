"""The forward pass of a descriptor as a program: written once, for every family.

A block adds a branch to the residual stream x; which norms stand where is the descriptor's:

    pre       x = x + f(norm(x))
    sandwich  x = x + norm'(f(norm(x)))
    post      x = norm(x + f(x))

Activations are float32; a bfloat16 matrix rounds the rows that enter it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from numem.kernels import operations as op
from numem.kernels.joined import joined
from numem.kernels.mixture import Mixture
from numem.kernels.operations import Linear
from numem.kernels.program import Buffers, Op, Part, Program
from numem.models.architecture.descriptor import FULL, SLIDING, Descriptor, Moe
from numem.models.weights.loader import Weights

# The vector that serves at each place that a descriptor's `norms` may name.
NORM_ROLES = {
    "input": "attn_norm",
    "post_attn": "attn_post_norm",
    "after_attn": "attn_post_norm",
    "pre_ffn": "ffn_norm",
    "post_ffn": "ffn_post_norm",
    "after_ffn": "ffn_post_norm",
}


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weight and bias of one norm."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one layer computes with: norms by their place, and the matrices."""

    norms: dict[str, NormWeights]
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_out: Linear
    feed: "Feed | Experts"


@dataclass(frozen=True, slots=True)
class Feed:
    """A dense feed-forward: gate and up stacked, or up alone; then down."""

    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: the router and the matrices of the experts by id, gate and up stacked."""

    router: Linear
    gate_up: Sequence[Linear]
    down: Sequence[Linear]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything a program refers to: read once, shared by every program of the model."""

    embed: Linear
    head: Linear | None
    embed_norm: NormWeights | None
    final_norm: NormWeights | None
    layers: tuple[LayerWeights, ...]
    positions: Tensor | None
    tables: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def read(cls, d: Descriptor, weights: Weights, max_position: int) -> "ModelWeights":
        """Read the weights of a descriptor.

        `positions`, of learned ones, has the vector that is added at each (that of token type 0 included), `tables` the
        cosines and sines of each layer kind.
        """
        return cls(
            embed=weights.embed(),
            head=weights.head() if d.has_head else None,
            embed_norm=_norm(weights, "embed_norm"),
            final_norm=_norm(weights, "final_norm"),
            layers=tuple(_layer(d, weights, index) for index in range(d.layers)),
            positions=_positions(weights, max_position),
            tables={
                FULL: _tables(weights, d.rope_tables(max_position)),
                SLIDING: _tables(weights, d.local_rope_tables(max_position)),
            },
        )


def emit(d: Descriptor, weights: ModelWeights, dtype: str, *, taps: bool = False, join: bool = True) -> Program:
    """The program of a model.

    Args:
        dtype: of the weights, to which the scale of the embedding is rounded.
        taps: whether it looks at the points of `numem.models.taps`; the bits are the same either way.
        join: whether neighbours are joined into calls of the C extension; otherwise the operations stay as they are,
            for another device to run.
    """
    program = _Emission(d, weights, d.embed_factor(dtype), taps).program()
    if join:
        program.body, program.tail = joined(program.body), joined(program.tail)
    return program


class _Emission:
    def __init__(self, d: Descriptor, weights: ModelWeights, scale: float, taps: bool) -> None:
        self.d, self.weights, self.scale, self.taps = d, weights, scale, taps
        self.ops: list[Op] = []
        self.buffers = b = Buffers()
        q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
        self.x, self.normed, self.branch = b.new(d.hidden), b.new(d.hidden), b.new(d.hidden)
        self.qkv = b.new(q + 2 * kv)
        self.q, self.k = b.columns(self.qkv, 0, q), b.columns(self.qkv, q, kv)
        self.attended = b.new(q)
        self.inner = b.new(d.inter)
        self.gate_up = b.new(2 * d.inter if d.gated else 0)

    def program(self) -> Program:
        d, body = self.d, self.ops
        self.ops.append(op.Embed(self.weights.embed, self.x, self.scale))
        if self.weights.positions is not None:
            self.ops.append(op.AddPositions(self.x, self.weights.positions))
        self._norm(self.weights.embed_norm, self.x, self.x)
        for index, layer in enumerate(self.weights.layers):
            self._look("resid-pre", index, self.x)
            self._keys(index, layer)
            if index == d.layers - 1:  # every key is written; what follows serves the wanted rows
                self.ops = []
            self._attention(index, layer)
            self._look("resid-mid", index, self.x)
            self._feed_forward(index, layer)
            self._look("resid-post", index, self.x)
        result = self._norm(self.weights.final_norm, self.x, self.normed)
        head = [] if self.weights.head is None else [op.Head(self.weights.head, result, d.final_softcap)]
        return Program(self.buffers, body, self.ops, head, carried=(self.x, self.q), result=result)

    def _keys(self, index: int, layer: LayerWeights) -> None:
        """Queries, keys and values of a layer; the latter two go to its pages."""
        d = self.d
        source = self._norm(layer.norms.get("input"), self.x, self.normed)
        self.ops.append(op.Matmul(layer.qkv, source, self.qkv))
        for part, weight in ((self.q, layer.q_norm), (self.k, layer.k_norm)):
            if weight is not None:
                self.ops.append(op.RmsNorm(part, weight, d.norm.eps, d.norm.offset, part))
        cos, sin = self.weights.tables[d.layer_kinds[index]]
        self.ops.append(op.RopeWrite(self.qkv, cos, sin, index, d.heads, d.kv_heads, d.head_dim))

    def _attention(self, index: int, layer: LayerWeights) -> None:
        d = self.d
        sliding = d.layer_kinds[index] == SLIDING
        self.ops.append(
            op.Attend(
                self.q, self.attended, index, d.heads, d.kv_heads, d.head_dim, d.attn_scale,
                window=d.window if sliding else 0,
                causal=d.causal,
                right=d.window_right if sliding and not d.causal else -1,
                softcap=d.attn_softcap or 0.0,
            )
        )  # fmt: skip
        self._matmul(layer.attn_out, self.attended, layer.norms.get("post_attn"), "attn-out", index)
        self._norm(layer.norms.get("after_attn"), self.x, self.x)

    def _feed_forward(self, index: int, layer: LayerWeights) -> None:
        d, feed, post = self.d, layer.feed, layer.norms.get("post_ffn")
        source = self._norm(layer.norms.get("pre_ffn"), self.x, self.normed)
        if isinstance(feed, Experts):
            assert d.moe is not None
            self.ops.append(
                Mixture(feed.router, feed.gate_up, feed.down, d.moe.top_k, d.moe.norm_topk, d.act, source, self.branch)
            )
            self._join(post, "mlp-out", index)
        else:
            if d.gated:
                self.ops += [op.Matmul(feed.up, source, self.gate_up), op.Gate(self.gate_up, self.inner, d.act)]
            else:
                self.ops += [op.Matmul(feed.up, source, self.inner), op.Activate(self.inner, d.act)]
            self._matmul(feed.down, self.inner, post, "mlp-out", index)
        self._norm(layer.norms.get("after_ffn"), self.x, self.x)

    def _matmul(self, linear: Linear, source: Part, post: NormWeights | None, point: str, index: int) -> None:
        """The last matrix of a branch, and the sum: in one call where nothing stands between them."""
        if post is None and not self.taps:
            self.ops.append(op.Matmul(linear, source, self.x, self.x))
        else:
            self.ops.append(op.Matmul(linear, source, self.branch))
            self._join(post, point, index)

    def _join(self, post: NormWeights | None, point: str, index: int) -> None:
        """x = x + post(branch); sums and norms round by themselves, so that a look between them changes no bit."""
        if post is not None and self.d.norm.kind == "rms" and not self.taps:
            self._norm(post, self.branch, self.x, self.x)
            return
        self._norm(post, self.branch, self.branch)
        self._look(point, index, self.branch)
        self.ops.append(op.Add(self.branch, self.x, self.x))

    def _norm(self, norm: NormWeights | None, x: Part, out: Part, residual: Part | None = None) -> Part:
        """Where the normalised rows are: `out`, or `x` itself where there is no norm."""
        if norm is None:
            return x
        eps, offset = self.d.norm.eps, self.d.norm.offset
        if self.d.norm.kind == "rms":
            self.ops.append(op.RmsNorm(x, norm.weight, eps, offset, out, residual))
        else:
            self.ops.append(op.LayerNorm(x, norm.weight, norm.bias, eps, offset, out))
        return out

    def _look(self, point: str, index: int, part: Part) -> None:
        if self.taps:
            self.ops.append(op.Look(point, index, part))


def _norm(weights: Weights, role: str, layer: int = 0) -> NormWeights | None:
    weight = weights.vector(role, layer)
    return None if weight is None else NormWeights(weight, weights.vector(f"{role}_bias", layer))


def _layer(d: Descriptor, weights: Weights, index: int) -> LayerWeights:
    norms = {}
    for place in d.norms:
        norm = _norm(weights, NORM_ROLES[place], index)
        if norm is not None:
            norms[place] = norm
    return LayerWeights(
        norms=norms,
        qkv=weights.linear(("attn_q", "attn_k", "attn_v"), index),
        q_norm=weights.vector("attn_q_norm", index),
        k_norm=weights.vector("attn_k_norm", index),
        attn_out=weights.linear(("attn_o",), index),
        feed=_experts(d.moe, weights, index) if d.moe is not None and d.moe.layers[index] else _feed(d, weights, index),
    )


def _feed(d: Descriptor, weights: Weights, index: int) -> Feed:
    up = weights.linear(("ffn_gate", "ffn_up") if d.gated else ("ffn_up",), index)
    return Feed(up, weights.linear(("ffn_down",), index))


def _experts(moe: Moe, weights: Weights, index: int) -> Experts:
    return Experts(
        weights.linear(("moe_router",), index),
        weights.stack(("expert_gate", "expert_up"), index, moe.experts),
        weights.stack(("expert_down",), index, moe.experts),
    )


def _tables(weights: Weights, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    return weights.place(cos), weights.place(sin)


def _positions(weights: Weights, max_position: int) -> Tensor | None:
    table = weights.vector("position_embed")
    if table is None:
        return None
    kind = weights.vector("type_embed")
    return table[:max_position] if kind is None else table[:max_position] + kind[0]
