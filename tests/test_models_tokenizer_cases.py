"""Public reports about prompts, as tests: one BOS, ends of text, Gemma's roles, contents in parts, empty prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import processors

from numem import load_lm
from numem.errors import CheckpointError, InputError
from numem.models.text.tokenizer import Tokenizer
from tests.model_fixtures import SPECIAL, edit_json, tiny_model, tiny_tokenizer

BOS, EOS = 0, 2
# The rules of Gemma's template: system text joins the first turn, roles alternate, the assistant is the model.
GEMMA = """{{ bos_token }}
{%- set first = '' -%}
{%- if messages[0].role == 'system' -%}
  {%- set first = messages[0].content + '\n\n' -%}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif -%}
  {{ '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
  {{- first if loop.first }}{{ message.content | trim }}{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}"""


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def bos_processor(directory: Path) -> Path:
    raw = Raw.from_file(str(directory / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    raw.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def gemma(tmp_path: Path) -> Tokenizer:
    """BOS by the post-processor and by the template."""
    return Tokenizer(bos_processor(tiny_tokenizer(tmp_path, bos_token=SPECIAL[BOS], chat_template=GEMMA)))


def test_there_is_one_bos_whatever_writes_it(gemma: Tokenizer) -> None:
    """vllm#27486, vllm#27515, sglang#888, DeepSeek-R1#151, llama-cpp-python#1439: a chat of "hi" begins with one BOS, and
    so do a plain completion and a chat that was rendered to text and encoded."""
    chat = turns(("user", "hi"))
    for ids in (gemma.chat(chat), gemma.encode("hi"), gemma.encode(gemma.render(chat)), gemma.encode("")):
        assert ids[0] == BOS and BOS not in ids[1:]
    assert gemma.encode(gemma.render(chat)) == gemma.chat(chat)
    assert gemma.encode_batch(["hi", gemma.render(chat)]) == [gemma.encode("hi"), gemma.chat(chat)]


def test_a_text_that_spells_two_keeps_two(gemma: Tokenizer) -> None:
    assert gemma.encode(SPECIAL[BOS] * 2 + "hi")[:3] == [BOS, BOS, gemma.encode("hi")[1]]


def test_no_bos_is_added_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    """sglang#888: SmolLM2 and Qwen have a BOS or none, and add none."""
    tokenizer = Tokenizer(tiny_tokenizer(tmp_path))
    assert tokenizer.bos_id == 1 and 1 not in tokenizer.encode("hi") and tokenizer.encode("") == []
    edit_json(tmp_path / "tokenizer_config.json", bos_token=...)
    assert Tokenizer(tmp_path).bos_id is None


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(..., {2, 7}), (1, {1, 2, 7}), ([1, 106], {1, 2, 7, 106}), ([], {2, 7}), (None, {2, 7}), (-1, {2, 7})],
)
def test_text_ends_at_any_id_of_the_union(tmp_path: Path, generation: Any, expected: set[int]) -> None:
    """mlx-vlm#309, mlx-vlm#2112, TensorRT-Model-Connect#640, lighteval#1279: a list, an int, nothing at all."""
    tiny_tokenizer(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=7, vocab_size=320)
    if generation is not ...:
        edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    assert Tokenizer(tmp_path).eos_ids == expected


def test_generation_stops_at_an_id_of_generation_config(tmp_path: Path) -> None:
    """lighteval#1279: and goes on where that is ignored."""
    model = tiny_model(tmp_path)
    prompt = [5, 6, 7]
    free = load_lm(model).generate_ids(prompt, 12, ignore_eos=True)
    end = free[3]
    edit_json(model / "generation_config.json", eos_token_id=[1, end])
    lm = load_lm(model)
    assert lm.generate_ids(prompt, 12) == free[: free.index(end) + 1]
    assert lm.generate_ids(prompt, 12, ignore_eos=True) == free


def test_a_model_of_several_kinds_of_input_keeps_its_text_values_apart(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=[1, 5], text_config={"vocab_size": 300, "eos_token_id": 6})
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size) == (264, 300)
    assert tokenizer.eos_ids == frozenset({1, 2, 5, 6})


def test_gemma_merges_the_system_text_and_names_the_model(gemma: Tokenizer) -> None:
    """TGI#3198, mistral.rs#506, adk-python#1373."""
    messages = turns(("system", "Be brief."), ("user", "hi"), ("assistant", "Yes?"), ("user", "bye"))
    bos, start, end = SPECIAL
    assert gemma.render(messages) == (
        f"{bos}{start}user\nBe brief.\n\nhi{end}\n"
        "<|im_start|>model\nYes?<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>model\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        turns(("user", "a"), ("user", "b")),
        turns(("assistant", "a"), ("user", "b")),
        turns(("system", "s"), ("assistant", "a")),
    ],
)
def test_roles_that_do_not_alternate_are_refused(gemma: Tokenizer, messages: list[dict[str, Any]]) -> None:
    """TGI#3198, mistral.rs#506: a clear error, in one line."""
    with pytest.raises(InputError, match="roles must alternate") as caught:
        gemma.chat(messages)
    assert "\n" not in str(caught.value)


def test_a_content_in_parts_is_their_text(gemma: Tokenizer) -> None:
    """adk-python#1373: content as a list of parts."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": ", you"}]
    messages = turns(("system", parts[:1]), ("user", parts))
    assert gemma.render(messages) == gemma.render(turns(("system", "Hello"), ("user", "Hello, you")))
    assert messages[1]["content"] is parts


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image", "url": "x"}, "'image'"),
        ({"type": "text"}, "'text'"),
        ({"type": "text", "text": 3}, "'text'"),
        ({}, "'None'"),
        ("hi", "'str'"),
    ],
)
def test_other_parts_are_refused_by_type(gemma: Tokenizer, part: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"messages\[0\]: a part of type {said} is not read"):
        gemma.chat(turns(("user", [part])))


def test_a_base_model_has_no_chat(tmp_path: Path) -> None:
    """mistral.rs#506: a missing template is no default template."""
    tiny_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=...)
    with pytest.raises(InputError, match=r"no chat template.*plain prompt"):
        Tokenizer(tmp_path).chat(turns(("user", "hi")))


def test_an_empty_prompt_begins_with_the_bos_or_is_refused(tmp_path: Path) -> None:
    """vllm#7283, vllm#7632, vllm#7746: an empty prompt is the BOS where the model adds one, else a clear error."""
    model = tiny_model(tmp_path)
    with pytest.raises(InputError, match="the prompt has no tokens"):
        load_lm(model).generate_text("", 3)
    edit_json(model / "tokenizer_config.json", add_bos_token=True)
    lm = load_lm(model)
    assert lm.tokenizer.encode("") == [1]
    assert lm.generate_text("", 3) == lm.tokenizer.decode(lm.generate_ids([1], 3))


def test_an_eos_that_is_no_id_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id={"id": 1})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("decoder", ["a"], "decoder is a list"),
        ("normalizer", ["a"], "normalizer is a list"),
        ("model", {"continuing_subword_prefix": "much longer than a token"}, "not a tokenizer"),
    ],
)
def test_what_the_library_takes_or_panics_at_is_refused(tmp_path: Path, name: str, value: Any, said: str) -> None:
    path = tiny_tokenizer(tmp_path) / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document[name] = document[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match=said):
        Tokenizer(tmp_path)
