"""Turning ids into text as they come.

A decoder that works token by token gives each id a run of bytes, and text is what these bytes say in UTF-8: byte-level
tokenizers, and SentencePiece ones, where `▁` is a space and `<0x41>` a byte. Every push costs the same. Other decoders
look across tokens: for them a window of the last ids is decoded.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

_REPLACEMENT = "\ufffd"
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# The decoders of SentencePiece tokenizers, with and without a space that was put before the text.
_SENTENCE = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class Pieces:
    """The bytes that each id stands for.

    Args:
        raw: the library's tokenizer.
        hidden: ids of special tokens.
        bytes_of: a token's bytes.
        strip: whether one space at the start of a text is dropped.
    """

    def __init__(
        self, raw: tokenizers.Tokenizer, hidden: frozenset[int], bytes_of: Callable[[str], bytes], strip: bool
    ) -> None:
        self._raw = raw
        self._hidden = hidden
        self._bytes_of = bytes_of
        self.strip = strip

    def bytes(self, token: int, skip_special: bool) -> bytes:
        """Bytes of an id, none where it stands for nothing or is hidden."""
        if skip_special and token in self._hidden:
            return b""
        text = self._raw.id_to_token(token)
        return b"" if text is None else self._bytes_of(text)

    def text(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(self.bytes(token, skip_special) for token in ids).decode("utf-8", "replace")
        return text[1:] if self.strip and text.startswith(" ") else text


def read_pieces(raw: tokenizers.Tokenizer, document: Mapping[str, Any]) -> Pieces | None:
    """The pieces of a tokenizer.json, None where its decoder looks across tokens."""
    decoder = document.get("decoder") or {}
    hidden = frozenset(entry["id"] for entry in document.get("added_tokens", []) if entry.get("special"))
    if decoder.get("type") == "ByteLevel":
        return Pieces(raw, hidden, _byte_level, strip=False)
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else None
    if parts in (_SENTENCE, [*_SENTENCE, _STRIP]):
        return Pieces(raw, hidden, _sentence_piece, strip=parts != _SENTENCE)
    return None


class TextStream:
    """Turns ids into text as they come, never emitting half a character.

    A character's bytes may be spread over several ids; they are held back until it is whole, or until `finish`.

    Args:
        pieces: the bytes of ids, or None.
        decode: text of ids, used where `pieces` is None.
        check: refuses an id that stands for nothing.
        skip_special: special tokens are left out.
    """

    def __init__(
        self,
        pieces: Pieces | None,
        decode: Callable[[Sequence[int]], str],
        check: Callable[[int], int],
        skip_special: bool,
    ) -> None:
        self._pieces = pieces
        self._decode = decode
        self._check = check
        self._skip_special = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = pieces is not None and pieces.strip
        self._ids: list[int] = []
        self._context = 0  # ids of the window whose text was emitted
        self._emitted = 0  # characters of that text

    def push(self, token: int) -> str:
        """Text that this id completes, possibly empty."""
        number = self._check(token)
        if self._pieces is not None:
            return self._begin(self._bytes.decode(self._pieces.bytes(number, self._skip_special)))
        self._ids.append(number)
        text = self._decode(self._ids)
        if len(text) <= self._emitted or text.endswith(_REPLACEMENT):
            return ""
        piece = text[self._emitted :]
        # What came before the last piece has no say in what follows.
        self._ids = self._ids[self._context :]
        self._context, self._emitted = len(self._ids), len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD."""
        if self._pieces is not None:
            return self._begin(self._bytes.decode(b"", final=True))
        return self._decode(self._ids)[self._emitted :]

    def _begin(self, text: str) -> str:
        """Drop the space before the first character of all."""
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def _byte_level(token: str) -> bytes:
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode("utf-8", "replace")


def _sentence_piece(token: str) -> bytes:
    found = _BYTE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace(_SPACE, " ").encode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
