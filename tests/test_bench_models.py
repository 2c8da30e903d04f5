"""The fields and the arithmetic of `numem bench models`, on tiny models with a stand-in for the peer; no figure is asserted."""

from pathlib import Path
from typing import Any, Self

import pytest

from numem import LM
from numem.bench import NAMES, models, models_llamacpp, peers
from numem.bench.models_gemv import gemv_vs_bandwidth
from numem.bench.models_llamacpp import FIGURES, against_llamacpp
from numem.bench.models_shape import DECODERS, Shape
from numem.bench.report import render
from numem.bench.text import phrases
from numem.errors import FetchError

TINY = Shape(context=20, new=3, pairs=2, gemv=1 << 20, texts=5)


class StandIn:
    """Answers like `peer_llamacpp.py`, with fixed times."""

    version = "stand-in 1"

    def __init__(self, script: str, threads: int) -> None:
        assert (Path(peers.__file__).parent / script).is_file()
        self.asked: list[str] = []

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(command)
        if command == "quantise":
            Path(arguments["to"]).write_bytes(b"GGUF")
        if command == "run":
            assert len(arguments["ids"]) == TINY.context and arguments["new"] == TINY.new
        return {"prefill_ms": 40.0, "decode_ms": 30.0, "ids": [1]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def test_decode_and_prefill(tiny_lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    formats = []

    def load(key: str, *, dtype: str, quantise: str) -> LM:
        formats.append(quantise)
        return tiny_lm

    monkeypatch.setattr(models_llamacpp, "Peer", StandIn)
    monkeypatch.setattr(models_llamacpp, "gguf_file", lambda key: gguf)
    monkeypatch.setattr(models_llamacpp, "load_lm", load)
    found = against_llamacpp("any", "q4a", TINY)
    assert set(FIGURES) < set(found) and formats == ["q4a", "q8"]
    for name in FIGURES:
        assert found[name]["median"] > 0 and found[name]["verdict"] in ("met", "missed", "straddled")
    assert found["decode_q8_vs_llamacpp"]["tokens_per_s_peer"] == pytest.approx(100.0)
    assert found["prefill_vs_llamacpp"]["tokens_per_s_peer"] == pytest.approx(500.0)


def test_what_is_not_here_is_named_and_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(key: str, four_bits: str, shape: Shape) -> dict[str, Any]:
        raise FetchError(f"{key}: not accepted")

    def absent(shape: Shape) -> dict[str, Any]:
        raise peers.PeerMissing("peer_sentences: no module")

    monkeypatch.setattr(models, "against_llamacpp", refused)
    monkeypatch.setattr(models, "against_sentence_transformers", absent)
    result = models.models(TINY)
    for key in DECODERS:
        assert result[key] == dict.fromkeys(FIGURES) and "not accepted" in result["details"][key]["skipped"]
    assert result["embed_vs_sentence_transformers"] is None and result["gemv_vs_bandwidth"] > 0
    report = render({"models": result})
    assert "## Models" in report and "not accepted" in report and "no module" in report


def test_products_against_reading() -> None:
    found = gemv_vs_bandwidth(1 << 20)
    assert set(found["formats"]) == {"q8", "q4", "q4a"}
    assert found["median"] == min(one["median"] for one in found["formats"].values()) and found["bar"] == ">= 0.85"


def test_a_missing_peer_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "python"
    empty.write_text('#!/bin/sh\nread line\necho \'{"missing": "No module named llama_cpp"}\'\n')
    empty.chmod(0o755)
    monkeypatch.setenv("NUMEM_PEERS_PYTHON", str(empty))
    with pytest.raises(peers.PeerMissing, match=r"No module named llama_cpp; install numem\[peers\]"):
        peers.Peer("peer_llamacpp.py", 2)


def test_phrases_are_short_and_differ() -> None:
    texts = phrases(1000)
    assert len(set(texts)) == 1000 and {3, 24} <= {len(text.split()) for text in texts} and "models" in NAMES
