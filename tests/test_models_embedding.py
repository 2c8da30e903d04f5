"""Embedding models against transformers' hidden states with pooling of our own, and what a vector may depend on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numem import Embedder, load_embedder
from numem.errors import CheckpointError, InputError
from numem.kernels import native
from numem.models.embedding.embedder import passes
from tests.embedding_fixtures import (
    TEXTS,
    bert,
    cosines,
    gemma_embedding,
    qwen3_embedding,
    reference,
    write_modules,
)
from tests.model_fixtures import edit_json

# What is asked of float32: cosine with the reference.
CLOSE = 0.99999

MAKERS: dict[str, Callable[..., Path]] = {"bert": bert, "gemma": gemma_embedding, "qwen3": qwen3_embedding}
POOLING = {"bert": "mean", "gemma": "mean", "qwen3": "last"}
DENSE = {"bert": (), "gemma": ("2_Dense", "3_Dense"), "qwen3": ()}
LONG = "the theory of the in and the an, " * 20


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("embedders")
    return {name: make(root / name) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def embedders(directories: dict[str, Path]) -> dict[str, Embedder]:
    return {name: load_embedder(directory) for name, directory in directories.items()}


@pytest.mark.parametrize("family", MAKERS)
def test_vectors_equal_the_reference(family: str, directories: dict[str, Path], embedders: dict[str, Embedder]) -> None:
    """sglang#33603, sentence-transformers#3208, TEI#732: windows both ways, the model's own pooling, dense heads."""
    embedder = embedders[family]
    texts = [*TEXTS, LONG]
    vectors = embedder.embed_texts(texts)
    assert vectors.shape == (len(texts), embedder.dim) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    ids = embedder.tokenize(texts)
    expected = reference(directories[family], ids, POOLING[family], DENSE[family])
    assert cosines(vectors, expected).min() >= CLOSE
    # The reference tells these texts apart: a constant would not pass.
    assert cosines(expected[:-1], expected[1:]).min() < 0.99


@pytest.mark.parametrize("family", MAKERS)
def test_a_vector_does_not_depend_on_its_batch_mates(family: str, embedders: dict[str, Embedder]) -> None:
    """transformers#45491: a short text beside a long one is finite, and its bytes are those it has alone."""
    embedder = embedders[family]
    texts = ["a", "the " * 700, *TEXTS]
    vectors = embedder.embed_texts(texts)
    assert np.isfinite(vectors).all()
    for text, vector in zip(texts, vectors, strict=True):
        assert embedder.embed_texts([text])[0].tobytes() == vector.tobytes()
    assert embedder.embed_texts(texts[::-1])[::-1].tobytes() == vectors.tobytes()
    many = embedder.embed_texts([TEXTS[0]] * 150)
    assert len(np.unique(many, axis=0)) == 1


def test_pooling_by_the_first_token(tmp_path: Path) -> None:
    directory = bert(tmp_path / "m", pooling="cls")
    embedder = load_embedder(directory)
    ids = embedder.tokenize(TEXTS)
    assert cosines(embedder.embed_texts(TEXTS), reference(directory, ids, "cls")).min() >= CLOSE
    write_modules(directory, "mean", "Normalize")
    assert cosines(load_embedder(directory).embed_texts(TEXTS), embedder.embed_texts(TEXTS)).max() < 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "pooling"), [(6, "mean"), (12, "cls")])
def test_true_shapes_of_minilm_and_bge(tmp_path: Path, layers: int, pooling: str) -> None:
    shape = {
        "vocab_size": 200, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": layers,
        "num_attention_heads": 12, "max_position_embeddings": 512,
    }  # fmt: skip
    directory = bert(tmp_path / "m", pooling=pooling, **shape)
    embedder = load_embedder(directory)
    ids = embedder.tokenize([*TEXTS, LONG])
    assert cosines(embedder.embed_texts([*TEXTS, LONG]), reference(directory, ids, pooling)).min() >= CLOSE


def test_texts_are_cut_at_the_models_limit(embedders: dict[str, Embedder], directories: dict[str, Path]) -> None:
    """EmbedAnything#213: at max_seq_length (40 here), not at the 64 positions, nor the 12 inside tokenizer.json."""
    embedder = embedders["bert"]
    (ids,) = embedder.tokenize(["food. " * 100])
    assert len(ids) == embedder.max_tokens == 40 and (ids[0], ids[-1]) == (2, 3)
    a, b = embedder.embed_texts(["food. " * 100, "food. " * 100 + "the man"])
    assert a.tobytes() == b.tobytes()
    longer = load_embedder(directories["bert"], max_tokens=64)
    assert len(longer.tokenize(["food. " * 100])[0]) == 64
    with pytest.raises(InputError, match="max_tokens 65"):
        load_embedder(directories["bert"], max_tokens=65)


def test_bidirectional_windows_see_half_of_the_window_on_either_side(tmp_path: Path) -> None:
    """sglang#33603: |q - k| <= 4 for a window of 8; a change at distance 4 of the last token is seen, at 5 it is not."""
    directory = gemma_embedding(tmp_path / "m", num_hidden_layers=1, sliding_window=8)
    write_modules(directory, "last", hidden=32)
    for folder in ("2_Dense", "3_Dense"):
        assert (directory / folder).is_dir()
    embedder = load_embedder(directory)
    base = "qwertyuiopasdf"

    def changed(at: int) -> bool:
        other = base[:at] + "z" + base[at + 1 :]
        a, b = embedder.embed_texts([base, other])
        return bool((a != b).any())

    last = len(base)  # the EOS follows the text
    kind = "title: none | text: "
    assert embedder.tokenize([base])[0][-1] == 2 and embedder.prompts.of(None, None) == kind
    assert changed(last - 4) and not changed(last - 5)
    write_modules(directory, "cls", hidden=32)
    edit_json(directory / "config_sentence_transformers.json", prompts={})
    embedder = load_embedder(directory)
    assert changed(3) and not changed(4)  # the BOS is before the text: characters 0 to 3 are at distances 1 to 4


def test_matryoshka_vectors_are_normalised_again(embedders: dict[str, Embedder]) -> None:
    """TEI#732: `dim` keeps the leading components and gives them length 1."""
    for embedder in embedders.values():
        whole = embedder.embed_texts(TEXTS)
        for dim in (1, 16, embedder.dim):
            cut = embedder.embed_texts(TEXTS, dim=dim)
            assert cut.shape == (len(TEXTS), dim)
            np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
            assert cosines(cut, whole[:, :dim]).min() >= 1 - 1e-6
        assert embedder.embed_texts([], dim=16).shape == (0, 16)
        wrong: tuple[Any, ...] = (0, -1, 1000, embedder.dim + 1, 2.0, True)
        for dim in wrong:
            with pytest.raises(InputError, match=rf"not a whole number in \[1, {embedder.dim}\]"):
                embedder.embed_texts(TEXTS, dim=dim)


def test_prompts_are_those_of_the_model(embedders: dict[str, Embedder]) -> None:
    qwen, gemma, minilm = (embedders[name] for name in ("qwen3", "gemma", "bert"))

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        return a.tobytes() == b.tobytes()

    task = "Given a web search query, retrieve relevant passages that answer the query"
    (ids,) = qwen.tokenize(["what"], kind="query")
    assert ids == qwen.tokenize([f"Instruct: {task}\nQuery:what"])[0]
    assert same(qwen.embed_texts(["what"], kind="query"), qwen.embed_texts(["what"], instruct=task))
    assert same(qwen.embed_texts(["x"], instruct="Find"), qwen.embed_texts(["Instruct: Find\nQuery:x"]))
    plain = load_embedder(gemma.directory).tokenize(["x"], kind="query")
    assert plain == gemma.tokenize(["x"], instruct="search result")
    assert gemma.tokenize(["x"]) != plain
    assert same(minilm.embed_texts(["x"], kind="query"), minilm.embed_texts(["x"], kind="document"))
    with pytest.raises(InputError, match="takes no instruction"):
        minilm.embed_texts(["x"], instruct="Find")
    with pytest.raises(InputError, match="kind 'clustering' is not one of document, query"):
        minilm.embed_texts(["x"], kind="clustering")


def test_qwen3_pools_the_appended_token(tmp_path: Path, embedders: dict[str, Embedder]) -> None:
    """Where the tokenizer does not append it, the embedder does."""
    bare = load_embedder(qwen3_embedding(tmp_path / "m", after=()))
    assert bare.tokenize(["", "a"])[0] == [0]
    assert bare.embed_texts(TEXTS).tobytes() == embedders["qwen3"].embed_texts(TEXTS).tobytes()


def test_no_texts_and_wrong_texts(embedders: dict[str, Embedder]) -> None:
    embedder = embedders["bert"]
    empty = embedder.embed_texts([])
    assert empty.shape == (0, 64) and empty.dtype == np.float32
    wrong: list[tuple[Any, str]] = [
        ("one text", "give a list of texts"),
        (["a", 3], "text 1 is a int"),
        (["a", None], "text 1 is a NoneType"),
        (["a", "\ud800"], "surrogate"),
    ]
    for texts, word in wrong:
        with pytest.raises(InputError, match=word):
            embedder.embed_texts(texts)


def test_ids_that_the_embedding_lacks(tmp_path: Path) -> None:
    embedder = load_embedder(bert(tmp_path / "m", vocab_size=80))
    assert embedder.embed_texts(["abc"]).shape == (1, 64)
    with pytest.raises(CheckpointError, match="the embedding has 80 rows"):
        embedder.embed_texts(["the man!"])


def test_passes_hold_whole_texts_in_order() -> None:
    lengths = [16, 1, 17, 200, 3, 3, 33]
    runs = list(passes(lengths, 4))
    assert runs == [(0, 3), (3, 4), (4, 6), (6, 7)]
    assert list(passes([], 4)) == [] and list(passes([1] * 9, 4)) == [(0, 4), (4, 8), (8, 9)]


def test_texts_are_split_into_tokens_slice_by_slice(
    embedders: dict[str, Embedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of a hundred thousand long texts would be gigabytes; a slice changes no bit and no message."""
    for embedder in embedders.values():
        whole = embedder.embed_texts([*TEXTS, LONG], dim=16)
        monkeypatch.setattr("numem.models.embedding.embedder.SLICE_TEXTS", 3)
        assert embedder.embed_texts([*TEXTS, LONG], dim=16).tobytes() == whole.tobytes()
        with pytest.raises(InputError, match="text 4: character 1 is half"):
            embedder.embed_texts(["a", "b", "c", "d", "e\ud800"])
        monkeypatch.undo()


@pytest.mark.parametrize("kind", [5, ["query"], ""])
def test_kinds_are_names(embedders: dict[str, Embedder], kind: Any) -> None:
    with pytest.raises(InputError, match="is not one of document, query"):
        embedders["bert"].embed_texts(["a"], kind=kind)


def test_identity_has_a_field_for_everything_that_changes_a_vector(
    tmp_path: Path, embedders: dict[str, Embedder], directories: dict[str, Path]
) -> None:
    base = embedders["bert"].identity
    assert load_embedder(directories["bert"]).identity.scope == base.scope
    directory = bert(tmp_path / "m")
    assert load_embedder(directory).identity.scope == base.scope  # same seed, same bytes, another directory

    def fields() -> tuple[str, ...]:
        return base.compare(load_embedder(directory).identity).fields

    edit_json(directory / "config_sentence_transformers.json", prompts={"query": "q: "})
    assert "semantic.prompts.texts.query" in fields() and all("prompts" in name for name in fields())
    (directory / "config_sentence_transformers.json").unlink()
    edit_json(directory / "sentence_bert_config.json", max_seq_length=39)
    assert fields() == ("semantic.encoding.limit",)
    edit_json(directory / "sentence_bert_config.json", max_seq_length=40)
    write_modules(directory, "cls", "Normalize")
    assert fields() == ("semantic.modules.pooling",)
    write_modules(directory, "mean")
    assert fields() == ("semantic.modules.heads",)
    write_modules(directory, "mean", "Normalize")
    assert fields() == ()
    other = load_embedder(bert(tmp_path / "n", seed=1)).identity
    assert base.compare(other).fields == ("semantic.weights",)
    bfloat = load_embedder(directory, dtype="bfloat16")
    assert "semantic.weight_dtype" in base.compare(bfloat.identity).fields
    assert cosines(bfloat.embed_texts(TEXTS), embedders["bert"].embed_texts(TEXTS)).min() > 0.99


@pytest.mark.parametrize("quantise", [None, "q8"])
def test_bytes_do_not_depend_on_threads(
    quantise: str | None, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path))
    embedder = load_embedder(directories["bert"], quantise=quantise)
    before = native.threads()
    try:
        native.set_threads(1)
        one = embedder.embed_texts([*TEXTS, LONG])
        native.set_threads(2)
        two = embedder.embed_texts([*TEXTS, LONG])
    finally:
        native.set_threads(before)
    assert one.tobytes() == two.tobytes()
    assert embedder.embed_texts([TEXTS[0]])[0].tobytes() == one[0].tobytes()
