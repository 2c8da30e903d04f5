"""A request and its outcome: what a caller asks of the resident plane, and what became of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Protocol

import numpy as np

from numem.errors import InputError
from numem.runtime.restore.kv import Restored
from numem.runtime.sampling import GREEDY, Sampler


class Finish(StrEnum):
    """Why a sequence ended; where several hold at once, the first in this order is given."""

    LENGTH = "length"
    EOS = "eos"
    STOP = "stop"
    CAPACITY = "capacity"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        id: the caller's name for it, unique among requests that have not ended.
        tokens: prompt token ids, at least one.
        max_new_tokens: tokens to generate at most.
        sampler: how tokens are chosen; sample i of several uses seed + i.
        eos: ids that end the output; the ending token is part of it.
        stop: strings that end the output; the text ends before the first of them.
        samples: continuations of the one prompt, which is computed once.
        priority: higher goes first; equal ones in order of arrival.
        deadline_s: seconds from submission after which it is ended, whatever it has by then.
        publish: make the state durable when it ends (checkpoint queue).
        witness: keep the logits of every step and the final cache bytes, for a proof.

    Raises:
        InputError: a value of another type: found later, it would end every request that is served beside this one.
    """

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampler: Sampler = GREEDY
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    samples: int = 1
    priority: int = 0
    deadline_s: float | None = None
    publish: bool = False
    witness: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or any("\ud800" <= c <= "\udfff" for c in self.id):
            raise InputError(f"request {self.id!r}: its id is no text; give it a string")
        deadline = 0.0 if self.deadline_s is None else self.deadline_s
        kinds = (
            ("tokens", self.tokens, Sequence | np.ndarray),
            ("max_new_tokens", self.max_new_tokens, int | np.integer),
            ("sampler", self.sampler, Sampler),
            ("eos", self.eos, Collection),
            ("samples", self.samples, int | np.integer),
            ("priority", self.priority, int | np.integer),
            ("deadline_s", deadline, Real),
        )
        for name, value, kind in kinds:
            if not isinstance(value, kind) or isinstance(value, bool | str | bytes):
                found = type(value).__name__
                raise InputError(f"request {self.id!r}: {name} is of type {found}; see numem.runtime.request.Request")


@dataclass(slots=True)
class Token:
    """One generated token, as it is told while its sequence goes on.

    Attributes:
        sample: which of the request's samples.
        index: zero-based, without holes, never twice for a sequence.
        text: what is certain to follow the text told before, possibly empty; never a part of a stop string.
    """

    request_id: str
    sample: int
    index: int
    token: int
    text: str


class TokenStream(Protocol):
    """Turns ids into text as they come (`Tokenizer.stream`)."""

    def push(self, token: int) -> str:
        """Text that this id completes."""

    def finish(self) -> str:
        """Text that was held back."""


@dataclass(slots=True)
class Outcome:
    """What became of one sequence of a request.

    Attributes:
        sample: which of the request's samples.
        generated: output token ids; text: what they say, up to a stop string (empty without a tokenizer).
        error: why it ended in an error.
        computed, shared, restored: where its prompt tokens came from at its first admission; they add up to the
            prompt's length. `again` counts rows brought back after a preemption, by source.
        preempted: how often it lost its lane.
        queue_ms: submission to admission. ttft_ms: admission to first token. step_ms: time of the steps it took part
            in, after the first token.
        restore: what was read from the durable plane.
        logits, kv: of a witness, float32 [steps, vocab] and raw cache bytes.
    """

    request: Request
    sample: int = 0
    generated: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish = Finish.LENGTH
    error: str = ""
    computed: int = 0
    shared: int = 0
    restored: int = 0
    again: dict[str, int] = field(default_factory=dict)
    preempted: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    step_ms: float = 0.0
    restore: Restored = field(default_factory=Restored)
    logits: list[np.ndarray] = field(default_factory=list)
    kv: np.ndarray | None = None
