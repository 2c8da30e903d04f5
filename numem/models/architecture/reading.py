"""config.json and the names of a checkpoint's tensors -> a descriptor."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.architecture.config import Config, token_ids
from numem.models.architecture.descriptor import SLIDING, Bias, Descriptor, Moe
from numem.models.architecture.dispatch import check_settings, find_family, text_part
from numem.models.architecture.families import FAMILIES, Family
from numem.models.architecture.names import resolve
from numem.models.architecture.rope_reading import read_ropes
from numem.models.architecture.windows import read_windows

# Far above any model: keeps a corrupt config from asking for gigabytes of names.
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 10_000

_ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Buffers that old checkpoints carry and no engine reads.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.masked_bias")


def read_descriptor(
    config: Mapping[str, Any], tensor_names: Collection[str], families: Mapping[str, Family] = FAMILIES
) -> Descriptor:
    """Read a descriptor from config.json and the names of the checkpoint's tensors.

    Args:
        config: config.json.
        tensor_names: names of the tensors in the checkpoint.
        families: the families that run, by model_type.

    Raises:
        UnsupportedModelError: a family or setting that this engine does not run, named.
        CheckpointError: missing or contradictory values, missing tensors, or tensors that nothing would read.
    """
    family, head = find_family(config, families)
    values = Config(text_part(config, family), family.defaults)
    check_settings(config, family)
    check_settings(values.values, family)
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    layers = values.count("num_hidden_layers", most=_MOST_LAYERS)
    kv_heads = values.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} heads are not a multiple of {kv_heads} key-value heads")
    head_dim = values.count("head_dim", hidden // heads if hidden % heads == 0 else None)
    max_pos = values.count("max_position_embeddings")
    causal = family.causal and not (
        "use_bidirectional_attention" in family.runs and values.flag("use_bidirectional_attention")
    )
    window, window_right, layer_kinds = read_windows(values, family, layers, causal)
    rope, rope_local = read_ropes(values.values, family, head_dim, max_pos)
    moe = _moe(values, family, layers)
    attn_bias, mlp_bias = _biases(values, family)
    names = _names(family, attn_bias, mlp_bias, moe, head, tensor_names)
    scalar = float(head_dim)
    if "query_pre_attn_scalar" in family.runs:
        scalar = values.number("query_pre_attn_scalar", scalar)
    descriptor = Descriptor(
        family=family.model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inter=values.count("intermediate_size"),
        vocab=values.count("vocab_size"),
        max_pos=max_pos,
        attn_scale=1.0 / math.sqrt(scalar),
        tied_head=head and "lm_head" not in names,
        layer_kinds=layer_kinds,
        rope=rope,
        names=names,
        norm=replace(family.norm, eps=values.number(family.eps, below=1)),
        norms=family.norms,
        qk_norm="attn_q_norm" in names,
        attn_bias=attn_bias,
        mlp_bias=mlp_bias,
        attn_softcap=_softcap(values, family, "attn_logit_softcapping"),
        final_softcap=_softcap(values, family, "final_logit_softcapping"),
        embed_scale=math.sqrt(hidden) if family.embed_scaled else None,
        act=_act(values, family),
        gated=family.gated,
        window=window,
        window_right=window_right,
        causal=causal,
        rope_local=rope_local if SLIDING in layer_kinds else None,
        moe=moe,
        positions=family.positions,
        pos_rows=max_pos if "position_embed" in names else 0,
        token_types=values.count("type_vocab_size") if "type_embed" in names else 0,
        bos=next(iter(_ids(config, values, "bos_token_id")), None),
        eos=_ids(config, values, "eos_token_id"),
        pad=next(iter(_ids(config, values, "pad_token_id")), None),
        ignored=tuple(
            sorted({prefix for name in tensor_names for prefix in family.ignored if name.startswith(prefix)})
        ),
    )
    _compare_names(descriptor, tensor_names)
    return descriptor


def _ids(config: Mapping[str, Any], values: Config, key: str) -> tuple[int, ...]:
    """Ids from the whole config.json, then from its text part, then the family's own."""
    for part in (config, values.values, values.defaults):
        if part.get(key) is not None:
            return token_ids(part, key)
    return ()


def _act(values: Config, family: Family) -> str:
    name = values.get(family.act)
    if not isinstance(name, str) or name not in _ACTS:
        raise UnsupportedModelError(f"config.json: {family.act} {name!r} is not run; known: {', '.join(_ACTS)}")
    return _ACTS[name]


def _softcap(values: Config, family: Family, key: str) -> float | None:
    """Null means none, where an absent key takes the family's default."""
    if key not in family.runs or values.get(key) is None:
        return None
    return values.number(key)


def _biases(values: Config, family: Family) -> tuple[Bias, bool]:
    honoured = {key: key in family.bias_keys and values.flag(key) for key in ("attention_bias", "mlp_bias")}
    q, k, v, o = (honoured["attention_bias"] or f"attn_{p}" in family.biased for p in "qkvo")
    return Bias(q, k, v, o), honoured["mlp_bias"] or "ffn_down" in family.biased


def _moe(values: Config, family: Family, layers: int) -> Moe | None:
    keys = family.moe
    if keys is None:
        return None
    counts = {
        key: values.count(key, least=0, most=_MOST_EXPERTS)
        for key in ("num_experts", "num_local_experts")
        if values.values.get(key) is not None
    }
    if len(set(counts.values())) > 1:
        raise CheckpointError(
            f"config.json: {' and '.join(f'{key} {value}' for key, value in counts.items())} disagree; keep one"
        )
    experts = next(iter(counts.values()), keys.experts)
    sparse = [experts > 0] * layers
    if keys.sparse:
        step = values.count("decoder_sparse_step", 1)
        dense = values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
            raise CheckpointError(f"config.json: mlp_only_layers is {dense!r}, not a list of layers")
        sparse = [experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(sparse):
        return None
    top_k = values.count("num_experts_per_tok", most=experts)
    norm_topk = keys.norm_topk is None or values.flag(keys.norm_topk)
    return Moe(experts, top_k, values.count(keys.inter), norm_topk, tuple(sparse))


def _names(
    family: Family, bias: Bias, mlp_bias: bool, moe: Moe | None, head: bool, tensor_names: Collection[str]
) -> dict[str, str]:
    """The roles this model has, with their names in this checkpoint; no lm_head where it has none."""
    sparse = (False,) if moe is None else moe.layers
    absent = {
        "lm_head": not head,
        **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), all(sparse)),
        **dict.fromkeys(("moe_router", "expert_gate", "expert_up", "expert_down"), not any(sparse)),
    }
    names = {role: name for role, name in family.names.items() if not absent.get(role, False)}
    biased = {f"attn_{p}" for p in "qkvo" if getattr(bias, p)}
    if mlp_bias:
        biased |= {"ffn_gate", "ffn_up", "ffn_down"} & names.keys()
    if family.norm.bias:
        biased |= {role for role in names if role.endswith("norm")}
    first_sparse = sparse.index(True) if any(sparse) else 0
    first = dict.fromkeys(("moe_router", "expert_gate", "expert_up", "expert_down"), first_sparse)
    full = resolve(names, family.roots, family.variants, biased, first, set(tensor_names))
    if full.get("lm_head") not in tensor_names:
        full.pop("lm_head", None)
    return full


def _compare_names(descriptor: Descriptor, tensor_names: Collection[str]) -> None:
    wanted, present = descriptor.shapes().keys(), set(tensor_names)
    missing = sorted(wanted - present)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors that config.json calls for, "
            f"first {missing[0]}"
        )
    unread = sorted(
        name for name in present - wanted if not name.endswith(_BUFFERS) and not name.startswith(descriptor.ignored)
    )
    if unread:
        raise CheckpointError(
            f"the checkpoint has {len(unread)} tensors that a {descriptor.family} model of this config.json does not "
            f"read, first {unread[0]}"
        )
