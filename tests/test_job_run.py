"""The main job as a library call, on a tiny model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from numem import LM, Memory, load_lm
from numem.errors import InputError, NotFoundError
from numem.job import durable, stages
from numem.job.batch import load_batch, make_batch, save_batch
from numem.job.prompts import Prompt
from numem.job.run import run_job
from numem.job.settings import Decoding
from numem.job.summary import summarise

SETTINGS = Decoding(max_new_tokens=6, lanes=2, arrivals="restore")


def words(count: int, seed: int) -> str:
    letters = np.random.default_rng(seed).integers(97, 123, count)
    return "".join(chr(c) for c in letters)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Two passages of 300 and 517 characters, four questions each, and one prompt of its own."""
    table = []
    for number, length in enumerate((300, 517)):
        passage = words(length, number)
        table += [Prompt(f"p{number}-{q}", "test", text=passage + words(12, 10 + q)) for q in range(4)]
    return [*table, Prompt("alone", "test", text=words(40, 99))]


def distinct(lm: LM, prompts: list[Prompt]) -> int:
    """Tokens that must be computed once: distinct positions of the trie, and every pending token of its own."""
    rows = [tuple(p.encode(lm.tokenizer)) for p in prompts]
    return len({row[:n] for row in rows for n in range(1, len(row))} | {(i, *row) for i, row in enumerate(rows)})


def test_each_token_is_computed_once_and_restored_after(tiny_lm: LM, prompts: list[Prompt], tmp_path: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        first = run_job(memory, tiny_lm, prompts, SETTINGS)
    assert first.exact is True and first.proof["prompts"] == 2 and first.proof["bytes_compared"] > 0
    assert first.requested_tokens == first.computed_tokens + first.shared_tokens + first.restored_tokens
    assert first.computed_tokens == distinct(tiny_lm, prompts)
    # Restored are the rows that prefill computed, and then they stay in the pages.
    assert first.restored_bytes > 0 and first.restored_tokens == 0 and first.shared_tokens > 0
    assert (first.chunks_stored, first.chunks_reused) == (5, 0)
    assert first.ttft_ms["recomputed"].n == 3 and first.ttft_ms["restored"].n >= 2

    half = tiny_lm  # the same model in a new memory handle: a new process would find the same
    with Memory(tmp_path / "m") as memory:
        second = run_job(memory, half, prompts, replace(SETTINGS, again=True))
    assert second.exact is True
    assert (second.chunks_stored, second.chunks_reused, second.stored_bytes) == (0, 5, 0)
    assert second.computed_tokens < first.computed_tokens / 4
    assert second.restored_tokens > 800 and second.restored_bytes == first.restored_bytes
    assert second.ttft_ms["recomputed"].n == 1  # the prompt that shares nothing
    rows = [json.loads(line) for line in Path(second.outputs).read_text().splitlines()]
    assert [row["id"] for row in rows] == [p.id for p in prompts]


def test_output_does_not_depend_on_lanes_or_memory(tiny_lm: LM, prompts: list[Prompt], tmp_path: Path) -> None:
    texts = []
    for lanes in (1, 3, 8):
        with Memory(tmp_path / str(lanes)) as memory:
            summary = run_job(memory, tiny_lm, prompts, replace(SETTINGS, lanes=lanes, proof=False))
        texts.append(Path(summary.outputs).read_bytes())
        assert summary.exact is None
    assert texts[0] == texts[1] == texts[2]


def test_what_is_gone_from_the_spool_is_recomputed(tiny_lm: LM, prompts: list[Prompt], tmp_path: Path) -> None:
    """Between prefill and publication a piece is lost: the job completes, exactly, and counts it."""
    with Memory(tmp_path / "m") as memory:
        batch = make_batch(tiny_lm, prompts, model="tiny")
        save_batch(memory, batch)
        stages.prefill(memory, tiny_lm, batch, "r")
        lost = sorted(p for p in (tmp_path / "m" / "spool").rglob("*") if p.is_file())
        for path in lost:
            path.unlink()
        assert durable.publish(memory, batch, "r").missing == 5
        durable.promote(memory, batch, "r")
        stages.restore(memory, tiny_lm, batch, "r")
        stages.decode(memory, tiny_lm, batch, "r", out=tmp_path / "out", decoding=SETTINGS)
        summary = summarise(memory, batch, "r")
    assert any("gone before publication" in warning for warning in summary.warnings)
    assert summary.requested_tokens == summary.computed_tokens + summary.shared_tokens + summary.restored_tokens
    with Memory(tmp_path / "n") as memory:
        cold = run_job(memory, tiny_lm, prompts, replace(SETTINGS, proof=False))
    assert Path(cold.outputs).read_bytes() == (tmp_path / "out" / "completions.jsonl").read_bytes()


def test_a_batch_survives_and_refuses(tiny_lm: LM, prompts: list[Prompt], memory: Memory) -> None:
    batch = make_batch(tiny_lm, prompts, model="tiny")
    path = save_batch(memory, batch)
    assert load_batch(memory, batch.id) == batch
    assert make_batch(tiny_lm, prompts, model="tiny").id == batch.id
    other = load_lm(tiny_lm.directory, dtype="bfloat16")
    with pytest.raises(InputError, match="another model"):
        stages.prefill(memory, other, batch, "r")
    with pytest.raises(NotFoundError, match="no decode stage"):
        summarise(memory, batch, "r")
    for name in ("0" * 32, "../../etc/passwd", "x"):
        with pytest.raises((NotFoundError, InputError)):
            load_batch(memory, name)
    path.write_text("{}")
    with pytest.raises(InputError, match="damaged"):
        load_batch(memory, batch.id)


def test_prefill_does_not_redo_what_is_staged_or_durable(tiny_lm: LM, memory: Memory) -> None:
    """A conversation of six turns: every chunk is captured once, and another run stages and computes nothing."""
    turns = [words(150 * n + 140, 7) for n in range(1, 7)]
    prompts = [Prompt(f"t{n}-{q}", "test", text=text + f"{q}?") for n, text in enumerate(turns) for q in range(2)]
    batch = make_batch(tiny_lm, prompts, model="tiny")
    assert len(batch.prefixes) == 6
    first = stages.prefill(memory, tiny_lm, batch, "a")
    assert first.staged_chunks == len(batch.chunk_ids()) == len(memory.staged(batch.chunk_ids()))
    assert first.computed == len(
        {prefix.tokens[:n] for prefix in batch.prefixes for n in range(1, len(prefix.tokens) + 1)}
    )
    staged = stages.prefill(memory, tiny_lm, batch, "b")
    assert (staged.computed, staged.staged_chunks, staged.reused_chunks, staged.charged) == (0, 0, 0, ())
    durable.publish(memory, batch, "b")
    published = stages.prefill(memory, tiny_lm, batch, "c")
    assert (published.computed, published.staged_chunks) == (0, 0)
    assert published.reused_chunks == len(batch.chunk_ids())
