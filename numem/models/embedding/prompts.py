"""What a model wants in front of a text: the prompts of its own files, by the kind of the text.

    config_sentence_transformers.json   {"prompts": {name: text}, "default_prompt_name": name or null}

A query prompt may hold an instruction; `instruct` puts another in its place:

    Instruct: {instruction}\\nQuery:          Qwen3-Embedding (no space after the colon)
    task: {instruction} | query:              EmbeddingGemma
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numem.errors import CheckpointError, InputError
from numem.models.embedding.files import ModelFiles

PROMPTS_FILE = "config_sentence_transformers.json"

QUERY, DOCUMENT = "query", "document"

# Models use several names for the prompt of a document.
_NAMES = {QUERY: ("query",), DOCUMENT: ("document", "passage", "corpus")}

_FORMS = (
    re.compile(r"(Instruct: )(.*)(\nQuery: ?)", re.DOTALL),
    re.compile(r"(task: )(.*)( \| query: ?)", re.DOTALL),
)

# Where a model's files have no query prompt although its publisher states one.
QWEN3_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
PUBLISHED = {"bge-small-en-v1.5": {QUERY: "Represent this sentence for searching relevant passages: "}}


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a model.

    Attributes:
        texts: by name.
        default: name of the prompt of texts whose kind has none, or None.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def of(self, kind: str | None, instruct: str | None) -> str:
        """The prompt of a kind of text.

        Args:
            kind: "query", "document" or the name of a prompt of the model; None for a document, or with an
                instruction for a query.
            instruct: takes the place of the instruction that the query prompt holds.

        Raises:
            InputError: no such kind, an instruction for another kind than a query, or for a model that takes none.
        """
        if kind is None:
            kind = DOCUMENT if instruct is None else QUERY
        if not isinstance(kind, str) or (kind not in _NAMES and kind not in self.texts):
            known = sorted({QUERY, DOCUMENT, *self.texts})
            raise InputError(f"embed: kind {kind!r} is not one of {', '.join(known)}")
        names = _NAMES.get(kind, (kind,))
        found = next((name for name in names if name in self.texts), self.default)
        prompt = "" if found is None else self.texts[found]
        if instruct is None:
            return prompt
        if kind != QUERY:
            raise InputError(f"embed: an instruction belongs to a query, not to kind {kind!r}; give kind 'query'")
        for form in _FORMS:
            parts = form.fullmatch(prompt)
            if parts is not None:
                return parts[1] + instruct + parts[3]
        raise InputError(
            f"embed: the model takes no instruction (its query prompt is {prompt!r}); write it into the text if it "
            "belongs there"
        )

    def describe(self) -> dict[str, Any]:
        """Plain values for the fingerprint."""
        return {"default": self.default, "texts": dict(self.texts)}


def read_prompts(files: ModelFiles, fallback: Mapping[str, str]) -> Prompts:
    """Read the prompts of a model directory.

    Args:
        fallback: prompts that the model's publisher states elsewhere, where its files have none of that name.

    Raises:
        CheckpointError: prompts that are not texts, or a default that is not among them.
    """
    config = files.optional(PROMPTS_FILE)
    path = files.directory / PROMPTS_FILE
    given = config.get("prompts") or {}
    if not isinstance(given, dict) or not all(isinstance(text, str | None) for text in given.values()):
        raise CheckpointError(f"{path}: prompts is not an object of texts")
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in given):
        raise CheckpointError(f"{path}: default_prompt_name {default!r} is not among its prompts")
    return Prompts({**fallback, **{name: text or "" for name, text in given.items()}}, default)
