"""Reading a table of prompts: what is at fault is named by file, line and field."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from numem.errors import ContextLengthError, InputError, ModelError
from numem.job.prompts import Prompt, check_length, read_prompts


def write(path: Path, *rows: Any) -> Path:
    """A JSONL file of rows; a string or bytes is written as it is."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


class Words:
    """Encodes words by their length; its chat template has no role "narrator"."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if any(message["role"] == "narrator" for message in messages):
            raise ModelError("chat template: role 'narrator' is unknown")
        return [token for message in messages for token in self.encode(message["content"])]


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is it so"}]


def test_plain_and_chat_rows_in_table_order(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a bc"}, "", {"id": "x", "messages": CHAT}, {"id": 7, "prompt": "é"})
    first, second, third = read_prompts(path)
    assert (first.id, first.text, first.where) == ("prompt-00000", "a bc", f"{path}:1")
    assert (second.id, second.messages, second.where) == ("x", tuple(CHAT), f"{path}:3")
    assert (third.id, third.text) == ("7", "é")
    assert [p.encode(Words()) for p in (first, second)] == [[1, 2], [2, 5, 3, 2, 2, 2]]


def test_unknown_columns_and_message_fields_are_ignored(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hi", "name": "eve"}
    path = write(tmp_path / "p.jsonl", {"messages": [message], "source": 3})
    assert read_prompts(path)[0].messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
def test_both_suffixes_of_json_lines_are_read(tmp_path: Path, suffix: str) -> None:
    assert len(read_prompts(write(tmp_path / f"p{suffix}", {"prompt": "a"}, {"prompt": "b"}))) == 2


def test_parquet_rows_read_like_json_lines(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "one two", "messages": None}, {"id": None, "prompt": None, "messages": CHAT}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    first, second = read_prompts(tmp_path / "p.parquet")
    assert (first.id, first.text, first.where) == ("a", "one two", f"{tmp_path / 'p.parquet'}:row 1")
    assert (second.id, second.messages) == ("prompt-00001", tuple(CHAT))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", ["not JSON"]),
        ("nonsense", ["not JSON"]),
        (b'{"prompt": "\xff"}', ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        ("[1]", ["object", "list"]),
        ('"text"', ["object", "str"]),
        ("null", ["object", "NoneType"]),
        ({}, ["'prompt' and 'messages'"]),
        ({"prompt": "a", "messages": CHAT}, ["exactly one"]),
        ({"prompt": ""}, ["'prompt'", "non-empty"]),
        ({"prompt": " \n\t"}, ["'prompt'", "non-empty"]),
        ({"prompt": None}, ["'prompt'"]),
        ({"prompt": 3}, ["'prompt'"]),
        ({"prompt": ["a"]}, ["'prompt'"]),
        ({"messages": []}, ["'messages'"]),
        ({"messages": "hi"}, ["'messages'"]),
        ({"messages": [CHAT[0], "hi"]}, ["'messages[1]'"]),
        ({"messages": [{"role": "user"}]}, ["'messages[0]'"]),
        ({"messages": [{"content": "hi"}]}, ["'messages[0]'"]),
        ({"messages": [{"role": "user", "content": ""}]}, ["'messages[0]'"]),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, ["'messages[0]'"]),
        ({"messages": [{"role": 1, "content": "hi"}]}, ["'messages[0]'"]),
        ({"prompt": "a", "id": ""}, ["'id'"]),
        ({"prompt": "a", "id": True}, ["'id'"]),
        ({"prompt": "a", "id": 1.5}, ["'id'"]),
        ({"prompt": "a", "id": ["x"]}, ["'id'"]),
        ({"prompt": "a", "id": "good"}, ["'good'", ":1 already"]),
        ({"prompt": "broken \ud800 text"}, ["Unicode"]),
    ],
)
def test_a_row_at_fault_is_named_by_file_and_line(tmp_path: Path, row: Any, words: list[str]) -> None:
    path = write(tmp_path / "p.jsonl", {"id": "good", "prompt": "fine"}, "", row)
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_ids_that_read_alike_are_duplicates(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="p.jsonl:2: id '1' was used at .*:1 already"):
        read_prompts(write(tmp_path / "p.jsonl", {"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}))


def test_files_at_fault_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing.jsonl: no such file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="no such file"):
        read_prompts(tmp_path)
    with pytest.raises(InputError, match=r"'\.csv' is not"):
        read_prompts(write(tmp_path / "p.csv", "prompt"))
    for text in ("", "\n\n"):
        with pytest.raises(InputError, match="no prompts"):
            read_prompts(write(tmp_path / "empty.jsonl", text))
    bad = write(tmp_path / "p.parquet", "not parquet")
    with pytest.raises(InputError, match="p.parquet: not a Parquet file") as caught:
        read_prompts(bad)
    assert "\n" not in str(caught.value)


def test_a_parquet_row_at_fault_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["fine", ""]}), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p.parquet:row 2: field 'prompt'"):
        read_prompts(tmp_path / "p.parquet")
    pq.write_table(pa.table({"text": ["fine"]}), tmp_path / "q.parquet")
    with pytest.raises(InputError, match=r"q.parquet:row 1: exactly one"):
        read_prompts(tmp_path / "q.parquet")


def test_encoding_errors_name_the_row() -> None:
    with pytest.raises(InputError, match=r"p.jsonl:4: chat template: role 'narrator'"):
        Prompt("x", "p.jsonl:4", messages=({"role": "narrator", "content": "x"},)).encode(Words())
    with pytest.raises(InputError, match=r"p.jsonl:5: the prompt is empty"):
        Prompt("x", "p.jsonl:5", text=" ").encode(Words())


@pytest.mark.parametrize(("tokens", "fits"), [(1, True), (64, True), (65, False)])
def test_a_prompt_may_fill_the_context_but_not_exceed_it(tokens: int, fits: bool) -> None:
    prompt = Prompt("x", "p.jsonl:9", text="x")
    if fits:
        check_length(prompt, tokens, 64)
    else:
        with pytest.raises(ContextLengthError, match="p.jsonl:9: 65 tokens exceed the context of 64"):
            check_length(prompt, tokens, 64)
