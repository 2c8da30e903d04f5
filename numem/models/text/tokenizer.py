"""Text to token ids and back, from the tokenizer.json of a model directory."""

import json
import operator
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from numem.errors import CheckpointError, InputError
from numem.identity.digest import blake3_of
from numem.models.architecture.config import token_ids
from numem.models.text.chat import LEGACY_FILE, TEMPLATE_FILE, read_template
from numem.models.text.stream import TextStream, read_pieces
from numem.models.weights.lockfile import read_json, read_lock

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE, LEGACY_FILE)
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of a model directory.

    Attributes:
        eos_ids: every id that ends a text: the union of config.json, generation_config.json and the tokenizer's own.
        bos_id: id of the beginning-of-sequence token, None where the model names none. Having one does not mean that
            it is added: see `encode`.
        vocab_size: one past the largest id that stands for a token.
        padded_vocab_size: rows of the embedding; ids in [vocab_size, padded_vocab_size) stand for nothing and must
            never be sampled.

    Raises:
        CheckpointError: missing or malformed files, or files that differ from those recorded beside the model.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{self.directory}: no tokenizer.json; other tokenizer formats are not read")
        lock = read_lock(self.directory)
        if lock is not None:
            for name in _FILES:
                lock.check_file(self.directory, name)
        self._document = read_json(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # the library raises nothing narrower, and its panics are no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from error
        # The library takes a step written as a list of its values too; what is read here are objects.
        for name in ("normalizer", "decoder"):
            if not isinstance(self._document.get(name), dict | None):
                raise CheckpointError(f"{path}: {name} is a {type(self._document[name]).__name__}, not an object")
        # A file may carry the limits of an embedding service; a prompt is never cut or padded silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = self._optional("tokenizer_config.json")
        self._special = self._special_tokens(config)
        self.template = read_template(self.directory, config)
        model = self._optional("config.json")
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        # A model of several kinds of input keeps its text model's values in a block of their own.
        inner = model.get("text_config")
        configs = [model, inner] if isinstance(inner, Mapping) else [model]
        rows = [config["vocab_size"] for config in configs if isinstance(config.get("vocab_size"), int)]
        self.padded_vocab_size = rows[0] if rows else self.vocab_size
        self.bos_id = self._id("bos_token", tuple(i for config in configs for i in token_ids(config, "bos_token_id")))
        ends = {i for config in configs for i in token_ids(config, "eos_token_id")}
        ends.update(token_ids(self._optional("generation_config.json"), "eos_token_id"))
        own = self._id("eos_token", ())
        self.eos_ids = frozenset(ends if own is None else ends | {own})
        self._adds_bos = config.get("add_bos_token") is True and self.bos_id is not None
        self._processor_adds_bos = self._tokenizer.encode("").ids[:1] == [self.bos_id]
        self._pieces = read_pieces(self._tokenizer, self._document)
        self._check_case(config)
        self._digest: bytes | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a text. A BOS is added only where the tokenizer's post-processor or `add_bos_token` says so.

        A text that begins with the BOS, as a rendered chat does, gets no second one.
        """
        check_text(text)
        return self._with_bos(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one call of the library."""
        for number, text in enumerate(texts):
            check_text(text, f"text {number}")
        return [self._with_bos(e.ids) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InputError: an id that stands for nothing.
        """
        ids = [self._known(i) for i in ids]
        if self._pieces is not None:
            return self._pieces.text(ids, skip_special)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the model's chat template, which alone decides about a BOS.

        Text of a message that spells a control token becomes that token, as in transformers.

        Raises:
            InputError: the model has no chat template, or the messages do not fit it.
        """
        return self.encode_piece(self.render(messages, add_generation_prompt))

    def encode_piece(self, text: str) -> list[int]:
        """Ids of a text that stands after others or says all by itself: nothing is added at its ends."""
        check_text(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text that `chat` encodes."""
        if self.template is None:
            raise InputError(
                f"{self.directory}: the model has no chat template; give a plain prompt instead of messages"
            )
        text = self.template.render(messages, add_generation_prompt=add_generation_prompt, tokens=self._special)
        check_text(text)
        return text

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """An incremental detokeniser; its pieces joined are `decode` of all ids."""

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special=skip_special)

        return TextStream(self._pieces, decode, self._known, skip_special)

    def digest(self) -> bytes:
        """BLAKE3-256 of everything that decides ids: tokenizer.json in canonical form, the chat template, BOS; 32 bytes.

        Formatting and key order of the files do not enter, nor do truncation and padding, which are never applied.
        """
        if self._digest is None:
            document = {k: v for k, v in self._document.items() if k not in ("truncation", "padding")}
            # Vocabulary entries are keys here and may start with "$", which numem's canonical JSON reserves.
            canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
            template = "" if self.template is None else self.template.text
            special = json.dumps([self._special, self._adds_bos], sort_keys=True).encode()
            self._digest = blake3_of(
                [b"numem/tokenizer/v1", canonical, template.encode("utf-8", "surrogatepass"), special]
            )
        return self._digest

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None:
            return ids
        if self._processor_adds_bos and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return [self.bos_id, *ids] if self._adds_bos and ids[:1] != [self.bos_id] else ids

    def _check_case(self, config: Mapping[str, Any]) -> None:
        """Refuse a BERT tokenizer whose two files disagree about case: either choice would give other ids."""
        normalizer = self._document.get("normalizer") or {}
        lower, flag = normalizer.get("lowercase"), config.get("do_lower_case")
        if normalizer.get("type") == "BertNormalizer" and isinstance(flag, bool) and flag != lower:
            raise CheckpointError(
                f"{self.directory}: tokenizer_config.json has do_lower_case {flag}, but tokenizer.json has lowercase "
                f"{lower}; make them agree"
            )

    def _known(self, token: int) -> int:
        try:
            number = operator.index(token)
        except TypeError as error:
            raise InputError(f"token id {str(token)[:40]!r} is a {type(token).__name__}, not a whole number") from error
        if not 0 <= number < max(self.vocab_size, self.padded_vocab_size):
            raise InputError(f"token id {number} lies outside [0, {max(self.vocab_size, self.padded_vocab_size)})")
        return number

    def _optional(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        return read_json(path) if path.is_file() else {}

    def _special_tokens(self, config: Mapping[str, Any]) -> dict[str, str]:
        legacy = self._optional("special_tokens_map.json")
        out = {}
        for name in _NAMES:
            value = config.get(name, legacy.get(name))
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                out[name] = value
        return out

    def _id(self, name: str, fallback: tuple[int, ...]) -> int | None:
        token = self._special.get(name)
        number: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return next(iter(fallback), None) if number is None else number


def check_text(text: str, name: str = "text") -> None:
    """Raise InputError, which calls the text by `name`, unless it is a string of whole characters."""
    if not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: character {error.start} is half of a surrogate pair; give valid Unicode") from error
