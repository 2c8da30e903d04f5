"""The ends of what may be asked and chosen: no new tokens, full prompts, and ids that only pad the embedding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from numem import LM, Memory, Sampler, load_lm
from numem.errors import ContextLengthError, InputError
from numem.models.taps import trace
from numem.runtime.beam import beam_search
from numem.runtime.engine import Engine
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.request import Request
from tests.model_fixtures import tiny_model

TOKENS, ROWS = 264, 320


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 250, length)]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """A model whose padding rows would win every argmax: its head is the embedding, and those rows are eight times the
    largest others."""
    directory = tiny_model(tmp_path_factory.mktemp("m") / "padded", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    name = "model.embed_tokens.weight"
    heaviest = tensors[name][:TOKENS].norm(dim=1).argsort()[-(ROWS - TOKENS) :]
    tensors[name][TOKENS:] = 8 * tensors[name][heaviest]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return load_lm(directory)


def test_no_new_tokens_leave_a_checkpoint(tiny_lm: LM, memory: Memory) -> None:
    """The prompt's logits can be had, nothing is chosen, and what was published is restored whole (vllm#52693)."""
    ids = prompt(40)
    assert tiny_lm.generate_ids(ids, 0) == []
    assert trace(tiny_lm, ids).logits.shape == (40, tiny_lm.descriptor.vocab)
    session = tiny_lm.session(pages=20)
    with session.start(ids) as asked:
        assert (asked.processed, asked.logits) == (39, None)
        asked.publish(memory).wait()
        assert asked.processed == 39
    with session.start(ids) as cold, session.restore(memory, ids) as restored:
        assert restored.restored.tokens == 39
        assert cold.step() == restored.step()
        assert cold.logits is not None and restored.logits is not None
        assert cold.logits.tobytes() == restored.logits.tobytes() == trace(tiny_lm, ids).logits[-1].tobytes()


def test_empty_full_and_longer_prompts(tiny_dir: Path) -> None:
    """vllm#7283, vllm#7632, vllm#7746 (empty), vllm#16445 (as long as can be), vllm#40302 (longer)."""
    lm = load_lm(tiny_dir, max_position=64)
    assert lm.generate_ids(prompt(64), 0) == []
    assert len(lm.generate_ids(prompt(64), 1, ignore_eos=True)) == 1
    assert len(lm.generate_ids(prompt(60), 5, ignore_eos=True)) == 5
    for length, new in ((64, 2), (60, 6), (65, 0)):
        with pytest.raises(ContextLengthError, match="max_position 64"):
            lm.generate_ids(prompt(length), new)
    with pytest.raises(InputError, match="no tokens"):
        lm.generate_ids([], 4)


def test_padding_is_never_chosen(padded: LM) -> None:
    """Greedy, sampled, in lanes or by beams; the logits of padding are left as they were computed."""
    ids = prompt(30)
    with padded.start(ids) as greedy:
        for _ in range(20):
            token = greedy.step()
            assert greedy.logits is not None
            assert token == greedy.logits[:TOKENS].argmax() and greedy.logits.shape == (ROWS,)
            assert greedy.logits.argmax() >= TOKENS
        expected = greedy.tokens[30:]
    sampler = Sampler(temperature=5.0, seed=3)
    sampled = padded.generate_ids(ids, 60, sampler=sampler, ignore_eos=True)
    assert max(sampled) < TOKENS
    session = padded.session(pages=60)
    requests = [Request("a", tuple(ids), 20), Request("b", tuple(ids), 60, sampler=sampler)]
    outcomes = {o.request.id: o.generated for o in Scheduler(session, 2).run(requests)}
    assert outcomes == {"a": expected, "b": sampled}
    for beam in beam_search(session, ids, width=4, max_new_tokens=6):
        assert max(beam.tokens) < TOKENS


def test_a_limit_outside_the_vocabulary_is_refused(tiny_lm: LM) -> None:
    for vocab in (0, -1, tiny_lm.descriptor.vocab + 1):
        with pytest.raises(InputError, match="vocab"):
            Engine(tiny_lm.decoder, pages=2, vocab=vocab)


def test_a_prompt_may_hold_padding(padded: LM) -> None:
    """It has a row like any other id; only beyond the embedding there is none."""
    assert len(padded.generate_ids([5, ROWS - 1], 2, ignore_eos=True)) == 2
    with pytest.raises(InputError, match=f"outside \\[0, {ROWS}\\)"):
        padded.generate_ids([ROWS, 5], 2)


def test_the_fixture_is_what_it_says(padded: LM) -> None:
    assert (padded.tokenizer.vocab_size, padded.descriptor.vocab, padded.descriptor.tied_head) == (TOKENS, ROWS, True)
    rows = padded.decoder.weights.embed.rows(torch.tensor([0, ROWS - 1]))
    assert float(rows[1].norm()) > float(rows[0].norm())
