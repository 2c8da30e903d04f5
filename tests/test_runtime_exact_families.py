"""The exactness contract for every family and number format, on tiny random models: bytes compared, never tolerances."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem import LM, Memory, load_lm
from numem.errors import ContextLengthError, InputError
from numem.identity.chain import CHUNK_TOKENS
from numem.kernels import native
from numem.models.architecture.reading import read_descriptor
from numem.models.transformer import Transformer
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.loader import Weights
from numem.runtime.continuation import Continuation
from numem.runtime.engine import pages_for_lanes, whole_texts
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.pages import PageStorage
from numem.runtime.request import Request
from tests.family_fixtures import CASES, family_model


@dataclass(frozen=True, slots=True)
class Kind:
    """A family in a number format."""

    family: str
    dtype: str = "float32"
    quantise: str | None = None

    def __str__(self) -> str:
        return f"{self.family}-{self.quantise or self.dtype}"

    @property
    def changes(self) -> dict[str, Any]:
        """Settings that let every matrix have its format: super-blocks take 256 columns."""
        if self.quantise != "q4k":
            return {}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        return {"hidden_size": 256, "intermediate_size": 256, **heads}


FAMILIES = ("gemma2", "gemma3_text", "qwen3_moe", "mixtral-windowed")
PLAIN = ("llama", "mistral-windowed", "qwen2", "qwen3")  # their float forms have tests of their own
FORMATS = ("q8", "q4", "q4a", "q4k")
# Every family and every format; all pairs of them are slow.
QUICK = [
    *(Kind(family) for family in FAMILIES),
    *(Kind(family, quantise=format) for family, format in zip(FAMILIES, FORMATS, strict=True)),
    Kind("gemma3_text", "bfloat16"),
]
ALL = [
    *(Kind(family, "bfloat16") for family in FAMILIES),
    *(Kind(family, quantise=format) for family in (*PLAIN, *FAMILIES) for format in FORMATS),
]
KINDS = [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ALL if kind not in QUICK)]
LENGTH, STEPS = 300, 6


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 250, length)]


def trace(continuation: Continuation, steps: int = STEPS, start: int = 0) -> tuple[list[int], list[bytes], bytes]:
    """Tokens, logits of every step and, after them, cache bytes from `start` on."""
    tokens, logits = [], []
    for _ in range(steps):
        tokens.append(continuation.step())
        assert continuation.logits is not None
        logits.append(continuation.logits.tobytes())
    return tokens, logits, continuation.kv(start).tobytes()


@pytest.fixture(scope="module", params=KINDS, ids=str)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LM:
    kind: Kind = request.param
    directory = family_model(
        tmp_path_factory.mktemp("m"), CASES[kind.family], max_position_embeddings=512, **kind.changes
    )
    return load_lm(directory, dtype=kind.dtype, quantise=kind.quantise)


def encoder(directory: Path, family: str, quantise: str | None = None) -> Transformer:
    family_model(directory, CASES[family])
    checkpoint = Checkpoint(directory)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    weights = Weights(checkpoint, descriptor, dtype="float32", quantise=quantise)
    return Transformer(descriptor, weights, dtype="float32", max_position=256)


@pytest.fixture
def threads() -> Iterator[None]:
    before = native.threads()
    yield
    native.set_threads(before)


def test_cold_equals_warm_equals_restored(lm: LM, memory: Memory) -> None:
    """Windows, soft caps and mixtures included; the bytes are used: nothing but the pending token is computed.

    vllm#34046, vllm#33123, vllm#42699, vllm#40896, sglang#34683; llama.cpp#25295, llama.cpp#25297.
    """
    ids = prompt(LENGTH)
    session = lm.session(pages=pages_for_lanes(4, LENGTH + STEPS), debug=True)
    with session.start(ids) as cold, cold.fork() as warm:
        cold.publish(memory).wait()
        expected = trace(cold, start=CHUNK_TOKENS)
        assert trace(warm, start=CHUNK_TOKENS) == expected
    before = session.engine.rows_computed
    with session.restore(memory, ids) as restored:
        assert restored.restored.tokens == LENGTH - 1
        assert session.engine.rows_computed == before
        # A restore leaves the first chunk out of windowed layers.
        assert trace(restored, start=CHUNK_TOKENS) == expected
    session.engine.pool.check()


def test_prefilled_equals_generated_and_chunks_equal_the_whole(lm: LM) -> None:
    session = lm.session(pages=pages_for_lanes(3, 160))
    with session.start(prompt(40)) as decoded:
        decoded.advance(100)
        generated, tokens = decoded.kv().tobytes(), list(decoded.tokens)
        expected = trace(decoded)
    with session.start(tokens) as prefilled:
        assert prefilled.kv().tobytes() == generated
        assert trace(prefilled) == expected
    route = session.engine.pool.allocate()
    for a, b in ((0, 1), (1, 17), (17, 90), (90, len(tokens) - 1)):
        session.engine.append([(route, tokens[a:b])], logits="none")
    with Continuation(session, tokens, route) as chunked:
        assert trace(chunked) == expected


def test_a_lane_is_as_if_alone(lm: LM, threads: None) -> None:
    """Batch of one = lane k of five for every k, late joiners too, with one thread and with two (imp#1314, omlx#3476)."""
    requests = [Request(str(i), tuple(prompt(3 + 29 * i, seed=i)), 4 + 3 * i, witness=True) for i in range(5)]
    session = lm.session(pages=pages_for_lanes(3, 180), debug=True)
    native.set_threads(2)
    outcomes = {o.request.id: o for o in Scheduler(session, 3).run(requests)}
    native.set_threads(1)
    for request in requests:
        outcome = outcomes[request.id]
        with session.start(request.tokens) as alone:
            tokens, logits, kv = trace(alone, request.max_new_tokens)
        assert outcome.generated == tokens
        assert [row.tobytes() for row in outcome.logits] == logits
        assert outcome.kv is not None and outcome.kv.tobytes() == kv
    session.engine.pool.check()


@pytest.mark.parametrize("quantise", [None, "q8", "q4"])
@pytest.mark.parametrize("family", ["bert", "gemma3_text-bidirectional"])
def test_a_text_is_as_if_alone(family: str, quantise: str | None, tmp_path: Path, threads: None) -> None:
    """An encoder's rows do not depend on the texts beside them, nor on which of them are asked for (transformers#45491)."""
    model = encoder(tmp_path / "m", family, quantise)
    texts = [prompt(n, seed=n) for n in (1, 200, 2, 33, 256, 16, 100, 90)]
    native.set_threads(2)
    together = [rows.numpy() for rows in model.encode(texts)]
    firsts, lasts = model.encode(texts, "first"), model.encode(texts, "last")
    native.set_threads(1)
    for text, rows, first, last in zip(texts, together, firsts, lasts, strict=True):
        assert rows.shape == (len(text), model.descriptor.hidden) and np.isfinite(rows).all()
        assert model.encode([text])[0].numpy().tobytes() == rows.tobytes()
        assert first.numpy().tobytes() == rows[0].tobytes()
        assert last.numpy().tobytes() == rows[-1].tobytes()


def test_one_layers_pages_serve_all(tmp_path: Path) -> None:
    """Where nothing is kept, pages of one layer give the bits that pages of every layer give."""
    model = encoder(tmp_path / "m", "gemma3_text-bidirectional")
    texts = [prompt(n, seed=n) for n in (50, 1, 17)]
    rows, pages = whole_texts(texts)
    every = PageStorage(model.spec, model.kv_heads, model.head_dim, pages, poison=True)
    expected = torch.cat(model.encode(texts)).numpy().tobytes()
    assert model.hidden(rows, every).numpy().tobytes() == expected
    assert model.hidden(rows, model.scratch(pages)).numpy().tobytes() == expected


def test_what_cannot_be_encoded(tmp_path: Path) -> None:
    model = encoder(tmp_path / "m", "bert")
    assert model.encode([]) == []
    for before in ([], [prompt(3)]):
        with pytest.raises(InputError, match="no tokens"):
            model.encode([*before, []])
    with pytest.raises(ContextLengthError, match="max_position 256"):
        model.encode([prompt(257)])
    with pytest.raises(InputError, match="outside"):
        model.encode([[5, model.vocab]])
    rows, pages = whole_texts([prompt(5)])
    with pytest.raises(InputError, match="no output head"):
        model.forward(rows, model.scratch(pages))
