"""Streaming: text as ids come, never half a character, at a cost that does not grow with what came before."""

import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from numem.errors import CheckpointError, InputError
from numem.models.text.tokenizer import Tokenizer
from tests.model_fixtures import edit_json, tiny_tokenizer

ALPHABET = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
BYTES = 3  # id of byte 0 in the SentencePiece tokenizers below


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module", params=["prefix", "bare"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in the SentencePiece style: spaces as a mark, bytes as tokens of their own."""
    directory = tmp_path_factory.mktemp("pieces")
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": BYTES + byte for byte in range(256)}
    vocab |= {token: 259 + i for i, token in enumerate(["▁", "a", "b", "c", "▁a", "ab", "é"])}
    merges = [("▁", "a"), ("a", "b")]
    raw = Raw(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", "▁")
    raw.normalizer = spaces
    if request.param == "prefix":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    raw.decoder = decoders.Sequence(parts)
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A WordPiece tokenizer, as BERT has: its decoder joins words and pieces of words."""
    return Tokenizer(bert(tmp_path_factory.mktemp("words")))


def bert(directory: Path, lower: bool = True) -> Path:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "eat", "##ing", "food", "a", ".", "é", "e", "Food"]
    raw = Raw(models.WordPiece(vocab={token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=lower)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    raw.add_special_tokens(tokens[:4])
    raw.enable_truncation(4)
    directory.mkdir(exist_ok=True)
    raw.save(str(directory / "tokenizer.json"))
    return directory


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*(stream.push(i) for i in ids), stream.finish()]


@settings(max_examples=300, deadline=None)
@given(text=ALPHABET)
@example(text="<|im_end|>")
def test_streamed_text_equals_decoded_text(plain: Tokenizer, text: str) -> None:
    ids = plain.encode(text)
    assert "".join(streamed(plain, ids)) == plain.decode(ids)
    found = streamed(plain, ids, skip_special=False)  # text may name a special token
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in found)
    assert "".join(found) == plain.decode(ids, skip_special=False) == text


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=30), skip=st.booleans())
def test_streaming_equals_decoding_for_any_ids(plain: Tokenizer, ids: list[int], skip: bool) -> None:
    """Bytes that never become a character are U+FFFD in both, in the same places as the tokenizers library has them."""
    expected = plain._tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(plain, ids, skip)) == plain.decode(ids, skip_special=skip) == expected


def test_a_character_is_emitted_whole(plain: Tokenizer) -> None:
    ids = plain.encode("é🙂x")
    assert len(ids) == 7
    assert streamed(plain, ids) == ["", "é", "", "", "", "🙂", "x", ""]
    assert plain.stream().push(ids[2]) == ""


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="abcé 漢🙂", max_size=12))
def test_sentence_pieces_stream_to_their_text(pieces: Tokenizer, text: str) -> None:
    ids = pieces.encode(text)
    found = streamed(pieces, ids)
    assert "".join(found) == pieces.decode(ids) == pieces._tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in found)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 265), max_size=30), skip=st.booleans())
def test_sentence_pieces_stream_to_what_is_decoded_for_any_ids(pieces: Tokenizer, ids: list[int], skip: bool) -> None:
    decoded = pieces.decode(ids, skip_special=skip)
    assert "".join(streamed(pieces, ids, skip)) == decoded
    if "\ufffd" not in decoded:
        assert decoded == pieces._tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_of_several_byte_tokens_is_emitted_when_it_is_whole(pieces: Tokenizer) -> None:
    ids = [BYTES + byte for byte in "🙂漢".encode()]
    assert streamed(pieces, ids) == ["", "", "", "🙂", "", "", "漢", ""]
    assert streamed(pieces, [*ids[:2], pieces.encode("b")[-1]]) == ["", "", "\ufffdb", ""]
    assert streamed(pieces, ids[:3]) == ["", "", "", "\ufffd"]


def test_words_are_joined_as_the_decoder_joins_them(words: Tokenizer) -> None:
    ids = words.encode("Eating a food.")
    assert ids == [2, 4, 5, 7, 6, 8, 3] and words.decode(ids) == "eating a food."
    assert "".join(streamed(words, ids)) == "eating a food."
    assert streamed(words, ids)[1:4] == ["eat", "ing", " a"]


def test_case_is_what_the_files_agree_on(tmp_path: Path) -> None:
    assert Tokenizer(bert(tmp_path / "lower")).encode("FOOD É") == [2, 6, 10, 3]  # accents go with the case
    cased = bert(tmp_path / "cased", lower=False)
    assert Tokenizer(cased).encode("Food") == [2, 11, 3]
    for flag in (False, None):
        edit_json(cased / "tokenizer_config.json", do_lower_case=flag)
        Tokenizer(cased)
    edit_json(cased / "tokenizer_config.json", do_lower_case=True)
    with pytest.raises(CheckpointError, match="do_lower_case True, but tokenizer.json has lowercase False"):
        Tokenizer(cased)


def test_a_push_costs_the_same_after_many(plain: Tokenizer, pieces: Tokenizer, words: Tokenizer) -> None:
    """Decoding all ids anew would take minutes here."""
    for tokenizer in (plain, pieces, words):
        ids = [i for i in tokenizer.encode("a b c ab food eating") if i > 3] * 4000
        started = time.monotonic()
        text = "".join(streamed(tokenizer, ids))
        assert time.monotonic() - started < 30 and len(text) >= len(ids) / 4


def test_ids_that_stand_for_nothing_are_refused(pieces: Tokenizer) -> None:
    stream = pieces.stream()
    for bad in (-1, 266):
        with pytest.raises(InputError, match=str(bad)):
            stream.push(bad)
