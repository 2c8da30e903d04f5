"""Reading a table of prompts: JSONL or Parquet, one prompt a row.

A row has `messages` (a list of {"role", "content"} for the chat template) or `prompt` (plain text), and optionally `id`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numem.errors import ContextLengthError, InputError, ModelError


class Encoder(Protocol):
    """What a prompt needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: list[dict[str, Any]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the table, with the place it came from for error messages."""

    id: str
    where: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()

    def encode(self, tokenizer: Encoder) -> list[int]:
        """Token ids of the prompt; InputError where there are none."""
        try:
            if self.text is None:
                tokens = tokenizer.chat([dict(m) for m in self.messages])
            else:
                tokens = tokenizer.encode(self.text)
        except ModelError as error:
            raise InputError(f"{self.where}: {error}") from error
        if not tokens:
            raise InputError(f"{self.where}: the prompt is empty")
        return tokens


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """Read and check a table of prompts.

    Raises:
        InputError: no such file, an unknown suffix, no rows, or a row at fault; names file and line and field.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a JSONL or Parquet table of prompts")
    if path.suffix in (".jsonl", ".ndjson"):
        rows = _jsonl(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        raise InputError(f"{path}: suffix {path.suffix!r} is not .jsonl or .parquet")
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        prompt = _prompt(where, row, len(prompts))
        if prompt.id in seen:
            raise InputError(f"{where}: id {prompt.id!r} was used at {seen[prompt.id]} already")
        seen[prompt.id] = where
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{path}: the table has no prompts")
    return tuple(prompts)


def check_length(prompt: Prompt, tokens: int, max_position: int) -> None:
    """ContextLengthError where a prompt cannot fit."""
    if tokens > max_position:
        raise ContextLengthError(
            f"{prompt.where}: {tokens} tokens exceed the context of {max_position}; shorten the prompt or raise "
            "--max-position (NUMEM_MAX_POSITION for the UI)"
        )


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not raw.strip():
                continue
            try:
                yield where, json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON ({error})") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from error
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}:row {number}", {key: value for key, value in row.items() if value is not None}


def _prompt(where: str, row: Any, index: int) -> Prompt:
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row must be an object, got {type(row).__name__}")
    name = row.get("id", f"prompt-{index:05d}")
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise InputError(f"{where}: field 'id' must be a non-empty string or an integer")
    if ("prompt" in row) == ("messages" in row):
        raise InputError(f"{where}: exactly one of the fields 'prompt' and 'messages' is needed")
    if "prompt" in row:
        text = row["prompt"]
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where}: field 'prompt' must be a non-empty string")
        _unicode(where, str(name), text)
        return Prompt(str(name), where, text=text)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: field 'messages' must be a non-empty list")
    for at, message in enumerate(messages):
        ok = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not ok or not message["content"].strip():
            raise InputError(f"{where}: field 'messages[{at}]' needs a string 'role' and a non-empty 'content'")
    _unicode(where, str(name), *(m[k] for m in messages for k in ("role", "content")))
    return Prompt(str(name), where, messages=tuple({k: m[k] for k in ("role", "content")} for m in messages))


def _unicode(where: str, *texts: str) -> None:
    """JSON can write half of a surrogate pair, which no tokenizer or output file accepts."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the row holds broken Unicode ({error.reason})") from error
