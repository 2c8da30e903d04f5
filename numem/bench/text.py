"""Token sequences for measurements: the example passages, repeated to length."""

import json
from pathlib import Path
from typing import Protocol

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"


class _Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def phrases(count: int) -> list[str]:
    """`count` different short English texts of 3 to 24 words, cut from the same passages."""
    words = _text().split()
    out, at = [], 0
    for number in range(count):
        length = 3 + number * 7 % 22
        if at + length > len(words):
            at = number % 5 + 1
        out.append(" ".join(words[at : at + length]))
        at += length
    return out


def tokens(tokenizer: _Encoder, count: int) -> list[int]:
    """`count` tokens of English text; synthetic words where the examples are not at hand (an installed wheel)."""
    ids = tokenizer.encode(_text())
    while len(ids) < count:
        ids = ids + ids
    return ids[:count]


def _text() -> str:
    if not EXAMPLES.is_file():
        return " ".join(f"The {n}th line of a long and plain story." for n in range(1, 2000))
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines() if line.strip()]
    return "\n\n".join(dict.fromkeys(row["messages"][0]["content"] for row in rows[::8]))
