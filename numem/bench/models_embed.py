"""Embeddings of short texts against sentence-transformers, on the same model directory."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from numem.bench.machine import threads, timed
from numem.bench.models_shape import EMBEDDER, Shape
from numem.bench.pairs import figure, ratios
from numem.bench.peers import Peer
from numem.bench.text import phrases
from numem.models.embedding.embedder import load_embedder


def against_sentence_transformers(shape: Shape) -> dict[str, Any]:
    """`embed_vs_sentence_transformers` (float32 on both sides) and the same with q8, each with texts/s and the least
    cosine between the two sides; everything warm, the sides in turns.

    Raises:
        PeerMissing: sentence-transformers is not installed.
        FetchError: the model cannot be had.
    """
    texts = phrases(shape.texts)
    sides = {"float32": load_embedder(EMBEDDER), "q8": load_embedder(EMBEDDER, quantise="q8")}
    with Peer("peer_sentences.py", threads()) as peer, tempfile.TemporaryDirectory(prefix="numem-bench-") as place:
        rows = Path(place) / "rows.f32"
        peer.ask("load", path=str(sides["float32"].directory))
        samples: dict[str, list[float]] = {"peer": [], **{name: [] for name in sides}}
        for _ in range(shape.pairs + 1):
            samples["peer"].append(peer.ask("run", texts=texts, to=str(rows))["ms"])
            for name, embedder in sides.items():
                samples[name].append(timed(partial(embedder.embed_texts, texts)))
        theirs = np.fromfile(rows, "<f4").reshape(len(texts), -1)
        speed = {name: round(len(texts) / float(np.median(values[1:])) * 1e3) for name, values in samples.items()}

        def side(name: str) -> dict[str, Any]:
            cosine = float((sides[name].embed_texts(texts) * theirs).sum(axis=1).min())
            found: dict[str, Any] = figure(
                ratios(samples["peer"][1:], samples[name][1:]),
                least=1.5,
                texts_per_s=speed[name],
                texts_per_s_peer=speed["peer"],
                least_cosine=round(cosine, 7),
            )
            return found

        words = float(np.mean([len(text.split()) for text in texts]))
        return {
            "embed_vs_sentence_transformers": side("float32"),
            "embed_q8_vs_sentence_transformers": side("q8"),
            "texts": len(texts),
            "words": round(words, 1),
            "peer": peer.version,
        }
