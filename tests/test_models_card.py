"""`numem models list | card | verify`: what is known of a model, and whether it is still what was recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from numem.cli import app
from numem.errors import CheckpointError, UnknownModelError
from numem.models.gguf.importer import import_gguf
from numem.models.hub import registry
from numem.models.hub.card import card
from numem.models.hub.entry import Entry, Level
from numem.models.hub.sources import PackageSource
from numem.models.hub.verification import verify_directory
from numem.models.weights.lockfile import LOCK_NAME, Lock, sha256_file
from tests.gguf_fixtures import family_gguf
from tests.model_fixtures import edit_json, tiny_gguf, tiny_model

GEMMA: dict[str, Any] = {
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "query_pre_attn_scalar": 32,
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return tiny_gguf(root / "tiny.gguf", tiny_model(root / "model"))


@pytest.fixture
def here(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry of one model, which is in the cache, and one that is not."""
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path))
    entry = Entry(
        "tiny", PackageSource("a", "1", "a/x", "0" * 64), "llama", "a tiny model", level=Level.ANCHORED, licence="MIT"
    )
    away = Entry("away", PackageSource("b", "1", "b/x", "1" * 64), "llama", "not here", accept="SOME_TERMS")
    monkeypatch.setattr(registry, "_ENTRIES", {"tiny": entry, "away": away})
    return import_gguf(packed, registry.location(entry), source={"kind": "test"})


def numem_(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def test_a_card_of_a_model_that_is_here(here: Path) -> None:
    known = card("tiny")
    assert {key: known[key] for key in ("key", "kind", "level", "licence", "present", "directory")} == {
        "key": "tiny",
        "kind": "lm",
        "level": "anchored",
        "licence": "MIT",
        "present": True,
        "directory": str(here),
    }
    shape = known["architecture"]
    assert (shape["family"], shape["layers"], shape["heads"], shape["kv_heads"], shape["positions"]) == (
        "llama", 3, 4, 2, 256,
    )  # fmt: skip
    assert shape["rope"] == {"kind": "default", "theta": 50000.0} and shape["rope_local"] is None
    assert known["parameters"] * 2 == known["bytes"]
    assert known["kv_bytes_per_token"] == {"float32": 2 * 3 * 2 * 32 * 4, "bfloat16": 2 * 3 * 2 * 32 * 2}
    assert known["tokenizer"]["eos"] == [2] and known["tokenizer"]["chat"] and not known["tokenizer"]["adds_bos"]
    assert known["recorded"]["source"] == {"kind": "test"} and known["quantised"] == []
    assert card(here)["architecture"] == shape and card(str(here))["present"]


def test_a_card_of_a_model_that_is_not_here_fetches_nothing(here: Path) -> None:
    known = card("away")
    assert known["present"] is False and known["accept"] == "SOME_TERMS" and "architecture" not in known
    assert known["level"] == "runnable" and known["level_means"]
    with pytest.raises(UnknownModelError, match="did you mean tiny"):
        card("tinny")


def test_a_card_shows_sliding_layers_and_both_rotations(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "gemma3_text", **GEMMA)
    known = card(import_gguf(family_gguf(tmp_path / "x.gguf", model, "gemma3"), tmp_path / "out"))
    shape = known["architecture"]
    assert (shape["window"], shape["sliding_layers"]) == (8, 6)
    assert (shape["rope"]["theta"], shape["rope_local"]["theta"]) == (1000000.0, 10000.0)
    assert known["kv_bytes_per_token"]["bfloat16"] == 2 * 7 * 1 * 32 * 2


def test_a_card_lists_the_quantised_streams(here: Path) -> None:
    from numem import load_lm

    load_lm(str(here), quantise="q8")
    (stream,) = card("tiny")["quantised"]
    assert stream["bytes"] == (here / "quantised" / stream["file"]).stat().st_size
    assert set(stream["formats"]) == {"q8"} and stream["formats"]["q8"] > 4
    (here / "quantised" / stream["file"]).write_bytes(b"damaged")
    assert card("tiny")["quantised"][0]["formats"] == {}


def test_verify_hashes_everything_that_was_recorded(here: Path) -> None:
    done = verify_directory(here)
    assert (done.files, done.problems) == (5, ())
    result = numem_("verify")
    assert result.exit_code == 0 and result.stdout == "tiny: 5 files are as they were recorded\n"
    assert json.loads(numem_("verify", str(here), "--json").stdout)["models"][0]["ok"] is True


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_verify_names_the_file_that_differs(here: Path, name: str) -> None:
    data = bytearray((here / name).read_bytes())
    data[len(data) // 2] ^= 1
    (here / name).write_bytes(data)
    (problem,) = verify_directory(here).problems
    assert str(here / name) in problem and "\n" not in problem
    result = numem_("verify", "tiny", "--json")
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["models"]
    assert found["problems"] == [problem] and found["ok"] is False
    assert problem in numem_("verify", str(here)).stdout


def test_verify_names_every_file_that_is_gone_and_what_came_since(here: Path) -> None:
    extra = here / "other.safetensors"
    extra.write_bytes(b"x")
    (problem,) = verify_directory(here).problems
    assert "several safetensors files" in problem
    extra.unlink()
    for name in ("tokenizer.json", "model.safetensors"):
        (here / name).unlink()
    problems = verify_directory(here).problems
    assert len(problems) == 2 and all("missing" in line for line in problems)


def test_verify_covers_directories_of_modules_and_never_leaves_the_model(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    from numem.models.weights.checkpoint import Checkpoint

    files = {str(f.relative_to(model)): sha256_file(f) for f in model.rglob("*") if f.is_file()}
    Lock({}, files, Checkpoint(model).digest().hex()).write(model)
    assert verify_directory(model).problems == ()
    (model / "1_Pooling" / "config.json").write_text("[]")
    assert "1_Pooling/config.json" in verify_directory(model).problems[0]
    edit_json(model / LOCK_NAME, files={**files, "../outside": "0" * 64, "/etc/passwd": "0" * 64})
    problems = verify_directory(model).problems
    assert len(problems) == 3 and sum("no file of the directory" in line for line in problems) == 2


def test_there_is_nothing_to_verify_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no numem\.lock\.json"):
        verify_directory(tiny_model(tmp_path / "model", tokenizer=False))
    result = numem_("verify", str(tmp_path / "model"), "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["type"] == "CheckpointError"


def test_verify_never_fetches(here: Path) -> None:
    result = numem_("verify", "away", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["type"] == "FetchError"


def test_the_list_shows_kind_level_licence_and_size(here: Path) -> None:
    known = {m["key"]: m for m in json.loads(numem_("list", "--json").stdout)["models"]}
    assert known["tiny"]["bytes"] == sum(f.stat().st_size for f in here.iterdir()) and known["away"]["bytes"] is None
    assert known["tiny"]["level"] == "anchored" and known["tiny"]["licence"] == "MIT"
    lines = numem_("list").stdout
    assert "language models" in lines and "embedding models" in lines and "anchored" in lines


def test_a_card_for_people_has_the_same_values(here: Path) -> None:
    document = json.loads(numem_("card", "tiny", "--json").stdout)
    assert document == json.loads(json.dumps(card("tiny")))
    shown = numem_("card", "tiny").stdout
    assert "architecture.rope.theta" in shown and "50000.0" in shown and "kv_bytes_per_token" in shown


def test_fetch_can_be_forbidden(here: Path) -> None:
    assert numem_("fetch", "tiny", "--offline").exit_code == 0
    assert numem_("fetch", "away", "--offline").exit_code == 1
