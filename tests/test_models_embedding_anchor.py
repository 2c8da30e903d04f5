"""The real MiniLM: reference values of transformers in float32, with mean pooling over the mask and a limit of 256."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from numem import Embedder, load_embedder
from tests.embedding_fixtures import cosines, write_modules

pytestmark = pytest.mark.anchors

MODEL = "all-minilm-l6-v2"
FOOD, BREAD = "A man is eating food.", "A man is eating a piece of bread."
TEXTS = [FOOD, BREAD, "The girl is carrying a baby.", "Quarterly interest rates rose."]
HALF = 5e-5  # the recorded values have four decimals, the components five


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return load_embedder(MODEL)


def sentences(count: int) -> list[str]:
    """Texts of 4 to 40 words from the opening of Moby-Dick."""
    words = (Path(__file__).parent / "data" / "moby_dick_head.txt").read_text(encoding="utf-8").split()
    lengths = np.random.default_rng(3).integers(4, 41, count).tolist()
    starts = np.random.default_rng(4).integers(0, len(words) - 40, count).tolist()
    return [" ".join(words[a : a + n]) for a, n in zip(starts, lengths, strict=True)]


def test_cosines_and_components(minilm: Embedder) -> None:
    vectors = minilm.embed_texts(TEXTS)
    assert vectors.shape == (4, minilm.dim) == (4, 384) and minilm.max_tokens == 256
    assert [len(ids) for ids in minilm.tokenize(TEXTS)] == [8, 11, 9, 7]
    similar = vectors @ vectors.T
    expected = {
        (0, 1): 0.7553, (0, 2): -0.1050, (0, 3): -0.0425, (1, 2): -0.0610, (1, 3): -0.0546, (2, 3): -0.0408,
    }  # fmt: skip
    for (a, b), value in expected.items():
        assert similar[a, b] == pytest.approx(value, abs=HALF)
    assert vectors[0, :4] == pytest.approx([0.03324, 0.00441, -0.00628, 0.04838], abs=5e-6)
    food, bread = minilm.embed_texts(["food", "bread"])
    assert food @ bread == pytest.approx(0.5555, abs=HALF)


def test_a_short_text_beside_a_long_one(minilm: Embedder) -> None:
    """sentence-transformers#3208, swift-embeddings#21, EmbedAnything#213: no padding in the mean, cut at 256 tokens."""
    long = " ".join(sentences(40))
    together = minilm.embed_texts(["a", long])
    assert together[0].tobytes() == minilm.embed_texts(["a"])[0].tobytes()
    (ids,) = minilm.tokenize([long])
    assert len(ids) == 256 and (ids[0], ids[-1]) == (101, 102)
    cut = load_embedder(MODEL, max_tokens=128).embed_texts([long])
    assert (cut != together[1]).any() and (load_embedder(MODEL, max_tokens=512).embed_texts([long]) != cut).any()


def test_pooling_by_the_first_token_on_the_same_weights(minilm: Embedder, tmp_path: Path) -> None:
    directory = tmp_path / "cls"
    shutil.copytree(minilm.directory, directory)
    (directory / "numem.lock.json").unlink()
    write_modules(directory, "cls", "Normalize", hidden=384)
    vectors = load_embedder(directory).embed_texts(TEXTS)
    assert [vectors[0] @ v for v in vectors[1:]] == pytest.approx([0.8171, 0.5341, 0.5566], abs=HALF)


@pytest.fixture(scope="module")
def vectors(minilm: Embedder) -> np.ndarray:
    return minilm.embed_texts(sentences(200))


@pytest.mark.parametrize(("quantise", "least"), [("q8", 0.999), ("q4", 0.95), ("q4a", 0.95), ("q4k", 0.95)])
def test_quantised_vectors_are_near(minilm: Embedder, vectors: np.ndarray, quantise: str, least: float) -> None:
    """Cosine with float32 of every one of 200 texts."""
    other = load_embedder(MODEL, quantise=quantise)
    found = cosines(other.embed_texts(sentences(200)), vectors)
    assert found.min() >= least
    assert any(name.startswith("semantic.quantisation") for name in minilm.identity.compare(other.identity).fields)
