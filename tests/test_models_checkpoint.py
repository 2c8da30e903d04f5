"""Checkpoints: single and sharded files, every way in which they can contradict themselves, and digests."""

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from numem import load_embedder, load_lm
from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME, Lock, sha256_file
from tests.model_fixtures import raw_safetensors, tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tiny_model(tmp_path / "sharded", shard="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def shards(path: Path) -> list[str]:
    return sorted(item.name for item in path.glob("*.safetensors"))


def index(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / INDEX).read_text())
    return document


def rewrite(path: Path, **weight_map: str) -> None:
    document = index(path)
    document["weight_map"] |= weight_map
    (path / INDEX).write_text(json.dumps(document))


def refuse(path: Path, *parts: str) -> None:
    """Opening fails within a second, with one line that has all the parts."""
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path)
    assert time.monotonic() - started < 1
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_tensors_equal_those_of_the_safetensors_library(whole: Path) -> None:
    checkpoint = Checkpoint(whole)
    reference = load_file(whole / "model.safetensors")
    assert checkpoint.names == tuple(sorted(reference))
    assert checkpoint.nbytes == sum(t.nbytes for t in reference.values())
    for name, tensor in reference.items():
        mine = checkpoint.tensor(name)
        assert mine.shape == tensor.shape == checkpoint.shape(name)
        assert mine.dtype == tensor.dtype == checkpoint.dtype(name)
        assert torch.equal(mine, tensor)


def test_tensors_are_views_that_never_reach_the_file(whole: Path) -> None:
    before = sha256_file(whole / "model.safetensors")
    checkpoint = Checkpoint(whole)
    checkpoint.tensor("model.norm.weight").fill_(7)
    assert checkpoint.tensor("model.norm.weight").data_ptr() == checkpoint.tensor("model.norm.weight").data_ptr()
    assert (checkpoint.tensor("model.norm.weight") == 7).all()
    assert sha256_file(whole / "model.safetensors") == before


@pytest.mark.parametrize("code", ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"])
def test_every_dtype_round_trips(tmp_path: Path, code: str) -> None:
    from numem.models.weights.safetensors_file import DTYPES

    tensor = torch.arange(12).reshape(3, 4).to(DTYPES[code])
    save_file({"a": tensor, "empty": tensor[:0], "scalar": tensor[0, 0].clone()}, tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.tensor("a"), tensor)
    assert checkpoint.tensor("empty").shape == (0, 4) and checkpoint.tensor("scalar").shape == ()


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25])
    data = b"\x07" + values.numpy().tobytes()
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    raw_safetensors(tmp_path / "model.safetensors", header, data)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.tensor("b"), values) and checkpoint.tensor("a").item() == 7


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


GOOD = {"a": entry(0, 8), "b": entry(8, 16)}
MALFORMED: list[tuple[str, Any, bytes, str]] = [
    ("header longer than the file", None, struct.pack("<Q", 10**15) + b"{}", "cut short"),
    ("too short for a length", None, b"\x01\x02", "too few"),
    ("empty file", None, b"", "too few"),
    ("no JSON", b"{not json", b"", "not valid JSON"),
    ("no UTF-8", b'{"\xff": 1}', b"", "not valid JSON"),
    ("not an object", b"[1, 2]", b"", "not an object"),
    ("nested without end", b"[" * 100_000, b"", "not valid JSON"),
    ("same tensor twice", b'{"a": 1, "a": 1}', b"", "'a' appears twice"),
    ("metadata of numbers", {"__metadata__": {"x": 1}, **GOOD}, bytes(16), "__metadata__"),
    ("entry not an object", {"a": 3}, b"", "tensor a is not an object"),
    ("negative offset", {"a": entry(-8, 0, [2])}, b"", "data_offsets [-8, 0]"),
    ("offsets that end before they begin", {"a": entry(8, 0, [2])}, bytes(8), "end before they begin"),
    ("offsets that are not integers", {"a": {**entry(0, 8), "data_offsets": [0, 8.0]}}, bytes(8), "data_offsets"),
    ("three offsets", {"a": {**entry(0, 8), "data_offsets": [0, 4, 8]}}, bytes(8), "data_offsets"),
    ("overlap", {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "b overlaps"),
    ("same bytes twice", {"a": entry(0, 8), "b": entry(0, 8)}, bytes(8), "b overlaps"),
    ("hole", {"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), "b leaves a hole"),
    ("hole at the start", {"a": entry(4, 8)}, bytes(8), "a leaves a hole"),
    ("unknown dtype", {"a": entry(0, 8, dtype="Q4")}, bytes(8), "unknown dtype 'Q4'"),
    ("dtype not text", {"a": entry(0, 8, dtype=["F32"])}, bytes(8), "unknown dtype"),
    ("shape times size is not the bytes", {"a": entry(0, 8, [3])}, bytes(8), "needs 12 bytes"),
    ("huge shape", {"a": entry(0, 8, [2**62, 2**62])}, bytes(8), "needs"),
    ("negative size", {"a": entry(0, 8, [-2])}, bytes(8), "shape [-2]"),
    ("boolean size", {"a": entry(0, 4, [True])}, bytes(4), "shape [True]"),
    ("data cut short", GOOD, bytes(12), "cut short"),
    ("no data", GOOD, b"", "cut short"),
    ("trailing bytes", GOOD, bytes(17), "1 trailing bytes"),
]


@pytest.mark.parametrize(("header", "data", "message"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_malformed_safetensors_are_refused_before_use(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    """safetensors MetadataIncompleteBuffer, ComfyUI#15602: truncated, malformed or padded files give a clear error."""
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    if header is None:
        path.write_bytes(data)
    else:
        raw_safetensors(path, header, data)
    refuse(tmp_path, str(path), message)


def test_every_truncation_of_a_real_file_is_refused(whole: Path, tmp_path: Path) -> None:
    """safetensors MetadataIncompleteBuffer: a file cut anywhere is never taken for a whole one."""
    data = (whole / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text("{}")
    for length in [*range(64), *range(64, len(data), 9973), len(data) - 1]:
        (tmp_path / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path)


def test_sharding_changes_neither_tensors_nor_digest(whole: Path, sharded: Path) -> None:
    one, many = Checkpoint(whole), Checkpoint(sharded)
    assert one.names == many.names
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names)
    assert one.digest() == many.digest() and len(one.digest()) == 32


def test_the_digest_follows_name_dtype_shape_and_bytes(tmp_path: Path) -> None:
    """ds4#805, MemOS#2300: identity comes from content, never from a name or a path."""

    def digest(**tensors: torch.Tensor) -> bytes:
        (tmp_path / "config.json").write_text("{}")
        save_file(tensors, tmp_path / "model.safetensors")
        return Checkpoint(tmp_path).digest()

    base = digest(a=torch.zeros(4), b=torch.ones(2))
    assert digest(b=torch.ones(2), a=torch.zeros(4)) == base
    changed = [
        digest(a=torch.zeros(4), c=torch.ones(2)),
        digest(a=torch.zeros(2, 2), b=torch.ones(2)),
        digest(a=torch.zeros(4, dtype=torch.int32), b=torch.ones(2)),
        digest(a=torch.tensor([0.0, 0.0, 0.0, -0.0]), b=torch.ones(2)),
        digest(a=torch.zeros(4)),
    ]
    assert len({base, *changed}) == 6


def test_unusual_names_load(whole: Path, sharded: Path, tmp_path: Path) -> None:
    """sglang PR#32279, mlx-vlm#1827: shard names are whatever the index says."""
    renames = {name: f"model.safetensors-{i:05}-of-00009.safetensors" for i, name in enumerate(shards(sharded), 1)}
    document = index(sharded)
    document["weight_map"] = {tensor: renames[name] for tensor, name in document["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(document))
    for old, new in renames.items():
        (sharded / old).rename(sharded / new)
    assert Checkpoint(sharded).digest() == Checkpoint(whole).digest()

    other = tmp_path / "single"
    other.mkdir()
    for name, target in (("config.json", "config.json"), ("model.safetensors", "weights-fp32.safetensors")):
        (other / target).write_bytes((whole / name).read_bytes())
    assert Checkpoint(other).digest() == Checkpoint(whole).digest()


def test_a_missing_shard_is_named(sharded: Path) -> None:
    """sglang PR#32279, club-3090#1042: the message names the absent file."""
    gone = shards(sharded)[1]
    (sharded / gone).unlink()
    refuse(sharded, INDEX, gone)


def test_an_index_that_names_absent_files_is_refused(sharded: Path) -> None:
    """unsloth-zoo#900."""
    rewrite(sharded, **{"model.norm.weight": "model-00099-of-00099.safetensors"})
    refuse(sharded, INDEX, "model-00099-of-00099.safetensors")


def test_a_tensor_mapped_to_the_wrong_file_is_refused(sharded: Path) -> None:
    """mlx-vlm#1827."""
    weight_map = index(sharded)["weight_map"]
    wrong = next(name for name in shards(sharded) if name != weight_map["model.norm.weight"])
    rewrite(sharded, **{"model.norm.weight": wrong})
    refuse(sharded, "model.norm.weight", wrong)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    first, second = shards(sharded)[:2]
    tensors = load_file(sharded / first) | load_file(sharded / second)
    save_file(tensors, sharded / second)
    refuse(sharded, "in two files", first, second)


def test_a_tensor_that_the_index_lacks_is_refused(sharded: Path) -> None:
    document = index(sharded)
    shard = document["weight_map"].pop("model.norm.weight")
    (sharded / INDEX).write_text(json.dumps(document))
    refuse(sharded, shard, "model.norm.weight")


@pytest.mark.parametrize("target", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "", 3, None])
def test_an_index_cannot_name_a_path(sharded: Path, target: Any) -> None:
    rewrite(sharded, **{"model.norm.weight": target})
    refuse(sharded, INDEX, "model.norm.weight")


DIRECTORIES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("index without a map", lambda p: (p / INDEX).write_text("{}"), "weight_map"),
    ("index that is no JSON", lambda p: (p / INDEX).write_text("{"), "not valid JSON"),
    ("index that is a list", lambda p: (p / INDEX).write_text("[]"), "not a JSON object"),
    ("files without an index", lambda p: (p / INDEX).unlink(), "without an index (model-00001-of-"),
    ("index and a single file", lambda p: (p / "model.safetensors").write_bytes(b""), "keep one"),
    ("two indices", lambda p: (p / "other.safetensors.index.json").write_text("{}"), "several indices"),
    ("no config", lambda p: (p / "config.json").unlink(), "no config.json"),
    ("config that is no JSON", lambda p: (p / "config.json").write_text("{'a': 1}"), "config.json: not valid JSON"),
    ("config that is a number", lambda p: (p / "config.json").write_text("1"), "config.json: holds a int"),
    ("generation config", lambda p: (p / "generation_config.json").write_text("x"), "generation_config.json"),
]


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DIRECTORIES], ids=[d[0] for d in DIRECTORIES])
def test_contradictory_directories_are_refused(sharded: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(sharded)
    refuse(sharded, message)


def test_directories_without_weights_say_what_they_have(tmp_path: Path) -> None:
    refuse(tmp_path / "absent", "not a directory")
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, "no *.safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(tmp_path, "pytorch_model.bin is not read")
    (tmp_path / "model.safetensors").mkdir()
    refuse(tmp_path, "model.safetensors")


def test_a_tensor_that_is_not_there_is_named(whole: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor named nothing\.weight"):
        Checkpoint(whole).tensor("nothing.weight")


@pytest.fixture
def locked(sharded: Path) -> Path:
    files = {item.name: sha256_file(item) for item in sharded.iterdir()}
    Lock({"kind": "test"}, files, Checkpoint(sharded).digest().hex()).write(sharded)
    Checkpoint(sharded).digest()
    return sharded


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_the_weights_names_the_file(locked: Path) -> None:
    """Bit rot in a payload is found by the digest that every load computes; a user's own directory has no record."""
    damaged = locked / shards(locked)[1]
    flip(damaged, -1)
    checkpoint = Checkpoint(locked)
    with pytest.raises(CheckpointError, match=damaged.name):
        checkpoint.digest()
    with pytest.raises(CheckpointError, match=damaged.name):
        checkpoint.digest()
    (locked / LOCK_NAME).unlink()
    Checkpoint(locked).digest()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_changed_file_beside_the_weights_is_refused(locked: Path, name: str) -> None:
    (locked / name).write_text((locked / name).read_text() + " ")
    refuse(locked, name, LOCK_NAME)


def test_a_removed_file_is_refused(locked: Path) -> None:
    (locked / "config.json").unlink()
    refuse(locked, "config.json")


@pytest.mark.parametrize("document", ["{}", "[]", '{"version": 2}', '{"version": 1, "files": {"a": 1}}', "\xff"])
def test_a_damaged_lock_file_is_refused(locked: Path, document: str) -> None:
    (locked / LOCK_NAME).write_text(document, encoding="latin-1")
    refuse(locked, LOCK_NAME)


def test_an_embedding_model_is_sent_to_its_own_verb(tmp_path: Path) -> None:
    """Each verb names the other: load_lm for text, load_embedder for vectors."""
    path = tiny_model(tmp_path / "model", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"numem\.load_lm"):
        load_embedder(path)
    (path / "modules.json").write_text("[]")
    with pytest.raises(UnsupportedModelError, match=r"numem\.load_embedder") as caught:
        load_lm(path)
    assert caught.value.code == "kind"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool])
def test_weights_that_need_scales_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    """Taken for numbers they would be other weights: their scales lie in other tensors, or nowhere."""
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        directory = tiny_model(tmp_path / name)
        tensors = load_file(directory / "model.safetensors")
        tensors[name] = tensors[name].to(dtype)
        save_file(tensors, directory / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=f"{name} is stored as {str(dtype)[6:]};"):
            load_lm(directory)


@pytest.mark.parametrize("width", [8, 24, 272])
def test_a_width_of_heads_that_kernels_do_not_take_is_refused(tmp_path: Path, width: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"head_dim {width} is not run; only multiples of 16 up to 256"):
        load_lm(tiny_model(tmp_path, head_dim=width))
