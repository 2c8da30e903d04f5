"""The GGUF container: damaged files are refused at once and by name, whatever they claim."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numem.errors import CheckpointError, ModelError, UnsupportedModelError
from numem.models.gguf.container import GgufFile
from tests.gguf_fixtures import write_gguf

VALUES = {
    "general.name": "näme",
    "a.flag": True,
    "a.count": 7,
    "a.real": 0.5,
    "a.texts": ["x", "", "é"],
    "a.numbers": [1, 2, 3],
}
HUGE = 1 << 60


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    matrix = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", "llama", VALUES, {"m": matrix, "v": matrix[0]})


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_what_the_gguf_library_writes_is_read(path: Path) -> None:
    file = GgufFile(path)
    assert {key: file.metadata[key] for key in VALUES} == VALUES
    assert file.metadata["general.architecture"] == "llama"
    assert file.tensors["m"].shape == (6, 32) and file.tensors["v"].shape == (32,)
    assert np.array_equal(file.convert("m", "<f4", lambda rows: rows), np.arange(192).reshape(6, 32))
    assert file.convert("v", "<f4", lambda rows: rows * 2).tolist() == list(range(0, 64, 2))
    reader = gguf.GGUFReader(path)
    assert [t.data_offset for t in reader.tensors] == [file.tensors[t.name].begin for t in reader.tensors]


def test_values_of_another_kind_are_named(path: Path) -> None:
    file = GgufFile(path)
    assert file.get("a.none", int) is None and file.get("a.none", int, 3) == 3
    for key, kind in (("a.flag", int), ("a.count", str), ("a.real", int)):
        with pytest.raises(CheckpointError, match=key):
            file.get(key, kind)
    with pytest.raises(CheckpointError, match=r"lacks a\.none"):
        file.get("a.none", int, required=True)


BROKEN: dict[str, tuple[bytes, type[ModelError], str]] = {
    "empty": (b"", CheckpointError, "not a readable GGUF"),
    "magic": (b"GGML" + bytes(60), CheckpointError, "does not begin with GGUF"),
    "version": (head(version=1) + bytes(60), UnsupportedModelError, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModelError, "big-endian"),
    "tensors": (head(tensors=HUGE) + bytes(60), CheckpointError, f"{HUGE} tensors do not fit"),
    "keys": (head(keys=HUGE) + bytes(60), CheckpointError, f"{HUGE} keys do not fit"),
    "key": (head(keys=1) + struct.pack("<Q", HUGE) + bytes(60), CheckpointError, "cut short"),
    "text": (head(keys=1) + text("k") + struct.pack("<IQ", 8, HUGE), CheckpointError, "cut short"),
    "list": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE), CheckpointError, "values do not fit"),
    "texts": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE), CheckpointError, "texts do not fit"),
    "nested": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), CheckpointError, "list of type 9"),
    "type": (head(keys=1) + text("k") + struct.pack("<I", 77), CheckpointError, "unknown type 77"),
    "utf-8": (head(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9), CheckpointError, "not UTF-8"),
    "twice": (head(keys=2) + 2 * (text("k") + struct.pack("<IB", 7, 1)) + bytes(9), CheckpointError, "'k' appears"),
    "rank": (head(tensors=1) + text("t") + struct.pack("<I", 99) + bytes(60), CheckpointError, "99 dimensions"),
    "kind": (head(tensors=1) + tensor("t", (32,), 200) + bytes(99), UnsupportedModelError, "unknown type 200"),
    "size": (head(tensors=1) + tensor("t", (HUGE, HUGE), 0) + bytes(99), CheckpointError, "cut short: tensor t"),
    "offset": (head(tensors=1) + tensor("t", (1,), 0, HUGE) + bytes(99), CheckpointError, "cut short: tensor t"),
    "block": (head(tensors=1) + tensor("t", (33,), 8) + bytes(99), CheckpointError, "which Q8_0 cannot have"),
    "none": (head(tensors=1) + tensor("t", (0,), 0) + bytes(99), CheckpointError, "which F32 cannot have"),
    "two": (head(tensors=2) + 2 * tensor("t", (1,), 0) + bytes(99), CheckpointError, "'t' appears twice"),
    "alignment": (
        head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0) + bytes(60),
        CheckpointError,
        "alignment is 0",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    data, error, message = BROKEN[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(error, match=message) as caught:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5
    assert "bad.gguf" in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2000), at=st.integers(0, 400), byte=st.integers(0, 255))
def test_no_damage_makes_another_error(path: Path, tmp_path: Path, cut: int, at: int, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data[: len(data) - cut % len(data)])
    try:
        file = GgufFile(damaged)
        for name in file.tensors:
            file.convert(name, "<f4", lambda rows: rows)
    except ModelError as error:
        assert "damaged.gguf" in str(error)
