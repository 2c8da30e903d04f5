"""Text to token ids and back, from the tokenizer.json of a model directory."""

import codecs
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from numem.errors import CheckpointError, InputError
from numem.identity.digest import blake3_of
from numem.models.architecture.descriptor import token_ids
from numem.models.text.chat import LEGACY_FILE, TEMPLATE_FILE, read_template
from numem.models.weights.lockfile import read_json, read_lock

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE, LEGACY_FILE)
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_REPLACEMENT = "\ufffd"


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
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise CheckpointError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from error
        # A file may carry the limits of an embedding service; a prompt is never cut or padded silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = self._optional("tokenizer_config.json")
        self._special = self._special_tokens(config)
        self.template = read_template(self.directory, config)
        model = self._optional("config.json")
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        rows = model.get("vocab_size")
        self.padded_vocab_size = rows if isinstance(rows, int) else self.vocab_size
        self.bos_id = self._id("bos_token", token_ids(model, "bos_token_id"))
        ends = {*token_ids(model, "eos_token_id")}
        ends.update(token_ids(self._optional("generation_config.json"), "eos_token_id"))
        own = self._id("eos_token", ())
        self.eos_ids = frozenset(ends if own is None else ends | {own})
        self._adds_bos = config.get("add_bos_token") is True and self.bos_id is not None
        self._digest: bytes | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a text. A BOS is added only where the tokenizer's post-processor or `add_bos_token` says so."""
        _check_text(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        if self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InputError: an id that stands for nothing.
        """
        ids = [self._known(i) for i in ids]
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
        _check_text(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text that `chat` encodes."""
        if self.template is None:
            raise InputError(
                f"{self.directory}: the model has no chat template; give a plain prompt instead of messages"
            )
        text = self.template.render(messages, add_generation_prompt=add_generation_prompt, tokens=self._special)
        _check_text(text)
        return text

    def stream(self, *, skip_special: bool = True) -> "TextStream":
        """An incremental detokeniser; its pieces joined are `decode` of all ids."""
        return TextStream(self, skip_special)

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

    def _known(self, token: int) -> int:
        number = int(token)
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


class TextStream:
    """Turns ids into text as they come, never emitting half a character.

    A character's bytes may be spread over several ids; they are held back until it is whole, or until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._owner = tokenizer
        self._skip_special = skip_special
        self._bytes: codecs.IncrementalDecoder | None = None
        if (tokenizer._document.get("decoder") or {}).get("type") == "ByteLevel":
            self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
            self._hidden = {
                entry["id"] for entry in tokenizer._document.get("added_tokens", []) if entry.get("special")
            }
        self._ids: list[int] = []
        self._emitted = ""

    def push(self, token: int) -> str:
        """Text that this id completes, possibly empty."""
        number = self._owner._known(token)
        if self._bytes is not None:
            return self._bytes.decode(self._raw(number))
        # Other decoders look across tokens (prefix spaces, byte fallback): decode anew and hold back an open end.
        self._ids.append(number)
        text = self._owner.decode(self._ids, skip_special=self._skip_special)
        return self._advance(text.rstrip(_REPLACEMENT))

    def finish(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._advance(self._owner.decode(self._ids, skip_special=self._skip_special))

    def _advance(self, text: str) -> str:
        if not text.startswith(self._emitted):
            return ""
        piece = text[len(self._emitted) :]
        self._emitted = text
        return piece

    def _raw(self, number: int) -> bytes:
        token = self._owner._tokenizer.id_to_token(number)
        if token is None or (self._skip_special and number in self._hidden):
            return b""
        if all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        text: str = token
        return text.encode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: character {error.start} is half of a surrogate pair; give valid Unicode") from error
