"""Runs that were killed and go on: no finished prompt is decoded twice, and the completions are those of one run."""

import gc
import json
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numem import LM, Memory
from numem.errors import InputError, ModelError
from numem.job.batch import Batch, load_batch, make_batch
from numem.job.decode import journal_path, pool_pages
from numem.job.journal import Entry, Journal
from numem.job.prompts import read_prompts
from numem.job.reports import Summary
from numem.job.run import run_job
from numem.job.settings import ARRIVALS, Decoding
from numem.runtime.continuation import Session
from numem.runtime.request import Outcome
from numem.runtime.restore.arrivals import POLICIES
from numem.runtime.sampling import Sampler
from tests.dagster_fixtures import passage, table
from tests.job_workers import killed_run

SETTINGS = Decoding(max_new_tokens=5, lanes=3, arrivals="restore", ignore_eos=True, proof=False)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 passages of 300 bytes, 6 questions each."""
    return table(tmp_path_factory.mktemp("tables") / "t.jsonl", passages=3, questions=6, length=300)


@contextmanager
def sessions(lm: LM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Session]]:
    """Every session that is opened meanwhile."""
    opened: list[Session] = []
    make = lm.session

    def session(*, pages: int | None = None, debug: bool = False) -> Session:
        opened.append(make(pages=pages, debug=debug))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(lm, "session", session)
        yield opened


def run(memory: Memory, lm: LM, prompts: Path, decoding: Decoding) -> Summary:
    return run_job(memory, lm, read_prompts(prompts), decoding, model="tiny")


def entries(memory: Memory, lm: LM, summary: Summary, decoding: Decoding) -> list[Entry]:
    batch = load_batch(memory, summary.batch)
    settings = decoding.digest(batch, () if decoding.ignore_eos else lm.tokenizer.eos_ids)
    with Journal(journal_path(memory, batch, settings), settings, len(batch.items)) as journal:
        return list(journal.entries())


def settled(opened: list[Session]) -> None:
    """Nothing is left in the pages of a session that ended."""
    for session in opened:
        session.engine.pool.check()
        stats = session.engine.pool.stats()
        assert stats.free + stats.resident + stats.reserved == stats.physical


@pytest.mark.crash
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.5, seed=11)], ids=["greedy", "sampled"])
def test_killed_at_random_moments_and_finished(
    tmp_path: Path, tiny_dir: Path, tiny_lm: LM, prompts: Path, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = replace(SETTINGS, sampler=sampler)
    with Memory(tmp_path / "whole") as memory:
        whole = run(memory, tiny_lm, prompts, decoding)
        expected = Path(whole.outputs).read_bytes()
    home, letters = tmp_path / "killed", random.Random(sampler.seed)
    killed_run(tiny_dir, home, prompts, decoding, "prefill", letters.randint(1, 2))
    finished = letters.randint(1, 12)
    killed_run(tiny_dir, home, prompts, decoding, "decode", finished, letters.randint(0, 3))
    with Memory(home) as memory, sessions(tiny_lm, monkeypatch) as opened:
        last = run(memory, tiny_lm, prompts, decoding)
        rows = sum(session.engine.rows_computed for session in opened)
        settled(opened)
        assert Path(last.outputs).read_bytes() == expected
        found = entries(memory, tiny_lm, last, decoding)
    mine = Path(last.outputs).parent.name
    ours = [entry for entry in found if entry.run == mine]
    assert finished <= last.resumed == len(found) - len(ours) < len(found) == last.prompts
    # Every row that was evaluated belongs to a prompt that was not finished before.
    assert rows == sum(entry.computed + len(entry.tokens) - 1 for entry in ours)
    assert last.requested_tokens == whole.requested_tokens
    assert last.requested_tokens == last.computed_tokens + last.shared_tokens + last.restored_tokens


def test_a_finished_run_is_not_done_again_unless_asked(
    tmp_path: Path, tiny_lm: LM, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = replace(SETTINGS, proof=True)
    with Memory(tmp_path / "m") as memory:
        first = run(memory, tiny_lm, prompts, decoding)
        with sessions(tiny_lm, monkeypatch) as opened:
            second = run(memory, tiny_lm, prompts, decoding)
        proof = second.proof["tokens"] - second.proof["prompts"]
        assert sum(session.engine.rows_computed for session in opened) == proof  # the proof runs its witnesses alone
        third = run(memory, tiny_lm, prompts, replace(decoding, again=True))
    assert (first.resumed, second.resumed, third.resumed) == (0, 18, 0)
    assert (second.decode_tokens, third.decode_tokens) == (0, first.decode_tokens)
    assert first.exact is second.exact is third.exact is True
    assert first.proof["bytes_compared"] == second.proof["bytes_compared"] == third.proof["bytes_compared"] > 0
    assert len({Path(one.outputs).read_bytes() for one in (first, second, third)}) == 1
    assert first.outputs != second.outputs
    assert second.computed_tokens == first.computed_tokens and second.ttft_ms == first.ttft_ms


def test_a_proof_decodes_witnesses_of_which_nothing_was_kept(tmp_path: Path, tiny_lm: LM, prompts: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        run(memory, tiny_lm, prompts, SETTINGS)
        proven = run(memory, tiny_lm, prompts, replace(SETTINGS, proof=True))
    assert (proven.resumed, proven.exact, proven.proof["prompts"]) == (15, True, 3)


def test_other_settings_start_afresh(tmp_path: Path, tiny_lm: LM, prompts: Path) -> None:
    changes = (
        {"max_new_tokens": 4},
        {"ignore_eos": False},
        {"sampler": Sampler(temperature=1.0)},
        {"sampler": Sampler(temperature=1.0, seed=1)},
    )
    with Memory(tmp_path / "m") as memory:
        assert run(memory, tiny_lm, prompts, SETTINGS).resumed == 0
        for change in changes:
            assert run(memory, tiny_lm, prompts, replace(SETTINGS, **change)).resumed == 0, change
        assert run(memory, tiny_lm, prompts, replace(SETTINGS, lanes=1, cache_mib=0, arrivals="measured")).resumed == 18


def test_a_damaged_line_is_decoded_again(tmp_path: Path, tiny_lm: LM, prompts: Path) -> None:
    with Memory(tmp_path / "m") as memory:
        first = run(memory, tiny_lm, prompts, SETTINGS)
        (path,) = (tmp_path / "m/outputs").glob("*/journals/*.jsonl")
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0][:40] + b"?" + lines[0][41:], *lines[1:-1], lines[-1][:-9]]))
        second = run(memory, tiny_lm, prompts, SETTINGS)
        third = run(memory, tiny_lm, prompts, SETTINGS)
    assert (second.resumed, second.warnings) == (16, ("damaged lines of the journal, decoded again: 1",))
    assert (third.resumed, third.warnings) == (18, ())
    assert Path(second.outputs).read_bytes() == Path(first.outputs).read_bytes()


def test_a_prompt_that_fails_costs_no_other(
    tmp_path: Path, tiny_lm: LM, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Sampler.choose

    def broken(self: Sampler, *given: Any) -> int:
        if self.seed == 4:  # that of the fifth prompt
            raise ModelError("sampler: logits are not finite")
        return choose(self, *given)

    with Memory(tmp_path / "m") as memory:
        with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"1 of 18 prompts failed.*p0-q4.*finite"):
            patch.setattr(Sampler, "choose", broken)
            run(memory, tiny_lm, prompts, SETTINGS)
        assert not list((tmp_path / "m/outputs").rglob("completions.jsonl"))
        assert run(memory, tiny_lm, prompts, SETTINGS).resumed == 17


@pytest.mark.parametrize("at", [0, 1, 7])
def test_an_interrupt_keeps_what_is_finished(
    tmp_path: Path, tiny_lm: LM, prompts: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(stage: str, done: int, total: int, tokens: int = 0) -> None:
        if stage == "decode" and done >= at:
            signal.raise_signal(signal.SIGINT)

    with Memory(tmp_path / "m") as memory:
        with sessions(tiny_lm, monkeypatch) as opened, pytest.raises(KeyboardInterrupt):
            run_job(memory, tiny_lm, read_prompts(prompts), SETTINGS, model="tiny", progress=progress)
        settled(opened)
        assert run(memory, tiny_lm, prompts, SETTINGS).resumed >= at


def many(path: Path, count: int) -> Path:
    """Prompts of 60 to 90 bytes in nested groups of twenty and of five."""
    rows = []
    for i in range(count):
        text = f"{passage(i // 20, 40)}{passage(1000 + i // 5, 16)}:{i:05d}{passage(5000 + i, 3 + i % 20)}"
        rows.append(json.dumps({"id": f"{i:05d}", "prompt": text}))
    letters = random.Random(1)
    letters.shuffle(rows)
    path.write_text("\n".join(rows) + "\n")
    return path


def thousands(count: int, root: Path, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A big table through few pages: nothing but offsets and samples grows with it, and little is computed twice."""
    decoding = Decoding(max_new_tokens=3, lanes=4, arrivals="restore", cache_mib=1, proof=False)
    prompts = many(root / "t.jsonl", count)
    held = []

    def progress(stage: str, done: int, total: int, tokens: int = 0) -> None:
        if stage == "decode" and done % 50 == 0:
            held.append(sum(type(o) is Outcome for o in gc.get_objects()))

    with Memory(root / "m") as memory, sessions(lm, monkeypatch) as opened:
        summary = run_job(memory, lm, read_prompts(prompts), decoding, model="tiny", progress=progress)
        batch = load_batch(memory, summary.batch)
        records = [len(json.dumps(record.body)) for record in memory.records() if record.kind.startswith("job/")]
    settled(opened)
    assert max(held) <= 3 * decoding.lanes + 2
    assert max(session.engine.pool.physical for session in opened) == pool_pages(lm, batch, decoding)
    page_bytes = 16 * lm.decoder.spec.row_bytes
    assert pool_pages(lm, batch, decoding) <= 4 * 8 + (1 << 20) // page_bytes
    assert summary.prompts == count and summary.warnings == ()
    assert summary.requested_tokens == batch.tokens
    nodes = len({item.tokens[:n] for item in batch.items for n in range(1, len(item.tokens))}) + count
    assert summary.computed_tokens <= 1.05 * nodes
    assert max(records) < 20_000 + 40 * len(batch.prefixes)
    rows = [json.loads(line)["id"] for line in Path(summary.outputs).read_text().splitlines()]
    assert rows == [item.id for item in batch.items]


def test_two_hundred_prompts_in_bounded_memory(tmp_path: Path, tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    thousands(200, tmp_path, tiny_lm, monkeypatch)


@pytest.mark.slow
def test_two_thousand_prompts_in_bounded_memory(tmp_path: Path, tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    thousands(2000, tmp_path, tiny_lm, monkeypatch)


def test_settings_that_make_no_sense_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"max_new_tokens": -1}, {"lanes": 0}, {"cache_mib": -1}, {"arrivals": "guess"}]
    for settings in wrong:
        with pytest.raises(InputError, match="decoding"):
            Decoding(**settings)
    assert ARRIVALS == POLICIES


def test_pages_for_kept_state_are_bounded_by_the_budget_and_by_the_batch(tiny_lm: LM, prompts: Path) -> None:
    batch: Batch = make_batch(tiny_lm, read_prompts(prompts), model="tiny")
    page_bytes = 16 * tiny_lm.decoder.spec.row_bytes
    none = pool_pages(tiny_lm, batch, replace(SETTINGS, cache_mib=0))
    one = pool_pages(tiny_lm, batch, replace(SETTINGS, cache_mib=1))
    all_of_it = pool_pages(tiny_lm, batch, replace(SETTINGS, cache_mib=1 << 20))
    assert one - none == (1 << 20) // page_bytes
    assert all_of_it - none == sum(-(-(len(item.tokens) + 5) // 16) for item in batch.items)
