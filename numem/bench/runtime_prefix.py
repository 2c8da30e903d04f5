"""Many short questions over one long prefix, with and without the reuse of its rows."""

import time
from typing import TYPE_CHECKING, Any

from numem.bench.pairs import figure, interleaved, ratios
from numem.bench.text import tokens
from numem.runtime.engine import pages_for_lanes
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.residency import Residency
from numem.runtime.request import Request

if TYPE_CHECKING:
    from numem.models.lm import LM

LANES = 8
QUESTION = 12
BAR = 8


def sharing(lm: "LM", prefix: int, questions: int, answer: int, alone: int, pairs: int) -> dict[str, Any]:
    """`shared_prefix_speedup`: time of all questions without reuse, as a ratio to the time with it.

    Both sides begin with empty pages and end with the last answer. Without reuse the time is proportional to the number
    of prompts, so that side runs `alone` of them and is scaled up.
    """
    text = tokens(lm.tokenizer, prefix + QUESTION * questions)
    common = text[:prefix]
    requests = [
        Request(f"q{n}", (*common, *text[prefix + QUESTION * n : prefix + QUESTION * (n + 1)]), answer)
        for n in range(questions)
    ]
    pages = pages_for_lanes(LANES + 2, prefix + QUESTION + answer)
    shared: list[int] = []

    def reused() -> None:
        session = lm.session(pages=pages)
        scheduler = Scheduler(session, LANES, residency=Residency(session.engine))
        shared.append(sum(outcome.shared for outcome in scheduler.run(requests)))
        scheduler.close()

    def computed() -> None:
        scheduler = Scheduler(lm.session(pages=pages), LANES, share=False)
        for _ in scheduler.run(requests[:alone]):
            pass
        scheduler.close()

    began = time.perf_counter()
    seconds = interleaved({"reused": reused, "computed": computed}, pairs)
    scale = questions / alone
    slow = [value * scale for value in seconds["computed"]]
    return {
        "shared_prefix_speedup": figure(
            ratios(slow, seconds["reused"]),
            least=BAR,
            prefix=prefix,
            prompts=questions,
            new_tokens=answer,
            shared_tokens=shared[-1],
            reused_s=[round(value, 3) for value in seconds["reused"]],
            computed_s=[round(value, 3) for value in slow],
            computed_note=f"{alone} of {questions} prompts were run without reuse; their time is scaled by {scale:g}",
            took_s=round(time.perf_counter() - began, 1),
        )
    }
