"""Texts to token ids as an embedding model wants them: cut at its limit, with the tokens at both ends kept.

sentence_bert_config.json   {"max_seq_length", "do_lower_case"}
tokenizer_config.json       {"model_max_length", "add_eos_token", "eos_token"}
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from numem.errors import CheckpointError, InputError, UnsupportedModelError
from numem.models.embedding.files import ModelFiles
from numem.models.text.tokenizer import Tokenizer

SENTENCE_FILE = "sentence_bert_config.json"
TOKENIZER_FILE = "tokenizer_config.json"

# Longer contexts than this are never meant as a limit: tokenizers without one write 10^30.
_NO_LIMIT = 1 << 31

# Tokens of a text where nobody asks for more.
MOST_TOKENS = 8192

_SENTENCE_SETTINGS = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}


class TextEncoder:
    """The tokenizer of a model with its limit.

    Args:
        tokenizer: of the model.
        limit: most tokens of a text, those at its ends included.
        lower: texts are lowered before they are split.
        end: id that ends every text; it is appended where the tokenizer does not do so by itself.

    Attributes:
        limit: as given.
        prefix, suffix: ids that stand before and after those of every text.

    Raises:
        CheckpointError: a limit that leaves no room for a text.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int, *, lower: bool = False, end: int | None = None) -> None:
        self.limit = limit
        self._tokenizer = tokenizer
        self._lower = tokenizers.normalizers.Lowercase() if lower else None
        whole, piece = tokenizer.encode("a"), tokenizer.encode_piece("a")
        at = next((i for i in range(len(whole)) if whole[i : i + len(piece)] == piece), 0)
        self.prefix, self.suffix = whole[:at], whole[at + len(piece) :]
        self._end = [] if end is None or self.suffix[-1:] == [end] else [end]
        self.suffix = self.suffix + self._end
        if limit <= len(self.prefix) + len(self.suffix):
            raise CheckpointError(
                f"{tokenizer.directory}: a limit of {limit} tokens leaves no room between the "
                f"{len(self.prefix) + len(self.suffix)} that stand at the ends of every text"
            )

    def encode(self, texts: Sequence[str], prompt: str = "", first: int = 0) -> list[list[int]]:
        """Ids of each text behind a prompt, at most `limit` of them.

        Args:
            first: number of the first text in messages.

        Raises:
            InputError: a text without a token, by its index, or broken Unicode.
        """
        whole = [prompt + text for text in texts] if prompt else texts
        if self._lower is not None:
            whole = [self._lower.normalize_str(text) for text in whole]
        out = self._tokenizer.encode_batch(whole)
        if self._end:
            out = [ids + self._end for ids in out]
        keep = self.limit - len(self.suffix)
        for at, ids in enumerate(out):
            if len(ids) > self.limit:
                out[at] = ids[:keep] + self.suffix
            elif not ids:
                raise InputError(
                    f"embed: text {first + at} has no tokens; this model adds none, so it must not be empty"
                )
        return out

    def describe(self) -> dict[str, Any]:
        """Plain values for the fingerprint."""
        return {
            "limit": self.limit,
            "lower": self._lower is not None,
            "tokenizer": self._tokenizer.digest().hex(),
            "end": self._end,
        }


def read_encoder(
    files: ModelFiles,
    tokenizer: Tokenizer,
    positions: int,
    *,
    max_tokens: int | None = None,
    end_token: str | None = None,
) -> TextEncoder:
    """The encoder of a model directory.

    The limit is `max_seq_length`, else the tokenizer's `model_max_length`, and at most `positions` and `MOST_TOKENS`.
    Truncation and padding inside tokenizer.json are those of a training run and do not count.

    Args:
        positions: that the transformer can evaluate.
        max_tokens: in place of the model's own limit.
        end_token: text of the token that ends every text, None where the tokenizer's own rule decides.

    Raises:
        CheckpointError: values that are not what they should be, or an end token that the tokenizer does not have.
        UnsupportedModelError: settings of another kind of model.
        InputError: max_tokens outside [1, positions].
    """
    sentence, config = files.optional(SENTENCE_FILE), files.optional(TOKENIZER_FILE)
    for key, run in _SENTENCE_SETTINGS.items():
        if sentence.get(key) not in (None, run):
            raise UnsupportedModelError(
                f"{files.directory / SENTENCE_FILE}: {key} {sentence[key]!r} is not run; only {run!r}"
            )
    limit = max_tokens
    if limit is None:
        own = _limit(files, SENTENCE_FILE, "max_seq_length", sentence)
        own = _limit(files, TOKENIZER_FILE, "model_max_length", config) if own is None else own
        limit = min(positions if own is None else own, positions, MOST_TOKENS)
    if not 1 <= limit <= positions:
        raise InputError(f"max_tokens {limit} lies outside [1, {positions}], the model's own range")
    if end_token is None and config.get("add_eos_token") is True:
        eos = config.get("eos_token")
        end_token = eos.get("content") if isinstance(eos, Mapping) else eos
    end = None
    if end_token is not None:
        ids = tokenizer.encode_piece(end_token)
        if len(ids) != 1:
            raise CheckpointError(f"{files.directory}: the tokenizer has no token {end_token!r}, which ends every text")
        end = ids[0]
    lower = sentence.get("do_lower_case") is True
    return TextEncoder(tokenizer, limit, lower=lower, end=end)


def _limit(files: ModelFiles, name: str, key: str, config: Mapping[str, Any]) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise CheckpointError(f"{files.directory / name}: {key} is {value!r}, not a number of tokens")
    return None if value >= _NO_LIMIT else int(value)
