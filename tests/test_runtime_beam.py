"""Beam search by forks equals computing every hypothesis alone, in tokens, scores and logits bytes."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from numem import LM
from numem.errors import CapacityError, ContextLengthError, InputError, ModelError
from numem.runtime.beam import Beam, beam_search
from numem.runtime.continuation import Session
from numem.runtime.engine import pages_for_lanes


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]


@contextmanager
def evaluated(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Logits of every row, in order; pages are audited after every call."""
    seen: list[bytes] = []
    engine, append = session.engine, session.engine.append

    def watched(*args: Any, **kwargs: Any) -> list[np.ndarray]:
        rows = append(*args, **kwargs)
        seen.extend(row.tobytes() for row in rows if row.size)
        engine.pool.check()
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(engine, "append", watched)
        yield seen
    idle(session)


def idle(session: Session) -> None:
    stats = session.engine.pool.stats()
    assert (stats.free, stats.resident, stats.reserved, stats.routes) == (stats.physical, 0, 0, 0)
    session.engine.pool.check()


def reference(
    session: Session, ids: list[int], width: int, limit: int, eos: Sequence[int], penalty: float
) -> tuple[list[Beam], list[bytes]]:
    """Beam search with a continuation from scratch per hypothesis and step, and a sort over every extension."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Beam] = []
    seen: list[bytes] = []
    for length in range(1, limit + 1):
        extensions = []
        for index, (tokens, score) in enumerate(live):
            with session.start([*ids, *tokens]) as alone:
                alone.step()
                assert alone.logits is not None
                seen.append(alone.logits.tobytes())
                row = alone.logits[: session.engine.vocab].astype(np.float64)
            row = row - row.max()
            total = score + (row - np.log(np.exp(row).sum()))
            extensions += [(-float(t), token, index) for token, t in enumerate(total)]
        following: list[tuple[tuple[int, ...], float]] = []
        for cost, token, index in sorted(extensions):
            if len(following) == width:
                break
            tokens = (*live[index][0], token)
            if token in eos or length == limit:
                finished.append(Beam(tokens, -cost, -cost / math.pow(length, penalty), token in eos))
            if token not in eos:
                following.append((tokens, -cost))
        live = following
    # The search may end sooner; what it leaves out could not have been among the best.
    return sorted(finished, key=lambda beam: -beam.rank)[:width], seen


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("width", [1, 4])
def test_beams_equal_independent_runs(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch, length: int, width: int) -> None:
    """Forks at every offset of a page around its boundary (xllm#1984)."""
    session = tiny_lm.session(pages=pages_for_lanes(2 * width, 60), debug=True)
    with evaluated(session, monkeypatch) as seen:
        beams = beam_search(session, prompt(length), width=width, max_new_tokens=6)
    expected, logits = reference(session, prompt(length), width, 6, (), 1.0)
    assert beams == expected
    assert seen == logits
    assert len({beam.tokens for beam in beams}) == width
    idle(session)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
def test_eos_and_length_penalty(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch, penalty: float) -> None:
    """Finished beams leave the batch, others take their place, and ending early changes no result."""
    session = tiny_lm.session(pages=pages_for_lanes(8, 60), debug=True)
    with evaluated(session, monkeypatch):
        free = beam_search(session, prompt(20), width=4, max_new_tokens=6)
    eos = {beam.tokens[2] for beam in free} | {free[0].tokens[-1]}
    with evaluated(session, monkeypatch) as seen:
        beams = beam_search(session, prompt(20), width=4, max_new_tokens=8, eos=eos, length_penalty=penalty)
    expected, logits = reference(session, prompt(20), 4, 8, sorted(eos), penalty)
    assert beams == expected
    assert seen == logits[: len(seen)]
    assert any(beam.ended for beam in beams) or penalty > 2
    assert all(beam.ended == (beam.tokens[-1] in eos) and not eos & set(beam.tokens[:-1]) for beam in beams)


def test_ties_go_to_the_lower_token_then_the_older_beam(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_lm.session(pages=60)
    append = session.engine.append

    def level(items: Any, **kwargs: Any) -> list[np.ndarray]:
        return [np.zeros_like(row) for row in append(items, **kwargs)]

    monkeypatch.setattr(session.engine, "append", level)
    beams = beam_search(session, prompt(5), width=3, max_new_tokens=2)
    # Step one: 0, 1, 2. Step two, all scores equal: token 0 of the three beams, the oldest first.
    assert [beam.tokens for beam in beams] == [(0, 0), (1, 0), (2, 0)]
    idle(session)


def test_the_first_beam_of_one_is_greedy(tiny_lm: LM) -> None:
    session = tiny_lm.session(pages=60)
    (beam,) = beam_search(session, prompt(33), width=1, max_new_tokens=12)
    assert list(beam.tokens) == tiny_lm.generate_ids(prompt(33), 12, ignore_eos=True)


def test_a_width_beyond_the_vocabulary(tiny_lm: LM) -> None:
    session = tiny_lm.session(pages=700)
    vocab = session.engine.vocab
    beams = beam_search(session, prompt(3), width=vocab + 5, max_new_tokens=1)
    assert len(beams) == vocab
    idle(session)


def test_pages_are_shared_and_parting_tails_copied_once(tiny_lm: LM) -> None:
    """A prompt of 40 pages with 4 beams never holds four prompts; no page is copied where nothing parts."""
    session = tiny_lm.session(pages=41 + 4 * 3)
    beam_search(session, prompt(640), width=4, max_new_tokens=8)
    assert session.engine.page_copies <= 4 * 7
    before = session.engine.page_copies
    beam_search(session, prompt(40), width=1, max_new_tokens=8)
    assert session.engine.page_copies == before
    idle(session)


@pytest.mark.parametrize("pages", range(3, 9))
def test_too_few_pages_leave_none_behind(tiny_lm: LM, pages: int) -> None:
    session = tiny_lm.session(pages=pages, debug=True)
    with pytest.raises(CapacityError):
        beam_search(session, prompt(30), width=4, max_new_tokens=40)
    idle(session)


def test_an_error_of_the_model_leaves_no_pages_behind(tiny_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_lm.session(pages=60)
    append = session.engine.append

    def broken(items: Any, **kwargs: Any) -> list[np.ndarray]:
        rows = append(items, **kwargs)
        return [np.full_like(row, np.nan) for row in rows] if len(items) > 1 else rows

    monkeypatch.setattr(session.engine, "append", broken)
    with pytest.raises(ModelError, match="not finite"):
        beam_search(session, prompt(30), width=4, max_new_tokens=5)
    idle(session)


def test_what_cannot_be_searched(tiny_lm: LM) -> None:
    session = tiny_lm.session(pages=60)
    for width, limit in ((0, 1), (1, 0)):
        with pytest.raises(InputError):
            beam_search(session, prompt(3), width=width, max_new_tokens=limit)
    with pytest.raises(InputError):
        beam_search(session, [], width=1, max_new_tokens=1)
    with pytest.raises(ContextLengthError):
        beam_search(session, prompt(4), width=1, max_new_tokens=tiny_lm.max_position)
    idle(session)
