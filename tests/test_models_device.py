"""Devices by name, what a machine without a GPU says, and weights in the form of the GPU's kernels."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from numem import load_embedder, load_lm
from numem.cli import app
from numem.errors import CapacityError, UnsupportedModelError
from numem.kernels.cuda.matrix import Matrix
from numem.kernels.formats import FORMATS, dequantise, quantise
from numem.models import devices
from numem.models.architecture.reading import read_descriptor
from numem.models.devices import device_class, device_names, gpu_refuses, resolve_device
from numem.models.forward import ModelWeights
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.device_maker import DeviceMaker
from numem.models.weights.loader import Weights
from tests.model_fixtures import tiny_model
from tests.test_models_adapters import tiny_adapter

ROOT = Path(__file__).parents[1]
GB = 10**9


class FakeCuda:
    """Some GPUs: name, capability, free bytes."""

    def __init__(self, *gpus: tuple[str, tuple[int, int], int]) -> None:
        self.gpus = gpus

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(self.gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.gpus))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: self.gpus[i][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: self.gpus[i][1])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (self.gpus[i][2], 141 * GB))


H200 = ("NVIDIA H200", (9, 0), 100 * GB)
BUSY = ("NVIDIA H200", (9, 0), 5 * GB)
T4 = ("Tesla T4", (7, 5), 15 * GB)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.version, "cuda", None)
    yield


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_without_cuda_the_message_names_device_and_remedy(no_cuda: None, model: Path, name: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"device '{name}': this build of torch has no CUDA; .*device='cpu'"
    ):
        load_lm(model, device=name)


def test_without_a_gpu_the_message_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="no NVIDIA GPU is seen here; check `nvidia-smi`.*'cpu' or 'auto'"):
        resolve_device("cuda")
    with pytest.raises(UnsupportedModelError, match="cuda:all.*no NVIDIA GPU"):
        device_names("cuda:all")


def test_without_triton_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(H200).install(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"pip install numem\[cuda\]"):
        resolve_device("cuda")
    assert resolve_device("auto") == devices.CPU


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "mps", "", "cuda:0,cuda:1", "cuda:all"])
def test_other_names_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    FakeCuda(H200, H200).install(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="cpu, cuda, cuda:N or auto"):
        resolve_device(name)


def test_a_gpu_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(H200, T4, BUSY).install(monkeypatch)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:2", needs=4 * GB) == torch.device("cuda", 2)
    assert device_class(torch.device("cuda", 2)) == "cuda-sm90-NVIDIA H200"
    with pytest.raises(UnsupportedModelError, match="'cuda:3': this process sees cuda:0 to cuda:2"):
        resolve_device("cuda:3")
    with pytest.raises(UnsupportedModelError, match=r"'cuda:1': Tesla T4 has compute capability 7\.5; 8\.0 or newer"):
        resolve_device("cuda:1")
    with pytest.raises(CapacityError, match=r"'cuda:2': the model takes 6\.0 GB and 5\.0 GB are free; quantise it"):
        resolve_device("cuda:2", needs=6 * GB)


def test_auto_takes_the_gpu_with_most_free_memory_if_the_model_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(BUSY, H200, H200, T4).install(monkeypatch)
    assert resolve_device("auto", needs=50 * GB) == torch.device("cuda", 1)
    assert resolve_device("auto", needs=101 * GB) == devices.CPU
    assert resolve_device("auto", refused="its rows see what follows them") == devices.CPU
    FakeCuda(T4).install(monkeypatch)
    assert resolve_device("auto") == devices.CPU


def test_auto_without_a_gpu_is_the_cpu_bit_for_bit(no_cuda: None, model: Path) -> None:
    auto, cpu = load_lm(model, device="auto"), load_lm(model)
    assert auto.identity.scope == cpu.identity.scope
    assert auto.identity.device_class.startswith("cpu-")
    assert auto.generate_ids([5, 6, 7], 8) == cpu.generate_ids([5, 6, 7], 8)


@pytest.mark.parametrize("name", ["cuda:0,cuda:0", "cuda,cuda:1", "cuda:0,cpu", ",", "cuda:0,"])
def test_lists_name_different_gpus(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="different GPUs by number"):
        device_names(name)


def test_names_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(H200, H200, H200).install(monkeypatch)
    assert device_names("cuda:all") == ("cuda:0", "cuda:1", "cuda:2")
    assert device_names("cuda:2, cuda:0") == ("cuda:2", "cuda:0")
    assert device_names("cpu") == ("cpu",)


def test_models_that_are_not_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    checkpoint = Checkpoint(model)
    d = read_descriptor(checkpoint.config, checkpoint.names)
    assert gpu_refuses(d) == ""
    assert "the CPU alone" in gpu_refuses(replace(d, causal=False))
    assert "norm layer" in gpu_refuses(replace(d, norm=replace(d.norm, kind="layer")))
    assert "more than 31 query heads" in gpu_refuses(replace(d, heads=32 * d.kv_heads))
    assert "float32" in gpu_refuses(d, "float32")
    assert "after_attn" in gpu_refuses(replace(d, norms=("after_attn", "after_ffn")))
    FakeCuda(H200).install(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="'cuda': the layers .*; use device='cpu'"):
        resolve_device("cuda", refused=gpu_refuses(replace(d, gated=False)))


def test_embedding_models_stay_on_the_cpu(model: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="device 'cuda:1': embedding models are run on the CPU alone"):
        load_embedder(model, device="cuda:1")


def test_the_command_says_it_in_one_line(no_cuda: None, model: Path, tmp_path: Path) -> None:
    args = ["generate", str(model), "x", "--device", "cuda", "--memory", str(tmp_path / "memory"), "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code != 0
    assert json.loads(done.stdout)["error"].startswith("device 'cuda': this build of torch has no CUDA")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "memory").exists()


def test_the_cpu_never_imports_triton(model: Path) -> None:
    code = (
        "import sys, numem; lm = numem.load_lm(sys.argv[1], device='auto'); lm.generate_ids([5, 6], 2)\n"
        "print('triton' in sys.modules, [m for m in sys.modules if m.startswith('numem.kernels.cuda')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False []"


# Weights.


def wide(tmp_path: Path, **config: Any) -> Path:
    """A model whose rows every format divides."""
    return tiny_model(tmp_path / "wide", hidden_size=256, intermediate_size=512, num_hidden_layers=2, **config)


def read(directory: Path, dtype: torch.dtype, **options: Any) -> tuple[Weights, ModelWeights]:
    checkpoint = Checkpoint(directory)
    d = read_descriptor(checkpoint.config, checkpoint.names)
    maker = DeviceMaker(torch.device("cpu"), dtype)
    weights = Weights(checkpoint, d, dtype=str(dtype).removeprefix("torch."), maker=maker, **options)
    made = ModelWeights.read(d, weights, 64)
    weights.release()
    return weights, made


def matrices(made: ModelWeights) -> list[Matrix]:
    layers: list[Any] = [m for at in made.layers for m in (at.qkv, at.attn_out, at.feed.up, at.feed.down)]  # type: ignore[union-attr]
    found = [made.embed, *layers]
    assert all(isinstance(m, Matrix) for m in found)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_weights_are_those_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = wide(tmp_path, attention_bias=True)
    checkpoint = Checkpoint(directory)
    _, made = read(directory, dtype)
    first = made.layers[0]
    parts = [checkpoint.tensor(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qkv"]
    assert isinstance(first.qkv, Matrix)
    assert torch.equal(first.qkv.weights, torch.cat(parts).to(dtype))
    biases = [checkpoint.tensor(f"model.layers.0.self_attn.{name}_proj.bias") for name in "qkv"]
    assert first.qkv.bias is not None and torch.equal(first.qkv.bias, torch.cat(biases).float())
    assert torch.equal(first.norms["input"].weight, checkpoint.tensor("model.layers.0.input_layernorm.weight").float())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("slab", [1 << 8, 1 << 25])
def test_every_format_stands_for_the_same_weights(monkeypatch: pytest.MonkeyPatch, name: str, slab: int) -> None:
    """q6k has no kernel: its matrices are held dense."""
    monkeypatch.setattr("numem.models.weights.device_maker._SLAB", slab)
    n, k = 77, 512
    weight = torch.randn((n, k), generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, n)[:, None]
    planes = quantise(weight, name)
    made: Any = DeviceMaker(torch.device("cpu"), torch.float32).quantised(name, n, k, planes, torch.arange(float(n)))
    assert isinstance(made, Matrix) and made.bits == {"q8": 8, "q6k": 16}.get(name, 4)
    exact = dequantise(planes, name, n, k)
    # scale * (code - zero) + min, rounded once here and twice there
    assert torch.allclose(made.reference(), exact, rtol=2**-22, atol=float(exact.abs().max()) * 2**-24)
    if not FORMATS[name].mins:
        assert torch.equal(made.reference(), exact)
    assert made.bias is not None and torch.equal(made.bias, torch.arange(float(n)))


@pytest.mark.parametrize("scheme", ["q8", "q4", "q4a", "q4k"])
def test_codes_are_those_of_the_cpu_and_are_kept(tmp_path: Path, scheme: str) -> None:
    """LoRA merge, choice of formats and codes do not depend on the device: a file kept by one serves the other."""
    directory = wide(tmp_path)
    adapter = tiny_adapter(tmp_path / "adapter", directory)
    cpu = load_lm(directory, quantise=scheme, dtype="bfloat16", adapters=[adapter])
    kept = {path: path.stat().st_mtime_ns for path in (directory / "quantised").glob("*.safetensors")}
    assert len(kept) == 1
    weights, made = read(directory, torch.bfloat16, quantise=scheme, adapters=[adapter])
    assert {path: path.stat().st_mtime_ns for path in (directory / "quantised").glob("*.safetensors")} == kept
    assert weights.describe()["quantisation"] == cpu.identity.semantic["quantisation"]
    for path in kept:
        path.unlink()
    _, new = read(directory, torch.bfloat16, quantise=scheme, adapters=[adapter])
    for a, b in zip(matrices(made), matrices(new), strict=True):
        assert a.bits == b.bits and torch.equal(a.weights, b.weights)
    ids = torch.tensor([0, 5, 319])
    ours: Any = made.embed
    theirs = cpu.decoder.weights.embed.rows(ids)
    assert torch.equal(ours.reference()[ids].float(), theirs.to(torch.bfloat16).float())
