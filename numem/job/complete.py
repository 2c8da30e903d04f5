"""One prompt through a memory: the longest stored prefix is restored, the rest computed, and what is new published."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numem.errors import ContextLengthError, InputError
from numem.identity.chain import boundary_id
from numem.runtime.engine import pages_for_lanes
from numem.runtime.sampling import GREEDY, Sampler

if TYPE_CHECKING:
    from numem.models.lm import LM
    from numem.store.memory import Memory


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of a prompt.

    Attributes:
        prompt_tokens: tokens of the prompt = restored_tokens + computed_tokens (the pending one counts as computed).
        tokens, text: what was generated; an EOS token is the last of `tokens` and not in `text`.
        stop: "eos" or "length".
        ttft_ms: from the start of the restore to the first token.
        decode_tokens_per_s: of the tokens after the first, None where there are none.
        boundary: causal id (hex) of the state in the memory: prompt and generated tokens but the last.
        chunks_published, chunks_reused: chunks written now, and chunks that were durable already.
        warnings: stored chunks that could not be used, and why.
    """

    prompt_tokens: int
    restored_tokens: int
    computed_tokens: int
    tokens: tuple[int, ...]
    text: str
    stop: str
    ttft_ms: float
    decode_tokens_per_s: float | None
    boundary: str
    chunks_published: int
    chunks_reused: int
    warnings: tuple[str, ...]


def require_fits(lm: "LM", tokens: Sequence[int], max_new_tokens: int) -> None:
    """Refuse what `complete` would refuse, before a memory is opened for it.

    Raises:
        InputError, ContextLengthError: no tokens, nothing to generate, or longer than the model's max_position.
    """
    if not tokens or max_new_tokens < 1:
        raise InputError(
            f"generate: {len(tokens)} prompt tokens and {max_new_tokens} new ones; give at least 1 of each"
        )
    if len(tokens) + max_new_tokens - 1 > lm.max_position:
        raise ContextLengthError(
            f"generate: {len(tokens)} prompt tokens and {max_new_tokens} new ones exceed the context of "
            f"{lm.max_position}; shorten the prompt or ask for fewer new tokens"
        )


def complete(
    memory: "Memory",
    lm: "LM",
    tokens: Sequence[int],
    max_new_tokens: int,
    *,
    sampler: Sampler = GREEDY,
    on_text: Callable[[str], None] = lambda text: None,
) -> Completion:
    """Continue `tokens` by up to `max_new_tokens`; `on_text` is called with pieces of text as they come.

    Raises:
        InputError, ContextLengthError: see `require_fits`.
    """
    require_fits(lm, tokens, max_new_tokens)
    session = lm.session(pages=pages_for_lanes(1, len(tokens) + max_new_tokens))
    stream, pieces, made = lm.tokenizer.stream(), list[str](), list[int]()

    def show(piece: str) -> None:
        if piece:
            pieces.append(piece)
            on_text(piece)

    began, first, stop = time.perf_counter(), 0.0, "length"
    with session.restore(memory, tokens) as continuation:
        for _ in range(max_new_tokens):
            made.append(continuation.step(sampler))
            first = first or time.perf_counter()
            if made[-1] in lm.tokenizer.eos_ids:
                stop = "eos"
                break
            show(stream.push(made[-1]))
        seconds = time.perf_counter() - first
        show(stream.finish())
        published = continuation.publish(memory).wait()
        restored = continuation.restored
        return Completion(
            prompt_tokens=len(tokens),
            restored_tokens=restored.tokens,
            computed_tokens=len(tokens) - restored.tokens,
            tokens=tuple(made),
            text="".join(pieces),
            stop=stop,
            ttft_ms=round((first - began) * 1e3, 3),
            decode_tokens_per_s=round((len(made) - 1) / seconds, 2) if len(made) > 1 else None,
            boundary=boundary_id(lm.identity.scope, continuation.tokens, continuation.processed).hex(),
            chunks_published=len(published.tickets),
            chunks_reused=len(published.reused),
            warnings=tuple(restored.failures),
        )
