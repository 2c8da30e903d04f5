"""Every family of decoders on a device: logits near those of the CPU, whole and token by token, from one checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.shapes import Random, config_of, descriptor_of, weights_of
from numem.errors import UnsupportedModelError
from numem.kernels.cuda.lowering import Lowering
from numem.kernels.cuda.matrix import Matrix, Stack
from numem.kernels.operations import Attend, Matmul
from numem.models.architecture.reading import read_descriptor
from numem.models.device_transformer import DeviceTransformer
from numem.models.devices import gpu_refuses
from numem.models.forward import Experts, ModelWeights, emit
from numem.models.transformer import Transformer
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.device_maker import DeviceMaker
from numem.models.weights.loader import Weights
from numem.runtime.device.form import TokenMajor
from numem.runtime.engine import Engine, Span
from numem.runtime.paging.pages import PageStorage
from tests.family_fixtures import CASES, family_model

FEW = {"llama-biased", "mistral-windowed", "qwen2", "qwen3_moe-sparse", "mixtral", "gemma2", "gemma3_text-linear"}
DECODERS = [name for name, case in CASES.items() if case.kind == "lm"]
POSITIONS = 128


def _decoders(directory: Path, device: torch.device, dtype: str) -> tuple[Transformer, DeviceTransformer]:
    """The same checkpoint for the CPU and for a device."""
    checkpoint = Checkpoint(directory)
    d = read_descriptor(checkpoint.config, checkpoint.names)
    plain = Transformer(d, Weights(checkpoint, d, dtype=dtype), dtype=dtype, max_position=POSITIONS)
    weights = Weights(checkpoint, d, dtype=dtype, maker=DeviceMaker(device, getattr(torch, dtype)))
    read = ModelWeights.read(d, weights, POSITIONS)
    return plain, DeviceTransformer(d, read, dtype=dtype, max_position=POSITIONS, device=device)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in DECODERS])
def test_logits_are_near_those_of_the_cpu(name: str, tmp_path: Path, device: torch.device, big: bool) -> None:
    """Past a page and a window, prefilled and decoded; in bfloat16 the two round at different places."""
    dtype = "bfloat16" if big else "float32"
    model = family_model(tmp_path / "model", CASES[name])
    plain, there = _decoders(model, device, dtype)
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 60, 37)]
    engines = Engine(plain, pages=8), Engine(there, pages=8)
    if device.type == "cpu":  # the form that device kernels read
        engines[1].storage = PageStorage(there.spec, there.kv_heads, there.head_dim, 8, form=TokenMajor(device))
    pages = [5, 2, 7]
    found = []
    for engine in engines:
        (whole,) = engine.evaluate([Span(pages, 0, tokens[:-2], "all")])
        rows = [
            engine.evaluate([Span(pages, at, tokens[at : at + 1])])[0] for at in range(len(tokens) - 2, len(tokens))
        ]
        found.append(np.concatenate([whole, np.stack(rows)]))
    cpu, gpu = found
    size = np.abs(cpu).max()
    assert np.isfinite(gpu).all()
    apart = np.abs(cpu - gpu).max(1) / size
    near = apart <= (0.06 if big else 2e-4)
    if big and there.descriptor.moe is not None:
        # in bfloat16 a router's choice between nearly equal experts may fall either way, which changes its row
        assert near.mean() >= 0.75, apart
    else:
        assert near.all(), apart
        assert np.abs(cpu - gpu).mean() <= (0.01 if big else 2e-5) * size


def test_experts_are_stacked(tmp_path: Path, device: torch.device) -> None:
    """By number; as dense weights where their formats differ; and the CPU's own rows."""
    model = family_model(tmp_path / "model", CASES["mixtral"])
    checkpoint = Checkpoint(model)
    d = read_descriptor(checkpoint.config, checkpoint.names)
    weights = Weights(checkpoint, d, dtype="float32", maker=DeviceMaker(device, torch.float32))
    feed = ModelWeights.read(d, weights, POSITIONS).layers[0].feed
    assert isinstance(feed, Experts) and isinstance(feed.gate_up, Stack) and isinstance(feed.router, Matrix)
    assert feed.router.dtype is torch.float32 and feed.gate_up.count == 4
    third = checkpoint.tensor(d.source("expert_down", 0, 2).name)[d.source("expert_down", 0, 2).index]
    at = slice(2 * d.hidden, 3 * d.hidden)
    assert isinstance(feed.down, Stack) and torch.equal(feed.down.matrix.weights[at].cpu(), third.float())


def test_two_norms_of_one_residual_stream_are_refused(device: torch.device) -> None:
    """As of blocks side by side: the first norm is the embedding's, and every other follows a branch."""
    d = descriptor_of(config_of("0.6b", dry=True))
    program = emit(d, weights_of(d, Random("bf16", torch.float32, device), 64), "float32", join=False)
    assert len(Lowering(program).out) > 5
    body = list(program.body)
    at = next(i for i, each in enumerate(body) if isinstance(each, Attend))
    assert isinstance(body[at + 1], Matmul)
    del body[at + 1]
    program.body = tuple(body)
    with pytest.raises(UnsupportedModelError, match="two norms of one residual stream"):
        Lowering(program)


def test_what_is_refused_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = family_model(tmp_path / "model", CASES["gemma3_text-bidirectional"])
    checkpoint = Checkpoint(model)
    d = read_descriptor(checkpoint.config, checkpoint.names)
    assert "see what follows them" in gpu_refuses(d)
    with pytest.raises(UnsupportedModelError, match="see what follows them"):
        DeviceTransformer(
            d,
            ModelWeights.read(d, Weights(checkpoint, d, dtype="float32"), 8),
            dtype="float32",
            max_position=8,
            device=torch.device("cpu"),
        )
