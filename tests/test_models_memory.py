"""Memory of a load: matrices go from the mapped file straight to their final place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from numem.models.weights.safetensors_file import write_safetensors
from tests.model_fixtures import tiny_model, tiny_tokenizer

HIDDEN, INTER, LAYERS, VOCAB = 512, 1536, 24, 16384

# What a load needs beside weights: buffers of conversions, the self-test, arenas of the allocator's threads.
SLACK = 24 << 20

SCRIPT = """
import json, resource, sys
from numem import load_lm
from numem.models.weights.loader import Weights

def counted(*arguments, **options):
    made.append(linear(*arguments, **options))
    return made[-1]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small, large, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
load_lm(small, **settings)
made, linear, Weights.linear, before = [], Weights.linear, counted, peak()
lm = load_lm(large, **settings)
print(json.dumps({"rise": peak() - before, "resident": sum(matrix.nbytes for matrix in made)}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and one of 87 million values in float16, written without holding it."""
    root = tmp_path_factory.mktemp("models")
    small = tiny_model(root / "small")
    large = root / "large"
    tiny_tokenizer(large)
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    (large / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (512, HIDDEN),
            "self_attn.k_proj": (256, HIDDEN),
            "self_attn.v_proj": (256, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 512),
            "mlp.gate_proj": (INTER, HIDDEN),
            "mlp.up_proj": (INTER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTER),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    values = torch.randn(VOCAB * HIDDEN, generator=torch.Generator().manual_seed(0)).mul_(0.05).to(torch.float16)
    raw = values.numpy().data.cast("B")
    payloads = ((name, raw[: 2 * torch.Size(shape).numel()]) for name, shape in shapes.items())
    write_safetensors(large / "model.safetensors", {n: ("F16", s) for n, s in shapes.items()}, payloads, {})
    return small, large


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "float32", "quantise": "q8"}, marks=pytest.mark.slow),
    ],
    ids=["float32", "bfloat16", "q8"],
)
def test_a_load_peaks_little_above_the_resident_weights(
    models: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    small, large = models
    command = [sys.executable, "-c", SCRIPT, str(small), str(large), json.dumps(settings)]
    environment = {**os.environ, "NUMEM_CACHE": str(tmp_path), "OMP_NUM_THREADS": "2"}
    for _ in range(2 if "quantise" in settings else 1):  # quantised, then read back
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        assert measured["resident"] > 40 << 20
        assert measured["rise"] <= 1.15 * measured["resident"] + SLACK
