"""Quantised models: which matrix has which format, what is kept for the next load, and what that is keyed by."""

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from numem import LM, Memory, load_lm
from numem.errors import CheckpointError, InputError
from numem.kernels import formats
from numem.kernels.quantised import QuantisedLinear
from numem.models.weights import streams
from tests.model_fixtures import tiny_model
from tests.test_models_adapters import tiny_adapter

PROMPT = [5, 17, 40, 9, 200, 31, 8]
LAYER_ROLES = ("attn_q", "attn_k", "attn_v", "attn_o", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path / "cache"))
    return tiny_model(tmp_path / "model", num_hidden_layers=2)


def logits(lm: LM) -> torch.Tensor:
    engine = lm.session().engine
    (rows,) = engine.append([(engine.pool.allocate(), PROMPT)], logits="all")
    return torch.from_numpy(rows.copy())


def kept(directory: Path) -> list[Path]:
    return sorted((directory / "quantised").glob("*.safetensors"))


def never(*arguments: object, **options: object) -> None:
    raise AssertionError("quantised again")


@pytest.mark.parametrize(
    ("scheme", "layers", "tables", "qkv", "error"),
    [
        ("q8", "q8", "q8", "q8", 0.1),
        ("q4", "q4", "q8", "q8", 0.9),
        ("q4a", "q4a", "q8", "q4a", 0.9),
        ("q4k", "q4a", "q8", "q4a", 0.9),
    ],
)
def test_every_matrix_has_the_format_of_its_scheme(
    model: Path, scheme: str, layers: str, tables: str, qkv: str, error: float
) -> None:
    """Rows of 64 are no super-block, so q4k takes the 4-bit format that divides them."""
    lm = load_lm(model, quantise=scheme)
    expected = {role: layers for role in LAYER_ROLES} | {"embed": tables, "lm_head": tables}
    expected |= {f"attn_{part}": qkv for part in "qkv"}
    versions = {role: f"{name}/{formats.FORMATS[name].version}" for role, name in expected.items()}
    assert lm.identity.semantic["quantisation"] == versions
    assert lm.identity.semantic["weights"] == load_lm(model).identity.semantic["weights"]
    whole, rounded = logits(load_lm(model)), logits(lm)
    assert float((whole - rounded).norm() / whole.norm()) < error


def test_rows_that_no_format_divides_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model(tmp_path / "model", intermediate_size=80)
    first = load_lm(directory, quantise="q8")
    assert first.identity.semantic["quantisation"]["ffn_down"] == "float32"
    monkeypatch.setattr(QuantisedLinear, "of_parts", never)
    second = load_lm(directory, quantise="q8")
    assert second.identity == first.identity and torch.equal(logits(first), logits(second))


def test_weights_that_were_quantised_before_are_held_as_they_are(model: Path) -> None:
    """Each matrix lies on the grid of another format; two lie on none."""
    weights = load_file(model / "model.safetensors")
    grids = {"q_proj": "q4", "gate_proj": "q4a", "down_proj": "q8", "o_proj": "q4a"}
    for name, tensor in weights.items():
        for part, grid in grids.items():
            if part in name:
                planes = formats.quantise(tensor, grid)
                weights[name] = formats.dequantise(planes, grid, *tensor.shape).to(torch.float16)
    save_file(weights, model / "model.safetensors")
    lm = load_lm(model, quantise="native")
    names = {role: str(text).split("/")[0] for role, text in lm.identity.semantic["quantisation"].items()}
    # q, k and v are one matrix, as gate and up are: they take the format that holds them all
    assert names == {role: "q8" for role in (*LAYER_ROLES, "embed", "lm_head")} | {"attn_o": "q4a"}
    whole = logits(load_lm(model))
    assert float((logits(lm) - whole).norm() / whole.norm()) < 0.1


def test_the_next_load_reads_what_was_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_lm(model, quantise="q4a")
    (path,) = kept(model)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(QuantisedLinear, "of_parts", never)
    second = load_lm(model, quantise="q4a")
    assert second.identity == first.identity and torch.equal(logits(first), logits(second))
    assert path.stat().st_mtime_ns == before


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("a flipped byte", lambda p: flip(p, -1), "differ from their digest"),
    ("a flipped byte of the header", lambda p: flip(p, 200), ""),
    ("cut short", lambda p: p.write_bytes(p.read_bytes()[:-7]), "cut short"),
    ("empty", lambda p: p.write_bytes(b""), "too few"),
    ("another program's", lambda p: save_file({"a": torch.ones(3)}, p), "not the quantised weights"),
]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_a_damaged_file_is_made_again(
    model: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], message: str
) -> None:
    """tt-metal#55014, executorch#22183, executorch#20833: what is kept is believed for its bytes alone."""
    first = load_lm(model, quantise="q8")
    (path,) = kept(model)
    whole = path.read_bytes()
    damage(path)
    with caplog.at_level(logging.WARNING):
        second = load_lm(model, quantise="q8")
    (said,) = caplog.messages
    assert str(path) in said and message in said and "quantised again" in said
    assert torch.equal(logits(first), logits(second)) and path.read_bytes() == whole
    caplog.clear()
    load_lm(model, quantise="q8")
    assert not caplog.messages


def test_a_file_of_other_weights_is_not_taken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tt-metal#55014: another model of the same name, size and time."""
    load_lm(model, quantise="q8")
    (path,) = kept(model)
    weights = model / "model.safetensors"
    times = weights.stat()
    changed = load_file(weights)
    changed["model.layers.0.mlp.up_proj.weight"][3, 4] += 1
    save_file(changed, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_size == times.st_size
    lm = load_lm(model, quantise="q8")
    assert len(kept(model)) == 2
    other = next(item for item in kept(model) if item != path)
    # and one that carries another's name
    other.write_bytes(path.read_bytes())
    assert torch.equal(logits(load_lm(model, quantise="q8")), logits(lm))


def test_formats_versions_and_adapters_are_part_of_the_name(model: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", model)
    plain = load_lm(model, quantise="q8")
    merged = load_lm(model, quantise="q8", adapters=[adapter])
    load_lm(model, quantise="q8", adapters=[(adapter, 0.5)])
    load_lm(model, quantise="q4")
    assert len(kept(model)) == 4
    assert merged.identity.compare(plain.identity).fields == ("semantic.adapters",)
    assert torch.equal(logits(load_lm(model, quantise="q8", adapters=[adapter])), logits(merged))
    assert not torch.equal(logits(plain), logits(merged))


KILLED = """
import os, signal, sys
from numem import load_lm
from numem.models.weights import streams

def half(path, layout, payloads, metadata):
    whole = write(path, layout, payloads, metadata)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)

write, streams.write_safetensors = streams.write_safetensors, half
load_lm(sys.argv[1], quantise="q8")
"""


def test_a_load_killed_while_it_writes_leaves_nothing_that_is_believed(model: Path) -> None:
    """tt-metal#55014: the next load quantises again, and clears up."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(model)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert not kept(model) and len(list((model / "quantised").glob("*.partial"))) == 1
    load_lm(model, quantise="q8")
    assert len(kept(model)) == 1 and not list((model / "quantised").glob("*.partial"))


@pytest.mark.slow
def test_processes_that_load_at_once_agree(model: Path) -> None:
    code = (
        "import sys; from numem import load_lm; print(load_lm(sys.argv[1], quantise='q8').generate_ids([5, 6, 7], 4))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = {process.communicate()[0] for process in running}
    assert said == {f"{load_lm(model, quantise='q8').generate_ids([5, 6, 7], 4)}\n"}
    assert len(kept(model)) == 1 and not list((model / "quantised").glob("*.partial"))


def test_a_model_directory_that_cannot_be_written_keeps_in_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "quantised").write_bytes(b"a file in the way")
    first = load_lm(model, quantise="q8")
    assert len(kept(tmp_path / "cache")) == 1
    with monkeypatch.context() as patch:
        patch.setattr(QuantisedLinear, "of_parts", never)
        assert torch.equal(logits(load_lm(model, quantise="q8")), logits(first))
    for path in kept(tmp_path / "cache"):
        path.unlink()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streams, "write_safetensors", full)
    assert torch.equal(logits(load_lm(model, quantise="q8")), logits(first))
    assert "not kept for the next load" in caplog.messages[-1] and "No space" in caplog.messages[-1]
    assert not kept(tmp_path / "cache") and not list((tmp_path / "cache" / "quantised").glob("*.partial"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused_by_name(model: Path, value: float) -> None:
    """slime#2256, torchao#4762, auto-round#1908, aiter#4289, coremltools#2851."""
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][2, 3] = value
    save_file(weights, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_lm(model, quantise="q8")
    assert not kept(model)


@pytest.mark.parametrize("scheme", ["q8", "q4", "q4a"])
def test_rows_of_any_size_keep_their_direction(model: Path, scheme: str) -> None:
    """slime#2256, torchao#4762: a row of zeros, of 1e-8 and of 1e30 of the others."""
    weights = load_file(model / "model.safetensors")
    embed = weights["model.embed_tokens.weight"]
    original = embed.clone()
    embed[7], embed[8], embed[9] = 0, original[8] * 1e-8, original[9] * 1e30
    save_file(weights, model / "model.safetensors")
    rows = load_lm(model, quantise=scheme).decoder.weights.embed.rows(torch.tensor([7, 8, 9]))
    assert torch.equal(rows[0], torch.zeros(64))
    for row, factor, source in ((rows[1], 1e8, original[8]), (rows[2], 1e-30, original[9])):
        assert torch.nn.functional.cosine_similarity(row * factor, source, dim=0) > 0.999


def test_state_of_other_weights_is_never_found(model: Path, memory: Memory) -> None:
    """A miss of another quantisation names it; ds4#805: so does one of another value in the same place."""
    from numem.job.complete import complete

    tokens = [3 + i % 200 for i in range(80)]
    made = load_lm(model, quantise="q8")
    complete(memory, made, tokens, 1)
    assert complete(memory, load_lm(model, quantise="q8"), tokens, 1).restored_tokens > 0
    for scheme in (None, "q4", "q4a"):
        other = load_lm(model, quantise=scheme)
        assert complete(memory, other, tokens, 1).restored_tokens == 0
        fields = made.identity.compare(other.identity).fields
        assert any(field.startswith("semantic.quantisation") for field in fields)
        assert all(field.startswith(("semantic.quantisation", "policy.self_test")) for field in fields)


def test_an_unknown_scheme_is_refused(model: Path) -> None:
    with pytest.raises(InputError, match="q8, q4, q4a, q4k, native"):
        load_lm(model, quantise="q3")


@pytest.mark.parametrize("groups", ["[1]", "{", "{}", '{"embed.0":["q8",320]}', '{"embed.0":["q8",384,64]}'])
def test_a_table_that_does_not_fit_is_made_again(model: Path, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose digest is right and whose table is not: it was written by another program."""
    first = load_lm(model, quantise="q8")
    (path,) = kept(model)
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(streams, "_groups", lambda _: groups)
        path.unlink()
        load_lm(model, quantise="q8")
    assert path.read_bytes() != whole
    assert torch.equal(logits(load_lm(model, quantise="q8")), logits(first))
    assert path.read_bytes() == whole
