"""`numem embed` on a tiny random model."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from numem import load_embedder
from numem.cli import app
from tests.cli_fixtures import error, output
from tests.embedding_fixtures import qwen3_embedding

TEXTS = ["in the end", "", "ä theory"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_embedding(tmp_path_factory.mktemp("models") / "m")


def run(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["embed", str(model), *arguments])


def test_vectors_as_json_and_as_a_file(model: Path, tmp_path: Path) -> None:
    expected = load_embedder(model).embed_texts(TEXTS)
    printed = output(run(model, *TEXTS, "--json"))
    assert (printed["texts"], printed["dim"]) == expected.shape
    assert np.array(printed["vectors"], dtype=np.float32).tobytes() == expected.tobytes()
    path = tmp_path / "out.npy"
    written = output(run(model, *TEXTS, "--json", "--out", str(path)))
    assert written["out"] == str(path) and "vectors" not in written and written["scope"] == printed["scope"]
    stored = np.load(path, allow_pickle=False)
    assert stored.dtype == np.float32 and stored.tobytes() == expected.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out.npy"]


def test_files_of_texts(model: Path, tmp_path: Path) -> None:
    expected = load_embedder(model).embed_texts(TEXTS)
    (tmp_path / "t.txt").write_text("in the end\n\nä theory\n", encoding="utf-8")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in TEXTS), encoding="utf-8")
    for name in ("t.txt", "t.jsonl"):
        document = output(run(model, "--file", str(tmp_path / name), "--json"))
        assert np.array(document["vectors"], dtype=np.float32).tobytes() == expected.tobytes()
    marked = tmp_path / "marked.txt"  # some editors begin a file with a byte order mark
    marked.write_text("in the end\r\n\r\nä theory\r\n", encoding="utf-8-sig", newline="")
    document = output(run(model, "--file", str(marked), "--json"))
    assert np.array(document["vectors"], dtype=np.float32).tobytes() == expected.tobytes()
    (tmp_path / "none.txt").write_text("")
    assert output(run(model, "--file", str(tmp_path / "none.txt"), "--json"))["texts"] == 0


def test_options_reach_the_embedder(model: Path) -> None:
    embedder = load_embedder(model)
    document = output(run(model, "x", "--instruct", "Find", "--dim", "16", "--json"))
    expected = embedder.embed_texts(["x"], instruct="Find", dim=16)
    assert np.array(document["vectors"], dtype=np.float32).tobytes() == expected.tobytes()
    query = output(run(model, "x", "--kind", "query", "--json"))
    assert np.array(query["vectors"], dtype=np.float32).tobytes() == embedder.embed_texts(["x"], kind="query").tobytes()


def test_people_see_the_first_components(model: Path) -> None:
    result = run(model, "in the end", "--dim", "2")
    vector = load_embedder(model).embed_texts(["in the end"], dim=2)[0]
    assert result.exit_code == 0 and f"{vector[0]:.5f}" in result.stdout and f"{vector[1]:.5f}" in result.stdout
    assert "in the end" in result.stdout and "1 texts in" in result.stderr


def test_wrong_use_is_one_line(model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "latin.txt").write_bytes(b"\xe4\n")
    for arguments, word in (
        ((), "give texts"),
        (("x", "--file", str(bad)), "not both"),
        (("--file", str(bad)), "bad.jsonl:2"),
        (("--file", str(tmp_path / "none.txt")), "no such file"),
        (("--file", str(tmp_path / "latin.txt")), "not UTF-8"),
        (("--file", str(model / "config.json")), "not .txt or .jsonl"),
        (("x", "--out", "v.bin"), ".npy"),
        (("x", "--dim", "65"), "[1, 64]"),
        (("x", "--kind", "clustering"), "clustering"),
        (("x", "--kind", ""), "kind ''"),
        (("x", "--kind", "document", "--instruct", "Find"), "belongs to a query"),
    ):
        assert word in error(run(model, *arguments, "--json"), "InputError")
    missing = error(run(model, "x", "--out", str(tmp_path / "no" / "v.npy"), "--json"), "InputError")
    assert "v.npy" in missing and "make it first" in missing
