"""Beam search over forks: every hypothesis is a route of its own over pages that it shares with the others.

step      live routes --one engine call--> logits --float64 log-softmax--> extensions, ranked over all beams
rank      score descending, then token id ascending, then the older beam
next      one fork for each extension that goes on; the forked ones are released, so that a tail with one heir is
          written in place and only a tail that parts is copied
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from numem.errors import ContextLengthError, InputError, ModelError
from numem.runtime.continuation import Session
from numem.runtime.engine import Engine
from numem.runtime.paging.pool import Route


@dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis.

    Attributes:
        tokens: generated ids; an EOS is the last of them.
        score: sum of the tokens' log-probabilities, natural logarithm, float64, added in order.
        rank: score / len(tokens) ** length_penalty, by which beams are compared.
        ended: whether an EOS ended it, not the limit.
    """

    tokens: tuple[int, ...]
    score: float
    rank: float
    ended: bool


@dataclass(slots=True)
class _Live:
    route: Route
    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True, order=True)
class _Extension:
    cost: float
    token: int
    parent: int


def beam_search(
    session: Session,
    tokens: Sequence[int],
    *,
    width: int,
    max_new_tokens: int,
    eos: Collection[int] = frozenset(),
    length_penalty: float = 1.0,
) -> list[Beam]:
    """The best continuations of a prompt, best first, at most `width`.

    In every step the extensions of all beams are taken in rank order until `width` of them go on; those before that
    end in an EOS are finished. It ends at max_new_tokens, or when no beam can still pass the worst of `width` finished
    ones. Scores depend on the tokens alone, as each row of a batch has the bits it has alone.

    Args:
        session: engine and identity; pages of the prompt are shared by all beams.
        width: beams that go on in each step.
        length_penalty: above 0 favours longer ones (see `Beam.rank`).

    Raises:
        InputError: no prompt, or a width or length below 1.
        ContextLengthError: prompt and output pass max_position.
        CapacityError: too few pages; every page is given back.
        ModelError: logits that are not finite.
    """
    if width < 1 or max_new_tokens < 1:
        raise InputError(f"beam search: width {width} and max_new_tokens {max_new_tokens} must be at least 1")
    limit = session.engine.max_position
    if len(tokens) + max_new_tokens - 1 > limit:
        raise ContextLengthError(
            f"beam search: {len(tokens)} prompt tokens and {max_new_tokens} new ones exceed max_position {limit}; "
            "load the model with a larger max_position"
        )
    start = session.start(tokens)
    live, finished = [_Live(start.route, (), 0.0)], list[Beam]()
    pending = [start.tokens[-1]]
    try:
        for length in range(1, max_new_tokens + 1):
            rows = session.engine.append([(beam.route, [token]) for beam, token in zip(live, pending, strict=True)])
            scores = [beam.score + _log_softmax(row, session.engine) for beam, row in zip(live, rows, strict=True)]
            going, ending = _extend(scores, width, eos)
            finished += [_beam(live, e, length_penalty, ended=True) for e in ending]
            if length == max_new_tokens:
                finished += [_beam(live, e, length_penalty, ended=False) for e in going]
                break
            finished = _best(finished, width)
            lengths = (length + 1, max_new_tokens)
            if not going or (len(finished) == width and _hopeless(going, finished, lengths, length_penalty)):
                break
            _move(session.engine, live, going)
            pending = [e.token for e in going]
        return _best(finished, width)
    finally:
        for beam in live:
            session.engine.release(beam.route)


def _extend(
    scores: Sequence[np.ndarray], width: int, eos: Collection[int]
) -> tuple[list[_Extension], list[_Extension]]:
    """Extensions that go on and those that end, in rank order, from total scores [vocab] of every beam."""
    # No beam contributes more than `width` that go on; every EOS may stand before them.
    count = width + len(eos)
    ranked = []
    for parent, total in enumerate(scores):
        least = np.partition(total, -count)[-count] if count < len(total) else -np.inf
        chosen = np.flatnonzero((total >= least) & (total > -np.inf))
        ranked += [_Extension(-float(total[token]), int(token), parent) for token in chosen]
    going, ending = list[_Extension](), list[_Extension]()
    for extension in sorted(ranked):
        if len(going) == width:
            break
        (ending if extension.token in eos else going).append(extension)
    return going, ending


def _move(engine: Engine, live: list[_Live], going: Sequence[_Extension]) -> None:
    """Replace the live beams by their extensions; `live` holds every unreleased route at any moment."""
    parents = len(live)
    for extension in going:
        parent = live[extension.parent]
        route = engine.pool.fork(parent.route)
        live.append(_Live(route, (*parent.tokens, extension.token), -extension.cost))
    for _ in range(parents):
        engine.release(live.pop(0).route)


def _beam(live: Sequence[_Live], extension: _Extension, penalty: float, *, ended: bool) -> Beam:
    tokens = (*live[extension.parent].tokens, extension.token)
    score = -extension.cost
    return Beam(tokens, score, _rank(score, len(tokens), penalty), ended)


def _log_softmax(logits: np.ndarray, engine: Engine) -> np.ndarray:
    """Log-probabilities, float64 [vocab], of float32 logits; padding ids stand for nothing and are left out."""
    row = logits[: engine.vocab].astype(np.float64)
    top = row.max()
    if not np.isfinite(top):
        raise ModelError("beam search: logits are not finite; the weights or the state are damaged")
    row -= top
    row -= np.log(np.exp(row).sum())
    return row


def _rank(score: float, length: int, penalty: float) -> float:
    return score / math.pow(length, penalty)


def _best(beams: Sequence[Beam], width: int) -> list[Beam]:
    """The best ones; equal ones in the order in which they ended."""
    return sorted(beams, key=lambda beam: -beam.rank)[:width]


def _hopeless(going: Sequence[_Extension], finished: Sequence[Beam], lengths: tuple[int, int], penalty: float) -> bool:
    """Whether nothing that grows from `going` passes the worst of the finished beams.

    A score never rises, so its rank is greatest undiminished at the longest length, or at the next one where the
    penalty favours short ones.
    """
    best = -going[0].cost
    reach = max(_rank(best, length, penalty) for length in lengths)
    return finished[-1].rank >= reach
