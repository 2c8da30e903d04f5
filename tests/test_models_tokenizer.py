"""Tokenizers: BOS and EOS rules, chat templates in their sandbox, streaming, digests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import processors

from numem.errors import CheckpointError, InputError
from numem.models.text.chat import ChatTemplate
from numem.models.text.tokenizer import Tokenizer
from numem.models.weights.lockfile import Lock, sha256_file
from tests.model_fixtures import SPECIAL, TEMPLATE, edit_json, tiny_tokenizer

BOS, EOS = 1, 2
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def with_bos_processor(directory: Path) -> None:
    raw = Raw.from_file(str(directory / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} $A", pair=f"{SPECIAL[1]} $A $B", special_tokens=[(SPECIAL[1], BOS)]
    )
    raw.save(str(directory / "tokenizer.json"))


def test_text_round_trips(plain: Tokenizer) -> None:
    text = "the thing — naïve 漢字 🙂\n\x00 end"
    assert plain.decode(plain.encode(text)) == text
    assert plain.encode("") == [] and plain.decode([]) == ""


def test_special_tokens_are_hidden_unless_asked_for(plain: Tokenizer) -> None:
    ids = plain.encode("a<|im_end|>b")
    assert EOS in ids
    assert plain.decode(ids) == "ab"
    assert plain.decode(ids, skip_special=False) == "a<|im_end|>b"


@pytest.mark.parametrize(
    ("flag", "processor", "expected"),
    [(..., False, []), (False, False, []), (True, False, [BOS]), (..., True, [BOS]), (True, True, [BOS])],
)
def test_a_bos_is_added_only_where_the_tokenizer_says_so(
    tmp_path: Path, flag: Any, processor: bool, expected: list[int]
) -> None:
    """vllm#27486, sglang#888, llama-cpp-python#1439: exactly one BOS where there is one, none elsewhere."""
    tiny_tokenizer(tmp_path)
    if processor:
        with_bos_processor(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token=flag)
    tokenizer = Tokenizer(tmp_path)
    letters = [tokenizer.encode("a")[-1]]
    assert tokenizer.encode("a") == expected + letters
    assert tokenizer.encode("") == expected


def test_a_chat_template_that_writes_the_bos_gets_no_second_one(tmp_path: Path) -> None:
    """vllm#27515, DeepSeek-R1#151: the template writes BOS and the tokenizer would add one too."""
    tiny_tokenizer(tmp_path, chat_template="{{ bos_token }}" + TEMPLATE, add_bos_token=True)
    with_bos_processor(tmp_path)
    ids = Tokenizer(tmp_path).chat([{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert ids[:2] == [BOS, BOS]  # the template's BOS and <|im_start|>, one token in this tokenizer
    assert ids.count(BOS) == 2


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    """mlx-vlm#309, #2112, lighteval#1279: the list of generation_config counts, as an int or missing too."""
    tiny_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).eos_ids == {EOS}
    edit_json(tmp_path / "config.json", eos_token_id=5, vocab_size=320)
    assert Tokenizer(tmp_path).eos_ids == {EOS, 5}
    edit_json(tmp_path / "generation_config.json", eos_token_id=[1, 106])
    assert Tokenizer(tmp_path).eos_ids == {EOS, 5, 1, 106}
    edit_json(tmp_path / "generation_config.json", eos_token_id=7)
    edit_json(tmp_path / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert Tokenizer(tmp_path).eos_ids == {0, 5, 7}
    edit_json(tmp_path / "generation_config.json", eos_token_id="7")
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer(tmp_path)


def test_sizes_tell_the_padded_tail(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size) == (264, 264)
    edit_json(tmp_path / "config.json", vocab_size=320)
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size) == (264, 320)
    assert tokenizer.decode([300]) == ""
    for bad in (-1, 320):
        with pytest.raises(InputError, match=str(bad)):
            tokenizer.decode([bad])


def test_a_file_that_cuts_or_pads_does_neither(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    raw = Raw.from_file(str(tmp_path / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=16)
    digest = Tokenizer(tiny_tokenizer(tmp_path / "other")).digest()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert len(tokenizer.encode("abcdefghij")) == 10 and len(tokenizer.encode("a")) == 1
    assert tokenizer.digest() == digest


def test_half_a_surrogate_pair_is_refused(plain: Tokenizer) -> None:
    with pytest.raises(InputError, match="surrogate"):
        plain.encode("a\ud800")
    with pytest.raises(InputError, match="surrogate"):
        plain.chat([{"role": "user", "content": "a\ud800"}])


@pytest.mark.parametrize("value", [5, None, b"x", ["a"]])
def test_what_is_no_text_is_refused(plain: Tokenizer, value: Any) -> None:
    with pytest.raises(InputError, match=f"text is a {type(value).__name__}"):
        plain.encode(value)
    with pytest.raises(InputError, match=f"text 1 is a {type(value).__name__}"):
        plain.encode_batch(["a", value])


@pytest.mark.parametrize("token", ["1", 1.0, None])
def test_ids_are_whole_numbers(plain: Tokenizer, token: Any) -> None:
    with pytest.raises(InputError, match="not a whole number"):
        plain.decode([token])


DIGEST = """
import sys
from numem.models.text.tokenizer import Tokenizer
print(Tokenizer(sys.argv[1]).digest().hex())
"""


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    expected = Tokenizer(tmp_path).digest().hex()
    assert len(expected) == 64
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", DIGEST, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_the_digest_follows_content_not_formatting(tmp_path: Path) -> None:
    def digest(name: str, **document: Any) -> bytes:
        path = tiny_tokenizer(tmp_path / name)
        edit_json(path / "tokenizer.json", **document)
        return Tokenizer(path).digest()

    base = Tokenizer(tiny_tokenizer(tmp_path / "base")).digest()
    path = tiny_tokenizer(tmp_path / "reordered")
    document = json.loads((path / "tokenizer.json").read_text())
    shuffled = json.dumps(dict(reversed(document.items())), indent=7, ensure_ascii=True)
    (path / "tokenizer.json").write_text(shuffled)
    assert Tokenizer(path).digest() == base
    moved = tiny_tokenizer(tmp_path / "moved")
    edit_json(moved / "tokenizer_config.json", chat_template=...)
    (moved / "chat_template.jinja").write_text(TEMPLATE)
    assert Tokenizer(moved).digest() == base

    changed = [digest("normalized", normalizer={"type": "NFC"})]
    for name, settings_ in (("template", {"chat_template": TEMPLATE + " "}), ("bos", {"add_bos_token": True})):
        path = tiny_tokenizer(tmp_path / name)
        edit_json(path / "tokenizer_config.json", **settings_)
        changed.append(Tokenizer(path).digest())
    assert len({base, *changed}) == 4


def test_chat_renders_the_template(plain: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert plain.render(USER) == text
    assert plain.chat(USER) == plain.encode(text)
    assert plain.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_templates_are_found_in_every_place(tmp_path: Path) -> None:
    path = tiny_tokenizer(
        tmp_path, chat_template=[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert Tokenizer(path).render(USER) == "d"
    (path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer(path).render(USER) == "json"
    (path / "chat_template.jinja").write_text("{% for m in messages %}\n    {{ m.content }}\n{% endfor %}\n")
    assert Tokenizer(path).render(USER) == "    hi\n"  # blocks trimmed, the rest as written


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=...)
    with pytest.raises(InputError, match=r"no chat template.*plain prompt"):
        Tokenizer(tmp_path).chat(USER)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=7)
    with pytest.raises(CheckpointError, match="chat_template is a int"):
        Tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(CheckpointError, match="chat template, line 1"):
        Tokenizer(tmp_path)


MESSAGES: list[tuple[Any, str]] = [
    ([], "at least one"),
    ("hi", "at least one"),
    (None, "at least one"),
    ([3], r"messages\[0\] is a int"),
    ([{"role": "user"}], r"messages\[0\]: content is missing"),
    ([{"content": "x"}], r"messages\[0\]: role is missing"),
    ([*USER, {"role": "user", "content": None}], r"messages\[1\]: content"),
]


@pytest.mark.parametrize(("messages", "match"), MESSAGES)
def test_malformed_messages_name_their_place(plain: Tokenizer, messages: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        plain.chat(messages)


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ (''|attr('__class__'))|attr('__mro__') }}",
    "{{ '{0.__class__}'.format(messages).__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ range(10**9)|list }}",
    "{{ 2 ** (10 ** 12) }}",
    "{{ (-10) ** 99999999 % 7 }}",
    "{{ 'a' * 10 ** 12 }}",
    "{% set many = 10 ** 12 %}{{ [1] * many }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_templates_cannot_leave_their_sandbox(text: str) -> None:
    with pytest.raises((CheckpointError, InputError)) as caught:
        ChatTemplate(text, "t").render(USER, add_generation_prompt=True, tokens={})
    assert "\n" not in str(caught.value)


def test_templates_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "x"}]
    text = "{% set _ = messages[0].__setitem__('content', 'y') %}{{ messages[0].content }}"
    with pytest.raises((CheckpointError, InputError)):
        ChatTemplate(text, "t").render(messages, add_generation_prompt=True, tokens={})
    assert messages == [{"role": "user", "content": "x"}]


def test_what_templates_on_the_hub_use_is_there() -> None:
    def render(text: str) -> str:
        return ChatTemplate(text, "t").render(USER, add_generation_prompt=True, tokens={"bos_token": "<s>"})

    assert render("{{ bos_token }}{{ {'b': '<é>', 'a': 1}|tojson }}") == '<s>{"b": "<é>", "a": 1}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}") == "3"
    assert render("{{ 'dated' if strftime_now is defined else 'fixed' }}") == "fixed"
    assert render("{{ unknown_token }}") == ""
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must\n alternate') }}")
    with pytest.raises(InputError, match="fails on these messages"):
        render("{{ messages[0].content + 1 }}")
    with pytest.raises(InputError, match="refuses these messages"):
        render("{{ nothing.at.all }}")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    for text in ("{", "[]", "{}", '{"model": {"type": "Nothing"}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
            Tokenizer(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_differ_from_their_record_are_refused(tmp_path: Path, name: str) -> None:
    tiny_tokenizer(tmp_path)
    Lock({}, {item.name: sha256_file(item) for item in tmp_path.iterdir()}, "0" * 64).write(tmp_path)
    Tokenizer(tmp_path)
    (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer(tmp_path)
