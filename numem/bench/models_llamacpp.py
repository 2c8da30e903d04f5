"""Decode and prefill of quantised models against llama.cpp on the same prompt, threads and bit width."""

import tempfile
import time
from pathlib import Path
from typing import Any

from numem.bench.machine import threads
from numem.bench.models_shape import Shape
from numem.bench.pairs import figure, ratios
from numem.bench.peers import Peer
from numem.bench.text import tokens
from numem.models.hub.registry import gguf_file
from numem.models.lm import LM, load_lm
from numem.runtime.sampling import GREEDY

FIGURES = ("decode_q8_vs_llamacpp", "decode_q4_vs_llamacpp", "prefill_vs_llamacpp")


def against_llamacpp(key: str, four_bits: str, shape: Shape) -> dict[str, Any]:
    """FIGURES of one model with tokens/s of both sides; everything warm, the two sides in turns.

    llama.cpp runs the GGUF file itself at four bits and its own Q8_0 of it at eight, with a float16 cache; numem runs
    its import of that file, quantised anew, with a bfloat16 cache. Prefill is that of the 4-bit models. Both choose
    greedily, each its own tokens: decoding costs the same whatever they are.

    Raises:
        PeerMissing: llama-cpp-python is not installed.
        FetchError: the model cannot be had, or its terms were not accepted.
    """
    path = gguf_file(key)
    with Peer("peer_llamacpp.py", threads()) as peer, tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        eight = Path(place) / "q8_0.gguf"
        peer.ask("quantise", path=str(path), to=str(eight))
        four = _compare(load_lm(key, dtype="bfloat16", quantise=four_bits), peer, path, shape)
        q8 = _compare(load_lm(key, dtype="bfloat16", quantise="q8"), peer, eight, shape)
        return {
            "decode_q8_vs_llamacpp": _figure(q8, "decode", shape.new, 1.0, format="q8"),
            "decode_q4_vs_llamacpp": _figure(four, "decode", shape.new, 1.0, format=four_bits),
            "prefill_vs_llamacpp": _figure(four, "prefill", shape.context, 0.8, format=four_bits),
            "prefill_q8_vs_llamacpp": _figure(q8, "prefill", shape.context, 0.8, format="q8"),
            "peer": peer.version,
            "gguf_bytes": {"q4": path.stat().st_size, "q8": eight.stat().st_size},
        }


Samples = dict[str, list[tuple[float, float]]]


def _compare(lm: LM, peer: Peer, path: Path, shape: Shape) -> Samples:
    """(prefill ms, decode ms) of both sides, in turns."""
    ids = tokens(lm.tokenizer, shape.context)
    peer.ask("load", path=str(path), context=shape.context + shape.new + 16)
    session = lm.session()

    def ours() -> tuple[float, float]:
        began = time.perf_counter()
        with session.start(ids) as continuation:
            continuation.step(GREEDY)  # chooses a token from the prompt's last logits
            prefilled = time.perf_counter()
            for _ in range(shape.new):
                continuation.step(GREEDY)
            ended = time.perf_counter()
        return (prefilled - began) * 1e3, (ended - prefilled) * 1e3

    def theirs() -> tuple[float, float]:
        answer = peer.ask("run", ids=ids, new=shape.new)
        return answer["prefill_ms"], answer["decode_ms"]

    samples: Samples = {"numem": [], "peer": []}
    for number in range(shape.pairs + 1):
        sides = [("numem", ours), ("peer", theirs)]
        for name, call in sides if number % 2 else sides[::-1]:
            samples[name].append(call())
    return {name: values[1:] for name, values in samples.items()}


def _figure(samples: Samples, what: str, count: int, least: float, **more: Any) -> dict[str, Any]:
    which = ("prefill", "decode").index(what)
    mine, peers = ([sample[which] for sample in samples[side]] for side in ("numem", "peer"))
    speeds = {
        "tokens_per_s": round(count / sorted(mine)[len(mine) // 2] * 1e3, 1),
        "tokens_per_s_peer": round(count / sorted(peers)[len(peers) // 2] * 1e3, 1),
    }
    found: dict[str, Any] = figure(ratios(peers, mine), least=least, **speeds, **more)
    return found
