"""The prompts of the demo: 3 passages of public-domain text, 8 questions each, the passage a shared prefix."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from numem.models.hub.registry import resolve
from numem.models.text.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
MARK = "\n\nQuestion: "


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, str]]:
    rows = []
    for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert sorted(row) == ["id", "messages"] and len(row["messages"]) == 1
        message = row["messages"][0]
        assert sorted(message) == ["content", "role"] and message["role"] == "user"
        passage, question = message["content"].split(MARK)
        rows.append({"id": row["id"], "passage": passage, "question": question, "content": message["content"]})
    return rows


def test_three_passages_with_eight_questions(prompts: list[dict[str, str]]) -> None:
    assert len(prompts) == len({p["id"] for p in prompts}) == len({p["question"] + p["passage"] for p in prompts}) == 24
    passages = [p["passage"] for p in prompts]
    assert len(set(passages)) == 3 and all(passages.count(p) == 8 for p in passages)


def test_passages_are_those_that_the_page_names(prompts: list[dict[str, str]]) -> None:
    page = (EXAMPLES / "PASSAGES.md").read_text(encoding="utf-8")
    for prompt in prompts:
        name = prompt["id"].rpartition("-")[0]
        digest = hashlib.sha256(prompt["passage"].encode()).hexdigest()
        assert re.search(rf"\| `{name}-\*` \| `[0-9a-f]{{64}}` \| `{digest}` \|", page)


@pytest.mark.anchors
def test_questions_share_their_passage_as_a_token_prefix(prompts: list[dict[str, str]]) -> None:
    tokenizer = Tokenizer(resolve("smollm2-135m-instruct"))
    ids = [tokenizer.chat([{"role": "user", "content": p["content"]}]) for p in prompts]
    shared = []
    for start in range(0, 24, 8):
        group = ids[start : start + 8]
        assert 1000 <= len(tokenizer.encode(prompts[start]["passage"])) <= 3000
        shared.append(next(i for i, column in enumerate(zip(*group, strict=False)) if len(set(column)) > 1))
    assert shared == [2886, 2154, 1588]
    assert sum(map(len, ids)) == 53497
