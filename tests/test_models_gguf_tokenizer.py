"""Tokenizers rebuilt from a GGUF: named pre-tokenizers, and SentencePiece pairs from tokens and scores."""

import json
from pathlib import Path
from typing import Any

import pytest

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.gguf.container import GgufFile
from numem.models.gguf.tokenizer import merges_of, write_tokenizer
from numem.models.text.tokenizer import Tokenizer
from tests.gguf_fixtures import write_gguf
from tests.model_fixtures import MERGES, SPECIAL, tiny_vocabulary

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Gemma's order: control tokens, the user's own, bytes, then pieces of falling score.
PIECES = ["▁the", "the", "th", "he", "▁t", "▁", "t", "h", "e", "a", "b", "é", "ab", "▁a", "\n"]
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "<b>", "\n\n", "  ", "   ", *BYTES, *PIECES]
TYPES = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, OWN, OWN, OWN, OWN, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
SCORES = [*[-1000.0] * 9, *[0.0] * 256, *[-float(n) for n in range(len(PIECES))]]


def tokenizer(directory: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of a GGUF with the metadata below."""
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()},
    }
    write_tokenizer(directory, GgufFile(write_gguf(directory / "x.gguf", "gemma3", values, {})), 64)
    return Tokenizer(directory)


def pieces(made: Tokenizer, text: str) -> list[str]:
    return [str(made._tokenizer.id_to_token(i)) for i in made.encode(text)]


def test_sentence_pieces_join_by_score(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    assert pieces(made, "the the") == ["<bos>", "the", "▁the"]
    assert pieces(made, "ab a") == ["<bos>", "ab", "▁a"]
    assert made.decode(made.encode("the the ab é")) == "the the ab é"
    assert made.bos_id == 2 and made.eos_ids == frozenset({1})


def test_a_character_without_a_piece_is_its_bytes(tmp_path: Path) -> None:
    made = tokenizer(tmp_path)
    assert pieces(made, "漢") == ["<bos>", "<0xE6>", "<0xBC>", "<0xA2>"]
    assert made.decode(made.encode("a漢🙂b")) == "a漢🙂b"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokens", list(range(len(TOKENS))), "tokens holds a int"),
        ("token_type", ["1"] * len(TYPES), "token_type holds a str"),
        ("scores", ["0"] * len(SCORES), "scores holds a str"),
        ("scores", [float("nan")] * len(SCORES), "scores holds what is no finite number"),
        ("merges", [1, 2], "merges holds a int"),
    ],
)
def test_lists_of_another_kind_are_named(tmp_path: Path, key: str, value: list[Any], said: str) -> None:
    model = {"ggml__model": "gpt2", "ggml__pre": "qwen2"} if key == "merges" else {}
    with pytest.raises(CheckpointError, match=said):
        tokenizer(tmp_path, **model, **{f"ggml__{key}": value})


def test_own_tokens_stand_above_every_pair(tmp_path: Path) -> None:
    """Runs of spaces, which converters write as spaces: 30 of Gemma's ids are such tokens."""
    made = tokenizer(tmp_path)
    assert pieces(made, "a  the") == ["<bos>", "a", "▁▁", "the"]
    assert pieces(made, "a   the") == ["<bos>", "a", "▁▁▁", "the"]
    assert pieces(made, "\n\n\n") == ["<bos>", "\n\n", "\n"]
    assert pieces(made, "<b>a<turn>") == ["<bos>", "<b>", "a", "<turn>"]
    ids = made.encode("<b>a<turn>")
    assert made.decode(ids) == "<b>a" and made.decode(ids, skip_special=False) == "<bos><b>a<turn>"


def test_a_text_has_one_bos(tmp_path: Path) -> None:
    """vllm#27486, sglang#888: plain text and a rendered chat have exactly one, an empty text has it alone."""
    template = "{{ bos_token }}{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
    made = tokenizer(tmp_path, chat_template=template)
    assert made.encode("") == [2]
    for ids in (made.encode("a"), made.chat([{"role": "user", "content": "a"}]), made.encode("<bos>a")):
        assert ids[0] == 2 and ids.count(2) == 1
    assert made.encode_batch(["<bos>a", "a"]) == [made.encode("a")] * 2


def test_a_space_before_the_text(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, ggml__add_space_prefix=True)
    assert pieces(made, "the the") == ["<bos>", "▁the", "▁the"]
    assert made.decode(made.encode("the the")) == "the the" and made.decode(made.encode(" a")) == " a"


def test_merges_are_every_cut_of_a_token_by_its_score() -> None:
    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    assert merges_of(vocab, [0, 0, 0, -3, -1, -2]) == [("b", "c"), ("ab", "c"), ("a", "bc"), ("a", "b")]
    assert merges_of(vocab, [0, 0, 0, -1, -1, -1]) == [("ab", "c"), ("a", "bc"), ("a", "b"), ("b", "c")]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ggml__scores": [0.0]}, CheckpointError, "280 tokens but 1 scores"),
        ({"ggml__token_type": [1]}, CheckpointError, "280 tokens but 1 token types"),
        ({"ggml__bos_token_id": 9999}, CheckpointError, "9999"),
        ({"ggml__bos_token_id": None}, CheckpointError, "no bos_token_id"),
        ({"ggml__tokens": [*TOKENS[:-1], "a"]}, CheckpointError, "appears twice"),
        ({"ggml__tokens": [t.replace("<0x41>", "<x>") for t in TOKENS]}, UnsupportedModelError, "byte 65"),
    ],
)
def test_lists_that_contradict_each_other_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        tokenizer(tmp_path, **changes)


def byte_level(directory: Path, pre: str, **changes: Any) -> Tokenizer:
    directory.mkdir()
    tokens = tiny_vocabulary() + ["12", "123"]
    return tokenizer(
        directory,
        ggml__model="gpt2",
        ggml__pre=pre,
        ggml__tokens=tokens,
        ggml__token_type=[CONTROL if t in SPECIAL else NORMAL for t in tokens],
        ggml__merges=[*MERGES, "1 2", "12 3"],
        ggml__scores=None,
        **changes,
    )


def test_pre_tokenizers_differ_in_digits_and_composition(tmp_path: Path) -> None:
    digits = {pre: pieces(byte_level(tmp_path / pre, pre), "1234") for pre in ("smollm", "qwen2", "llama-bpe")}
    assert digits == {"smollm": list("1234"), "qwen2": list("1234"), "llama-bpe": ["123", "4"]}
    composed = {pre: Tokenizer(tmp_path / pre).encode("e\u0301") for pre in digits}
    assert composed["qwen2"] == Tokenizer(tmp_path / "qwen2").encode("é")
    assert composed["llama-bpe"] != Tokenizer(tmp_path / "llama-bpe").encode("é")


def test_no_bos_is_added_by_byte_level_tokenizers_unless_the_file_says_so(tmp_path: Path) -> None:
    assert byte_level(tmp_path / "a", "llama-bpe").encode("a")[0] != 2
    assert byte_level(tmp_path / "b", "llama-bpe", ggml__add_bos_token=True).encode("a")[0] == 2


def test_fillers_at_the_end_are_no_tokens(tmp_path: Path) -> None:
    tokens = [*TOKENS, "[PAD280]", "[PAD281]"]
    made = tokenizer(tmp_path, ggml__tokens=tokens, ggml__token_type=[*TYPES, 5, 5], ggml__scores=[*SCORES, 0.0, 0.0])
    assert made.vocab_size == len(TOKENS) == 280


def test_special_ids_are_written(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<bos>", "<eos>", "<unk>")
    assert config["add_bos_token"] is True and config["model_max_length"] == 64
