"""The tokenizer files of a Hugging Face directory, rebuilt from a GGUF's metadata."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.weights.lockfile import write_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


class Metadata(Protocol):
    """What is asked of a GGUF's metadata."""

    path: Path

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None, *, required: bool = False) -> Any:
        """Value of a key, or the default."""


def write_tokenizer(directory: Path, values: Metadata) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    The `smollm` pre-tokenizer splits every digit on its own, then applies the byte-level rule with its default regular
    expression and no prefix space.

    Raises:
        UnsupportedModelError: another tokenizer model or pre-tokenizer, named.
        CheckpointError: token lists that contradict each other.
    """
    model = values.get("tokenizer.ggml.model", str, required=True)
    pre = values.get("tokenizer.ggml.pre", str, "")
    if model != "gpt2" or pre != "smollm":
        raise UnsupportedModelError(
            f"{values.path}: tokenizer model {model!r} with pre-tokenizer {pre!r} is not imported; "
            "known: 'gpt2' with 'smollm'"
        )
    tokens: list[str] = values.get("tokenizer.ggml.tokens", list, required=True)
    types: list[int] = values.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    merges: list[str] = values.get("tokenizer.ggml.merges", list, required=True)
    if len(types) != len(tokens):
        raise CheckpointError(f"{values.path}: {len(tokens)} tokens but {len(types)} token types")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{values.path}: a token appears twice in tokenizer.ggml.tokens")

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_pairs(values.path, merges, vocab)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = {name: _token(values, tokens, key) for name, key in _SPECIAL.items()}
    add_bos = values.get("tokenizer.ggml.add_bos_token", bool, False)
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
        "model_max_length": values.get("llama.context_length", int, required=True),
        "add_bos_token": add_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    config |= {f"{name}_token": token for name, token in special.items() if token is not None}
    template = values.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    write_json(directory / "tokenizer_config.json", config)


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


def _token(values: Metadata, tokens: Sequence[str], key: str) -> str | None:
    number: int | None = values.get(f"tokenizer.ggml.{key}_token_id", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise CheckpointError(f"{values.path}: {key}_token_id {number} is outside the {len(tokens)} tokens")
    return tokens[number]
