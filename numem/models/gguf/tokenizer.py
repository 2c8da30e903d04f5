"""The tokenizer files of a Hugging Face directory, rebuilt from a GGUF's metadata.

Two kinds: `gpt2`, byte-level pairs with their merges and a named pre-tokenizer, and `llama`, SentencePiece pairs, whose
merges follow from the tokens' scores.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.gguf.container import GgufFile
from numem.models.weights.lockfile import write_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPACE = "▁"

_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


@dataclass(frozen=True, slots=True)
class _Split:
    """A pre-tokenizer of a byte-level tokenizer.

    Attributes:
        pattern: what the text is split into before bytes are taken, None for the byte-level rule's own pattern.
        digits: digits are split one by one before that.
        nfc: text is composed first.
        whole: a word that is a token stays one, whatever the merges would make of it.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False


# The pattern of GPT-4's tokenizer and its descendants; they differ in how many digits go together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "smollm": _Split(digits=True),
    "qwen2": _Split(_WORDS.format(digits=r"\p{N}"), nfc=True),
    "llama-bpe": _Split(_WORDS.format(digits=r"\p{N}{1,3}"), whole=True),
}


def write_tokenizer(directory: Path, values: GgufFile, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        max_length: the model's positions.

    Raises:
        UnsupportedModelError: another tokenizer model or pre-tokenizer, named.
        CheckpointError: token lists that contradict each other.
    """
    tokens, types = _tokens(values)
    model = values.get("tokenizer.ggml.model", str, required=True)
    if model not in _MODELS:
        raise UnsupportedModelError(
            f"{values.path}: tokenizer model {model!r} is not imported; known: {', '.join(_MODELS)}"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{values.path}: a token appears twice in tokenizer.ggml.tokens")
    tokenizer = _MODELS[model](values, vocab, types)
    special = {name: _token(values, tokens, key) for name, key in _SPECIAL.items()}
    # SentencePiece begins a text with its BOS unless a file says otherwise.
    add_bos = values.get("tokenizer.ggml.add_bos_token", bool, model == "llama")
    if add_bos:
        bos = special["bos"]
        if bos is None:
            raise CheckpointError(f"{values.path}: add_bos_token is set, but there is no bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, vocab[bos])]
        )
    tokenizer.add_special_tokens(_added(tokens, types, (CONTROL, UNKNOWN), special=True))
    tokenizer.add_tokens(_added(tokens, types, (USER_DEFINED,), special=False))
    tokenizer.save(str(directory / "tokenizer.json"))

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "add_bos_token": add_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    config |= {f"{name}_token": token for name, token in special.items() if token is not None}
    template = values.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    write_json(directory / "tokenizer_config.json", config)


def merges_of(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece pair tokenizer, first to apply first.

    It joins the neighbours whose joint token has the highest score, so every way to cut a token into two tokens is a
    merge of that token's rank. Among equal scores, the longer left part goes first, then the longer right part.

    Args:
        vocab: token -> id.
        scores: by id.
    """
    found = []
    for token, number in vocab.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(-scores[number], -len(left), -len(right), left, right) for left, right in pairs]
    found.sort(key=lambda item: item[:3])
    return [(left, right) for _, _, _, left, right in found]


def _byte_level(values: GgufFile, vocab: dict[str, int], types: Sequence[int]) -> Tokenizer:
    pre = values.get("tokenizer.ggml.pre", str, "")
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"{values.path}: pre-tokenizer {pre!r} is not imported; known: {', '.join(_SPLITS)}"
        )
    split = _SPLITS[pre]
    merges = _pairs(values.path, values.items("tokenizer.ggml.merges", str), vocab)
    options = {"ignore_merges": True} if split.whole else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(values: GgufFile, vocab: dict[str, int], types: Sequence[int]) -> Tokenizer:
    scores = values.items("tokenizer.ggml.scores", float)
    if len(scores) < len(vocab):
        raise CheckpointError(f"{values.path}: {len(vocab)} tokens but {len(scores)} scores")
    if not all(map(math.isfinite, scores)):
        raise CheckpointError(f"{values.path}: metadata tokenizer.ggml.scores holds what is no finite number")
    # A user's own token is one symbol before any pair is joined: nothing ranks above it.
    scores = [0.0 if kind == USER_DEFINED else score for score, kind in zip(scores, types, strict=False)]
    missing = [i for i in range(256) if f"<0x{i:02X}>" not in vocab]
    if missing:
        raise UnsupportedModelError(f"{values.path}: tokenizer without a token for byte {missing[0]} is not imported")
    unknown = next((token for token, kind in zip(vocab, types, strict=False) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges_of(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", SPACE)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


_MODELS: dict[str, Callable[[GgufFile, dict[str, int], Sequence[int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_pieces,
}


def _tokens(values: GgufFile) -> tuple[list[str], list[int]]:
    """Tokens and their types by id, without the fillers that only pad the embedding."""
    tokens: list[str] = values.items("tokenizer.ggml.tokens", str)
    types: list[int] = values.items("tokenizer.ggml.token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{values.path}: {len(tokens)} tokens but {len(types)} token types")
    count = len(tokens)
    while count and types[count - 1] == UNUSED and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    if values.get("tokenizer.ggml.model", str, "") == "llama":
        # Converters write the spaces of a user's own token as spaces; within the tokenizer they are marks.
        tokens = [t.replace(" ", SPACE) if k == USER_DEFINED else t for t, k in zip(tokens, types, strict=True)]
    return tokens[:count], types[:count]


def _pairs(path: Path, merges: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        # Tokens may hold spaces after the first one only.
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(f"{path}: merge {merge!r} uses or makes a token that is not in the vocabulary")
        pairs.append((left, right))
    return pairs


def _added(tokens: Sequence[str], types: Sequence[int], kinds: tuple[int, ...], special: bool) -> list[AddedToken]:
    chosen = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]
    return [AddedToken(token, special=special, normalized=False) for token in chosen]


def _token(values: GgufFile, tokens: Sequence[str], key: str) -> str | None:
    number: int | None = values.get(f"tokenizer.ggml.{key}_token_id", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise CheckpointError(f"{values.path}: {key}_token_id {number} is outside the {len(tokens)} tokens")
    return tokens[number]
