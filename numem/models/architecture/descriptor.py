"""The descriptor: a model's architecture as data, read from config.json and cross-checked with the checkpoint."""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

import torch

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.architecture.families import FAMILIES, IGNORED_SUFFIXES, REFUSED, REFUSED_SETTINGS, Family
from numem.models.architecture.rope import Rope, check_positions, read_rope

FULL = "full"
SLIDING = "sliding"

# Far above any model: keeps a corrupt config from asking for gigabytes of names.
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Norm:
    """The kind of normalisation used throughout a model.

    Attributes:
        kind: "rms" or "layer".
        eps: added to the mean square.
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
class Descriptor:
    """Architecture of a decoder.

    Attributes:
        family: config.json's model_type.
        hidden, layers, heads, kv_heads, head_dim, inter, vocab, max_pos: sizes; vocab counts rows of the embedding,
            padding included.
        norm: the normalisation; `norms` says where it stands ("input", "post_attn", "pre_ffn", "post_ffn").
        qk_norm: RMSNorm over each head of q and k before rotation.
        attn_bias, mlp_bias: biases present.
        attn_scale: multiplies q·k.
        tied_head: the embedding serves as output head. Decided by the checkpoint: true exactly when it has no head.
        act, gated: activation of the feed-forward, and whether gate and up are separate.
        layer_kinds: "full" or "sliding" per layer; window: keys a sliding layer sees, the query's own included (0: none).
        rope: rotary embedding of every layer.
        names: role -> tensor-name template with {layer}; only roles that this model has.
        bos, eos, pad: ids that config.json names.
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
    rope: Rope
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
    causal: bool = True
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def canonical(self) -> dict[str, Any]:
        """Plain values for the fingerprint.

        Tensor names and special ids are left out: they change no number. So is every field at its default, so that a
        field added later leaves existing fingerprints alone; for the same reason a default here never changes.
        """
        tree: dict[str, Any] = _canonical(self)
        for key in ("names", "bos", "eos", "pad"):
            tree.pop(key, None)
        return tree

    def rope_tables(self, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), float32 [max_position, head_dim/2], as `Rope.tables`.

        Raises:
            ContextLengthError: more positions than the model has.
        """
        check_positions(max_position, self.max_pos)
        return self.rope.tables(max_position)

    def tensor(self, role: str, layer: int = 0) -> str:
        """Name of the tensor in this role (and layer)."""
        return self.names[role].format(layer=layer)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model reads, with its shape."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        by_role: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab, self.hidden),
            "lm_head": (self.vocab, self.hidden),
            "final_norm": (self.hidden,),
            "attn_norm": (self.hidden,),
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_o": (self.hidden, q),
            "attn_q_norm": (self.head_dim,),
            "attn_k_norm": (self.head_dim,),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.inter, self.hidden),
            "ffn_up": (self.inter, self.hidden),
            "ffn_down": (self.hidden, self.inter),
        }
        out: dict[str, tuple[int, ...]] = {}
        for role, template in self.names.items():
            shape = by_role[role.removesuffix("_bias")]
            shape = shape[:1] if role.endswith("_bias") else shape
            for layer in range(self.layers if "{layer}" in template else 1):
                out[template.format(layer=layer)] = shape
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


def read_descriptor(config: Mapping[str, Any], tensor_names: Collection[str]) -> Descriptor:
    """Read a descriptor from config.json and the names of the checkpoint's tensors.

    Raises:
        UnsupportedModelError: a family or setting that this engine does not run, named.
        CheckpointError: missing or contradictory values, missing tensors, or tensors that nothing would read.
    """
    family = _family(config)
    for key, reason in REFUSED_SETTINGS.items():
        if config.get(key) not in (None, False, 0, 1, [], {}):
            raise UnsupportedModelError(f"config.json: {key} is set: {reason}")
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedModelError(f"config.json: hidden_act {act!r} is not run; known: silu")

    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    layers = _count(config, "num_hidden_layers", most=_MOST_LAYERS)
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} heads are not a multiple of {kv_heads} key-value heads")
    head_dim = _count(config, "head_dim", family.head_dim or hidden // heads)
    max_pos = _count(config, "max_position_embeddings")
    window, layer_kinds = _windows(config, family, layers)
    attention_bias = "attention_bias" in family.bias_keys and _flag(config, "attention_bias")
    qkv_bias = attention_bias or family.qkv_bias
    bias = Bias(qkv_bias, qkv_bias, qkv_bias, attention_bias)
    mlp_bias = "mlp_bias" in family.bias_keys and _flag(config, "mlp_bias")
    names, tied = _names(family, bias, mlp_bias, tensor_names)

    descriptor = Descriptor(
        family=family.model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inter=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        max_pos=max_pos,
        attn_scale=1.0 / math.sqrt(head_dim),
        tied_head=tied,
        layer_kinds=layer_kinds,
        rope=read_rope(config, head_dim, max_pos),
        names=names,
        norm=Norm(eps=_eps(config)),
        qk_norm=family.qk_norm,
        attn_bias=bias,
        mlp_bias=mlp_bias,
        window=window,
        bos=next(iter(token_ids(config, "bos_token_id")), None),
        eos=token_ids(config, "eos_token_id"),
        pad=next(iter(token_ids(config, "pad_token_id")), None),
    )
    _compare_names(descriptor, tensor_names)
    return descriptor


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A config value that may be null, an id or a list of ids, as a tuple."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        # Some configs write -1 for "none".
        if isinstance(item, bool) or not isinstance(item, int):
            raise CheckpointError(f"{key} is {value!r}; expected an id, a list of ids or null")
    return tuple(item for item in values if item >= 0)


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    listed = config.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(a, str) for a in listed):
        raise CheckpointError(f"config.json: architectures is {listed!r}, not a list of names")
    if model_type is None and len(listed) == 1:
        model_type = next((f.model_type for f in FAMILIES.values() if f.architecture == listed[0]), None)
    if not isinstance(model_type, str):
        raise CheckpointError(f"config.json: model_type is {model_type!r}, so the architecture is unknown")
    if isinstance(config.get("text_config"), Mapping):
        raise UnsupportedModelError(
            f"config.json: model_type {model_type!r} wraps a text_config (multi-modal input)", "model-type"
        )
    if model_type in REFUSED:
        raise UnsupportedModelError(
            f"config.json: model_type {model_type!r} is not run: it needs {REFUSED[model_type]}", "model-type"
        )
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: unknown model_type {model_type!r}; run: {', '.join(FAMILIES)}", "model-type"
        )
    family = FAMILIES[model_type]
    for name in listed:
        if name != family.architecture:
            raise UnsupportedModelError(
                f"config.json: architecture {name!r} is not run for model_type {model_type!r}; "
                f"only {family.architecture}",
                "architecture",
            )
    return family


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, tuple[str, ...]]:
    """Window size (0 for none) and the kind of each layer; the defaults are those of transformers' configurations."""
    full = (0, (FULL,) * layers)
    if family.window == "none":
        return full
    if family.window == "all":
        if "sliding_window" in config and config["sliding_window"] is None:
            return full
        return _count(config, "sliding_window", 4096), (SLIDING,) * layers
    types = config.get("layer_types")
    if not _flag(config, "use_sliding_window"):
        if types and "sliding_attention" in types:
            raise CheckpointError("config.json: layer_types has sliding layers, but use_sliding_window is false")
        kinds = (FULL,) * layers
        window = 0
    else:
        window = _count(config, "sliding_window", 4096)
        first = _count(config, "max_window_layers", 28, least=0)
        kinds = tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    if types is None:
        return (window, kinds) if SLIDING in kinds else full
    known = {"full_attention": FULL, "sliding_attention": SLIDING}
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"config.json: layer_types does not list {layers} layers")
    for kind in types:
        if kind not in known:
            raise UnsupportedModelError(
                f"config.json: layer type {kind!r} is not run; known: {', '.join(known)}", "layer-type"
            )
    # An explicit list wins over max_window_layers, which is only its default.
    kinds = tuple(known[kind] for kind in types)
    return (window, kinds) if SLIDING in kinds else full


def _names(family: Family, bias: Bias, mlp_bias: bool, tensor_names: Collection[str]) -> tuple[dict[str, str], bool]:
    """The roles this model has, with their names in this checkpoint, and whether the head is tied."""
    present = set(tensor_names)
    names = dict(family.names)
    if names["embed"] not in present and names["embed"].removeprefix("model.") in present:
        # Saved from the bare decoder, without its causal-LM wrapper.
        names = {role: name.removeprefix("model.") for role, name in names.items()}
    if not family.qk_norm:
        del names["attn_q_norm"], names["attn_k_norm"]
    tied = names["lm_head"] not in present
    if tied:
        del names["lm_head"]
    biased = {f"attn_{p}": getattr(bias, p) for p in "qkvo"} | dict.fromkeys(
        ("ffn_gate", "ffn_up", "ffn_down"), mlp_bias
    )
    for role, has in biased.items():
        if has:
            names[f"{role}_bias"] = names[role].removesuffix("weight") + "bias"
    return names, tied


def _compare_names(descriptor: Descriptor, tensor_names: Collection[str]) -> None:
    wanted, present = descriptor.shapes().keys(), set(tensor_names)
    missing = sorted(wanted - present)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors that config.json calls for, "
            f"first {missing[0]}"
        )
    unread = sorted(name for name in present - wanted if not name.endswith(IGNORED_SUFFIXES))
    if unread:
        raise CheckpointError(
            f"the checkpoint has {len(unread)} tensors that a {descriptor.family} model of this config.json does not "
            f"read, first {unread[0]}"
        )


def _count(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"config.json: {key} is {value!r}, not a whole number in [{least}, {most}]")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}, not true or false")
    return value


def _eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise CheckpointError(f"config.json: rms_norm_eps is {value!r}, not a number between 0 and 1")
    return float(value)


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
