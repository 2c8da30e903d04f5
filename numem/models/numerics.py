"""The arithmetic of a model: what the kernels compute at its shapes, and the position tables it uses."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from blake3 import blake3

from numem.identity.digest import blake3_of
from numem.identity.fingerprint import NumericPolicy
from numem.kernels.mixture import route
from numem.kernels.policy import policy_name
from numem.kernels.selftest import Shapes, self_test
from numem.models.architecture.descriptor import Descriptor, Moe

# Positions whose tables are compared; a longer context changes none of these.
_POSITIONS = 8192

# Rows that are routed for the self-test.
_ROUTED = 16


def policy_of(
    descriptor: Descriptor, dtype: str, more: Iterable[np.ndarray] = (), *, quantised: Sequence[str] = ()
) -> NumericPolicy:
    """The numeric policy of a model.

    Args:
        dtype: of weights and cache.
        more: what else is computed for the self-test.
        quantised: formats that matrices are held in.

    Raises:
        ModelError: kernels whose rows depend on each other.
    """
    d = descriptor
    shapes = Shapes(
        hidden=d.hidden,
        inter=d.inter,
        heads=d.heads,
        kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        vocab=d.vocab,
        dtype=dtype,
        act=d.act,
        gated=d.gated,
        centred=d.norm.kind == "layer",
        sandwich="post_attn" in d.norms,
        offset=d.norm.offset,
        attn_softcap=d.attn_softcap or 0.0,
        final_softcap=d.final_softcap or 0.0,
        causal=d.causal,
        quantised=tuple(quantised),
    )
    outputs = [*(table.numpy() for table in position_tables(d)), *_routing(d.moe), *more]
    return NumericPolicy(policy_name(), blake3_of([self_test(shapes), *outputs]))


def position_tables(d: Descriptor) -> list[torch.Tensor]:
    """Cosines and sines of the first positions.

    They come from libm; their bytes join the self-test, so that another libm is another policy.
    """
    limit = min(d.position_limit, _POSITIONS)
    tables = [*d.rope_tables(limit)] if d.rope is not None else []
    if d.rope_local is not None:
        tables += d.local_rope_tables(limit)
    return tables


def _routing(moe: Moe | None) -> tuple[np.ndarray, ...]:
    """Experts and weights of a few rows of fixed logits: the router's softmax is no kernel of its own."""
    if moe is None:
        return ()
    raw = bytearray(blake3(b"numem/self-test/routing/v1").digest(length=4 * _ROUTED * moe.experts))
    logits = torch.frombuffer(raw, dtype=torch.int32).float().mul_(2.0**-29).view(_ROUTED, moe.experts)  # [-4, 4)
    ids, weights = route(logits, moe.top_k, norm_topk=moe.norm_topk)
    return np.ascontiguousarray(ids), np.ascontiguousarray(weights)
