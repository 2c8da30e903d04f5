"""`numem bench models`: quantised decoding and prefill against llama.cpp, matrix-vector products against the memory's read
bandwidth, embeddings against sentence-transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from numem.bench.machine import machine, threads
from numem.bench.models_embed import against_sentence_transformers
from numem.bench.models_gemv import gemv_vs_bandwidth
from numem.bench.models_llamacpp import FIGURES, against_llamacpp
from numem.bench.models_shape import DECODERS, WHOLE, Shape
from numem.bench.peers import PeerMissing
from numem.errors import FetchError


def models(shape: Shape = WHOLE) -> dict[str, Any]:
    """Figures of every model, and of products and embeddings.

    `{model: {decode_q8_vs_llamacpp, decode_q4_vs_llamacpp, prefill_vs_llamacpp}, gemv_vs_bandwidth,
    embed_vs_sentence_transformers, details}`.

    A peer or a model that is not here is named in `details` with the remedy, and its figures are null.
    """
    import torch

    from numem.kernels import native

    torch.set_num_threads(threads())
    native.set_threads(threads())
    result: dict[str, Any] = {"machine": machine()}
    details: dict[str, Any] = {}
    for key, four_bits in DECODERS.items():
        details[key] = _or_why(partial(against_llamacpp, key, four_bits, shape))
        result[key] = {name: _median(details[key], name) for name in FIGURES}
    details["gemv_vs_bandwidth"] = gemv_vs_bandwidth(shape.gemv)
    result["gemv_vs_bandwidth"] = _median(details, "gemv_vs_bandwidth")
    details["embed"] = _or_why(partial(against_sentence_transformers, shape))
    result["embed_vs_sentence_transformers"] = _median(details["embed"], "embed_vs_sentence_transformers")
    return {**result, "details": details}


def _or_why(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except (PeerMissing, FetchError) as error:
        return {"skipped": str(error)}


def _median(found: dict[str, Any], name: str) -> float | None:
    return float(found[name]["median"]) if name in found else None
