"""The descriptor: a model's architecture as a value, with the names and shapes of its tensors."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

import torch

from numem.errors import CheckpointError, InputError
from numem.models.architecture.rope import Rope, check_positions

FULL = "full"
SLIDING = "sliding"


@dataclass(frozen=True, slots=True)
class Norm:
    """The kind of normalisation used throughout a model.

    Attributes:
        kind: "rms" or "layer".
        eps: added to the mean square (or variance).
        offset: added to the stored weight (1 for zero-centred weights).
        cast_before_weight: the normalised row is rounded to the activation dtype before the weight multiplies it.
        bias: whether a bias follows.
    """

    kind: str = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    cast_before_weight: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Bias:
    """Which attention projections carry a bias."""

    q: bool = False
    k: bool = False
    v: bool = False
    o: bool = False


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts in place of some feed-forwards.

    The router's logits pass a float32 softmax over all experts; the `top_k` largest are kept, ties going to the lowest
    index, and divided by their sum where `norm_topk`.

    Attributes:
        experts, top_k: how many there are, and how many a token uses.
        inter: width of one expert.
        layers: per layer, whether it is a mixture; the others are dense.
    """

    experts: int
    top_k: int
    inter: int
    norm_topk: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensor of a role lies: a tensor of the checkpoint and the part of it, () for all."""

    name: str
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Architecture of a transformer.

    Attributes:
        family: config.json's model_type.
        hidden, layers, heads, kv_heads, head_dim, inter, vocab, max_pos: sizes; vocab counts rows of the embedding,
            padding included.
        attn_scale: multiplies q·k.
        tied_head: the embedding serves as output head. Decided by the checkpoint: true exactly when it has no head
            (and its class has one: see `has_head`).
        layer_kinds: "full" or "sliding" per layer.
        rope: rotation of every layer, None where positions are learned.
        names: role -> tensor-name template with {layer} and {expert}; only roles that this model has.
        norm: the normalisation.
        norms: where it stands: "input" (role attn_norm) and "pre_ffn" (ffn_norm) before a block, "post_attn"
            (attn_post_norm) and "post_ffn" (ffn_post_norm) on a block's output before it is added; "after_attn"
            (attn_post_norm) and "after_ffn" (ffn_post_norm) on the sum.
        qk_norm: RMSNorm over each head of q and k before rotation.
        attn_bias, mlp_bias: biases present.
        attn_softcap, final_softcap: c in c * tanh(x / c), of attention scores and of logits.
        embed_scale: multiplies the embedding; see `embed_factor`.
        act: "silu", "gelu_tanh" or "gelu".
        gated: act(gate) * up, else act(up).
        window: keys a sliding layer sees up to and including the query's own (0: all).
        window_right: keys it sees beyond its own, in a model that is not causal.
        causal: False for an encoder, whose rows see the whole text.
        rope_local: rotation of the sliding layers, where it differs.
        moe: its mixture of experts.
        positions: "rope" or "learned".
        pos_rows: rows of the learned position table.
        token_types: rows of the token-type table.
        bos, eos, pad: ids that config.json names.
        ignored: prefixes of tensors in the checkpoint that are not read, such as a vision tower.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    max_pos: int
    attn_scale: float
    tied_head: bool
    layer_kinds: tuple[str, ...]
    rope: Rope | None
    names: Mapping[str, str] = field(repr=False)
    norm: Norm = field(default_factory=Norm)
    norms: tuple[str, ...] = ("input", "pre_ffn")
    qk_norm: bool = False
    attn_bias: Bias = field(default_factory=Bias)
    mlp_bias: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float | None = None
    act: str = "silu"
    gated: bool = True
    window: int = 0
    window_right: int = 0
    causal: bool = True
    rope_local: Rope | None = None
    moe: Moe | None = None
    positions: str = "rope"
    pos_rows: int = 0
    token_types: int = 0
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    ignored: tuple[str, ...] = ()

    @property
    def has_head(self) -> bool:
        """Whether there are logits; an embedding model has none."""
        return self.tied_head or "lm_head" in self.names

    @property
    def position_limit(self) -> int:
        """Positions that can be evaluated: max_pos, or fewer where the rotation would change in mid-sequence."""
        limits = [rope.limit for rope in (self.rope, self.rope_local) if rope is not None and rope.limit]
        return min([self.max_pos, *limits])

    def canonical(self) -> dict[str, Any]:
        """Plain values for the fingerprint.

        Tensor names and special ids are left out: they change no number. So is every field at its default, so that a
        field added later leaves existing fingerprints alone; for the same reason a default here never changes.
        """
        tree: dict[str, Any] = _canonical(self)
        for key in ("names", "bos", "eos", "pad", "ignored"):
            tree.pop(key, None)
        return tree

    def embed_factor(self, dtype: str) -> float:
        """`embed_scale` rounded to the dtype of the weights ("float32" or "bfloat16"), as the reference rounds it.

        In bfloat16, sqrt(640) = 25.298 becomes 25.25. 1.0 where the embedding is not scaled.
        """
        if self.embed_scale is None:
            return 1.0
        return float(torch.tensor(self.embed_scale, dtype=torch.float32).to(getattr(torch, dtype)))

    def check_dtype(self, dtype: str) -> None:
        """Refuse a dtype that this model is not run in.

        Raises:
            InputError: anything but float32 and bfloat16.
        """
        if dtype in ("float32", "bfloat16"):
            return
        reason = "it ends at 65,504, and activations of trained models pass that"
        if self.embed_scale is not None:
            reason = f"the residual stream of {self.family} overflows it to inf and the output becomes NaN"
        hint = f": {reason}" if dtype == "float16" else ""
        raise InputError(f"dtype {dtype!r} is not run{hint}; use float32 or bfloat16")

    def rope_tables(self, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) of `rope`, float32 [max_position, rotated / 2], as `Rope.tables`.

        The tables are 0 wide where nothing is rotated.

        Raises:
            ContextLengthError: more positions than the model has.
            UnsupportedModelError: more than its rotation can serve without changing in mid-sequence.
        """
        return self._tables(self.rope, max_position)

    def local_rope_tables(self, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rope_tables`, for sliding layers."""
        return self._tables(self.rope_local or self.rope, max_position)

    def _tables(self, rope: Rope | None, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        check_positions(max_position, self.max_pos)
        if rope is None:
            return torch.empty((max_position, 0)), torch.empty((max_position, 0))
        return rope.tables(max_position)

    def tensor(self, role: str, layer: int = 0, expert: int = 0) -> str:
        """Name of the tensor in this role (and layer, and expert)."""
        return self.names[role].format(layer=layer, expert=expert)

    def source(self, role: str, layer: int = 0, expert: int = 0) -> Source:
        """The tensor in this role, and the part of it where one tensor serves several roles or experts."""
        name = self.tensor(role, layer, expert)
        if self.moe is None or not role.startswith("expert_") or "{expert}" in self.names[role]:
            return Source(name)
        if role == "expert_down":
            return Source(name, (expert,))
        first = 0 if role == "expert_gate" else self.moe.inter
        return Source(name, (expert, slice(first, first + self.moe.inter)))

    def layers_of(self, role: str) -> list[int]:
        """Layers that have this role."""
        if self.moe is None or not role.startswith(("ffn_gate", "ffn_up", "ffn_down", "expert_", "moe_")):
            return list(range(self.layers))
        mixture = not role.startswith("ffn_")
        return [layer for layer, is_mixture in enumerate(self.moe.layers) if is_mixture == mixture]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model reads, with its shape."""
        by_role = self._role_shapes()
        out: dict[str, tuple[int, ...]] = {}
        for role, template in self.names.items():
            shape = by_role[role.removesuffix("_bias")]
            shape = shape[:1] if role.endswith("_bias") else shape
            experts = 1
            if self.moe is not None and role.startswith("expert_"):
                if "{expert}" in template:
                    experts = self.moe.experts
                else:
                    rows = shape[0] if role == "expert_down" else 2 * shape[0]
                    shape = (self.moe.experts, rows, shape[1])
            for layer in self.layers_of(role) if "{layer}" in template else [0]:
                for expert in range(experts):
                    out[template.format(layer=layer, expert=expert)] = shape
        return out

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError at the first tensor that is missing or has another shape than the config gives it."""
        for name, expected in self.shapes().items():
            if name not in shapes:
                raise CheckpointError(f"the checkpoint lacks tensor {name}, which config.json calls for")
            if tuple(shapes[name]) != expected:
                raise CheckpointError(
                    f"tensor {name} has shape {list(shapes[name])}, but config.json gives it {list(expected)}"
                )

    def _role_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        experts, inter = (0, 0) if self.moe is None else (self.moe.experts, self.moe.inter)
        norms = ("final_norm", "attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm", "embed_norm")
        return {
            **dict.fromkeys(norms, (hidden,)),
            **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (self.head_dim,)),
            **dict.fromkeys(("embed", "lm_head"), (self.vocab, hidden)),
            "position_embed": (self.pos_rows, hidden),
            "type_embed": (self.token_types, hidden),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_o": (hidden, q),
            "ffn_gate": (self.inter, hidden),
            "ffn_up": (self.inter, hidden),
            "ffn_down": (hidden, self.inter),
            "moe_router": (experts, hidden),
            "expert_gate": (inter, hidden),
            "expert_up": (inter, hidden),
            "expert_down": (hidden, inter),
        }


def _canonical(value: Any) -> Any:
    if is_dataclass(value):
        out: dict[str, Any] = {}
        for item in fields(value):
            current = getattr(value, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if current != default:
                out[item.name] = _canonical(current)
        return out
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items()}
    return value
