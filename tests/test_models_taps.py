"""Taps: what they see is what transformers reports, they change no bit, and an edit acts where it was made."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem import LM, load_lm
from numem.errors import ContextLengthError, InputError
from numem.models.taps import POINTS, hidden_states, logit_lens, trace
from numem.models.transformer import Transformer
from numem.runtime.engine import whole_texts
from tests.family_fixtures import CASES, family_model
from tests.model_fixtures import tiny_model

IDS = [int(t) for t in np.random.default_rng(3).integers(3, 250, 70)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "gemma3_text"])
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Largest error 1e-4 of every layer's entry and of the final hidden state, which comes after the final norm; and
    what a norm or a cap does after a tapped sum has the bits of the pass without taps."""
    from transformers import AutoModelForCausalLM

    directory = family_model(tmp_path / "m", CASES[family])
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train(False)
    with torch.inference_mode():
        theirs = torch.cat(peer(torch.tensor([IDS]), output_hidden_states=True).hidden_states).numpy()
    lm = load_lm(directory)
    ours = hidden_states(lm, IDS, "all")
    assert ours.shape == theirs.shape == (lm.descriptor.layers + 1, len(IDS), lm.descriptor.hidden)
    assert float(np.abs(ours - theirs).max()) <= 1e-4
    assert hidden_states(lm, IDS).tobytes() == ours[:, -1].tobytes()
    engine = lm.session().engine
    (untapped,) = engine.append([(engine.pool.allocate(), IDS)], logits="all")
    assert trace(lm, IDS).logits.tobytes() == untapped.tobytes()
    assert logit_lens(lm, IDS)[-1].tobytes() == untapped[-1].tobytes()


def test_reading_changes_no_bit(tiny_lm: LM) -> None:
    engine = tiny_lm.session().engine
    (untapped,) = engine.append([(engine.pool.allocate(), IDS)], logits="all")
    layers = range(tiny_lm.descriptor.layers)
    places = [(point, layer) for layer in layers for point in POINTS]
    traced = trace(tiny_lm, IDS, places)
    assert traced.logits.tobytes() == untapped.tobytes()
    assert list(traced.captured) == places
    for layer in layers:
        pre, attended, mid, fed, post = (traced.captured[point, layer] for point in POINTS)
        assert (pre + attended).tobytes() == mid.tobytes()
        assert (mid + fed).tobytes() == post.tobytes()


def test_the_lens_ends_with_the_models_own_logits(tiny_lm: LM) -> None:
    lens = logit_lens(tiny_lm, IDS)
    assert lens.shape == (tiny_lm.descriptor.layers + 1, tiny_lm.descriptor.vocab)
    assert lens[-1].tobytes() == trace(tiny_lm, IDS).logits[-1].tobytes()
    assert lens[0].tobytes() != lens[-1].tobytes()


def test_an_edit_acts_from_its_place_on(tiny_lm: LM) -> None:
    """Positions and layers before the edit keep their bits; an edit that gives the same array back keeps all."""

    def lift(array: np.ndarray) -> np.ndarray:
        array[40] += 1
        return array

    places = [("resid-post", 0), ("resid-pre", 1)]
    plain = trace(tiny_lm, IDS, places)
    lifted = trace(tiny_lm, IDS, places, {("resid-pre", 1): lift})
    assert lifted.captured["resid-post", 0].tobytes() == plain.captured["resid-post", 0].tobytes()
    difference = lifted.captured["resid-pre", 1] - plain.captured["resid-pre", 1]
    assert np.flatnonzero(difference.any(axis=1)).tolist() == [40]
    assert lifted.logits[:40].tobytes() == plain.logits[:40].tobytes()
    assert (lifted.logits[40:] != plain.logits[40:]).any(axis=1).all()
    same = trace(tiny_lm, IDS, edit={("attn-out", 0): lambda array: array, ("mlp-out", 1): lambda array: None})
    assert same.logits.tobytes() == plain.logits.tobytes()


def test_an_ablated_model_passes_its_embedding_on(tiny_lm: LM) -> None:
    """With every branch at zero, what leaves the last layer is what entered the first."""
    edit = {(point, layer): np.zeros_like for point in ("attn-out", "mlp-out") for layer in range(3)}
    traced = trace(tiny_lm, IDS, [("resid-pre", 0), ("resid-post", 2)], edit)
    assert traced.captured["resid-pre", 0].tobytes() == traced.captured["resid-post", 2].tobytes()


def test_bad_places_and_edits_are_refused(tiny_lm: LM) -> None:
    for place in (("resid", 0), ("resid-pre", 3), ("resid-pre", -1)):
        with pytest.raises(InputError, match="there is no"):
            trace(tiny_lm, IDS, [place])
    with pytest.raises(InputError, match="takes a float32 array"):
        trace(tiny_lm, IDS, edit={("resid-pre", 0): lambda array: array[1:]})
    with pytest.raises(InputError, match="takes a float32 array"):
        trace(tiny_lm, IDS, edit={("resid-pre", 0): lambda array: array.astype(np.float64)})
    with pytest.raises(InputError, match="no tokens"):
        trace(tiny_lm, [])
    with pytest.raises(InputError, match="positions"):
        hidden_states(tiny_lm, IDS, "first")
    with pytest.raises(ContextLengthError, match="max_position"):
        trace(tiny_lm, [5] * (tiny_lm.max_position + 1))


def test_what_is_no_array_is_refused(tiny_lm: LM) -> None:
    edits: list[Any] = [np.ndarray.tolist, lambda array: 0.0, torch.from_numpy, lambda array: array.astype(">f4")]
    for wrong in edits:
        with pytest.raises(InputError, match="takes a float32 array"):
            trace(tiny_lm, IDS, edit={("attn-out", 0): wrong})
    with pytest.raises(InputError, match="not whole numbers"):
        trace(tiny_lm, [1, 2.5])  # type: ignore[list-item]  # that is the point


def test_an_array_of_any_layout_takes_the_place(tiny_lm: LM) -> None:
    plain = trace(tiny_lm, IDS).logits.tobytes()
    for copy in (np.asfortranarray, lambda array: np.repeat(array, 2, axis=1)[:, ::2]):
        assert trace(tiny_lm, IDS, edit={("mlp-out", 1): copy}).logits.tobytes() == plain


def test_a_tap_that_runs_its_model_or_fails_leaves_it_usable(tiny_lm: LM) -> None:
    """The activations are one call's at a time: it would wait for itself for ever."""
    plain = trace(tiny_lm, IDS).logits.tobytes()

    def nested(array: np.ndarray) -> None:
        tiny_lm.generate_ids(IDS, 2)

    with pytest.raises(InputError, match="cannot run its own model"):
        trace(tiny_lm, IDS, edit={("attn-out", 0): nested})
    with pytest.raises(ZeroDivisionError):
        trace(tiny_lm, IDS, edit={("attn-out", 0): lambda array: array / (1 // 0)})
    assert trace(tiny_lm, IDS).logits.tobytes() == plain


def test_taps_of_a_quantised_model_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path / "cache"))
    lm = load_lm(tiny_model(tmp_path / "model"), quantise="q4a")
    rows, pages = whole_texts([IDS])
    assert isinstance(lm.decoder, Transformer)
    plain = lm.decoder.forward(rows, lm.decoder.scratch(pages)).numpy().tobytes()
    assert trace(lm, IDS, [("resid-mid", 1)], {("mlp-out", 1): np.copy}).logits.tobytes() == plain
