"""Chat templates: Jinja text from a model directory, rendered in a sandbox that can neither write nor reach outside."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from numem.errors import CheckpointError, InputError
from numem.models.weights.lockfile import read_json

TEMPLATE_FILE = "chat_template.jinja"
LEGACY_FILE = "chat_template.json"


# Characters or items that a product may have, and bits of a power.
_MOST = 1 << 24


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, which also stops at what it would merely print as nothing, and at products and powers
    that would fill the memory; these are never computed while a template is compiled."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            size = max(_length(left) * _whole(right), _length(right) * _whole(left))
        else:
            size = abs(_whole(left)).bit_length() * _whole(right)
        if size > _MOST:
            raise MemoryError
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")


class ChatTemplate:
    """A compiled chat template.

    The environment is the one that templates on the hub are written for: blocks trimmed, loop controls, `tojson`
    without HTML escapes and `raise_exception`. `strftime_now` is left undefined on purpose: templates fall back to a
    fixed date then, and a prompt keeps its tokens, and so its stored prefix, from one day to the next.

    Args:
        text: the Jinja source.
        origin: the file it came from, for messages.

    Raises:
        CheckpointError: the template is not valid Jinja.
    """

    def __init__(self, text: str, origin: str) -> None:
        self.text = text
        self.origin = origin
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{origin}: chat template, line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tokens: Mapping[str, str]
    ) -> str:
        """Render a conversation.

        Args:
            messages: {"role": ..., "content": ...} in order; content is text, or a list of {"type": "text", "text": ...},
                which are joined.
            add_generation_prompt: end with the header of the assistant's turn.
            tokens: special tokens by name (`bos_token`, ...), visible to the template.

        Raises:
            InputError: messages that are malformed or that the template refuses, or a prompt that does not fit in memory.
            CheckpointError: a template that reaches for what the sandbox forbids.
        """
        plain = _plain(messages)
        try:
            return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **tokens)
        except jinja2.exceptions.SecurityError as error:
            raise CheckpointError(f"{self.origin}: the chat template was stopped by its sandbox: {error}") from error
        except jinja2.TemplateError as error:
            raise InputError(f"{self.origin}: the chat template refuses these messages: {_line(error)}") from error
        except MemoryError as error:
            raise InputError(f"{self.origin}: the chat template needs more memory than there is") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InputError(f"{self.origin}: the chat template fails on these messages: {_line(error)}") from error


def read_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of a model directory, None where it has none.

    `chat_template.jinja` comes first, then `chat_template.json`, then the entry of tokenizer_config.json, of whose
    named templates "default" is taken.
    """
    path = directory / TEMPLATE_FILE
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read as UTF-8 text: {_line(error)}") from error
    value = tokenizer_config.get("chat_template")
    path = directory / "tokenizer_config.json"
    if (directory / LEGACY_FILE).is_file():
        path = directory / LEGACY_FILE
        value = read_json(path).get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: chat_template is a {type(value).__name__}, not text")
    return ChatTemplate(value, str(path))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, whose content is text."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InputError("messages: expected a list of at least one {'role': ..., 'content': ...}")
    out = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{number}] is a {type(message).__name__}, not an object")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part(number, part) for part in content)
        for key, value in (("role", message.get("role")), ("content", content)):
            if not isinstance(value, str):
                raise InputError(f"messages[{number}]: {key} is missing or not text")
        out.append({**message, "content": content})
    return out


def _part(number: int, part: Any) -> str:
    """Text of one part of a content that is a list."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InputError(
            f"messages[{number}]: a part of type {str(kind)[:40]!r} is not read; give parts of type 'text'"
        )
    text: str = part["text"]
    return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
