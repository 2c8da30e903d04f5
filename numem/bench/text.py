"""Token sequences for measurements: the example passages, repeated to length."""

import json
from pathlib import Path
from typing import Protocol

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"


class _Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def tokens(tokenizer: _Encoder, count: int) -> list[int]:
    """`count` tokens of English text; synthetic words where the examples are not at hand (an installed wheel)."""
    if EXAMPLES.is_file():
        rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines() if line.strip()]
        text = "\n\n".join(dict.fromkeys(row["messages"][0]["content"] for row in rows[::8]))
    else:
        text = " ".join(f"The {n}th line of a long and plain story." for n in range(1, 2000))
    ids = tokenizer.encode(text)
    while len(ids) < count:
        ids = ids + ids
    return ids[:count]
