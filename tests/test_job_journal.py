"""The journal of finished prompts: what a kill, a torn line or other settings leave of it."""

import errno
import fcntl
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from numem.errors import IntegrityError, LeaseHeldError, NotFoundError, StorageFullError, StoreError
from numem.job import journal as journals
from numem.job.batch import Batch
from numem.job.completions import read_completions, write_completions
from numem.job.journal import Entry, Journal, Witness
from numem.job.reports import SHOWN
from numem.job.settings import Decoding
from numem.runtime.sampling import Sampler

SETTINGS, OTHER = "a" * 64, "b" * 64


def entry(
    index: int, *, tokens: tuple[int, ...] = (5, 6, 7), text: str = "ä\u2028\n\ufffd", **changes: object
) -> Entry:
    made = Entry(
        index=index, id=f"q{index}", run="r", prompt_tokens=10, tokens=tokens, text=text, finish="length", computed=7,
        shared=2, restored=1, restored_bytes=64, source="restored", preempted=1, again=3, queue_ms=0.5, ttft_ms=1.25,
        restored_ttft_ms=1.25, step_ms=2.0, failures=("chunk: gone",), witness=Witness("00", ("11", "22", "33"), 96),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]  # names of fields, checked by the dataclass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / f"{SETTINGS}.jsonl"


@pytest.fixture
def written(path: Path) -> Path:
    """Prompts 2, 0 and 1 of four, in that order."""
    with Journal(path, SETTINGS, 4) as journal:
        for index in (2, 0, 1):
            journal.append(entry(index))
    return path


def opened(path: Path) -> Journal:
    return Journal(path, SETTINGS, 4)


def test_what_was_appended_is_found_again(written: Path) -> None:
    with opened(written) as journal:
        assert (len(journal), journal.dropped) == (3, 0)
        assert [index in journal for index in range(4)] == [True, True, True, False]
        assert journal.read(1) == entry(1)
        with pytest.raises(NotFoundError, match="prompt 3"):
            list(journal.entries())
        journal.append(entry(3))
        assert [e.index for e in journal.entries()] == [0, 1, 2, 3]


@pytest.mark.crash
def test_a_journal_cut_anywhere_loses_the_line_that_was_cut_and_no_other(written: Path) -> None:
    whole = written.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        written.write_bytes(whole[:cut])
        with opened(written) as journal:
            assert len(journal) == sum(end <= cut for end in ends)
            journal.append(entry(3))
        assert written.read_bytes()[:cut].startswith(whole[: max([e for e in ends if e <= cut], default=0)])
        with opened(written) as journal:
            assert journal.dropped == 0 and 3 in journal


def test_a_damaged_line_is_passed_over_and_decoded_again(written: Path) -> None:
    body = bytearray(written.read_bytes())
    for at in range(0, body.index(10), 7):
        damaged = body.copy()
        damaged[at] ^= 4
        written.write_bytes(damaged)
        with opened(written) as journal:
            assert (2 in journal, 0 in journal, 1 in journal) == (False, True, True)
            assert journal.dropped >= 1


def test_other_settings_and_other_tables_are_not_mixed_in(written: Path) -> None:
    with Journal(written, OTHER, 4) as journal:
        assert (len(journal), journal.dropped) == (0, 3)
        journal.append(entry(0, tokens=(9,)))
    with opened(written) as journal:
        assert (len(journal), journal.dropped) == (3, 1)
        assert journal.read(0).tokens == (5, 6, 7)
    with Journal(written, SETTINGS, 2) as journal:
        assert (len(journal), journal.dropped) == (2, 2)


def test_again_forgets(written: Path) -> None:
    with Journal(written, SETTINGS, 4, again=True) as journal:
        assert len(journal) == 0
    assert written.read_bytes() == b""


def test_a_prompt_decoded_again_must_say_the_same(written: Path) -> None:
    with opened(written) as journal:
        journal.append(entry(0, witness=None))
        assert (len(journal), journal.read(0).witness) == (3, None)
        with pytest.raises(IntegrityError, match="--again"):
            journal.append(entry(0, tokens=(5, 6, 8)))
        assert journal.read(0).tokens == (5, 6, 7)


def test_one_run_at_a_time(written: Path) -> None:
    with opened(written), pytest.raises(LeaseHeldError, match="another run is decoding this batch"):
        opened(written)
    with opened(written) as journal:
        assert len(journal) == 3


def test_a_filesystem_without_locks_is_named_and_not_taken_for_another_run(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(handle: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(StoreError, match="cannot be locked .No locks available.; give the memory"):
        opened(written)


def test_a_full_disk_leaves_whole_lines(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(written) as journal:
        before = written.read_bytes()

        class Full:
            """A file whose disk takes 20 bytes more."""

            def __init__(self, file: object) -> None:
                self.file = file

            def write(self, line: bytes) -> int:
                return int(self.file.write(line[:20]))  # type: ignore[attr-defined]  # a raw file

            def __getattr__(self, name: str) -> object:
                return getattr(self.file, name)

        with monkeypatch.context() as patch:
            patch.setattr(journal, "_file", Full(journal._file))
            with pytest.raises(StorageFullError, match="no space left"):
                journal.append(entry(3))
        assert written.read_bytes() == before and 3 not in journal
        journal.append(entry(3))
    with opened(written) as journal:
        assert (len(journal), journal.dropped) == (4, 0)


def test_appends_are_synced_in_groups(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = 0
    fsync = os.fsync

    def count(handle: int) -> None:
        nonlocal synced
        synced += 1
        fsync(handle)

    monkeypatch.setattr(journals, "SYNC_S", 1e9)
    with Journal(path, SETTINGS, 200) as journal:
        monkeypatch.setattr(os, "fsync", count)
        for index in range(100):
            journal.append(entry(index))
        assert synced == 100 // journals.SYNC_ENTRIES
        journal.tick()
        assert synced == 100 // journals.SYNC_ENTRIES
        monkeypatch.setattr(journals, "SYNC_S", 0.0)
        journal.tick()
        assert synced == 100 // journals.SYNC_ENTRIES + 1
        journal.tick()
    assert synced == 100 // journals.SYNC_ENTRIES + 1

    def broken(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened_again(path) as journal:
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(StorageFullError):
            journal.append(entry(150))
        monkeypatch.setattr(os, "fsync", fsync)


def opened_again(path: Path) -> Journal:
    return Journal(path, SETTINGS, 200)


def test_completions_are_written_whole_in_table_order(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(written) as journal:
        with pytest.raises(NotFoundError):
            write_completions(journal, out)
        assert list(out.iterdir()) == []
        journal.append(entry(3, text="", tokens=(), restored_ttft_ms=None, source="shared", ttft_ms=4.0))
        path, digest, tally = write_completions(journal, out)
    rows = list(read_completions(path))
    assert [row["id"] for row in rows] == ["q0", "q1", "q2", "q3"]
    assert rows[0] == {
        "id": "q0", "completion": "ä\u2028\n\ufffd", "tokens": [5, 6, 7], "finish": "length", "prompt_tokens": 10,
    }  # fmt: skip
    assert len(digest) == 64
    assert tally.totals["prompt_tokens"] == 40 == sum(tally.totals[n] for n in ("computed", "shared", "restored"))
    assert (tally.preemptions, tally.rows_again, tally.failed) == (4, 12, 4)
    assert {name: one.n for name, one in tally.ttft_ms.items()} == {"recomputed": 0, "restored": 3, "shared": 1}


def test_the_memory_of_a_journal_is_a_number_per_prompt(path: Path, tmp_path: Path) -> None:
    """4,000 prompts of 200 tokens: 8 MB of journal, read back and written out in less than a tenth of that."""
    prompts, tokens = 4000, tuple(range(1000, 1200))

    def work() -> Iterator[int]:
        with Journal(path, SETTINGS, prompts) as journal:
            for index in range(prompts):
                journal.append(entry(index, tokens=tokens, text="x" * 800, failures=()))
            yield len(journal)
        with Journal(path, SETTINGS, prompts) as journal:
            yield len(journal)
            _, _, tally = write_completions(journal, tmp_path)
            yield len(tally.shown)

    tracemalloc.start()
    try:
        assert list(work()) == [prompts, prompts, SHOWN]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = path.stat().st_size
    assert size > 6e6 and peak < size / 10


def test_settings_that_decide_completions_have_a_digest_of_their_own() -> None:
    batch = Batch("0" * 32, "1" * 64, "m", (), ())
    base, eos = Decoding(), frozenset({2, 7})
    digest = base.digest(batch, eos)
    decisive = [
        Decoding(max_new_tokens=65),
        Decoding(ignore_eos=True),
        *(Decoding(sampler=Sampler(temperature=0.5, seed=seed)) for seed in (0, 1)),
        Decoding(sampler=Sampler(temperature=0.5, top_k=4)),
    ]
    digests = {digest, *(one.digest(batch, eos) for one in decisive), base.digest(batch, {2})}
    digests |= {base.digest(replace(batch, id="2" * 32), eos), base.digest(replace(batch, scope="3" * 64), eos)}
    assert len(digests) == 9
    for same in (
        Decoding(lanes=9, cache_mib=0, tier="host", arrivals="restore", proof=False, again=True),
        Decoding(sampler=Sampler(seed=5)),  # greedy: the seed decides nothing
    ):
        assert same.digest(batch, eos) == digest
