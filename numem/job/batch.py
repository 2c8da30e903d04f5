"""A batch of prompts: tokens, prefixes to compute once, and an id that is a function of both and of the model.

The batch is kept as one JSON file below the memory's local directory, named by its id, so that every stage finds it in
any process. Its id is also the Dagster partition key.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from numem.errors import InputError, NotFoundError
from numem.identity.canonical import canonical_json
from numem.identity.chain import Chunk, plan
from numem.job.prompts import Prompt, check_length
from numem.job.sharing import Prefix, shared_prefixes

if TYPE_CHECKING:
    from numem.models.lm import LM
    from numem.store.memory import Memory

VERSION = 1


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a batch: the caller's id and its token ids."""

    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts ready to run.

    Attributes:
        id: 32 hex digits of SHA-256 over scope and prompts.
        scope: hex scope of the model's identity.
        model: the key or directory the model was loaded from.
        items: prompts in table order.
        prefixes: prefixes computed once, each prompt in at most one.
    """

    id: str
    scope: str
    model: str
    items: tuple[Item, ...]
    prefixes: tuple[Prefix, ...]

    @property
    def tokens(self) -> int:
        return sum(len(item.tokens) for item in self.items)

    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunk plan of every prefix."""
        scope = bytes.fromhex(self.scope)
        return tuple(plan(scope, prefix.tokens, len(prefix.tokens)) for prefix in self.prefixes)

    def chunk_ids(self) -> tuple[bytes, ...]:
        """Causal ids of all prefixes' chunks, each once, parents before children."""
        return tuple(dict.fromkeys(chunk.id for chunks in self.chunks() for chunk in chunks))

    def shared(self) -> list[int]:
        """Tokens of each prompt that its prefix covers, 0 where it has none."""
        covered = [0] * len(self.items)
        for prefix in self.prefixes:
            for item in prefix.prompts:
                covered[item] = len(prefix.tokens)
        return covered


def check_identity(lm: "LM", batch: Batch) -> None:
    """Refuse to run a batch under a model it was not encoded for."""
    if lm.identity.scope.hex() != batch.scope:
        raise InputError(
            f"batch {batch.id}: was made for another model or numeric policy (scope {batch.scope[:16]}, this model has "
            f"{lm.identity.scope.hex()[:16]}); make the batch again with this model"
        )


def make_batch(lm: "LM", prompts: Sequence[Prompt], *, model: str) -> Batch:
    """Encode prompts and find their shared prefixes.

    Raises:
        InputError, ContextLengthError: a prompt is empty or too long; names file and line.
    """
    items, known = [], dict[int, int]()
    for prompt in prompts:
        tokens = prompt.encode(lm.tokenizer)
        check_length(prompt, len(tokens), lm.max_position)
        # One object for each id: thousands of prompts then take 8 bytes a token instead of 36.
        items.append(Item(prompt.id, tuple(known.setdefault(token, token) for token in tokens)))
    scope = lm.identity.scope.hex()
    content = canonical_json({"scope": scope, "items": [[item.id, list(item.tokens)] for item in items]})
    prefixes = shared_prefixes([item.tokens for item in items])
    digest = hashlib.sha256(b"numem/batch/v1" + content).hexdigest()[:32]
    return Batch(digest, scope, model, tuple(items), prefixes)


def save_batch(memory: "Memory", batch: Batch) -> Path:
    """Write the batch below the memory, atomically; writing it again is harmless."""
    path = _path(memory, batch.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": VERSION, **asdict(batch)}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".batch-")
    with os.fdopen(handle, "w") as file:
        json.dump(document, file)
    os.replace(temporary, path)
    return path


def load_batch(memory: "Memory", batch_id: str) -> Batch:
    """Read a batch by id.

    Raises:
        NotFoundError: no such batch in this memory.
        InputError: not a batch id, or a damaged file.
    """
    path = _path(memory, batch_id)
    if not path.is_file():
        raise NotFoundError(f"batch {batch_id}: not in this memory ({path.parent}); run the prompts stage first")
    try:
        tree = json.loads(path.read_text(), parse_int=cache(int))
        if tree.pop("version") != VERSION:
            raise InputError(f"{path}: batch version is not {VERSION}")
        tree["items"] = tuple(Item(i["id"], tuple(i["tokens"])) for i in tree["items"])
        tree["prefixes"] = tuple(Prefix(tuple(p["tokens"]), tuple(p["prompts"])) for p in tree["prefixes"])
        return Batch(**tree)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged batch file ({error}); run the prompts stage again") from error


def _path(memory: "Memory", batch_id: str) -> Path:
    if len(batch_id) != 32 or any(c not in "0123456789abcdef" for c in batch_id):
        raise InputError(f"batch {batch_id!r}: an id is 32 hex digits")
    return memory.local / "batches" / f"{batch_id}.json"
