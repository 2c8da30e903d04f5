"""Several turns over one token history: nothing that was computed is encoded or computed again."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from numem import LM, load_lm
from numem.errors import ContextLengthError, InputError
from numem.models.conversation import Conversation
from numem.runtime.engine import Engine
from numem.runtime.sampling import Sampler
from tests.model_fixtures import edit_json, tiny_model, tiny_vocabulary

END = 2


@dataclass(frozen=True, slots=True)
class Scripted(Sampler):
    """Says the ids of a list, which it takes them from, whatever the model thinks."""

    script: list[int] = field(default_factory=list)

    def choose(
        self, logits: np.ndarray, position: int, vocab: int | None = None, peak: tuple[int, float] | None = None
    ) -> int:
        return self.script.pop(0)


def engine_of(lm: LM) -> Engine:
    with lm.start([1]) as any_of_them:
        return any_of_them.session.engine


@pytest.fixture(scope="module")
def seams(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """A model whose tokenizer makes one token of two line feeds, and of "a" and a line feed."""
    directory = tiny_model(tmp_path_factory.mktemp("seams") / "tiny", max_position_embeddings=512)
    document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    count = len(tiny_vocabulary())
    document["model"]["vocab"] |= {"ĊĊ": count, "aĊ": count + 1}
    document["model"]["merges"] += [["Ċ", "Ċ"], ["a", "Ċ"]]
    edit_json(directory / "tokenizer.json", model=document["model"])
    return load_lm(directory)


def spell(lm: LM, text: str) -> list[int]:
    """Ids of a text, a byte each, as a model may say it."""
    return [token for c in text for token in lm.tokenizer.encode(c)]


REPLIES = ["\n\nYes.\n\n", "a\n\n", "\n", "", "a", "plain", "é\n"]


@pytest.mark.parametrize("first", REPLIES)
def test_the_second_turn_computes_only_what_it_adds(seams: LM, first: str) -> None:
    """A reply that the tokenizer would join with what stands around it, or spell with fewer tokens, keeps its own
    tokens: prime-rl#1863, mlc-llm#3179, llama.cpp#11970, TensorRT-LLM#18389."""
    tokenizer = seams.tokenizer
    sampler = Scripted(script=[*spell(seams, first), END, *spell(seams, "ok"), END])
    with Conversation(seams, max_new_tokens=40, sampler=sampler) as chat:
        assert chat.say("One?") == first
        history = list(chat.tokens)
        engine = engine_of(seams)
        computed = engine.rows_computed
        assert chat.say("Two?") == "ok"
        added = len(chat.tokens) - len(history)
        assert chat.tokens[: len(history)] == history
        # The pending END of the first turn, and all that is new but its own pending END.
        assert engine.rows_computed - computed == added
        text = tokenizer.decode(chat.tokens[:-1], skip_special=False)
        rendered = tokenizer.render(chat.messages, add_generation_prompt=False)
        assert rendered == text + "<|im_end|>\n"
        with seams.start(chat.tokens) as alone:
            held = chat._continuation
            assert held is not None and alone.kv().tobytes() == held.kv().tobytes()
    if "\n\n" in first:
        assert chat.tokens != [*tokenizer.encode_piece(text), END]


def test_a_reply_without_an_end_is_ended_by_the_template(seams: LM) -> None:
    sampler = Scripted(script=[*spell(seams, "abc"), *spell(seams, "ok"), END])
    with Conversation(seams, max_new_tokens=3, sampler=sampler, system="Be brief.") as chat:
        assert chat.say("One?") == "abc"
        assert chat.say("Two?") == "ok"
        text = seams.tokenizer.decode(chat.tokens, skip_special=False) + "\n"
        assert text == seams.tokenizer.render(chat.messages, add_generation_prompt=False)


def test_another_end_gives_way_to_the_templates(seams: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may end with a token that its template does not write."""
    monkeypatch.setattr(seams.tokenizer, "eos_ids", frozenset({0, END}))
    sampler = Scripted(script=[*spell(seams, "abc"), 0, *spell(seams, "ok"), END])
    with Conversation(seams, sampler=sampler) as chat:
        chat.say("One?")
        chat.say("Two?")
        assert 0 not in chat.tokens
        text = seams.tokenizer.decode(chat.tokens, skip_special=False) + "\n"
        assert text == seams.tokenizer.render(chat.messages, add_generation_prompt=False)


def test_a_template_that_trims_replies_does_not_change_the_history(tmp_path: Path) -> None:
    """What was said stays as it was said: only the template's frame is taken from the template."""
    directory = tiny_model(tmp_path / "tiny")
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = config["chat_template"].replace("message['content']", "message['content'] | trim")
    edit_json(directory / "tokenizer_config.json", chat_template=template)
    lm = load_lm(directory)
    sampler = Scripted(script=[*spell(lm, "\n Yes \n"), END, *spell(lm, "ok"), END])
    with Conversation(lm, max_new_tokens=40, sampler=sampler) as chat:
        chat.say("One?")
        history = list(chat.tokens)
        chat.say("Two?")
        assert chat.tokens[: len(history)] == history
        rest = lm.tokenizer.decode(chat.tokens[len(history) :], skip_special=False)
        assert rest == "\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"


@pytest.mark.parametrize(
    ("index", "content"), [(1, "\n\nYef"), (1, "\n\nYé!"), (0, "One!"), (0, "Önly?"), (1, "\n\nYes and")]
)
def test_edited_messages_keep_what_comes_before(seams: LM, index: int, content: str) -> None:
    """The text decides then, up to the last token boundary before it parts from the history."""
    tokenizer = seams.tokenizer
    sampler = Scripted(script=[*spell(seams, "\n\nYes é"), END, *spell(seams, "ok"), END])
    with Conversation(seams, max_new_tokens=40, sampler=sampler) as chat:
        chat.say("One?")
        history = list(chat.tokens)
        chat.messages[index]["content"] = content
        wanted = tokenizer.render([*chat.messages, {"role": "user", "content": "Two?"}])
        engine = engine_of(seams)
        computed = engine.rows_computed
        chat.say("Two?")
        prompt = chat.tokens[:-3]
        assert tokenizer.decode(prompt, skip_special=False) == wanted
        shared = next(i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b)
        kept = tokenizer.decode(history[:shared], skip_special=False)
        assert wanted.startswith(kept) and not wanted.startswith(
            tokenizer.decode(history[: shared + 1], skip_special=False)
        )
        assert engine.rows_computed - computed == len(chat.tokens) - 1 - shared


def test_asking_again_reuses_the_prompt(seams: LM) -> None:
    """The reply and the question taken back: the whole prompt is a prefix of the history."""
    sampler = Scripted(script=[*spell(seams, "abc"), END, *spell(seams, "ok"), END])
    with Conversation(seams, sampler=sampler) as chat:
        chat.say("One?")
        prompt = chat.tokens[:-4]
        del chat.messages[:]
        assert chat.say("One?") == "ok"
        assert chat.tokens[:-3] == prompt


def test_an_error_leaves_the_conversation_as_it_was(seams: LM) -> None:
    sampler = Scripted(script=[*spell(seams, "abc"), END, *spell(seams, "ok"), END])
    engine = engine_of(seams)
    with Conversation(seams, max_new_tokens=20, sampler=sampler) as chat:
        chat.say("One?")
        before = list(chat.tokens), [dict(m) for m in chat.messages], engine.pool.stats()
        with pytest.raises(ContextLengthError, match="max_position 512"):
            chat.say("x" * 600)
        with pytest.raises(InputError):
            chat.say("\ud800")
        sampler.script.insert(0, 10**6)  # no such token: the step after it fails
        with pytest.raises(InputError):
            chat.say("Two?")
        assert (chat.tokens, chat.messages, engine.pool.stats()) == before
        sampler.script[:] = [*spell(seams, "ok"), END]
        assert chat.say("Two?") == "ok"
        chat.close()
        sampler.script[:] = [*spell(seams, "again"), END]
        assert chat.say("Three?") == "again"
    engine.pool.check()
