"""Reading the modules, prompts and limits of an embedding model: what is run, and every refusal by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from numem.errors import CheckpointError, InputError, NumemError, UnsupportedModelError
from numem.models.embedding.encoding import TextEncoder, read_encoder
from numem.models.embedding.files import ModelFiles
from numem.models.embedding.modules import Dense, Normalize, read_modules
from numem.models.embedding.pooling import Head, pool
from numem.models.embedding.prompts import QUERY, QWEN3_QUERY, Prompts, read_prompts
from numem.models.text.tokenizer import Tokenizer
from numem.models.weights.lockfile import Lock, sha256_file
from tests.embedding_fixtures import ends_tokenizer, wordpiece_tokenizer, write_dense, write_modules
from tests.model_fixtures import edit_json, tiny_tokenizer

NEWER = ("sentence_transformers.base.modules.", "sentence_transformers.sentence_transformer.modules.pooling.")


def edit_modules(directory: Path, index: int, **values: Any) -> None:
    path = directory / "modules.json"
    listed = json.loads(path.read_text())
    listed[index] |= values
    path.write_text(json.dumps(listed))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("prefix", ["sentence_transformers.models.", *NEWER])
def test_pooling_and_order_in_both_spellings(tmp_path: Path, pooling: str, prefix: str) -> None:
    write_modules(tmp_path, pooling, "Normalize", prefix=prefix)
    modules = read_modules(ModelFiles(tmp_path), 64)
    assert (modules.pooling, modules.heads, modules.dim) == (pooling, (Normalize(),), 64)
    newer = {"mean": "mean", "cls": "cls", "last": "lasttoken"}[pooling]
    config = {"embedding_dimension": 64, "pooling_mode": newer, "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_modules(ModelFiles(tmp_path), 64) == modules


def test_dense_modules_are_read_in_their_order(tmp_path: Path) -> None:
    """TEI#732: an engine that forgets the Dense modules of a local directory gives vectors of another space."""
    write_dense(tmp_path, "2_Dense", (64, 32))
    write_dense(tmp_path, "3_Dense", (24, 64), bias=True, activation="activation.Tanh")
    write_modules(tmp_path, "mean", "Dense", "Dense", "Normalize", hidden=32)
    modules = read_modules(ModelFiles(tmp_path), 32)
    first, second, last = modules.heads
    assert isinstance(first, Dense) and isinstance(second, Dense) and last == Normalize()
    assert (first.activation, first.bias, second.activation) == ("identity", None, "tanh")
    assert second.bias is not None and modules.dim == 24
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    y = np.tanh(x @ first.weight.numpy().T @ second.weight.numpy().T + second.bias.numpy())
    np.testing.assert_allclose(Head(modules)(x), y / np.linalg.norm(y, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"type": "sentence_transformers.models.CNN"}, "models.CNN"),
        ({"type": "os.system"}, "os.system"),
        ({"type": "evil.Normalize"}, "evil.Normalize"),
        ({"type": "sentence_transformers.models.Pooling"}, "Transformer, Pooling, Pooling"),
        ({"path": "../elsewhere", "type": "sentence_transformers.models.Dense"}, "'../elsewhere'"),
        ({"path": "/etc", "type": "sentence_transformers.models.Dense"}, "'/etc'"),
        ({"path": "..", "type": "sentence_transformers.models.Dense"}, "'..'"),
        ({"path": "2_Dense", "type": "sentence_transformers.models.Dense"}, "2_Dense/config.json"),
        ({"path": 3}, "path 3"),
    ],
)
def test_modules_that_are_not_run(tmp_path: Path, values: dict[str, Any], word: str) -> None:
    write_modules(tmp_path, "mean", "Normalize")
    edit_modules(tmp_path, 2, **values)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        read_modules(ModelFiles(tmp_path), 64)
    assert word in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"pooling_mode_max_tokens": True}, "max + mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode_mean_tokens": False}, "by no rule"),
        ({"pooling_mode": "cls"}, "its flags say mean"),
        ({"include_prompt": False}, "include_prompt False"),
        ({"word_embedding_dimension": 32}, "32, but the transformer's rows have 64"),
        ({"embedding_dimension": 65}, "65"),
    ],
)
def test_pooling_that_is_not_run(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    """sentence-transformers#3208, swift-embeddings#21: the rule is the one of the model's files, and no other."""
    write_modules(tmp_path, "mean", "Normalize")
    edit_json(tmp_path / "1_Pooling" / "config.json", **config)
    with pytest.raises((CheckpointError, UnsupportedModelError), match="1_Pooling") as caught:
        read_modules(ModelFiles(tmp_path), 64)
    assert word in str(caught.value)


def test_a_directory_without_modules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no modules\.json, so how the model pools"):
        read_modules(ModelFiles(tmp_path), 64)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a JSON array"):
        read_modules(ModelFiles(tmp_path), 64)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"activation_function": "os.system"}, "'os.system'"),
        ({"activation_function": ...}, "None"),
        ({"activation_function": ["os.system"]}, "['os.system']"),
        ({"in_features": 31}, "linear.weight"),
        ({"bias": True}, "linear.bias"),
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_dense_modules_that_are_not_run(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    write_modules(tmp_path, "mean", "Dense", hidden=32)
    edit_json(write_dense(tmp_path, "2_Dense", (64, 32)) / "config.json", **config)
    with pytest.raises((CheckpointError, UnsupportedModelError), match="2_Dense") as caught:
        read_modules(ModelFiles(tmp_path), 32)
    assert word in str(caught.value)


def test_dense_weights_must_fit(tmp_path: Path) -> None:
    write_modules(tmp_path, "mean", "Dense", hidden=48)
    path = write_dense(tmp_path, "2_Dense", (64, 32))
    with pytest.raises(CheckpointError, match="in_features is 32, but the module before it gives 48"):
        read_modules(ModelFiles(tmp_path), 48)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors: missing"):
        read_modules(ModelFiles(tmp_path), 48)


@pytest.mark.parametrize("values", [torch.full((64, 32), torch.nan), torch.ones(64, 32, dtype=torch.int8)])
def test_dense_weights_must_be_finite_numbers(tmp_path: Path, values: torch.Tensor) -> None:
    """A vector of NaN compares as unlike everything, silently."""
    write_modules(tmp_path, "mean", "Dense", hidden=32)
    save_file({"linear.weight": values}, write_dense(tmp_path, "2_Dense", (64, 32)) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors: linear\.weight .* no finite numbers"):
        read_modules(ModelFiles(tmp_path), 32)


def test_files_are_those_that_were_recorded(tmp_path: Path) -> None:
    write_modules(tmp_path, "mean", "Normalize")
    names = ("modules.json", "1_Pooling/config.json")
    Lock({}, {name: sha256_file(tmp_path / name) for name in names}, "0" * 64).write(tmp_path)
    assert read_modules(ModelFiles(tmp_path), 64).pooling == "mean"
    write_modules(tmp_path, "cls", "Normalize")
    with pytest.raises(CheckpointError, match="1_Pooling/config.json: differs"):
        read_modules(ModelFiles(tmp_path), 64)


def test_mean_is_of_every_row_of_a_text_alone() -> None:
    rows = np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32)
    lengths = np.array([1, 5, 3])
    pooled = pool("mean", rows, lengths)
    assert pooled[0].tobytes() == rows[0].tobytes()
    np.testing.assert_allclose(pooled[1], rows[1:6].mean(0), atol=1e-7)
    assert pool("mean", rows[1:6], lengths[1:2]).tobytes() == pooled[1].tobytes()


def test_prompts_come_from_the_files(tmp_path: Path) -> None:
    name = tmp_path / "config_sentence_transformers.json"
    assert read_prompts(ModelFiles(tmp_path), {QUERY: QWEN3_QUERY}).of("query", None) == QWEN3_QUERY
    edit_json(name, prompts={"query": "q: ", "passage": "p: ", "STS": None}, default_prompt_name=None)
    prompts = read_prompts(ModelFiles(tmp_path), {QUERY: QWEN3_QUERY})
    assert [prompts.of(kind, None) for kind in ("query", "document", "STS", None)] == ["q: ", "p: ", "", "p: "]
    with pytest.raises(InputError, match="kind 'Clustering' is not one of STS, document, passage, query"):
        prompts.of("Clustering", None)
    edit_json(name, prompts={"query": "q: "}, default_prompt_name="query")
    assert read_prompts(ModelFiles(tmp_path), {}).of("document", None) == "q: "
    edit_json(name, default_prompt_name="absent")
    with pytest.raises(CheckpointError, match="'absent' is not among"):
        read_prompts(ModelFiles(tmp_path), {})
    edit_json(name, prompts={"query": 3}, default_prompt_name=None)
    with pytest.raises(CheckpointError, match="not an object of texts"):
        read_prompts(ModelFiles(tmp_path), {})


def test_an_instruction_takes_the_place_of_the_models_own() -> None:
    qwen, gemma = Prompts({"query": QWEN3_QUERY}), Prompts({"query": "task: search result | query: "})
    assert qwen.of(None, "Find code") == "Instruct: Find code\nQuery:"
    assert gemma.of("query", "question answering") == "task: question answering | query: "
    with pytest.raises(InputError, match="belongs to a query"):
        qwen.of("document", "Find code")
    for prompts in (Prompts(), Prompts({"query": "query: "})):
        with pytest.raises(InputError, match="takes no instruction"):
            prompts.of("query", "Find code")


def test_limits_keep_the_tokens_at_both_ends(tmp_path: Path) -> None:
    """The limit of 12 and the padding inside the tokenizer.json of this fixture do not count."""
    tokenizer = Tokenizer(wordpiece_tokenizer(tmp_path))
    edit_json(tmp_path / "sentence_bert_config.json", max_seq_length=20)
    encoder = read_encoder(ModelFiles(tmp_path), tokenizer, 64)
    short, long, empty = encoder.encode(["the man", "food. " * 40, ""])
    assert encoder.limit == 20 and (encoder.prefix, encoder.suffix) == ([2], [3])
    assert len(short) == 4 and empty == [2, 3]
    assert len(long) == 20 and long[0] == 2 and long[-1] == 3 and long[:-1] == tokenizer.encode("food. " * 40)[:19]
    edit_json(tmp_path / "sentence_bert_config.json", max_seq_length=...)
    assert read_encoder(ModelFiles(tmp_path), tokenizer, 64).limit == 64
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=30)
    assert read_encoder(ModelFiles(tmp_path), tokenizer, 64).limit == 30
    edit_json(tmp_path / "tokenizer_config.json", model_max_length=1000000000000000019884624838656)
    assert read_encoder(ModelFiles(tmp_path), tokenizer, 64).limit == 64
    assert read_encoder(ModelFiles(tmp_path), tokenizer, 64, max_tokens=50).limit == 50
    assert read_encoder(ModelFiles(tmp_path), tokenizer, 32768).limit == 8192


@pytest.mark.parametrize("limit", [0, -3, "256", True, float("nan")])
def test_limits_that_are_none(tmp_path: Path, limit: Any) -> None:
    tokenizer = Tokenizer(wordpiece_tokenizer(tmp_path))
    edit_json(tmp_path / "sentence_bert_config.json", max_seq_length=limit)
    with pytest.raises(CheckpointError, match="max_seq_length"):
        read_encoder(ModelFiles(tmp_path), tokenizer, 64)
    with pytest.raises(NumemError, match="max_tokens 65"):
        read_encoder(ModelFiles(tmp_path), tokenizer, 64, max_tokens=65)
    with pytest.raises(CheckpointError, match="leaves no room"):
        read_encoder(ModelFiles(tmp_path), tokenizer, 64, max_tokens=2)


def test_texts_are_lowered_where_the_model_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizer(tmp_path))
    edit_json(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    encoder = read_encoder(ModelFiles(tmp_path), tokenizer, 64)
    assert encoder.encode(["ÄB the"]) == [tokenizer.encode("äb the")]
    with pytest.raises(InputError, match="text 1 has no tokens"):
        encoder.encode(["a", ""])


def test_the_end_token_is_appended_only_where_it_is_missing(tmp_path: Path) -> None:
    bare = Tokenizer(ends_tokenizer(tmp_path / "bare", (), ()))
    own = Tokenizer(ends_tokenizer(tmp_path / "own", (), ("<|endoftext|>",)))
    for tokenizer in (bare, own):
        encoder = read_encoder(ModelFiles(tokenizer.directory), tokenizer, 8, end_token="<|endoftext|>")
        assert encoder.suffix == [0] and encoder.encode(["", "a"]) == [[0], [*bare.encode("a"), 0]]
        (long,) = encoder.encode(["b" * 100])
        assert len(long) == 8 and long.count(0) == 1 and long[-1] == 0
        assert TextEncoder(tokenizer, 8, end=0).describe()["end"] == ([0] if tokenizer is bare else [])
    ends_tokenizer(tmp_path / "bare", (), (), add_eos_token=True)
    assert read_encoder(ModelFiles(tmp_path / "bare"), bare, 8).suffix == [2]
    with pytest.raises(CheckpointError, match="no token '<eot>'"):
        read_encoder(ModelFiles(tmp_path / "own"), own, 8, end_token="<eot>")
